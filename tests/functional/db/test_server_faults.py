# SPDX-License-Identifier: Apache-2.0
"""A database server that dies, restarts or closes connections."""

from __future__ import annotations

import signal
import threading
import unittest

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.db import Database
from tests import servers
from tests.functional.db.databases import METADATA, ROWS, Mixin, add_one, poll


class _LaterClock(SystemClock):
    """The machine's clock, moved on by a test."""

    ahead = 0.0

    @override
    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


class ServerFaultCases(Mixin):
    """What the two servers have in common; each class has a server of its own, which it kills."""

    kind = ""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        servers.require(cls.kind)
        cls.server = servers.KINDS[cls.kind](durable=True)
        cls.addClassCleanup(cls.server.stop)
        cls.server.start()
        cls.url = servers.fresh_database(cls.server)

    def setUp(self) -> None:
        self.clock = _LaterClock()
        self.database = Database(self.url, clock=self.clock)
        self.addCleanup(self.database.close)
        with self.database.write() as tx:
            METADATA.drop_all(tx)
            METADATA.create_all(tx)
            tx.execute(sa.insert(ROWS), {"id": 1, "name": "one", "v": 0})

    def _value(self) -> int:
        return int(self.database.read_run(lambda tx: tx.execute(sa.select(ROWS.c.v)).scalar_one()))

    def test_a_server_killed_in_a_transaction_makes_the_store_unavailable_until_it_is_back(self) -> None:
        with self.assertRaises(errors.StoreUnavailable) as caught, self.database.write() as tx:
            add_one(tx)
            self.server.kill(signal.SIGKILL)
            add_one(tx)
        self.assertNotIn("outcome", caught.exception.details)
        with self.assertRaisesRegex(errors.StoreUnavailable, "cannot be used"):
            self.database.run(add_one)
        self.server.restart()
        self.database.run(add_one)
        self.assertEqual(1, self._value())

    def test_a_server_killed_before_the_commit_leaves_the_outcome_unknown(self) -> None:
        with self.assertRaises(errors.StoreUnavailable) as caught, self.database.write() as tx:
            add_one(tx)
            self.server.kill(signal.SIGKILL)
        self.assertEqual("unknown", caught.exception.details["outcome"])
        self.server.restart()
        self.assertEqual(0, self._value())

    def test_a_connection_that_died_at_rest_is_replaced_unnoticed(self) -> None:
        self.database.run(add_one)
        self._value()
        self.server.kill(signal.SIGKILL)
        self.server.restart()
        self.clock.ahead = 60.0
        with self.database.write() as tx:
            add_one(tx)
        self.assertEqual(2, self._value())

    def test_idempotent_work_survives_a_lost_connection_and_other_work_is_not_repeated(self) -> None:
        tries: list[int] = []

        def work(tx: sa.Connection) -> None:
            tries.append(1)
            tx.execute(sa.update(ROWS).values(v=7))
            if len(tries) == 1:
                self._end_session(tx)
            tx.execute(sa.update(ROWS).values(v=8))

        with self.assertRaises(errors.StoreUnavailable):
            self.database.run(work)
        self.assertEqual(([1], 0), (tries, self._value()))
        tries.clear()
        self.database.run(work, idempotent=True)
        self.assertEqual(([1, 1], 8), (tries, self._value()))

    def test_reading_goes_on_after_a_lost_connection(self) -> None:
        tries: list[int] = []

        def work(tx: sa.Connection) -> int:
            tries.append(1)
            if len(tries) == 1:
                self._end_session(tx)
            return int(tx.execute(sa.select(ROWS.c.v)).scalar_one())

        self.assertEqual((0, [1, 1]), (self.database.read_run(work), tries))

    def _end_session(self, tx: sa.Connection) -> None:
        """As an administrator would, from another session."""
        number = tx.exec_driver_sql(self.session).scalar_one()
        thread = threading.Thread(target=lambda: self._administer(f"{self.end} {self.call.format(number)}"))
        thread.start()
        thread.join(60)
        poll(lambda: self._ended(number), "the end of the session")

    def _administer(self, statement: str) -> list[tuple[object, ...]]:
        engine = sa.create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            answer = connection.exec_driver_sql(statement)
            return [tuple(row) for row in answer] if answer.returns_rows else []

    def _ended(self, number: int) -> bool:
        return not self._administer(self.look.format(number))


class PostgresqlFaults(ServerFaultCases, unittest.TestCase):
    """PostgreSQL."""

    kind = "postgresql"
    session, end, call = "SELECT pg_backend_pid()", "SELECT", "pg_terminate_backend({})"
    look = "SELECT pid FROM pg_stat_activity WHERE pid = {}"


class MariadbFaults(ServerFaultCases, unittest.TestCase):
    """MariaDB."""

    kind = "mariadb"
    session, end, call = "SELECT CONNECTION_ID()", "KILL", "{}"
    look = "SELECT id FROM information_schema.processlist WHERE id = {}"
