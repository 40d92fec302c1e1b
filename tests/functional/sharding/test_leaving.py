# SPDX-License-Identifier: Apache-2.0
"""Occupied nodes keep their shard and their host when nodes are imported or patched, on three databases."""

from __future__ import annotations

import unittest
import uuid
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.fleet.interface import NodeSpec, uuid_of_name
from moorage.fleet.tables import nodes
from tests.functional.sharding.case import FleetCase


class LeavingCase(FleetCase):
    def enrol(self, name: str, **given: Any) -> None:
        self.enrolment.enrol([NodeSpec(uuid_of_name(name), name, **given), NodeSpec(uuid_of_name("new"), "new")])

    def patch(self, name: str, **changes: Any) -> None:
        node = self.nodes.get(name)
        self.assertTrue(self.enrolment.change(node.uuid, node.generation, changes))

    def place(self, name: str) -> tuple[str | None, str | None]:
        node = self.nodes.get(name)
        return node.shard, node.host

    def test_an_occupied_node_keeps_its_shard(self) -> None:
        self.fleet(a=2)
        agent = self.registry.enlist("agent", "h", rpc_version="1.0")
        self.enrolment.assign()
        self.instance("a-000")
        self.write("a-001", instance_uuid=str(uuid.uuid4()))
        for name in ("a-000", "a-001"):
            for refused in (
                lambda name=name: self.enrol(name, shard="b"),
                lambda name=name: self.patch(name, shard="b"),
                lambda name=name: self.patch(name, shard=None),
            ):
                with self.assertRaisesRegex(errors.Conflict, f"moorage node set {name} --shard SHARD --include-inst"):
                    refused()
            self.assertEqual(("a", "h"), self.place(name))
            self.enrol(name, shard="a", host="h", properties={"rack": 1})
            self.patch(name, shard="a", properties={"rack": 2})
        self.registry.set(agent.uuid, forced_down=True)
        self.enrol("a-000", shard="b")
        self.patch("a-001", shard=None)
        self.assertEqual(("b", None), (self.place("a-000")[0], self.place("a-001")[0]))

    def test_nothing_of_a_refused_import_is_written(self) -> None:
        self.fleet(a=1)
        self.instance("a-000")
        with self.assertRaises(errors.Conflict):
            self.enrol("a-000", shard="b")
        self.assertEqual(["a-000"], [node.name for node in self.nodes.list()])

    def test_a_node_without_a_shard_and_an_empty_one_get_any(self) -> None:
        self.fleet(_=1, a=1)
        self.instance("_-000")
        self.enrol("_-000", shard="b")
        self.enrol("a-000", shard="b")
        self.assertEqual({"b": 2, None: 1}, self.sizes())

    def test_a_node_with_instances_of_the_store_keeps_its_host(self) -> None:
        self.fleet(_=3)
        with self.database.write() as tx:
            tx.execute(sa.update(nodes).values(host="h"))
        self.instance("_-000")
        self.write("_-001", instance_uuid=str(uuid.uuid4()))
        with self.assertRaisesRegex(errors.Conflict, "Node _-000 stays with host h"):
            self.enrol("_-000", host="other")
        self.enrol("_-000", host="h", properties={"rack": 1})
        for name in ("_-001", "_-002"):
            self.enrol(name, host="other")
        self.assertEqual(["h", "other", "other"], [self.place(f"_-00{number}")[1] for number in range(3)])


class TestSqlite(LeavingCase, unittest.TestCase):
    pass


class TestPostgresql(LeavingCase, unittest.TestCase):
    kind = "postgresql"


class TestMariadb(LeavingCase, unittest.TestCase):
    kind = "mariadb"
