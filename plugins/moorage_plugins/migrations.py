# SPDX-License-Identifier: Apache-2.0
"""The migrations of the reference plugins."""

from moorage.db.migrations import Migrations
from moorage_plugins.api.baremetal import tables as baremetal_tables
from moorage_plugins.block_storage import tables as block_storage_tables
from moorage_plugins.compute import tables as compute_tables
from moorage_plugins.coordination import tables as coordination_tables
from moorage_plugins.data_processing import tables as data_processing_tables
from moorage_plugins.schema import plugins_metadata
from moorage_plugins.stores import tables as store_tables

__all__ = ["MIGRATIONS", "TABLES"]

#: Modules that put tables into the metadata by being imported.
TABLES = (
    store_tables,
    compute_tables,
    baremetal_tables,
    coordination_tables,
    data_processing_tables,
    block_storage_tables,
)
MIGRATIONS = Migrations("moorage_plugins", "moorage_plugins.alembic", plugins_metadata)
