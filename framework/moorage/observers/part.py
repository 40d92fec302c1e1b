# SPDX-License-Identifier: Apache-2.0
"""What the part brings: observers of events."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    interface="moorage.observers.interface",
    options="moorage.observers.options",
    checks={
        "observers": "moorage.observers.interface:OBSERVERS.chosen",
    },
)
