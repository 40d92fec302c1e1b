# SPDX-License-Identifier: Apache-2.0
"""States of nodes and agents, and what claims make of them, on whatever database the class that this is mixed into has."""

from __future__ import annotations

import unittest
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.interface import InventoryItem, ResourceProvider
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.fleet.interface import Node, check_states
from moorage.fleet.nodes import NodeStore
from moorage.fleet.properties import change_node
from moorage.instances.availability import Availability
from moorage.instances.create import StoreClaimer
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.interface import ClaimResult, Flavor, RequestSpec
from moorage.services.interface import LIVE_MIGRATES, POWER_CONTROL, RUNS_COMMANDS
from moorage.services.registry import ServiceRegistry
from moorage.services.tables import services
from moorage.work.operations import SqlOperationStore
from moorage_plugins.compute.instances import ComputeInstances
from tests.conformance.allocation.stores import sql_store
from tests.ready import ready_node
from tests.unit.scheduling.group_tests import NodeNames

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object

DOWN_TIME = 60.0


class StateTests(_Base):
    database: Database

    def setUp(self) -> None:
        self.nodes = NodeStore(self.database)
        self.registry = ServiceRegistry(self.database, SystemClock())
        self.node, self.host = str(uuid.uuid4()), f"host-{uuid.uuid4()}"
        self.availability = ready_node(self.database, self.node, self.host, down_time=DOWN_TIME)
        (self.service,) = self.registry.list(binary="agent", host=self.host)
        self.store = sql_store(self.database)
        self.store.ensure_providers([ResourceProvider(self.node, self.node, inventories=(InventoryItem("VCPU", 100),))])
        self.instances = ComputeInstances(conf=None, database=self.database, clock=SystemClock())
        workers = SqlOperationStore(self.database, lease_seconds=60)
        groups = GroupStore(self.database)
        self.claimer = StoreClaimer(self.store, self.instances, workers, NodeNames(), groups, self.availability)

    def set(self, **states: Any) -> Node:
        change_node(self.database, self.node, {}, check_states(states))
        return self.nodes.get(self.node)

    def claim(self, instance: str | None = None, host: str | None = None) -> ClaimResult:
        spec = RequestSpec(instance or str(uuid.uuid4()), Flavor("small", {"VCPU": 1}))
        return self.claimer.claim(spec, self.node, host or self.host, f"req-{spec.instance_uuid}")

    def age_heartbeat(self, seconds: float) -> None:
        """Let the agent's last heartbeat be older."""
        with self.database.write() as tx:
            older = services.c.beat_at - int(seconds * 1_000_000)
            tx.execute(sa.update(services).where(services.c.uuid == self.service.uuid).values(beat_at=older))

    def refusal(self) -> str:
        """The state that a claim meets; nothing of it is written."""
        instance = str(uuid.uuid4())
        with self.assertRaises(errors.ConstraintViolated) as refused:
            self.claim(instance)
        with self.assertRaises(errors.NotFound):
            self.instances.get(instance)
        self.assertEqual([], self.store.allocations(consumers=[instance]))
        self.assertEqual(self.node, refused.exception.details["provider"])
        return str(refused.exception.details["state"])

    def unavailable(self, *absent: str) -> tuple[bool, Mapping[str, str], Mapping[str, str]]:
        found = self.availability.read(absent)
        mine = {uuid: why for uuid, why in found.nodes.items() if uuid == self.node}
        return self.host in found.down, {host: why for host, why in found.disabled.items() if host == self.host}, mine

    def test_an_agent_without_compute_gets_no_instances(self) -> None:
        for offers, able in (
            (None, True),
            (("block_storage",), False),
            (("compute_two",), False),
            (("compute",), True),
        ):
            with self.subTest(offers=offers):
                self.registry.enlist("agent", self.host, rpc_version="1.0", offers=offers)
                if able:
                    self.assertEqual(self.unavailable(), (False, {}, {}))
                    self.claim()
                else:
                    why = f"its agent {self.host} does not offer compute ([agent] services)"
                    self.assertEqual(self.unavailable(), (False, {self.host: why}, {}))
                    self.assertEqual(self.refusal(), why)

    def test_an_agent_lacks_a_power_that_it_does_not_name_among_others(self) -> None:
        for offers, lacks in (
            (None, False),
            (("compute",), False),
            (("compute", "block_storage.commands"), False),
            (("compute", "compute.live_migrate"), True),
            (("compute", "compute.powers"), True),
            (("compute", "compute.commands2"), True),
            (("compute", "compute.commands", "compute.live_migrate"), False),
        ):
            with self.subTest(offers=offers):
                self.registry.enlist("agent", self.host, rpc_version="1.0", offers=offers)
                self.assertEqual(lacks, self.host in self.availability.lacking([RUNS_COMMANDS]))
        self.assertNotIn(self.host, self.availability.lacking([RUNS_COMMANDS, LIVE_MIGRATES]))
        for offers, lacks in (
            (None, True),
            (("compute",), True),
            (("compute", "compute.powers"), True),
            (("compute", "compute.commands"), True),
            (("compute", "compute.powers", "compute.power"), False),
        ):
            with self.subTest(offers=offers):
                self.registry.enlist("agent", self.host, rpc_version="1.0", offers=offers)
                self.assertEqual(lacks, self.host in self.availability.lacking([POWER_CONTROL]))
        self.registry.enlist("agent", self.host, rpc_version="1.0", offers=("compute", "compute.commands"))
        self.assertIn(self.host, self.availability.lacking([RUNS_COMMANDS, LIVE_MIGRATES]))
        self.assertEqual(frozenset(), self.availability.lacking([]))

    def test_both_states_are_independent_and_each_has_a_reason_and_since_when(self) -> None:
        first = self.set(maintenance=True, maintenance_reason="disk")
        self.assertEqual((True, "disk", False, None), self.flags(first))
        self.assertIsNotNone(first.maintenance_since)
        second = self.set(disabled=True, disabled_reason="old")
        self.assertEqual((True, "disk", True, "old"), self.flags(second))
        self.assertEqual(first.maintenance_since, second.maintenance_since)
        third = self.set(maintenance=False)
        self.assertEqual((False, None, True, "old"), self.flags(third))
        self.assertEqual((None, second.disabled_since), (third.maintenance_since, third.disabled_since))

    def test_a_flag_that_is_set_again_keeps_since_when_it_was_set(self) -> None:
        first = self.set(disabled=True, disabled_reason="a")
        again = self.set(disabled=True, disabled_reason="b")
        self.assertEqual((first.disabled_since, "b"), (again.disabled_since, again.disabled_reason))
        generation = again.generation
        with self.database.write() as tx:
            self.nodes.change(tx, self.node, generation, {"maintenance": True})
            self.nodes.change(tx, self.node, generation + 1, {"maintenance": True, "maintenance_reason": "c"})
        found = self.nodes.get(self.node)
        self.assertGreaterEqual(found.maintenance_since or 0, first.disabled_since or 0)
        self.assertEqual((first.disabled_since, "c"), (found.disabled_since, found.maintenance_reason))

    def flags(self, node: Node) -> tuple[Any, ...]:
        return bool(node.maintenance), node.maintenance_reason, bool(node.disabled), node.disabled_reason

    def test_a_reason_without_its_flag_is_refused(self) -> None:
        for given in ({"disabled_reason": "x"}, {"disabled": False, "disabled_reason": "x"}):
            with self.assertRaisesRegex(errors.InvalidInput, "disabled_reason is given, but disabled is not true"):
                check_states(given)

    def test_a_claim_is_refused_on_a_node_in_maintenance_or_disabled(self) -> None:
        self.claim()
        self.set(maintenance=True, maintenance_reason="disk")
        self.assertEqual("the node is in maintenance (disk)", self.refusal())
        self.set(disabled=True)
        self.assertEqual("the node is in maintenance (disk) and disabled", self.refusal())
        self.assertEqual("the node is in maintenance (disk) and disabled", self.unavailable()[2][self.node])
        self.set(maintenance=False, disabled=False)
        self.assertEqual((False, {}, {}), self.unavailable())
        self.claim()

    def test_a_claim_is_refused_while_the_agent_is_disabled_or_forced_down_or_stopped(self) -> None:
        self.registry.set(self.service.uuid, disabled=True, disabled_reason="upgrade")
        self.assertEqual(f"its agent {self.host} is disabled (upgrade)", self.refusal())
        self.assertEqual((False, {self.host: self.refusal()}, {}), self.unavailable())
        self.registry.set(self.service.uuid, disabled=False, forced_down=True)
        self.assertEqual(f"its agent {self.host} is down", self.refusal())
        self.assertEqual((True, {}, {}), self.unavailable())
        self.registry.set(self.service.uuid, forced_down=False)
        self.claim()
        identity = self.registry.enlist("agent", self.host, rpc_version="1.0")
        self.registry.retire(identity)
        self.assertEqual(f"its agent {self.host} is down", self.refusal())
        self.assertTrue(self.unavailable()[0])

    def test_a_late_heartbeat_refuses_nothing_before_the_down_time(self) -> None:
        self.age_heartbeat(DOWN_TIME - 20)
        self.claim()
        self.assertEqual((False, {}, {}), self.unavailable())
        self.age_heartbeat(21)
        self.assertEqual(f"its agent {self.host} is down", self.refusal())
        self.assertEqual((True, {}, {}), self.unavailable())
        self.registry.enlist("agent", self.host, rpc_version="1.0")
        self.claim()

    def test_a_repeated_request_finds_its_claim_whatever_the_states_are_now(self) -> None:
        instance = str(uuid.uuid4())
        self.claim(instance)
        self.set(maintenance=True)
        self.registry.set(self.service.uuid, forced_down=True)
        self.assertEqual(ClaimResult(self.node, repeated=True), self.claim(instance))

    def test_a_node_that_another_agent_has_by_now_is_not_claimed_for_the_old_one(self) -> None:
        with self.assertRaisesRegex(errors.ConstraintViolated, f"its agent is {self.host} now, and no longer other"):
            self.claim(host="other")

    def test_a_host_without_an_agent_is_down_until_one_is_started(self) -> None:
        other = f"host-{uuid.uuid4()}"
        self.assertIn(other, self.availability.read([other]).down)
        self.registry.enlist("agent", other, rpc_version="1.0")
        self.assertNotIn(other, self.availability.read([other]).down)
        self.assertIn(other, self.availability.enlisted())

    def test_an_agent_is_up_while_its_heartbeats_come(self) -> None:
        self.assertFalse(self.availability.is_up(f"host-{uuid.uuid4()}"))
        self.assertTrue(self.availability.is_up(self.host))
        self.registry.set(self.service.uuid, disabled=True)
        self.assertTrue(self.availability.is_up(self.host), "what is disabled can be asked")
        self.age_heartbeat(DOWN_TIME + 1)
        self.assertFalse(self.availability.is_up(self.host))

    def test_an_instance_is_not_moved_off_a_host_that_is_down(self) -> None:
        with self.database.read() as tx:
            self.availability.check_source(tx, self.host)
        self.registry.set(self.service.uuid, disabled=True)
        with self.database.read() as tx:
            # What is disabled can be emptied.
            self.availability.check_source(tx, self.host)
        self.age_heartbeat(DOWN_TIME + 1)
        with self.database.read() as tx, self.assertRaisesRegex(errors.Conflict, "Start the agent, wait") as refused:
            self.availability.check_source(tx, self.host)
        # Members see this error, and no hosts.
        self.assertNotIn(self.host, refused.exception.message)
        self.assertEqual({}, refused.exception.details)
        with self.database.read() as tx, self.assertRaisesRegex(errors.Conflict, "is down"):
            Availability(self.database, DOWN_TIME).check_source(tx, "nowhere")
