# SPDX-License-Identifier: Apache-2.0
"""What the part brings: the reference quota sources."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    options="moorage_plugins.quota_sources.options",
)
