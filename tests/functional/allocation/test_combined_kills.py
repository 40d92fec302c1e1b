# SPDX-License-Identifier: Apache-2.0
"""Claims that share a transaction, in a process that is killed before the commit, after it, and between the answers."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import unittest

from moorage.db import Database
from moorage.testing.allocation import all_allocations, inconsistencies, provider
from tests import servers
from tests.conformance.allocation.stores import create_tables, sql_store, sqlite_url
from tests.functional.allocation import combined_claimer
from tests.functional.allocation.combined_claimer import BETWEEN, CLIENTS, FIRST

PROCESS = multiprocessing.get_context("forkserver")
PROCESS.set_forkserver_preload([combined_claimer.__name__])
ALL = {FIRST, *(f"client-{number}" for number in range(CLIENTS))}


class SqliteCombinedKillTests(unittest.TestCase):
    def setUp(self) -> None:
        self.url = self.new_url()
        self.database = Database(self.url)
        self.addCleanup(self.database.close)
        create_tables(self.database)
        self.store = sql_store(self.database)
        self.provider = provider(VCPU=CLIENTS + 1)
        self.store.ensure_providers([self.provider])

    def new_url(self) -> str:
        return sqlite_url(self)

    def claim(self, moment: str) -> tuple[dict[str, str], int | None]:
        """What each client was told, and how the process ended."""
        ours, theirs = PROCESS.Pipe()
        process = PROCESS.Process(target=combined_claimer.main, args=(theirs, self.url, self.provider.uuid, moment))
        process.start()
        self.addCleanup(process.kill)
        theirs.close()
        told: dict[str, str] = {}
        with contextlib.suppress(EOFError, OSError):
            while ours.poll(120):
                answer, consumer = ours.recv()
                self.assertNotIn(consumer, told)
                told[consumer] = answer
        process.join(60)
        return told, process.exitcode

    def stored(self) -> set[str]:
        self.assertEqual([], inconsistencies(self.store))
        return {item.consumer for item in all_allocations(self.store)}

    def killed(self, moment: str) -> tuple[set[str], set[str]]:
        """The clients that were answered, and those whose claims are stored; then all repeat their claims."""
        told, code = self.claim(moment)
        self.assertEqual(-signal.SIGKILL, code)
        self.assertEqual({"claimed"}, set(told.values()) | {"claimed"})
        stored = self.stored()
        again, code = self.claim("never")
        self.assertEqual((0, ALL), (code, set(again)))
        self.assertEqual(stored, {consumer for consumer, answer in again.items() if answer == "repeated"})
        self.assertEqual(ALL, self.stored())
        return set(told), stored

    def test_a_kill_before_the_commit_leaves_nothing_and_answers_nobody(self) -> None:
        told, stored = self.killed("before")
        self.assertEqual((set(), {FIRST}), (told - {FIRST}, stored))

    def test_a_kill_after_the_commit_leaves_all_claims_for_the_repetitions(self) -> None:
        told, stored = self.killed("after")
        self.assertEqual((set(), ALL), (told - {FIRST}, stored))

    def test_a_kill_between_answers_leaves_all_claims(self) -> None:
        told, stored = self.killed("between")
        self.assertEqual((BETWEEN, ALL), (len(told - {FIRST}), stored))


class PostgresqlCombinedKillTests(SqliteCombinedKillTests):
    def new_url(self) -> str:
        servers.require("postgresql")
        return servers.fresh_database(servers.shared("postgresql"))


class MariadbCombinedKillTests(SqliteCombinedKillTests):
    def new_url(self) -> str:
        servers.require("mariadb")
        return servers.fresh_database(servers.shared("mariadb"))
