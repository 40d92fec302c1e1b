# SPDX-License-Identifier: Apache-2.0
"""What the part brings: claims, pools and their stores."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    interface="moorage.allocation.interface",
    options="moorage.allocation.options",
    checks={
        "orphan detectors": "moorage.allocation.interface:DETECTORS.chosen",
    },
    api=("moorage.allocation.api", "moorage.allocation.pools_api", "moorage.allocation.quotas_api"),
)
