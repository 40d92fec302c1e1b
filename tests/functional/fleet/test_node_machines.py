# SPDX-License-Identifier: Apache-2.0
"""What agents write of the power of their nodes, on each database: only what changed, and nothing over another's write."""

from __future__ import annotations

import unittest
import uuid
from typing import Any

import sqlalchemy as sa

from moorage.control_plane.node_machines import machines_of, observe_nodes
from moorage.drivers.interface import NodePower, NodeSeen
from moorage.fleet.interface import NodeSpec
from moorage.fleet.nodes import NodeStore
from moorage.fleet.tables import nodes
from tests.functional.db.databases import TablesCase

ON, OFF = NodeSeen(NodePower.ON, occupied=True), NodeSeen(NodePower.OFF, occupied=False)
LOST = NodeSeen(NodePower.ERROR, occupied=False, error="the BMC does not answer")


class NodeMachineCase(TablesCase):
    def setUp(self) -> None:
        super().setUp()
        self.host = f"host-{uuid.uuid4().hex[:8]}"
        self.chosen = {"host": self.host}
        self.nodes = NodeStore(self.database)
        self.uuid = self.add(provision_state="enroll")

    def add(self, **details: Any) -> str:
        found = str(uuid.uuid4())
        given = {"driver": "redfish", "driver_info": {"redfish_password": "secret"}, **details}
        spec = NodeSpec(found, found, host=self.host, details=given)
        self.database.run(lambda tx: self.nodes.insert(tx, spec))
        return found

    def observe(self, seen: NodeSeen, ident: str = "") -> None:
        observe_nodes(self.database, self.nodes, self.chosen)({ident or self.uuid: seen})

    def row(self, ident: str = "") -> Any:
        with self.database.read() as tx:
            return tx.execute(sa.select(nodes).where(nodes.c.uuid == (ident or self.uuid))).one()

    def states(self, ident: str = "") -> tuple[Any, ...]:
        row = self.row(ident)
        return row.power_state, row.provision_state, row.fault, row.last_error

    def test_states_follow_what_is_seen_and_repeating_writes_nothing(self) -> None:
        for seen, states in (
            (LOST, ("error", "enroll", "power failure", LOST.error)),
            (OFF, ("power off", "available", None, None)),
            (ON, ("power on", "active", None, None)),
            (LOST, ("error", "active", "power failure", LOST.error)),
            (OFF, ("power off", "available", None, None)),
        ):
            self.observe(seen)
            self.assertEqual(states, self.states())
            before = self.row()
            self.observe(seen)
            self.assertEqual(before, self.row())
        self.assertIsNotNone(self.row().provision_updated_at)

    def test_an_operation_under_way_is_the_target(self) -> None:
        self.observe(NodeSeen(NodePower.OFF, occupied=True, target=NodePower.ON))
        self.assertEqual(("power off", "power on"), (self.row().power_state, self.row().target_power_state))
        self.observe(ON)
        self.assertEqual(("power on", None), (self.row().power_state, self.row().target_power_state))

    def test_what_others_say_of_a_node_stays(self) -> None:
        other = self.add(provision_state="manageable", fault="clean failure", last_error="a disk")
        self.observe(OFF, other)
        self.assertEqual(("power off", "manageable", "clean failure", "a disk"), self.states(other))

    def test_an_observation_that_comes_late_writes_nothing_over_a_newer_one(self) -> None:
        late = observe_nodes(self.database, self.nodes, self.chosen)
        self.observe(ON)
        late({self.uuid: OFF})
        self.assertEqual(("power on", "active"), self.states()[:2])

    def test_a_node_without_a_driver_and_one_of_another_host_are_left_alone(self) -> None:
        without = self.add(driver=None)
        self.observe(ON, without)
        self.assertEqual((None, "available"), self.states(without)[:2])
        self.assertEqual([self.uuid], [each.uuid for each in machines_of(self.nodes, self.chosen)])
        self.assertEqual([], list(machines_of(self.nodes, {"host": "another"})))
        self.assertNotIn("secret", repr(machines_of(self.nodes, self.chosen)))


class SqliteTests(NodeMachineCase, unittest.TestCase):
    pass


class PostgresqlTests(NodeMachineCase, unittest.TestCase):
    kind = "postgresql"


class MariadbTests(NodeMachineCase, unittest.TestCase):
    kind = "mariadb"
