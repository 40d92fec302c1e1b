# SPDX-License-Identifier: Apache-2.0
"""The core's migrations."""

from moorage.db.migrations import Migrations, tables_of
from moorage.db.schema import core_metadata

__all__ = ["MIGRATIONS"]

# Named and not imported: the families lie above the store engine.
MIGRATIONS = Migrations("moorage", "moorage.db.alembic", core_metadata, tables_of("moorage"), base=True)
