# SPDX-License-Identifier: Apache-2.0
"""Agents that declare a shard: they get its nodes and no others, and a node that changes its shard changes its agent."""

from __future__ import annotations

import unittest
import uuid as uuid_module
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.interface import ClaimRequest, InventoryItem, ResourceProvider
from moorage.clock import SystemClock
from moorage.control_plane.agent_role import nodes_of_agent
from moorage.control_plane.shard_hosts import ShardHosts
from moorage.control_plane.sharding_factories import declared_shard, open_mover
from moorage.fleet.interface import ShardMove, uuid_of_name
from moorage.fleet.tables import nodes
from moorage.instances.departures import Departures
from moorage.instances.interface import DEPARTURE, departed_consumer
from moorage.instances.reassign import Reassignment
from moorage.services.interface import ServiceIdentity
from moorage.sharding.checks import agents_of_shards, problems
from moorage.sharding.shard_metrics import ShardCollector
from moorage.work.operations import SqlOperationStore
from tests.conformance.allocation.stores import sql_store
from tests.functional.sharding.case import FleetCase


class ShardHostsCase(FleetCase):
    def setUp(self) -> None:
        super().setUp()
        self.mover = open_mover(self.instances)
        self.store = sql_store(self.database)
        self.workers = SqlOperationStore(self.database, lease_seconds=60.0, clock=SystemClock())
        self.departures = Departures(self.database, self.store, self.workers, self.registry)
        self.shard_hosts = ShardHosts(self.database, self.registry, self.instances, self.mover, self.departures)

    def agent(self, host: str, shard: str | None = None) -> ServiceIdentity:
        return self.registry.enlist("agent", host, shard=shard, rpc_version="1.0")

    def hosts(self) -> dict[str, str | None]:
        return {node.name: node.host for node in self.nodes.list()}

    def hosts_of(self, shard: str) -> set[str | None]:
        return {host for name, host in self.hosts().items() if name.startswith(shard)}

    def reshard(self, name: str, source: str | None, target: str | None, *, include: bool = False) -> None:
        move = ShardMove(uuid_of_name(name), source, target)
        self.assertEqual([True], self.database.run(lambda tx: self.mover.move(tx, [move], include_instances=include)))

    def correct(self) -> int:
        return self.shard_hosts.correct() + self.enrolment.assign()

    def test_enrolment_gives_the_nodes_of_a_shard_to_the_agents_that_declare_it_and_to_no_others(self) -> None:
        self.fleet(a=20, b=6, _=6)
        for host, shard in (("a1", "a"), ("a2", "a"), ("open", None)):
            self.agent(host, shard)
        self.assertEqual(32, self.enrolment.assign())
        self.assertEqual(
            ({"a1", "a2"}, {"open"}, {"open"}), (self.hosts_of("a"), self.hosts_of("b"), self.hosts_of("_"))
        )
        self.assertEqual(0, self.correct())

    def test_nodes_wait_while_no_agent_may_have_them(self) -> None:
        self.fleet(a=2, b=2, _=2)
        first = self.agent("a1", "a")
        self.assertEqual(2, self.enrolment.assign())
        self.assertEqual(({"a1"}, {None}, {None}), (self.hosts_of("a"), self.hosts_of("b"), self.hosts_of("_")))
        # Also while the agents of the shard are away, no agent of the rest of the fleet gets its nodes.
        self.registry.retire(first)
        self.agent("open")
        self.fleet(ax=1)
        with self.database.write() as tx:
            tx.execute(sa.update(nodes).where(nodes.c.name == "ax-000").values(shard="a"))
        self.enrolment.assign()
        self.assertEqual(({None}, {"open"}), (self.hosts_of("ax"), self.hosts_of("b")))

    def test_without_a_declared_shard_all_agents_share_all_nodes(self) -> None:
        self.fleet(a=20, _=20)
        self.agent("h1")
        self.agent("h2")
        self.enrolment.assign()
        self.assertEqual(({"h1", "h2"}, {"h1", "h2"}), (self.hosts_of("a"), self.hosts_of("_")))
        before = self.hosts()
        self.reshard("a-000", "a", "b")
        self.assertEqual((0, before), (self.correct(), self.hosts()))
        with self.database.read() as tx:
            self.assertEqual({}, agents_of_shards(tx))

    def test_a_node_that_changes_its_shard_changes_its_agent(self) -> None:
        self.fleet(a=3, b=1)
        for host in ("a", "b"):
            self.agent(f"{host}1", host)
        self.enrolment.assign()
        self.reshard("a-000", "a", "b")
        self.reshard("a-001", "a", "nobody")
        self.reshard("a-002", "a", None)
        self.assertEqual(3, self.correct())
        self.assertEqual({"a-000": "b1", "a-001": None, "a-002": None, "b-000": "b1"}, self.hosts())
        served = [node.name for node in nodes_of_agent(self.nodes, "b1", "b")()]
        self.assertEqual(["a-000", "b-000"], sorted(served))
        self.agent("open")
        self.assertEqual(2, self.correct())
        self.assertEqual(("open", "open"), (self.hosts()["a-001"], self.hosts()["a-002"]))
        # The agent declares another shard after a restart.
        self.agent("b1", "nobody")
        self.assertEqual(3, self.correct())
        self.assertEqual({"a-000": "open", "a-001": "b1", "a-002": "open", "b-000": "open"}, self.hosts())

    def test_an_occupied_node_changes_its_agent_with_its_instances_when_the_old_one_is_dead(self) -> None:
        self.fleet(a=3)
        old = self.agent("old")
        self.enrolment.assign()
        inside, busy = self.instance("a-000", "old"), self.instance("a-001", "old", "building")
        self.write("a-002", instance_uuid="00000000-0000-4000-8000-000000000001")
        self.agent("a1", "a")
        self.assertEqual((0, {"old"}), (self.correct(), self.hosts_of("a")))
        with self.database.read() as tx:
            self.assertEqual(["a1"], agents_of_shards(tx)["a"])
        (said,) = problems(self.database)
        self.assertIn("Agent old manages 3 nodes of shard a", said)
        self.assertIn("moorage service set agent:old --forced-down", said)
        self.registry.set(old.uuid, forced_down=True)
        self.assertEqual(2, self.correct())
        self.assertEqual({"a-000": "a1", "a-001": "old", "a-002": "a1"}, self.hosts())
        self.assertEqual(("a1", "old"), (self.instances.get(inside).host, self.instances.get(busy).host))
        self.assertFalse(self.registry.beat(old))
        with self.database.write() as tx:
            self.instances.set_status(tx, busy, "active", 5)
        self.assertEqual((1, 0), (self.correct(), self.correct()))
        self.assertEqual("a1", self.instances.get(busy).host)
        self.assertEqual([], problems(self.database))

    def test_what_departs_from_a_node_goes_with_it_and_what_a_resize_keeps_stays(self) -> None:
        self.fleet(a=2, b=1)
        old = self.agent("old")
        self.enrolment.assign()
        uuid, resized = self.instance("a-000", "old"), self.instance("b-000", "old")
        provider = ResourceProvider(uuid_of_name("a-000"), "a-000", inventories=(InventoryItem("VCPU", 4),))
        self.store.ensure_providers([provider])
        left = str(uuid_module.uuid4())
        self.store.claim(ClaimRequest(departed_consumer(left), {provider.uuid: {"VCPU": 1}}, f"departs-{left}"))
        with self.database.write() as tx:
            token = self.workers.create(tx, DEPARTURE, left, "let_go", "leaving", target_host="old")
            kept = {"host": "old", "node": "a-001", "node_uuid": uuid_of_name("a-001")}
            change = {"status": "resized", "pending": {"operation": "resize", "kept": kept}}
            self.assertTrue(self.instances.change(tx, resized, 0, change))
        self.agent("a1", "a")
        self.agent("b1", "b")
        self.registry.set(old.uuid, forced_down=True)
        self.assertEqual(1, self.correct())
        self.assertEqual({"a-000": "a1", "a-001": "old", "b-000": "old"}, self.hosts())
        self.assertEqual("a1", self.instances.get(uuid).host)
        departure = self.workers.get(DEPARTURE, left)
        assert departure is not None
        self.assertEqual(("a1", True), (departure.target_host, departure.token > token))
        with self.database.write() as tx:
            self.assertTrue(self.instances.change(tx, resized, 0, {"status": "active", "pending": {}}))
        self.assertEqual(2, self.correct())
        self.assertEqual({"a-000": "a1", "a-001": "a1", "b-000": "b1"}, self.hosts())

    def test_a_shard_without_an_agent_is_reported(self) -> None:
        self.fleet(a=2, b=1)
        self.assertEqual([], problems(self.database))
        agent = self.agent("a1", "a")
        self.agent("c1", "c")
        (said,) = problems(self.database)
        self.assertIn("No working agent serves shard b with its 1 nodes", said)
        self.assertIn("my_shard = b", said)
        self.registry.retire(agent)
        self.assertEqual(2, len(problems(self.database)))
        found = {
            (metric.name, sample.labels["shard"]): sample.value
            for metric in ShardCollector(self.database).collect()
            for sample in metric.samples
        }
        self.assertEqual(
            (2, 0, 1, 0), tuple(found[f"moorage_shard_{what}", shard] for shard in "ab" for what in ("nodes", "agents"))
        )
        self.assertEqual((0, 1), (found["moorage_shard_nodes", "c"], found["moorage_shard_agents", "c"]))
        self.agent("open")
        self.assertEqual(1, len(problems(self.database)))

    def test_occupied_nodes_of_an_agent_that_lives_cost_a_few_statements_however_many_there_are(self) -> None:
        self.fleet(a=30)
        old = self.agent("old")
        self.enrolment.assign()
        for number in range(30):
            for _ in range(2):
                self.instance(f"a-{number:03}", "old")
        self.agent("a1", "a")
        for dead, most in ((False, 10), (True, 12 * 30)):
            self.registry.set(old.uuid, forced_down=dead)
            executed: list[str] = []

            def note(*arguments: Any, into: list[str] = executed) -> None:
                into.append(arguments[2])

            sa.event.listen(sa.Engine, "before_cursor_execute", note)
            try:
                self.assertEqual(30 if dead else 0, self.correct())
            finally:
                sa.event.remove(sa.Engine, "before_cursor_execute", note)
            self.assertLess(len(executed), most)
            # MariaDB locks the instances that it gives away, for their events; places that are kept are looked for node by node.
            lists = [
                each
                for each in executed
                if each.startswith("SELECT instances.uuid") and "FOR UPDATE" not in each and "destination" not in each
            ]
            self.assertEqual(1 if dead else 0, len(lists))
        self.assertEqual({"a1"}, self.hosts_of("a") | {each.host for each in self.instances.list()})

    def test_a_shard_is_not_reassigned_to_an_agent_that_declares_another_one(self) -> None:
        self.fleet(a=1)
        self.agent("b1", "b")
        work = Reassignment(self.database, self.registry, self.nodes, self.instances, self.departures)
        preview = work.preview("a", "b1")
        self.assertIn("Agent b1 serves shard b", "".join(preview.problems))

    def test_a_declared_shard_must_be_a_name_that_nodes_can_have(self) -> None:
        for given, wanted in ((None, None), ("rack-a", "rack-a")):
            self.assertEqual(wanted, declared_shard(SimpleNamespace(sharding=SimpleNamespace(my_shard=given))))
        for wrong in ("", "none", "a,b"):
            with self.assertRaises(errors.ConfigError):
                declared_shard(SimpleNamespace(sharding=SimpleNamespace(my_shard=wrong)))


class TestSqlite(ShardHostsCase, unittest.TestCase):
    pass


class TestPostgresql(ShardHostsCase, unittest.TestCase):
    kind = "postgresql"


class TestMariadb(ShardHostsCase, unittest.TestCase):
    kind = "mariadb"
