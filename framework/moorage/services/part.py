# SPDX-License-Identifier: Apache-2.0
"""What the part brings: services, their heartbeats and the fences of their hosts."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    options="moorage.services.options",
    checks={
        "heartbeats": "moorage.services.options:check",
    },
    api=("moorage.services.api",),
    collectors=("moorage.services.fence_metrics:FenceCollector",),
)
