# SPDX-License-Identifier: Apache-2.0
"""The journal reproduces the tables: after a mix of operations, on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

import contextlib
import random
import unittest
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tests
from moorage import errors
from moorage.allocation.interface import AllocationChange, AllocationLedger
from moorage.client import connect
from moorage.control_plane.api_role import ApiRole
from moorage.db import RecordedEvent
from moorage.db.tables import event_sequence
from moorage.fleet.interface import uuid_of_name
from moorage.journal.purge import purge
from moorage.journal.reader import EventFilter, JournalReader
from tests import folding, servers
from tests.functional.scheduling.plane import SOON, Plane
from tests.servers import wait_until

FLAVOR = {"flavorid": "small", "resources": {"VCPU": 1, "MEMORY_MB": 64}}
LARGER = {"flavorid": "larger", "resources": {"VCPU": 2, "MEMORY_MB": 64}}
WRITERS = 8
ROUNDS = tests.cases(3)


class SqliteFoldingTests(unittest.TestCase):
    def setUp(self) -> None:
        self.plane = Plane(self, url=self.url(), api__bind="127.0.0.1:0", api__auth_strategy="noauth")
        self.plane.up(("h1", "h2", "h3"), schedulers=2)
        self.api = connect(self.plane.start(ApiRole(), "api-live").url)
        self.store = self.plane.store

    def url(self) -> str:
        return ""

    def write(self, seed: int) -> None:
        """One writer: instances that are made, resized, moved and deleted, nodes and services that are set, claims."""
        chance = random.Random(seed)
        for _ in range(ROUNDS):
            with contextlib.suppress(errors.MoorageError):
                made = self.api.create_instance({"flavor": FLAVOR})["uuid"]
                self.plane.wait_status(made, "active")
                for action in chance.sample(("live_migrate", "resize", "shelve_offload"), 2):
                    with contextlib.suppress(errors.Conflict):
                        body = {action: {"flavor": LARGER} if action == "resize" else {}}
                        self.api.request("POST", f"/instances/{made}/action", body=body)
                        self._wait_end(made)
                if chance.random() < 0.5:
                    self.api.delete_instance(made)
            node = uuid_of_name(f"h{chance.randint(1, 3)}-node-0")
            with contextlib.suppress(errors.MoorageError):
                self.api.request("PATCH", f"/nodes/{node}", body={"disabled": chance.random() < 0.2})
            service = chance.choice(self.api.services())
            with contextlib.suppress(errors.MoorageError):
                self.api.set_service(service["uuid"], disabled=False)
            assert isinstance(self.store, AllocationLedger)
            with contextlib.suppress(errors.MoorageError):
                claim = AllocationChange(str(uuid.UUID(int=chance.getrandbits(128))), {node: {"VCPU": 1}})
                self.store.replace([claim])
                if chance.random() < 0.5:
                    self.store.replace([AllocationChange(claim.consumer, {})])

    maxDiff = None

    def test_the_journal_alone_reproduces_the_tables(self) -> None:
        with ThreadPoolExecutor(WRITERS) as pool:
            for each in [pool.submit(self.write, seed) for seed in range(WRITERS)]:
                each.result()
        wait_until(lambda: self.plane.registry.evict(**self._seen("api-1")), "the eviction", SOON)
        self.plane.wait_quiet()
        self.assertEqual([], folding.differences(self.plane.database, self.store))
        self._assert_one_order()
        kinds = {each.kind for each in self._all()}
        self.assertLessEqual(
            {"instance.create", "instance.change", "instance.delete", "node.create", "node.change"}, kinds
        )
        self.assertLessEqual({"claim.change", "claim.delete", "service.start", "service.set", "service.dead"}, kinds)
        self.assertLessEqual(
            {"building", "active", "migrating", "deleting"}, {each.state.get("status") for each in self._all()}
        )

    def _wait_end(self, uuid: str) -> None:
        wait_until(lambda: self.plane.status(uuid) in ("active", "shelved_offloaded"), "the operation", SOON)

    def _seen(self, host: str) -> dict[str, Any]:
        # A beat that began before may still be on its way: then the eviction fails, and is tried with the next one.
        self.plane.heartbeats[host].stop()
        (row,) = (each for each in self.plane.registry.list() if each.host == host)
        return {"uuid": row.uuid, "epoch": row.epoch, "beat": row.beat}

    def _all(self) -> list[RecordedEvent]:
        return list(JournalReader(self.plane.database).page(None, EventFilter(), 100_000).events)

    def _assert_one_order(self) -> None:
        found = self._all()
        self.assertEqual(list(range(1, len(found) + 1)), [each.number for each in found])
        versions: dict[str, int] = {}
        for each in found:
            if each.kind.startswith(("instance.", "service.")) and each.kind != "instance.create":
                self.assertGreaterEqual(each.version, versions.get(each.subject, 0), each)
                versions[each.subject] = each.version

    def test_what_operators_do_is_recorded(self) -> None:
        self.api.pause_periodic_task("reconcile", reason="a reason that users wrote")
        self.api.resume_periodic_task("reconcile")
        self.api.run_periodic_task("reconcile")
        plan = self.api.make_shard_plan({"shards": ["east", "west"]})["uuid"]
        self.api.apply_shard_plan(plan)
        self.api.rollback_shard_plan(plan)
        self.plane.wait_quiet()
        found = self._all()
        tasks = [each.kind for each in found if each.subject == "task/reconcile"]
        self.assertEqual(["task.pause", "task.resume", "task.request"], tasks)
        plans = [(each.kind, each.state["status"]) for each in found if each.subject == f"shard_plan/{plan}"]
        self.assertEqual(("shard_plan.create", "planned"), plans[0])
        self.assertEqual([("shard_plan.change", "applied"), ("shard_plan.change", "undone")], plans[1:])
        moved = [each.state["shard"] for each in found if each.kind == "node.change"]
        self.assertEqual({"east", "west", None}, set(moved))
        self.assertEqual([], folding.differences(self.plane.database, self.store))
        self.assertNotIn("a reason", str(found))

    def test_a_purge_removes_the_beginning_and_tells_readers(self) -> None:
        for _ in range(3):
            self.plane.wait_status(self.api.create_instance({"flavor": FLAVOR})["uuid"], "active")
        self.plane.wait_quiet()
        before = self.api.events()
        self.assertEqual(0, purge(self.plane.database, 3600))
        self.assertEqual(2, purge(self.plane.database, 0, batch=2))
        after = self.api.events()
        self.assertEqual(before["events"][2:], after["events"][: len(before["events"]) - 2])
        with self.assertRaises(errors.Gone) as raised:
            self.api.events(1)
        self.assertEqual(3, raised.exception.details["oldest"])
        while purge(self.plane.database, 0, batch=2):
            pass
        with self.plane.database.read() as tx:
            row = tx.execute(event_sequence.select()).one()
        self.assertEqual(row.last, row.purged)
        self.assertEqual([], self.api.events(row.last)["events"])


class PostgresqlFoldingTests(SqliteFoldingTests):
    def url(self) -> str:
        return servers.fresh_database(servers.shared("postgresql"))


class MariadbFoldingTests(SqliteFoldingTests):
    def url(self) -> str:
        return servers.fresh_database(servers.shared("mariadb"))
