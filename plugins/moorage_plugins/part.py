# SPDX-License-Identifier: Apache-2.0
"""What the part brings: the tables of the reference plugins."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(migrations="moorage_plugins.migrations:MIGRATIONS")
