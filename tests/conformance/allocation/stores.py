# SPDX-License-Identifier: Apache-2.0
"""Stores for tests: a configuration with the defaults, a database with the tables, a store on it."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from moorage.allocation import options
from moorage.clock import SystemClock
from moorage.db import Database
from moorage_plugins.schema import plugins_metadata
from moorage_plugins.stores import options as sql_options
from moorage_plugins.stores import tables
from moorage_plugins.stores.sql import SqlStore
from tests import servers
from tests.memory_store.store import MemoryStore


def configuration(**values: Any) -> cfg.ConfigOpts:
    """The defaults, with values of ``[allocation]``."""
    conf = cfg.ConfigOpts()
    options.register_opts(conf)
    sql_options.register_opts(conf)
    conf([])
    for name, value in values.items():
        conf.set_override(name, value, group="allocation")
    return conf


def memory_store(**values: Any) -> MemoryStore:
    """A memory store."""
    return MemoryStore(conf=configuration(**values))


def sql_store(database: Database, *, claims_per_transaction: int | None = None, **values: Any) -> SqlStore:
    """A sql store on a database that has the tables.

    :param claims_per_transaction: None: the default of the database.
    """
    conf = configuration(**values)
    if claims_per_transaction is not None:
        conf.set_override("claims_per_transaction", claims_per_transaction, group="allocation_sql")
    return SqlStore(conf=conf, database=database, clock=SystemClock())


def create_tables(database: Database) -> None:
    """Create the tables of the store."""
    with database.write() as tx:
        plugins_metadata.create_all(tx, tables=tables.TABLES)


def sqlite_url(test: unittest.TestCase | type[unittest.TestCase]) -> str:
    """A SQLite file in a folder that is removed with the test or the class."""
    folder = tempfile.mkdtemp(prefix="moorage-test-")
    if isinstance(test, type):
        test.addClassCleanup(shutil.rmtree, folder, ignore_errors=True)
    else:
        test.addCleanup(shutil.rmtree, folder, ignore_errors=True)
    return f"sqlite:///{folder}/moorage.sqlite"


class SqlCase:
    """Mixed in: one database a class with the tables, emptied before each test. ``server``: None is a SQLite file."""

    server: str | None = None
    url: str
    database: Database

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()  # type: ignore[misc]
        if cls.server is None:
            cls.url = sqlite_url(cls)  # type: ignore[arg-type]
        else:
            cls.url = servers.fresh_database(servers.shared(cls.server))
        cls.database = Database(cls.url, pool_size=16)
        cls.addClassCleanup(cls.database.close)  # type: ignore[attr-defined]
        create_tables(cls.database)

    def empty(self) -> None:
        """Remove all rows."""
        with self.database.write() as tx:
            for table in tables.TABLES:
                tx.execute(sa.delete(table))
