# SPDX-License-Identifier: Apache-2.0
"""What the part brings: the database."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    migrations="moorage.db.core_migrations:MIGRATIONS",
    options="moorage.db.options",
    checks={
        "database": "moorage.db.database:check",
    },
)
