# SPDX-License-Identifier: Apache-2.0
"""What the part brings: operations and their leases."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    upgrade_checks={"operations": "moorage.work.checks:upgrade_check"},
)
