# SPDX-License-Identifier: Apache-2.0
"""The use case of seed 001, through a whole control plane: two hosts share a pool, and nobody counts it twice."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.interface import ClaimRequest
from moorage.cli import main
from moorage.db import Database
from moorage.testing.allocation import new_uuid
from tests import servers
from tests.commands import in_process
from tests.conformance.allocation.stores import sql_store
from tests.functional.control_plane.test_slice import SliceCase, flavor


class PoolTests(SliceCase):
    """The methods of one class run by name, each on what it makes itself."""

    def cli(self, *words: str) -> Any:
        status, said, error = in_process(main.main, [*words, "--state-dir", str(self.plane.state), "-f", "json"])
        self.assertEqual(0, status, said + error)
        return json.loads(said)

    def test_two_hosts_share_a_pool_and_it_is_counted_once(self) -> None:
        nodes = {node["name"]: node["uuid"] for node in self.api.nodes()}
        first, second = nodes["node-0"], nodes["node-1"]
        made = self.cli("pool", "set", "ceph", "--resource", "DISK_GB=1000", "--member", "node-0", "--member", "node-1")
        again = self.cli("pool", "set", "ceph")
        self.assertEqual((made["uuid"], sorted([first, second])), (again["uuid"], json.loads(again["members"])))

        def seen(left: float) -> bool:
            hosts = [host for host in self.api.hosts() if host["uuid"] in {first, second}]
            shown = [(host["capacity"].get("DISK_GB"), host["used"].get("DISK_GB")) for host in hosts]
            return shown == [(1000, 1000 - left)] * 2

        servers.wait_until(lambda: seen(1000), "the schedulers see the pool", 60)
        instance = self.create(flavor("pooled", VCPU=2, DISK_GB=400))
        self.assertEqual("active", instance["status"])
        held = {
            (each["provider"], each["resource_class"]): each["used"]
            for each in self.api.allocations(consumer=instance["uuid"])
        }
        self.assertIn(instance["node_uuid"], {first, second})
        self.assertEqual({(instance["node_uuid"], "VCPU"): 2, (made["uuid"], "DISK_GB"): 400}, held)
        totals = {row["resource_class"]: row for row in self.cli("usage", "list")}
        shown = [totals["DISK_GB"][name] for name in ("providers", "total", "capacity", "used", "free")]
        self.assertEqual([1, 1000, 1000, 400, 600], shown)
        (pool,) = self.cli("pool", "list")
        self.assertEqual(('{"DISK_GB": 400}', '{"DISK_GB": 1000.0}'), (pool["used"], pool["capacity"]))
        servers.wait_until(lambda: seen(600), "both hosts offer what is left", 60)
        # The pool has room for one more of the size, however many hosts share it.
        other = self.create(flavor("pooled", VCPU=1, DISK_GB=600))
        with self.assertRaises(errors.NoValidHost):
            self.api.create_instance(flavor("pooled", VCPU=1, DISK_GB=1))
        self.assertNotEqual([], self.cli("allocation", "list", "--provider", made["uuid"]))
        with self.assertRaises(errors.InUse):
            self.api.delete_pool(made["uuid"])
        for each in (instance, other):
            self.delete(each["uuid"])
        self.assertEqual([], self.cli("allocation", "list", "--provider", made["uuid"]))
        self.api.delete_pool(made["uuid"])
        self.assertEqual([], self.cli("pool", "list"))

    extra = "[allocation]\norphan_detectors = instance\nreap_interval = 0.5\n"

    def test_claims_that_expired_are_reaped_and_orphans_are_found(self) -> None:
        (uuid,) = [node["uuid"] for node in self.api.nodes() if node["name"] == "node-6"]
        path = str(self.plane.state / "moorage.sqlite")
        database = Database(sa.URL.create("sqlite", database=path).render_as_string())
        self.addCleanup(database.close)
        store, leased, orphan = sql_store(database), new_uuid(), new_uuid()
        store.claim(ClaimRequest(leased, {uuid: {"VCPU": 1}}, lifetime=1.0))
        store.claim(ClaimRequest(orphan, {uuid: {"VCPU": 1}}))
        servers.wait_until(lambda: store.consumer(leased) is None, "an engine reaps it", 60)
        (found,) = self.cli("allocation", "audit", "--repair")
        self.assertEqual(("orphan", orphan, False), (found["finding"], found["consumer"], found["repaired"]))
        (found,) = self.cli("allocation", "audit", "--release-orphans")
        self.assertEqual((orphan, True), (found["consumer"], found["repaired"]))
        self.assertIsNone(store.consumer(orphan))

    def test_drift_is_reported_and_repaired(self) -> None:
        (uuid,) = [node["uuid"] for node in self.api.nodes() if node["name"] == "node-7"]
        self.assertEqual([], self.cli("allocation", "audit"))
        with contextlib.closing(sqlite3.connect(self.plane.state / "moorage.sqlite", timeout=60)) as database:
            database.execute(
                "UPDATE inventories SET used = used + 3 WHERE resource_provider_id = "
                "(SELECT id FROM resource_providers WHERE uuid = ?)",
                (uuid,),
            )
            database.commit()
        (found,) = self.cli("allocation", "audit")
        names = ("finding", "provider", "resource_class", "repaired")
        self.assertEqual(["drift", uuid, "VCPU", False], [found[name] for name in names])

    def test_a_pool_that_cannot_be_is_refused_and_leaves_nothing(self) -> None:
        node = next(iter(self.api.nodes()))["uuid"]
        for uuid, body, error in (
            (new_uuid(), {"name": "p", "members": [new_uuid()], "inventories": {}}, errors.NotFound),
            (node, {"name": "p", "members": [], "inventories": {}}, errors.Conflict),
            (new_uuid(), {"name": "p", "members": [], "inventories": {"VCPU": {"total": 0}}}, errors.InvalidInput),
            (new_uuid(), {"name": "p", "members": [], "inventories": {"NO_SUCH": {"total": 1}}}, errors.InvalidInput),
        ):
            with self.subTest(body=body), self.assertRaises(error):
                self.api.set_pool(uuid, body)
        self.assertEqual([], self.api.pools())
        with self.assertRaises(errors.NotFound):
            self.api.delete_pool(new_uuid())


del SliceCase
