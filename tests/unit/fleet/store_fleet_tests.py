# SPDX-License-Identifier: Apache-2.0
"""Readings of the fleet by what changed, on whatever database the class that this is mixed into has."""

from __future__ import annotations

import random as random_module
import threading
import unittest
import uuid as uuid_module
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

import sqlalchemy as sa

from moorage.allocation.interface import SHARES, ClaimRequest, InventoryItem, ResourceProvider
from moorage.clock import SystemClock
from moorage.control_plane import store_fleet
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.store_fleet import StoreFleet
from moorage.db import MICROSECONDS, Database, now
from moorage.db.changes import OVERLAP
from moorage.fleet.aggregates import AggregateStore
from moorage.fleet.interface import NodeSpec
from moorage.fleet.nodes import NodeStore
from moorage.fleet.tables import nodes as nodes_table
from moorage.instances.availability import Availability
from moorage.scheduling.interface import FleetChanges, NodeState
from moorage.services.registry import ServiceRegistry
from moorage_plugins.stores.tables import resource_providers
from tests.conformance.allocation.stores import sql_store

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object


class StoreFleetTests(_Base):
    database: Database

    def setUp(self) -> None:
        self.nodes = NodeStore(self.database)
        self.store = sql_store(self.database)
        self.registry = ServiceRegistry(self.database, SystemClock())
        self.aggregates = AggregateStore(self.database)
        self.enrolment = Enrolment(self.database, self.nodes, self.store, self.registry, lambda: None)
        self.made: list[str] = []
        for number in range(5):
            self.enrol(f"h{number % 3}")
        for host in ("h0", "h1"):
            self.registry.enlist("agent", host, rpc_version="1.0")
        self.fleet = self.new_fleet()
        self.seen = {node.uuid: node for node in self.fleet.nodes()}
        self.age(nodes_table, resource_providers)

    def new_fleet(self) -> StoreFleet:
        return StoreFleet(self.nodes, self.store, Availability(self.database, 3600.0), self.aggregates)

    def enrol(self, host: str) -> str:
        uuid = str(uuid_module.uuid4())
        spec = NodeSpec(uuid, f"n-{uuid}", host, inventories=(InventoryItem("VCPU", 64),))
        self.enrolment.enrol([spec])
        self.made.append(uuid)
        return uuid

    def age(self, *tables: sa.Table) -> None:
        """Let all writes be older, so that their versions are known from the next reading on."""
        with self.database.write() as tx:
            for table in tables:
                tx.execute(sa.update(table).values(updated_at=table.c.updated_at - 5 * MICROSECONDS))
        self.apply()

    def apply(self, *, compare: bool = False) -> FleetChanges:
        changes = self.fleet.changes(compare=compare)
        if changes is None:
            self.seen = {node.uuid: node for node in self.fleet.nodes()}
            return FleetChanges()
        for uuid in changes.removed:
            self.seen.pop(uuid, None)
        self.seen |= {node.uuid: node for node in changes.changed}
        return changes

    def assert_whole(self) -> None:
        """What was read by changes is what a new reader reads."""
        fresh = self.new_fleet()
        expected = {node.uuid: node for node in fresh.nodes()}
        # The states of agents are read by themselves.
        self.assertEqual(_stateless(expected), _stateless(self.seen))
        for uuid in self.made:
            if uuid in expected:
                self.assertEqual(fresh.node_name(uuid), self.fleet.node_name(uuid))
        self.assertEqual(fresh.unavailable(), self.fleet.unavailable())

    def claim(self, node: str, consumer: str | None = None) -> str:
        consumer = consumer or str(uuid_module.uuid4())
        self.store.claim(ClaimRequest(consumer, {node: {"VCPU": 1}}))
        return consumer

    def pool(self) -> str:
        uuid, aggregate = str(uuid_module.uuid4()), str(uuid_module.uuid4())
        pool = ResourceProvider(uuid, f"pool-{uuid}", False, inventories=(InventoryItem("DISK_GB", 1000),))
        self.store.create_provider(pool)
        self.store.set_traits(uuid, {SHARES})
        for each in (uuid, self.made[0], self.made[1]):
            self.store.set_aggregates(each, {aggregate})
        return uuid

    def test_a_reading_may_rest_between_its_steps(self) -> None:
        steps: list[int] = []
        # On a server the nodes of other tests are there too.
        pages = len(self.nodes.uuids()) // 2
        self.fleet = StoreFleet(
            self.nodes, self.store, Availability(self.database, 3600.0), self.aggregates, lambda: steps.append(0)
        )
        with mock.patch.object(store_fleet, "_PAGE", 2):
            self.assertEqual(self.seen.keys(), {node.uuid for node in self.fleet.nodes()})
            self.assertEqual(pages, len(steps))
            for node in self.made:
                self.claim(node)
            self.assertEqual(set(self.made), {node.uuid for node in self.apply().changed})
            self.assertEqual(pages + 2 + 3, len(steps))
        self.assert_whole()

    def test_names_are_known_while_all_nodes_are_read_again(self) -> None:
        self.pool()
        self.apply()
        named = {uuid: self.fleet.node_name(uuid) for uuid in self.made}
        self.assertNotIn("", named.values())
        reading = self.fleet.nodes()
        next(reading)
        # Claims ask now.
        self.assertEqual(named, {uuid: self.fleet.node_name(uuid) for uuid in self.made})

    def test_providers_below_a_node_are_read_with_it(self) -> None:
        pool, node, other = self.pool(), self.made[0], self.made[3]
        cell, gpu = (str(uuid_module.uuid4()) for _ in range(2))
        gpus = (InventoryItem("PGPU", 2),)

        def nested(uuid: str) -> list[tuple[str, int, set[str]]]:
            providers = self.seen[uuid].providers[1:]
            return [(each.uuid, each.used.get("PGPU", 0), set(each.traits)) for each in providers if not each.shared]

        self.store.create_provider(ResourceProvider(cell, "cell", parent=node))
        self.store.create_provider(ResourceProvider(gpu, "gpu", inventories=gpus, parent=cell))
        self.apply()
        self.assertEqual([(cell, 0, set()), (gpu, 0, set())], nested(node))
        self.assertEqual([pool], [each.uuid for each in self.seen[node].providers if each.shared])
        self.assertEqual((2, 64), (self.seen[node].capacity["PGPU"], self.seen[node].capacity["VCPU"]))
        self.age(resource_providers)
        self.store.claim(ClaimRequest(str(uuid_module.uuid4()), {gpu: {"PGPU": 1}}))
        self.assertEqual([node], [each.uuid for each in self.apply().changed])
        self.assertEqual([(cell, 0, set()), (gpu, 1, set())], nested(node))
        self.assertEqual(1, self.seen[node].used["PGPU"])
        self.age(resource_providers)
        self.store.set_traits(gpu, {"HW_GPU_API_VULKAN"})
        self.apply()
        self.assertEqual((gpu, 1, {"HW_GPU_API_VULKAN"}), nested(node)[1])
        self.age(resource_providers)
        self.store.update_provider(cell, parent=other)
        self.apply()
        self.assertEqual(([], [cell, gpu]), (nested(node), [each[0] for each in nested(other)]))
        self.assert_whole()
        self.store.release(self.store.allocations(providers=[gpu])[0].consumer)
        self.store.delete_provider(gpu)
        self.apply()
        self.assertEqual([cell], [each[0] for each in nested(other)])
        self.assert_whole()

    def test_a_provider_below_a_node_that_becomes_a_node_leaves_the_other_one(self) -> None:
        node, below = self.made[0], str(uuid_module.uuid4())
        self.store.create_provider(
            ResourceProvider(below, f"n-{below}", inventories=(InventoryItem("VCPU", 6),), parent=node)
        )
        self.apply()
        self.assertEqual(70, self.seen[node].capacity["VCPU"])
        self.age(nodes_table, resource_providers)
        self.enrolment.enrol([NodeSpec(below, f"n-{below}", "h1", inventories=(InventoryItem("VCPU", 6),))])
        self.assertLessEqual({node, below}, {each.uuid for each in self.apply().changed})
        self.assertEqual([64, 6], [self.seen[uuid].capacity["VCPU"] for uuid in (node, below)])
        self.assert_whole()

    def test_the_roots_of_imported_nodes_are_not_looked_up(self) -> None:
        with mock.patch.object(self.store, "roots_of", wraps=self.store.roots_of) as roots_of:
            made = [self.enrol("h1") for _ in range(3)]
            self.assertEqual(set(made), {each.uuid for each in self.apply().changed})
            roots_of.assert_not_called()
            below = str(uuid_module.uuid4())
            self.store.create_provider(ResourceProvider(below, f"n-{below}", parent=made[0]))
            self.apply()
            roots_of.assert_called_once_with([below])
        self.assert_whole()

    def test_nothing_is_read_of_what_did_not_change(self) -> None:
        self.assertEqual(FleetChanges(), self.apply())
        self.claim(self.made[2])
        self.assertEqual([self.made[2]], [each.uuid for each in self.apply().changed])
        self.assert_whole()

    def test_every_change_is_read(self) -> None:
        consumer = ""

        def claim() -> None:
            nonlocal consumer
            consumer = self.claim(self.made[0])

        def change(uuid: str, **values: Any) -> None:
            generation = self.nodes.get(uuid).generation
            self.assertTrue(self.enrolment.change(uuid, generation, values))

        def rehost() -> None:
            with self.database.write() as tx:
                changed = nodes_table.c.generation + 1
                statement = sa.update(nodes_table).where(nodes_table.c.uuid == self.made[1])
                tx.execute(statement.values(host="h2", generation=changed, updated_at=now()))

        steps: list[Callable[[], object]] = [
            claim,
            lambda: self.store.release(consumer),
            lambda: change(self.made[3], properties={"rack": "r1"}),
            lambda: change(self.made[3], name="another name"),
            rehost,
            lambda: self.enrol("h1"),
            lambda: self.enrol("nobody"),
            lambda: self.registry.enlist("agent", "nobody", rpc_version="1.0"),
            lambda: self.enrolment.remove(self.made[4]),
            lambda: self.store.delete_provider(self.made[3]),
            lambda: self.enrolment.reconcile(),
            lambda: self.aggregates.create("gold", {"tier": "gold"}),
            lambda: self.aggregates.add("gold", "host", "h0"),
            lambda: self.aggregates.take_out("gold", "host", "h0"),
            lambda: self.store.set_traits(self.made[0], {"HW_CPU_X86_AVX2"}),
            lambda: self.store.set_traits(self.made[0], {"HW_CPU_X86_AVX", "HW_CPU_X86_SSE"}),
            lambda: self.store.set_traits(self.made[0], set()),
            self.pool,
            lambda: self.enrol("h0"),
        ]  # fmt: skip
        for number, step in enumerate(steps):
            with self.subTest(number):
                step()
                self.apply()
                self.assert_whole()

    def test_histories_of_changes(self) -> None:
        random = random_module.Random(7)
        consumers: list[str] = []
        for _ in range(40):
            step = random.random()
            alive = [each for each in self.made if each in self.seen]
            if step < 0.5:
                consumers.append(self.claim(random.choice(alive)))
            elif step < 0.7 and consumers:
                self.store.release(consumers.pop(random.randrange(len(consumers))))
            elif step < 0.8:
                self.enrol(random.choice(("h0", "h1", "h2")))
            elif step < 0.9:
                uuid = random.choice(alive)
                self.enrolment.change(uuid, self.nodes.get(uuid).generation, {"properties": {"rack": str(step)}})
            else:
                self.age(nodes_table, resource_providers)
            if random.random() < 0.5:
                self.apply()
        self.apply()
        self.assert_whole()

    def test_a_transaction_that_commits_after_a_reading_is_read_later(self) -> None:
        """It has written its time before the reading, and is invisible to it."""
        for late, compare in ((0.0, False), (2 * OVERLAP, True)):
            with self.subTest(late):
                written, commit = threading.Event(), threading.Event()
                thread = threading.Thread(target=self.claim_slowly, args=(late, written, commit))
                thread.start()
                self.assertTrue(written.wait(60))
                self.assertEqual(FleetChanges(), self.apply())
                commit.set()
                thread.join(60)
                if late:
                    self.assertEqual(FleetChanges(), self.apply(), "it is beyond the overlap")
                self.assertIn(self.made[0], [each.uuid for each in self.apply(compare=compare).changed])
                self.assert_whole()
                self.age(nodes_table, resource_providers)

    def claim_slowly(self, late: float, written: threading.Event, commit: threading.Event) -> None:
        def companion(tx: sa.Connection) -> None:
            column = resource_providers.c.updated_at
            older = sa.update(resource_providers).where(resource_providers.c.uuid == self.made[0])
            tx.execute(older.values(updated_at=column - int(late * MICROSECONDS)))
            written.set()
            commit.wait(60)

        request = ClaimRequest(str(uuid_module.uuid4()), {self.made[0]: {"VCPU": 1}})
        self.store.claim(request, companion)

    def test_a_comparison_finds_a_write_with_an_old_time(self) -> None:
        with self.database.write() as tx:
            statement = sa.update(nodes_table).where(nodes_table.c.uuid == self.made[0])
            old = nodes_table.c.updated_at - int(2 * OVERLAP * MICROSECONDS)
            changed = nodes_table.c.generation + 1
            tx.execute(statement.values(properties={"rack": "r9"}, generation=changed, updated_at=old))
        self.assertEqual(FleetChanges(), self.apply())
        self.assertEqual([self.made[0]], [each.uuid for each in self.apply(compare=True).changed])
        self.assertEqual(FleetChanges(), self.apply(compare=True))
        self.assert_whole()


def _stateless(found: dict[str, NodeState]) -> dict[str, tuple[Any, ...]]:
    return {
        uuid: (
            node.name, node.host, dict(node.capacity), dict(node.used), node.can_host, dict(node.properties),
            node.aggregates,
        )
        for uuid, node in found.items()
    }  # fmt: skip
