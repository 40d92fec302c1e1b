# SPDX-License-Identifier: Apache-2.0
"""What the part brings: cleanup after dead services."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    interface="moorage.cleanup.interface",
    options="moorage.cleanup.options",
    api=("moorage.cleanup.api",),
    collectors=("moorage.cleanup.cleanup_metrics:CleanupCollector",),
)
