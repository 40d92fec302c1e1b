# SPDX-License-Identifier: Apache-2.0
"""Claims while the database moves to another machine, or its disk is full (A5 and A8 of the catalogue of faults)."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import unittest
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.interface import ClaimRequest
from moorage.db import Database
from moorage.testing.allocation import all_allocations, inconsistencies, new_uuid, provider
from tests import SOAK, servers
from tests.conformance.allocation.stores import create_tables, sql_store
from tests.functional.allocation.test_processes import Race, wait_for_claims
from tests.servers.kinds import Mariadb, Postgresql
from tests.servers.proxy import Proxy
from tests.servers.standby import PostgresqlStandby


class Generations:
    """Reads the generation of a provider all the time and notes where it falls."""

    def __init__(self, url: str, provider: str, **settings: Any) -> None:
        self.falls: list[tuple[int, int]] = []
        #: The highest that was seen.
        self.seen = -1
        self._database = Database(url, **settings)
        self._store = sql_store(self._database)
        self._provider = provider
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            with contextlib.suppress(errors.Unavailable):
                found = self._store.provider(self._provider).generation
                if found < self.seen:
                    self.falls.append((self.seen, found))
                self.seen = max(self.seen, found)

    def end(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join(60)
        self._database.close()


class FailoverTests(unittest.TestCase):
    """PostgreSQL with a synchronous standby; a Galera cluster is tried in :mod:`tests.functional.allocation.test_galera`."""

    def test_a5_a_standby_that_lags_takes_over_without_a_lost_claim_or_a_generation_that_falls(self) -> None:
        servers.require("postgresql")
        with (
            Postgresql(durable=True) as primary,
            PostgresqlStandby(primary) as standby,
            Proxy(primary.host, primary.port, lambda piece: False) as proxy,
        ):
            standby.follow()
            url = sa.make_url(servers.fresh_database(primary)).set(port=proxy.port)
            race = Race(self, url.render_as_string(hide_password=False), 120)
            watch = Generations(race.url, race.providers[0])
            self.addCleanup(watch.end)
            claimers = race.start([f"p{number}" for number in range(3)])
            wait_for_claims(claimers, 10)
            standby.lag()
            wait_for_claims(claimers, 20)
            primary.kill()
            standby.promote()
            proxy.turn_to(standby.host, standby.port)
            for each in claimers:
                each.join()
                self.assertEqual(("full", ""), each.last)
            watch.end()
            self.assertEqual([], watch.falls)
            self.assertGreater(watch.seen, 30)
            race.check(claimers, unknown=0)
            race.database.close()


class _SmallDisk:
    """Mixed in before a server: its folder is a small file system of its own."""

    SIZE = "220m"
    folder: Path

    def prepare(self) -> None:
        if not self.folder.is_mount():
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={self.SIZE},mode=755", "tmpfs", str(self.folder)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise unittest.SkipTest(f"no file system can be mounted here: {done.stderr}")
            self._give(self.folder)  # type: ignore[attr-defined]
        super().prepare()  # type: ignore[misc]

    def stop(self, *, quick: bool = False) -> None:
        folder = self.folder
        super().stop(quick=quick)  # type: ignore[misc]
        if folder.is_mount():
            subprocess.run(["umount", str(folder)], check=True)
            folder.rmdir()

    def fill(self, left: int) -> None:
        """Leave so many bytes."""
        with (self.folder / "ballast").open("wb") as ballast:
            for size in (1 << 20, 1 << 12):
                while shutil.disk_usage(self.folder).free > left + size:
                    ballast.write(bytes(size))
                    ballast.flush()

    def make_room(self) -> None:
        """Give the disk back."""
        (self.folder / "ballast").unlink()


class _SmallPostgresql(_SmallDisk, Postgresql):
    pass


class _SmallMariadb(_SmallDisk, Mariadb):
    pass


@unittest.skipUnless(SOAK, "the disks of servers are filled by 'make soak'")
class FullDiskTests(unittest.TestCase):
    def check(self, kind: type[_SmallPostgresql | _SmallMariadb]) -> None:
        servers.require(kind.NAME)
        with kind(durable=True) as server:
            url = servers.fresh_database(server)
            database = Database(url)
            self.addCleanup(database.close)
            create_tables(database)
            store = sql_store(database)
            given = [provider(VCPU=2**31 - 1) for _ in range(3)]
            store.ensure_providers(given)
            wanted = {each.uuid: {"VCPU": 1} for each in given}
            server.fill(200_000)
            acknowledged: set[str] = set()
            unknown: set[str] = set()
            with self.assertRaises(errors.StoreUnavailable) as refused:
                for _ in range(100_000):
                    consumer = new_uuid()
                    unknown.add(consumer)
                    store.claim(ClaimRequest(consumer, wanted, "r"))
                    unknown.discard(consumer)
                    acknowledged.add(consumer)
            self.assertIn("disk", refused.exception.message)
            server.make_room()
            server.restart()
            stored = all_allocations(store)
            consumers = {item.consumer for item in stored}
            self.assertGreater(len(acknowledged), 0)
            self.assertLessEqual(acknowledged, consumers)
            self.assertLessEqual(consumers, acknowledged | unknown)
            self.assertEqual(3 * len(consumers), len(stored))
            self.assertEqual(([], []), (inconsistencies(store), store.drift()))
            store.claim(ClaimRequest(new_uuid(), wanted))
            database.close()

    def test_a8_postgresql(self) -> None:
        self.check(_SmallPostgresql)

    def test_a8_mariadb(self) -> None:
        self.check(_SmallMariadb)
