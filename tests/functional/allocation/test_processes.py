# SPDX-License-Identifier: Apache-2.0
"""Claims of several processes at once, with writers and the database killed and paused in the middle."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import unittest
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moorage.allocation.interface import InventoryItem, ResourceProvider
from moorage.db import Database
from moorage.testing.allocation import all_allocations, inconsistencies, provider
from tests import SOAK, forking, servers
from tests.conformance.allocation.stores import create_tables, sql_store, sqlite_url
from tests.functional.allocation import claimer

PROCESSES = 32 if SOAK else 8
#: Processes are forked from one that has imported everything once.
PROCESS = forking.CONTEXT


class Claimer:
    """One process of :mod:`tests.functional.allocation.claimer` and what it said."""

    def __init__(
        self,
        test: unittest.TestCase,
        url: str,
        name: str,
        providers: Sequence[str],
        target: Callable[..., None] = claimer.main,
    ) -> None:
        self.name = name
        self.acknowledged: list[str] = []
        self.last = ("", "")
        self._pipe, theirs = PROCESS.Pipe()
        self.process = PROCESS.Process(target=target, args=(theirs, url, name, providers))
        self.process.start()
        theirs.close()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        test.addCleanup(self.end)

    def _read(self) -> None:
        # EOFError at the end of the process, OSError when it was killed in the middle of a message.
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.last = self._pipe.recv()
                if self.last[0] == "ok":
                    self.acknowledged.append(self.last[1])

    def ready(self) -> None:
        servers.wait_until(lambda: self.last[0], f"{self.name} is ready", 60)

    def go(self) -> None:
        self._pipe.send("go")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid or 0, number)

    def join(self) -> None:
        """Wait for its end and for the last it said."""
        self.process.join(120)
        self._reader.join(60)

    def end(self) -> None:
        self.process.kill()
        self.join()
        self._pipe.close()


def acknowledged(claimers: Sequence[Claimer]) -> int:
    """How many claims were acknowledged in all."""
    return sum(len(each.acknowledged) for each in claimers)


def wait_for_claims(claimers: Sequence[Claimer], count: int, seconds: float = 60) -> None:
    """Wait until so many more claims are acknowledged."""
    goal = acknowledged(claimers) + count
    servers.wait_until(lambda: acknowledged(claimers) >= goal, f"{count} more claims", seconds)


class Race:
    """A database with providers of a capacity, and processes that claim of all of them."""

    def __init__(self, test: unittest.TestCase, url: str, capacity: int, providers: int = 2) -> None:
        self.test, self.url, self.capacity = test, url, capacity
        self.database = Database(url)
        test.addCleanup(self.database.close)
        create_tables(self.database)
        self.store = sql_store(self.database)
        given = [provider(VCPU=capacity) for _ in range(providers)]
        self.store.ensure_providers(given)
        self.providers = [each.uuid for each in given]

    def start(self, names: Sequence[str], *, go: bool = True, urls: Sequence[str] = ()) -> list[Claimer]:
        """Processes that claim, all from the same moment; ``urls``: where, one after the other."""
        where = itertools.cycle(urls or [self.url])
        claimers = [Claimer(self.test, next(where), name, self.providers) for name in names]
        for each in claimers:
            each.ready()
        for each in claimers if go else ():
            each.go()
        return claimers

    def check(self, claimers: Sequence[Claimer], unknown: int) -> None:
        """The provider is exactly full, every acknowledged claim is stored, and few are stored that nobody was told of."""
        told = {consumer for each in claimers for consumer in each.acknowledged}
        stored = all_allocations(self.store)
        consumers = {item.consumer for item in stored}
        self.test.assertEqual(set(), told - consumers, "acknowledged claims that are not stored")
        self.test.assertLessEqual(len(consumers - told), unknown, "stored claims that nobody was told of")
        for each in self.providers:
            self.test.assertEqual(self.capacity, sum(item.used for item in stored if item.provider == each))
        self.test.assertEqual(len(consumers) * len(self.providers), len(stored), "claims that are half there")
        self.test.assertEqual([], inconsistencies(self.store))
        self.test.assertEqual([], self.store.drift())


if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object


class Races(_Base):
    """Mixed in; ``url()`` gives an empty database."""

    capacity = 960 if SOAK else 240

    def url(self) -> str:
        raise NotImplementedError

    def test_many_processes_fill_providers_exactly(self) -> None:
        race = Race(self, self.url(), self.capacity)
        claimers = race.start([f"p{number}" for number in range(PROCESSES)])
        for each in claimers:
            each.join()
            self.assertEqual(("full", ""), each.last)
        race.check(claimers, unknown=0)

    def test_killed_and_paused_writers_leave_whole_claims_only(self) -> None:
        race = Race(self, self.url(), self.capacity)
        claimers = race.start([f"p{number}" for number in range(PROCESSES)])
        killed, paused, others = claimers[:3], claimers[3], claimers[4:]
        for number, each in enumerate(killed):
            wait_for_claims([each], 3 + number)
            each.signal(signal.SIGKILL)
        paused.signal(signal.SIGSTOP)
        # It may hold the lock of a provider while it stands, and then the others wait for it; they go on after it does.
        with contextlib.suppress(AssertionError):
            wait_for_claims(others, 5, seconds=1)
        paused.signal(signal.SIGCONT)
        for each in killed:
            each.join()
        again = race.start([each.name for each in killed])
        for each in [paused, *others, *again]:
            each.join()
            self.assertEqual(("full", ""), each.last)
        for first, second in zip(killed, again, strict=True):
            # The second of a name repeats what the first one did, and is told so for all of it.
            self.assertEqual(first.acknowledged, second.acknowledged[: len(first.acknowledged)])
        race.check([*claimers, *again], unknown=0)


class SqliteRaces(Races, unittest.TestCase):
    def url(self) -> str:
        return sqlite_url(self)


class PostgresqlRaces(Races, unittest.TestCase):
    def url(self) -> str:
        return servers.fresh_database(servers.shared("postgresql"))


class MariadbRaces(Races, unittest.TestCase):
    def url(self) -> str:
        return servers.fresh_database(servers.shared("mariadb"))


class KilledServerTests(unittest.TestCase):
    """The database is killed and started again while processes claim; each repeats the claim that it got no answer to."""

    def check(self, kind: str) -> None:
        servers.require(kind)
        with servers.KINDS[kind](durable=True) as server:
            race = Race(self, servers.fresh_database(server), 150)
            claimers = race.start([f"p{number}" for number in range(4)])
            for _ in range(2):
                wait_for_claims(claimers, 10)
                server.kill()
                server.restart()
            for each in claimers:
                each.join()
                self.assertEqual(("full", ""), each.last)
            race.check(claimers, unknown=0)
            race.database.close()  # PostgreSQL ends in order only when nobody is connected

    def test_postgresql(self) -> None:
        self.check("postgresql")

    def test_mariadb(self) -> None:
        self.check("mariadb")


class ShrinkingTests(unittest.TestCase):
    def test_capacity_that_shrinks_under_claiming_processes_is_not_exceeded_afterwards(self) -> None:
        race = Race(self, sqlite_url(self), 200, providers=1)
        claimers = race.start(["a", "b", "c"])
        (identity,) = race.providers
        name = race.store.usages()[0].provider.name
        wait_for_claims(claimers, 20)
        race.store.ensure_providers([ResourceProvider(identity, name, True, inventories=(InventoryItem("VCPU", 150),))])
        at_change = len(all_allocations(race.store))
        for each in claimers:
            each.join()
            self.assertEqual(("full", ""), each.last)
        self.assertEqual(max(150, at_change), len(all_allocations(race.store)))
        self.assertEqual([], race.store.drift())
