# SPDX-License-Identifier: Apache-2.0
"""What the part brings: messages between services."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    interface="moorage.rpc.interface",
    options="moorage.rpc.options",
    checks={
        "messages": "moorage.rpc.loading:check",
    },
    upgrade_checks={"messages": "moorage.rpc.checks:upgrade_check"},
)
