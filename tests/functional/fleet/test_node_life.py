# SPDX-License-Identifier: Apache-2.0
"""The life of a node on each database: who disabled it, claims and removals that race, and what a removal is refused for."""

from __future__ import annotations

import threading
import unittest
import uuid
from concurrent import futures
from dataclasses import replace
from typing import Any
from unittest import mock

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.interface import ClaimRequest
from moorage.clock import SystemClock
from moorage.context import RequestContext, acting_for
from moorage.control_plane.enrolment import Enrolment
from moorage.fleet.interface import STATES, InventoryItem, Node, NodeSpec
from moorage.fleet.nodes import NodeStore
from moorage.fleet.tables import nodes
from moorage.fleet.view import NodeView
from moorage.instances.create import StoreClaimer
from moorage.instances.departures import Departures
from moorage.instances.interface import DEPARTURE, Instance, departed_consumer
from moorage.instances.on_node import NodeContents
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.interface import Flavor, RequestSpec
from moorage.services.interface import ServiceIdentity
from moorage.services.registry import ServiceRegistry
from moorage.work.operations import SqlOperationStore
from moorage_plugins.compute.instances import ComputeInstances
from tests.conformance.allocation.stores import sql_store
from tests.functional.db.databases import TablesCase
from tests.ready import ready_node
from tests.unit.scheduling.group_tests import NodeNames

ROUNDS = 8
CLAIMERS = 3
REFUSALS = (errors.ConstraintViolated, errors.NotFound, errors.CapacityExceeded)


class LifeCase(TablesCase):
    def setUp(self) -> None:
        super().setUp()
        self.nodes = NodeStore(self.database)
        self.store = sql_store(self.database)
        self.instances = ComputeInstances(conf=None, database=self.database, clock=SystemClock())
        self.registry = ServiceRegistry(self.database, SystemClock())
        self.workers = SqlOperationStore(self.database, lease_seconds=60)
        self.departures = Departures(self.database, self.store, self.workers, self.registry)
        self.contents = NodeContents(self.database, self.instances, self.store, self.departures)
        self.enrolment = Enrolment(
            self.database, self.nodes, self.store, self.registry, lambda: None, contents=self.contents
        )
        self.make()

    def make(self) -> None:
        """A node of its own with an agent that is up."""
        self.node, self.host = str(uuid.uuid4()), f"host-{uuid.uuid4().hex[:8]}"
        self.name = f"node-{self.node}"
        self.availability = ready_node(self.database, self.node, self.host)
        self.enrolment.enrol([NodeSpec(self.node, self.name, inventories=(InventoryItem("VCPU", 100),))])
        groups = GroupStore(self.database)
        self.claimer = StoreClaimer(self.store, self.instances, self.workers, NodeNames(), groups, self.availability)

    def claim(self, name: str = "") -> str:
        spec = RequestSpec(str(uuid.uuid4()), Flavor("small", {"VCPU": 1}), properties={"name": name})
        self.claimer.claim(spec, self.node, self.host, f"req-{spec.instance_uuid}")
        return spec.instance_uuid

    def insert(self, name: str = "", **more: Any) -> str:
        """An instance that holds nothing of the node."""
        found = Instance(str(uuid.uuid4()), name, "active", self.host, self.name, self.node, "small", {"VCPU": 1})
        with self.database.write() as tx:
            self.instances.insert(tx, replace(found, **more))
        return found.uuid

    def change(self, **states: Any) -> Node:
        self.enrolment.change_properties(self.node, {}, states)
        return self.nodes.get(self.node)

    def on_it(self) -> frozenset[str]:
        return frozenset(each.uuid for each in self.instances.list(host=self.host))

    def refusal(self) -> str:
        with self.assertRaises(errors.InUse) as refused:
            self.enrolment.remove(self.node)
        self.assertEqual(self.name, self.nodes.get(self.node).name)
        self.assertEqual(self.node, self.store.provider(self.node).uuid)
        return refused.exception.message

    # -- states ---------------------------------------------------------------------------------------------------

    def test_each_state_has_who_began_it_and_the_journal_says_who_changed_it(self) -> None:
        for flag in STATES:
            for user in ("ada", "bob"):
                with acting_for(RequestContext(user_id=user, overwrite=False)):
                    found = self.change(**{flag: True, f"{flag}_reason": user})
                seen = [getattr(found, f"{flag}{part}") for part in ("", "_reason", "_by")]
                # Who began it, as since when: another reason changes neither.
                self.assertEqual([True, user, "ada"], seen)
        self.assertEqual("in maintenance (bob) and disabled (bob) and draining (bob)", self._claim_refused())
        with acting_for(RequestContext(user_id="eve", overwrite=False)):
            found = self.change(**dict.fromkeys(STATES, False), **{f"{flag}_reason": None for flag in STATES})
        self.assertEqual(
            {None},
            {getattr(found, f"{flag}{part}") for flag in STATES for part in ("_reason", "_since", "_by")},
        )
        self.claim()
        with self.database.read() as tx:
            rows = tx.execute(
                sa.text("SELECT actor FROM events WHERE subject = :s AND kind = 'node.change' ORDER BY id"),
                {"s": f"node/{self.node}"},
            ).scalars()
            self.assertEqual(["ada", "bob"] * 3 + ["eve"], [each for each in rows if each])

    def _claim_refused(self) -> str:
        with self.assertRaises(errors.ConstraintViolated) as refused:
            self.claim()
        return str(refused.exception.details["state"]).removeprefix("the node is ")

    def test_a_node_that_is_made_with_a_state_has_who_made_it(self) -> None:
        made = str(uuid.uuid4())
        with acting_for(RequestContext(user_id="ada", overwrite=False)):
            self.enrolment.create(NodeSpec(made, f"node-{made}", details={"maintenance": True}))
        found = self.nodes.get(made)
        self.assertEqual(("ada", None, None), (found.maintenance_by, found.disabled_by, found.draining_by))
        self.assertIsNotNone(found.maintenance_since)

    def test_a_node_whose_agent_is_down_is_dead(self) -> None:
        view = NodeView(self.nodes, self.availability.down, self.contents.counts)
        self.assertEqual((False, 0), (view.one(self.name)["dead"], view.one(self.name)["instances"]))
        self.claim()
        (service,) = self.registry.list(binary="agent", host=self.host)
        self.registry.set(service.uuid, forced_down=True)
        self.assertEqual((True, 1), (view.one(self.name)["dead"], view.one(self.name)["instances"]))
        with self.database.write() as tx:
            tx.execute(sa.update(nodes).where(nodes.c.uuid == self.node).values(host=None))
        self.assertIsNone(view.one(self.name)["dead"])

    def test_a_state_waits_for_a_claim_that_has_read_the_states(self) -> None:
        """Otherwise the claim would commit after the node was closed."""
        insert, closed = self.instances.insert, threading.Event()
        seen: list[bool] = []

        def close() -> None:
            self.change(disabled=True)
            closed.set()

        closing = threading.Thread(target=close)

        def closed_meanwhile(tx: Any, instance: Instance) -> Instance:
            if not seen:
                closing.start()
                # It waits as long as this transaction is open, so a longer look sees nothing else.
                seen.append(closed.wait(0.5))
            return insert(tx, instance)

        with mock.patch.object(self.instances, "insert", closed_meanwhile):
            made = self.claim()
        closing.join(60)
        self.assertEqual(([False], True, {made}), (seen, closed.is_set(), self.on_it()))
        self.assertEqual("disabled", self._claim_refused())

    def test_no_claim_commits_after_a_state_that_keeps_it_away(self) -> None:
        for number in range(ROUNDS):
            self.make()
            flag = list(STATES)[number % len(STATES)]
            begun = threading.Barrier(CLAIMERS + 1)
            with futures.ThreadPoolExecutor(CLAIMERS) as pool:
                running = [pool.submit(self._claim_until_refused, begun) for _ in range(CLAIMERS)]
                begun.wait(60)
                self.change(**{flag: True})
                committed = self.on_it()
                made = {each for task in running for each in task.result()}
            self.assertEqual(committed, self.on_it(), "a claim committed after the node was closed")
            self.assertEqual(committed, made)

    def _claim_until_refused(self, begun: threading.Barrier) -> list[str]:
        """Instances that were made; the first one of them before the barrier."""
        made = [self.claim()]
        begun.wait(60)
        while len(made) < 20:
            try:
                made.append(self.claim())
            except REFUSALS:
                break
        return made

    # -- removal --------------------------------------------------------------------------------------------------

    def test_a_free_node_is_removed_with_its_provider(self) -> None:
        self.change(disabled=True)
        self.enrolment.remove(self.node)
        with self.assertRaises(errors.NotFound):
            self.nodes.get(self.node)
        self.assertEqual([], self.store.usages(providers=[self.node]))
        with self.assertRaises(errors.NotFound):
            self.enrolment.remove(self.node)
        with self.assertRaises(REFUSALS):
            self.claim()

    def test_a_removal_says_what_is_on_the_node_and_what_to_do(self) -> None:
        uuids = [self.claim("web") for _ in range(6)]
        said = self.refusal()
        self.assertIn(
            f"Node {self.name} is not removed: 6 instances are on it (web, web, web, web, web and 1 more).", said
        )
        self.assertIn("moorage instance migrate", said)
        for each in uuids:
            self.claimer.release(each)
        with self.database.write() as tx:
            tx.execute(sa.text("DELETE FROM instances WHERE host = :h"), {"h": self.host})
        for each in uuids:
            self.store.release(each)
        self.enrolment.remove(self.node)

    def test_an_instance_that_holds_only_pools_is_on_the_node(self) -> None:
        self.insert("alone")
        self.assertIn("1 instance is on it (alone)", self.refusal())

    def test_an_instance_that_moves_to_the_node_is_named(self) -> None:
        made = self.insert("coming", host="elsewhere", node="n", node_uuid=str(uuid.uuid4()))
        pending = {"operation": "live_migrate", "node_uuid": self.node, "host": self.host, "node": self.name}
        with self.database.write() as tx:
            self.instances.change(tx, made, 5, {"status": "migrating", "pending": pending})
        self.assertIn("1 instance moves to it (coming)", self.refusal())

    def test_other_consumers_are_named(self) -> None:
        here = self.claim("here")
        left, other = departed_consumer(here), str(uuid.uuid4())
        for consumer in (left, other):
            self.store.claim(ClaimRequest(consumer, {self.node: {"VCPU": 1}}))
        said = self.refusal()
        self.assertIn(f"1 instance is on it (here); 1 other consumer holds resources of it ({other})", said)

    # -- departures -----------------------------------------------------------------------------------------------

    def depart(self, node: str = "") -> str:
        """An instance that was evacuated from the host; it holds what it had there."""
        instance = self.insert(host="elsewhere", node="n", node_uuid=str(uuid.uuid4()))
        self.store.claim(ClaimRequest(departed_consumer(instance), {node or self.node: {"VCPU": 1}}))
        with self.database.write() as tx:
            self.workers.create(tx, DEPARTURE, instance, "let_go", "leaving", target_host=self.host)
        return instance

    def fence(self) -> None:
        (agent,) = self.registry.list(binary="agent", host=self.host)
        self.registry.retire(ServiceIdentity(agent.uuid, self.host, "agent", None, agent.epoch))
        self.registry.set(agent.uuid, forced_down=True)
        self.registry.fence(agent.uuid, "it was scrapped", down_time=60)

    def departing(self, instance: str) -> tuple[bool, bool]:
        """Whether an instance has to be let go, and whether it still holds something on the host."""
        held = bool(self.store.allocations(consumers=[departed_consumer(instance)]))
        return self.workers.get(DEPARTURE, instance) is not None, held

    def test_a_host_that_is_not_fenced_keeps_the_instances_that_it_has_not_let_go(self) -> None:
        left = [self.depart() for _ in range(2)]
        view = NodeView(self.nodes, self.availability.down, self.contents.counts).one(self.node)
        self.assertEqual((0, 2), (view["instances"], view["departures"]))
        said = self.refusal()
        self.assertIn(
            f"2 evacuated or moved instances that host {self.host} has not let go ({', '.join(sorted(left))}).", said
        )
        self.assertIn(f"Start the agent of host {self.host}", said)
        self.assertIn(f"moorage host fence {self.host} --reason TEXT", said)
        self.assertNotIn(departed_consumer(left[0]), said)
        self.claim("here")
        said = self.refusal()
        self.assertIn("1 instance is on it (here). Delete these", said)
        self.assertIn("Besides, 2 evacuated or moved instances", said)
        self.assertEqual([(True, True)] * 2, [self.departing(each) for each in left])

    def test_the_removal_of_the_node_of_a_fenced_host_ends_its_departures_and_those_alone(self) -> None:
        second = str(uuid.uuid4())
        self.enrolment.enrol([NodeSpec(second, f"node-{second}", self.host, inventories=(InventoryItem("VCPU", 9),))])
        kept, here, beside = self.claim("kept"), self.depart(), self.depart(second)
        self.fence()
        self.assertEqual((1, 1), tuple(self.contents.counts(each)["departures"] for each in (self.node, second)))
        # The departure remains where the node cannot be removed.
        self.refusal()
        self.assertEqual((True, True), self.departing(here))
        with self.database.write() as tx:
            tx.execute(sa.text("DELETE FROM instances WHERE host = :h"), {"h": self.host})
        self.store.release(kept)
        self.enrolment.remove(self.node)
        self.assertEqual([(False, False), (True, True)], [self.departing(each) for each in (here, beside)])
        (agent,) = self.registry.list(binary="agent", host=self.host)
        self.assertEqual((True, 0), (agent.fenced, agent.evacuated))
        self.enrolment.remove(second)
        self.assertEqual((False, False), self.departing(beside))

    def test_an_instance_that_was_evacuated_again_departs_from_its_last_host(self) -> None:
        instance = self.depart()
        self.fence()
        seen = self.departures.of_node(self.node)
        other = str(uuid.uuid4())
        self.enrolment.enrol([NodeSpec(other, f"node-{other}", inventories=(InventoryItem("VCPU", 9),))])
        self.store.release(departed_consumer(instance))
        self.store.claim(ClaimRequest(departed_consumer(instance), {other: {"VCPU": 1}}))
        with self.database.write() as tx:
            self.workers.create(tx, DEPARTURE, instance, "let_go", "leaving", target_host="another", force=True)
        with mock.patch.object(Departures, "of_node", lambda me, node: seen):
            self.enrolment.remove(self.node)
        self.assertEqual((True, True), self.departing(instance))

    def test_an_agent_that_starts_waits_for_a_removal_that_has_ended_its_departures(self) -> None:
        instance = self.depart()
        self.fence()
        started = threading.Event()
        seen: list[bool] = []

        def start() -> None:
            self.registry.enlist("agent", self.host, rpc_version="1.0")
            started.set()

        starting = threading.Thread(target=start)
        delete = self.nodes.delete

        def started_meanwhile(*args: Any) -> bool:
            if not seen:
                starting.start()
                # It waits as long as this transaction is open, so a longer look sees nothing else.
                seen.append(started.wait(0.5))
            return delete(*args)

        with mock.patch.object(self.nodes, "delete", started_meanwhile):
            self.enrolment.remove(self.node)
        starting.join(60)
        self.assertEqual(([False], True, (False, False)), (seen, started.is_set(), self.departing(instance)))

    def test_of_the_return_of_an_agent_and_the_removal_of_its_node_one_is_first(self) -> None:
        """No departure ends while the agent that has to do it is up."""
        for number in range(ROUNDS):
            self.make()
            instance = self.depart()
            self.fence()
            begun = threading.Barrier(2)
            found: list[tuple[bool, bool]] = []

            def come_back(instance: str = instance, found: list[tuple[bool, bool]] = found) -> None:
                self.registry.enlist("agent", self.host, rpc_version="1.0")
                found.append(self.departing(instance))

            with futures.ThreadPoolExecutor(2) as pool:
                back = pool.submit(self._try, begun, come_back, number % 3)
                removal = pool.submit(self._try, begun, lambda: self.enrolment.remove(self.node), number % 2)
                refused = [back.result(), removal.result()][1]
            if refused is None:
                self.assertEqual(([(False, False)], (False, False)), (found, self.departing(instance)))
                with self.assertRaises(errors.NotFound):
                    self.nodes.get(self.node)
            else:
                self.assertIsInstance(refused, errors.InUse)
                self.assertEqual(([(True, True)], (True, True)), (found, self.departing(instance)))
                self.assertEqual(self.name, self.nodes.get(self.node).name)

    def test_an_instance_of_another_service_counts_outside_of_maintenance(self) -> None:
        with self.database.write() as tx:
            tx.execute(sa.update(nodes).where(nodes.c.uuid == self.node).values(instance_uuid=str(uuid.uuid4())))
        self.assertIn("of another service is on it", self.refusal())
        self.change(maintenance=True)
        self.enrolment.remove(self.node)

    def test_of_creates_and_a_removal_at_once_no_instance_is_on_a_removed_node(self) -> None:
        for number in range(ROUNDS):
            self.make()
            begun = threading.Barrier(CLAIMERS + 1)
            with futures.ThreadPoolExecutor(CLAIMERS + 1) as pool:
                claims = [pool.submit(self._try, begun, self.claim) for _ in range(CLAIMERS)]
                removal = pool.submit(self._try, begun, lambda: self.enrolment.remove(self.node), number % 3)
                made, refused = [each.result() for each in claims], removal.result()
            succeeded = [each for each in made if isinstance(each, str)]
            self.assertEqual(len(succeeded), len(self.on_it()))
            if succeeded:
                self.assertIsInstance(refused, errors.InUse)
                self.assertEqual(self.name, self.nodes.get(self.node).name)
            else:
                self.assertIsNone(refused)
                with self.assertRaises(errors.NotFound):
                    self.nodes.get(self.node)
            self.assertEqual(len(succeeded), len(self.store.allocations(providers=[self.node])))

    def _try(self, begun: threading.Barrier, act: Any, spins: int = 0) -> Any:
        begun.wait(60)
        for _ in range(spins * 3):
            self.registry.list(binary="agent", host=self.host)
        try:
            return act()
        except (errors.InUse, *REFUSALS) as error:
            return error


class SqliteLifeTests(LifeCase, unittest.TestCase):
    """On SQLite."""


class PostgresqlLifeTests(LifeCase, unittest.TestCase):
    """On PostgreSQL."""

    kind = "postgresql"


class MariadbLifeTests(LifeCase, unittest.TestCase):
    """On MariaDB."""

    kind = "mariadb"
