# SPDX-License-Identifier: Apache-2.0
"""What the part brings: rings and periodic tasks."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    interface="moorage.coordination.interface",
    options="moorage.coordination.options",
    api=("moorage.coordination.api",),
)
