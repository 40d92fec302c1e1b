# SPDX-License-Identifier: Apache-2.0
"""The core's migrations."""

from moorage.db.migrations import Migrations
from moorage.db.schema import core_metadata

__all__ = ["MIGRATIONS"]

#: Named and not imported: the families lie above the store engine.
TABLES = (
    "moorage.services.tables",
    "moorage.fleet.tables",
    "moorage.scheduling.tables",
    "moorage.sharding.tables",
    "moorage.cleanup.tables",
    "moorage.coordination.tables",
)
MIGRATIONS = Migrations("moorage", "moorage.db.alembic", core_metadata, TABLES)
