# SPDX-License-Identifier: Apache-2.0
"""Databases for tests: a file that goes away, and all tables at once without the migrations."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from moorage.clock import Clock
from moorage.db import Database, migrations

__all__ = ["create_all", "empty_tables", "temporary"]


def create_all(database: Database) -> None:
    """Create the tables of the core and of every installed distribution, as their code has them."""
    found = migrations.discover()
    with database.write() as transaction:
        for each in found:
            each.import_tables()
            each.metadata.create_all(transaction)


def empty_tables(transaction: sa.Connection, *metadata: sa.MetaData) -> None:
    """All tables, without a row: made where they are missing, emptied where they have rows.

    On a server that takes a small part of the time that dropping and making them takes. Where the tables are there and empty, it
    takes two statements.
    """
    present = set(sa.inspect(transaction).get_table_names())
    for each in metadata:
        if missing := [table for table in each.sorted_tables if table.name not in present]:
            each.create_all(transaction, tables=missing)
    tables = [table for each in reversed(metadata) for table in reversed(each.sorted_tables) if table.name in present]
    if not tables:
        return
    looks = [sa.exists(sa.select(sa.literal_column("1")).select_from(table)) for table in tables]
    for table, has_rows in zip(tables, transaction.execute(sa.select(*looks)).one(), strict=True):
        if has_rows:
            transaction.execute(sa.delete(table))


@contextlib.contextmanager
def temporary(*, clock: Clock | None = None, tables: bool = False) -> Iterator[Database]:
    """A SQLite database in a folder of its own, which is removed at the end.

    :param tables: with all tables (:func:`create_all`).
    """
    with tempfile.TemporaryDirectory(prefix="moorage-test-") as folder:
        database = Database(f"sqlite:///{Path(folder) / 'moorage.sqlite'}", clock=clock)
        try:
            if tables:
                create_all(database)
            yield database
        finally:
            database.close()
