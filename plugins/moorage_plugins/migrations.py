# SPDX-License-Identifier: Apache-2.0
"""The migrations of the reference plugins."""

from moorage.db.migrations import Migrations, tables_of
from moorage_plugins.schema import plugins_metadata

__all__ = ["MIGRATIONS"]

MIGRATIONS = Migrations(
    "moorage_plugins", "moorage_plugins.alembic", plugins_metadata, tables_of("moorage_plugins"), base=True
)
