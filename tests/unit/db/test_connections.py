# SPDX-License-Identifier: Apache-2.0
"""Connections to SQLite that stay checked out between transactions."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import tempfile
import threading
import unittest
from typing import Any
from unittest import mock

import sqlalchemy as sa
from sqlalchemy import event

from moorage.db import Database
from moorage.db.engines import ENDED

ONE = sa.select(1)


class KeptConnectionTests(unittest.TestCase):
    def database(self, **settings: Any) -> Database:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        database = Database(f"sqlite:///{folder}/test.sqlite", **settings)
        self.addCleanup(database.close)
        return database

    def failing_once(
        self, database: Database, method: str, error: Exception
    ) -> contextlib.AbstractContextManager[mock.Mock]:
        """Lets the first call of a method of the writers' dialect fail while the block runs."""
        dialect = database._writers.engine.dialect
        effects = itertools.chain([error], itertools.repeat(mock.DEFAULT))
        return mock.patch.object(dialect, method, wraps=getattr(dialect, method), side_effect=effects)

    def test_transactions_one_after_the_other_use_one_connection(self) -> None:
        database, out = self.database(), mock.Mock()
        for each in (database._readers, database._writers):
            event.listen(each.engine, "checkout", out)
        for _ in range(5):
            with database.read() as tx:
                tx.execute(ONE)
            database.run(lambda tx: tx.execute(ONE))
            with self.assertRaises(ZeroDivisionError), database.write():
                raise ZeroDivisionError
        self.assertEqual(2, out.call_count)
        self.assertEqual([0, 0], [database._readers.lent, database._writers.lent])

    def test_who_waits_for_a_connection_gets_one_that_is_given_back(self) -> None:
        # Two are all that there are, and one is all that is kept.
        database = self.database(pool_size=1, pool_timeout=30)
        leave, inside, done = threading.Event(), threading.Semaphore(0), []

        def hold() -> None:
            with database.read():
                inside.release()
                leave.wait(60)

        def read() -> None:
            with database.read() as tx:
                done.append(tx.execute(ONE).scalar_one())

        holders = [threading.Thread(target=hold) for _ in range(2)]
        waiters = [threading.Thread(target=read) for _ in range(4)]
        for thread in holders:
            thread.start()
            self.assertTrue(inside.acquire(timeout=60))
        for thread in waiters:
            thread.start()
        self.assertEqual([], done)
        leave.set()
        for thread in (*holders, *waiters):
            thread.join(25)
        self.assertEqual([1] * 4, done)
        self.assertEqual(0, database._readers.lent)
        self.assertEqual(1, database._readers._pool.checkedout())

    def test_a_connection_with_an_open_transaction_is_not_used_again(self) -> None:
        database = self.database(lock_timeout=1)
        database.run(lambda tx: tx.execute(sa.text("CREATE TABLE things (id INTEGER PRIMARY KEY)")))
        failing = self.failing_once(database, "do_rollback", sqlite3.OperationalError("no"))
        with failing as called, self.assertRaises(ZeroDivisionError), database.write() as tx:
            tx.execute(sa.text("INSERT INTO things VALUES (1)"))
            raise ZeroDivisionError
        called.assert_called()
        with database.write() as tx:
            tx.execute(sa.text("INSERT INTO things VALUES (2)"))
        with database.read() as tx:
            self.assertEqual([2], list(tx.execute(sa.text("SELECT id FROM things")).scalars()))

    def test_a_commit_that_is_refused_leaves_no_transaction_open(self) -> None:
        # Found by the simulation. SQLAlchemy takes the transaction for ended, and SQLite does not.
        database = self.database(lock_timeout=1)
        busy = sqlite3.OperationalError("database is locked")
        busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
        with self.failing_once(database, "do_commit", busy) as called:
            database.run(lambda tx: tx.execute(sa.text("CREATE TABLE things (id INTEGER PRIMARY KEY)")))
        called.assert_called()

    def test_a_connection_returns_to_the_pool_without_the_mark_of_its_transaction(self) -> None:
        readers = self.database(pool_size=1)._readers
        for _ in range(2):
            pool, connections = readers.engine.pool, [readers.take() for _ in range(2)]
            for each in connections:
                self.assertNotIn(ENDED, each.info)
                each.info[ENDED] = True
                readers.release(each, pool)

    def test_a_database_that_is_closed_in_a_transaction_keeps_no_connection_of_it(self) -> None:
        database = self.database()
        with database.read() as tx:
            tx.execute(ONE)
            driver = tx.connection.driver_connection
            assert driver is not None
            database.close()
        with self.assertRaisesRegex(sqlite3.ProgrammingError, "closed"):
            driver.execute("SELECT 1")
        with database.read() as tx:
            self.assertEqual(1, tx.execute(ONE).scalar_one())

    def test_closing_closes_what_is_kept(self) -> None:
        database = self.database()
        with database.read() as tx:
            driver = tx.connection.driver_connection
            assert driver is not None
        database.close()
        with self.assertRaisesRegex(sqlite3.ProgrammingError, "closed"):
            driver.execute("SELECT 1")
