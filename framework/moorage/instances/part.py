# SPDX-License-Identifier: Apache-2.0
"""What the part brings: instances and server groups."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    interface="moorage.instances.interface",
    checks={
        "instances": "moorage.instances.interface:INSTANCE_STORES.chosen",
    },
    api=("moorage.instances.api", "moorage.instances.server_groups_api"),
)
