# SPDX-License-Identifier: Apache-2.0
"""The same tests on SQLite, PostgreSQL and MariaDB: a database with one table for each class."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
import unittest
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from moorage.db import Database, new_metadata
from moorage.db.schema import BigId, exact
from moorage.testing.database import create_all
from tests import servers

if TYPE_CHECKING:
    Mixin = unittest.TestCase
else:
    Mixin = object

FORK = multiprocessing.get_context("fork")
METADATA = new_metadata()
#: ``v`` counts up, ``name`` is unique.
ROWS = sa.Table(
    "rows",
    METADATA,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("name", exact(20), nullable=False),
    sa.Column("v", sa.Integer, nullable=False),
    sa.UniqueConstraint("name", name="uq_rows_name"),
)
ADD_ONE = sa.update(ROWS).where(ROWS.c.id == sa.bindparam("of_id")).values(v=ROWS.c.v + 1)


def sqlite_url(test: type[unittest.TestCase]) -> str:
    """A file in a folder that goes with the class."""
    folder = tempfile.mkdtemp(prefix="moorage-test-")
    test.addClassCleanup(shutil.rmtree, folder, ignore_errors=True)
    return f"sqlite:///{folder}/moorage.sqlite"


class TablesCase(Mixin):
    """Mixed in: ``self.database`` has all tables of Moorage; one database for each class."""

    kind = "sqlite"
    database: Database

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if cls.kind != "sqlite":
            servers.require(cls.kind)
        url = sqlite_url(cls) if cls.kind == "sqlite" else servers.fresh_database(servers.shared(cls.kind))
        cls.database = Database(url, service="test")
        cls.addClassCleanup(cls.database.close)
        create_all(cls.database)


class DatabaseCase(Mixin):
    """Mixed in: ``self.database`` has the table with rows 1 and 2, whose ``v`` is 0."""

    kind = "sqlite"
    #: What the database gets from ``ALTER DATABASE``.
    defaults = ""
    url: str
    database: Database

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.url = sqlite_url(cls) if cls.kind == "sqlite" else servers.fresh_database(servers.shared(cls.kind))
        cls.database = Database(cls.url, lock_timeout=5)
        cls.addClassCleanup(cls.database.close)
        with cls.database.write() as tx:
            if cls.defaults:
                tx.exec_driver_sql(f"ALTER DATABASE {cls.defaults}")
            METADATA.create_all(tx)

    def setUp(self) -> None:
        super().setUp()
        with self.database.write() as tx:
            tx.execute(sa.delete(ROWS))
            tx.execute(sa.insert(ROWS), [{"id": 1, "name": "one", "v": 0}, {"id": 2, "name": "two", "v": 0}])

    def value(self, number: int = 1) -> int:
        """``v`` of a row, as a new transaction sees it."""
        with self.database.read() as tx:
            return int(tx.execute(sa.select(ROWS.c.v).where(ROWS.c.id == number)).scalar_one())

    def another(self, **settings: Any) -> Database:
        """A second client of the same database."""
        database = Database(self.url, **settings)
        self.addCleanup(database.close)
        return database


def add_one(tx: sa.Connection, number: int = 1) -> int:
    """Count a row up; the number of rows that matched."""
    return tx.execute(ADD_ONE, {"of_id": number}).rowcount


def poll(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Wait until it holds; fail when it does not in time."""
    servers.wait_until(condition, what, seconds)


class Watch:
    """How long a block took: ``with Watch() as watch: ...; watch.seconds``."""

    def __enter__(self) -> Watch:
        self._begin = time.monotonic()
        return self

    def __exit__(self, *failure: object) -> None:
        self.seconds = time.monotonic() - self._begin
