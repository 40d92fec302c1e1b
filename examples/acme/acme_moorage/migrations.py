# SPDX-License-Identifier: Apache-2.0
"""The history of Acme's tables: an alembic environment and a version table of their own."""

from acme_moorage.tables import metadata
from moorage.db.migrations import Migrations

__all__ = ["MIGRATIONS"]

MIGRATIONS = Migrations("acme_moorage", "acme_moorage.alembic", metadata)
