# SPDX-License-Identifier: Apache-2.0
"""Faults of the store in the middle of claims; the letters and numbers are those of the catalogue of faults.

A1 and A3 (many writers, the database killed) are in :mod:`tests.functional.allocation.test_processes`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
import sqlalchemy as sa

from moorage import errors
from moorage.allocation.interface import ClaimRequest, InventoryItem
from moorage.db import Database
from moorage.testing.allocation import all_allocations, held, inconsistencies, new_uuid, provider
from moorage_plugins.stores import tables
from moorage_plugins.stores.sql import SqlStore
from tests import cases, forking, seeded, servers
from tests.conformance.allocation.stores import create_tables, sql_store, sqlite_url
from tests.functional.allocation import victim
from tests.servers.proxy import Proxy

#: Processes are forked from one that has imported everything once.
PROCESS = forking.CONTEXT

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object


class Faults(_Base):
    """Mixed in; ``url()`` gives an empty database.

    :cvar combined: how many claims a transaction makes.
    """

    combined: ClassVar[int] = 1

    def url(self) -> str:
        raise NotImplementedError

    def opened(self, url: str, **more: Any) -> tuple[Database, SqlStore]:
        database = Database(url, **more)
        self.addCleanup(database.close)
        return database, self.store_on(database)

    def store_on(self, database: Database) -> SqlStore:
        return sql_store(database, claims_per_transaction=self.combined)

    def made(self, store: SqlStore, count: int = 2, total: int = 1000) -> list[str]:
        given = [provider(VCPU=total) for _ in range(count)]
        store.ensure_providers(given)
        return [each.uuid for each in given]

    def prepared(self, **more: Any) -> tuple[str, Database, SqlStore]:
        url = self.url()
        database, store = self.opened(url, **more)
        create_tables(database)
        return url, database, store

    def check(self, store: SqlStore) -> None:
        self.assertEqual([], inconsistencies(store))
        self.assertEqual([], store.drift())

    def test_a7_a_writer_that_slept_on_what_it_read_is_refused(self) -> None:
        url, _, store = self.prepared()
        (uuid,) = self.made(store, 1)
        ours, theirs = PROCESS.Pipe()
        process = PROCESS.Process(target=victim.pause_before_writing, args=(theirs, url, uuid))
        process.start()
        self.addCleanup(process.join, 60)
        self.addCleanup(process.kill)
        theirs.close()
        self.assertEqual(("read", 0), ours.recv())
        stopped = psutil.Process(process.pid)
        servers.wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "the writer stands", 60)
        store.set_inventories(uuid, [InventoryItem("VCPU", 500)], 0)
        store.claim(ClaimRequest(new_uuid(), {uuid: {"VCPU": 400}}))
        os.kill(process.pid or 0, signal.SIGCONT)
        self.assertEqual(("refused", 2), ours.recv())
        self.assertEqual((InventoryItem("VCPU", 500),), store.inventories(uuid).provider.inventories)
        self.check(store)

    def test_a11_a_claimer_that_dies_between_two_providers_leaves_nothing(self) -> None:
        url, _, store = self.prepared()
        uuids, consumer = self.made(store, 3), new_uuid()
        resources = {uuid: {"VCPU": 2} for uuid in uuids}
        process = PROCESS.Process(target=victim.die_between_providers, args=(url, consumer, resources))
        process.start()
        process.join(60)
        self.assertEqual(-signal.SIGKILL, process.exitcode)
        self.assertEqual({}, held(store))
        self.assertFalse(store.claim(ClaimRequest(consumer, resources, "r")).repeated)
        self.assertEqual({(uuid, "VCPU"): 2 for uuid in uuids}, held(store))
        self.check(store)

    def test_a10_capacity_shrinks_while_claims_run(self) -> None:
        _, _, store = self.prepared()
        (uuid,) = self.made(store, 1, 120)
        chance = seeded()
        refused = threading.Event()

        def claim(number: int) -> int:
            granted = 0
            while not refused.is_set():
                try:
                    store.claim(ClaimRequest(new_uuid(), {uuid: {"VCPU": chance.randint(1, 3)}}))
                    granted += 1
                except errors.CapacityExceeded:
                    refused.set()
            return granted

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(claim, number) for number in range(4)]
            for total in (100, 80, 60):
                store.set_inventories(uuid, [InventoryItem("VCPU", total)])
            granted = sum(each.result(120) for each in running)
        self.assertEqual(granted, len(all_allocations(store)))
        used = held(store).get((uuid, "VCPU"), 0)
        self.assertLessEqual(used, 120)
        # Whatever was held when it shrank is held; nothing more is granted above the new capacity.
        with self.assertRaises(errors.CapacityExceeded) as caught:
            store.claim(ClaimRequest(new_uuid(), {uuid: {"VCPU": 61}}))
        self.assertEqual(max(0, 60 - used), caught.exception.details["free"])
        self.assertEqual([], store.drift())


class ServerFaults(Faults):
    """What needs a server with rows that lock and connections that are cut."""

    def test_a6_a_reply_lost_after_the_commit_is_found_by_the_request_id(self) -> None:
        url, _, store = self.prepared()
        uuids = self.made(store, 2)
        parsed = sa.make_url(url)
        chance, lock = seeded(), threading.Lock()

        def lose(piece: bytes) -> bool:
            with lock:
                return b"COMMIT" in piece and chance.random() < 0.3

        told: list[str] = []
        unknown: list[Any] = []
        repeated: list[bool] = []

        def claims(number: int) -> None:
            mine = shared or self.opened(address)[1]
            for turn in range(cases(12)):
                request = ClaimRequest(new_uuid(), {uuid: {"VCPU": 1} for uuid in uuids}, f"{number}/{turn}")
                for _ in range(200):
                    try:
                        repeated.append(mine.claim(request).repeated)
                        told.append(request.consumer)
                        break
                    except errors.StoreUnavailable as error:
                        unknown.append(error.details.get("outcome"))

        with Proxy(parsed.host or "127.0.0.1", parsed.port or 0, lose) as proxy:
            through = parsed.set(host="127.0.0.1", port=proxy.port)
            address = through.render_as_string(hide_password=False)
            # Only the threads of one store share transactions.
            shared = self.opened(address)[1] if self.combined > 1 else None
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(claims, range(4)))
            lost = proxy.lost
        self.assertGreater(lost, 0)
        if self.combined == 1:
            # Otherwise the store looks most of them up itself.
            self.assertIn("unknown", unknown)
        self.assertLessEqual(
            repeated.count(True), unknown.count("unknown"), "what nobody doubted was called a repetition"
        )
        self.assertEqual(4 * cases(12), len(told))
        stored = [item.consumer for item in all_allocations(store)]
        self.assertEqual(sorted(told * 2), sorted(stored), "exactly one claim for each request")
        self.check(store)

    def test_a9_a_row_that_stays_locked_costs_a_bounded_time_and_no_connection(self) -> None:
        url, _, store = self.prepared()
        locked, free = self.made(store, 2)
        blocker, _ = self.opened(url)
        database, patient = self.opened(url, lock_timeout=1, attempts=2, pool_size=2)
        with blocker.write() as tx:
            tx.execute(
                sa.update(tables.resource_providers)
                .where(tables.resource_providers.c.uuid == locked)
                .values(can_host=True)
            )
            for _ in range(3):
                begun = time.monotonic()
                with self.assertRaises(errors.StoreBusy):
                    patient.claim(ClaimRequest(new_uuid(), {locked: {"VCPU": 1}}))
                self.assertLess(time.monotonic() - begun, 60)
            patient.claim(ClaimRequest(new_uuid(), {free: {"VCPU": 1}}))
            self.assertEqual(0, database._writers.lent)
        patient.claim(ClaimRequest(new_uuid(), {locked: {"VCPU": 1}}))
        self.assertEqual({(locked, "VCPU"): 1, (free, "VCPU"): 1}, held(store))
        self.check(store)


class SqliteFaults(Faults, unittest.TestCase):
    def url(self) -> str:
        return sqlite_url(self)

    def test_a8_a_full_disk_is_said_and_leaves_whole_claims(self) -> None:
        url, database, store = self.prepared()
        uuids = self.made(store, 3, 2**31 - 1)
        path = str(sa.make_url(url).database)
        ours, theirs = PROCESS.Pipe()
        process = PROCESS.Process(target=victim.fill_the_disk, args=(theirs, url, path, uuids))
        process.start()
        self.addCleanup(process.kill)
        theirs.close()
        said, acknowledged, message = ours.recv()
        process.join(60)
        self.assertEqual("full", said, message)
        self.assertIn("disk", message)
        stored = all_allocations(store)
        self.assertGreater(len(acknowledged), 0)
        self.assertEqual(set(acknowledged), {item.consumer for item in stored})
        self.assertEqual(3 * len(acknowledged), len(stored))
        self.check(store)
        store.claim(ClaimRequest(new_uuid(), {uuid: {"VCPU": 1} for uuid in uuids}))


class PostgresqlFaults(ServerFaults, unittest.TestCase):
    def url(self) -> str:
        return servers.fresh_database(servers.shared("postgresql"))


class MariadbFaults(ServerFaults, unittest.TestCase):
    def url(self) -> str:
        return servers.fresh_database(servers.shared("mariadb"))


class CombinedPostgresqlFaults(PostgresqlFaults):
    combined = 16


class CombinedMariadbFaults(MariadbFaults):
    combined = 16
