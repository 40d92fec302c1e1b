# SPDX-License-Identifier: Apache-2.0
"""What the part brings: the extension point of compute drivers."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    interface="moorage.drivers.interface",
    checks={
        "compute driver": "moorage.drivers.interface:COMPUTE_DRIVERS.chosen",
    },
)
