# SPDX-License-Identifier: Apache-2.0
"""What the part brings: nodes, aggregates and traits."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    api=("moorage.fleet.api", "moorage.fleet.facts_api"),
)
