# SPDX-License-Identifier: Apache-2.0
"""Shards for new nodes, and what the checks say of a fleet."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import sqlalchemy as sa
from oslo_upgradecheck.upgradecheck import Code

from moorage import errors
from moorage.cli import status
from moorage.clock import SystemClock
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.sharding_factories import shards_for_new
from moorage.fleet.interface import NodeSpec, uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.fleet.tables import nodes
from moorage.services.registry import ServiceRegistry
from moorage.sharding.checks import problems
from moorage.testing.database import temporary
from tests.conformance.allocation.stores import sql_store


class Fleet(unittest.TestCase):
    def setUp(self) -> None:
        context = temporary(tables=True)
        self.database = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)

    def enrolment(self, **options: Any) -> Enrolment:
        self.nodes = NodeStore(self.database)
        conf = mock.Mock()
        conf.sharding = mock.Mock(**{"assign_at_enrolment": True, "shards": [], "strategy": "balanced", **options})
        return Enrolment(
            self.database, self.nodes, sql_store(self.database), ServiceRegistry(self.database, SystemClock()),
            lambda: None, shards_for_new(self.nodes, conf),
        )  # fmt: skip

    def specs(self, count: int, first: int = 0, **more: Any) -> list[NodeSpec]:
        return [NodeSpec(uuid_of_name(f"n{n}"), f"n{n}", **more) for n in range(first, first + count)]


class TestAssignment(Fleet):
    def test_new_nodes_go_where_the_fewest_are_and_old_ones_stay(self) -> None:
        enrolment = self.enrolment(shards=["a", "b", "c"])
        enrolment.enrol(self.specs(7))
        self.assertEqual([("a", 3), ("b", 2), ("c", 2)], self.nodes.shards())
        before = {node.name: node.shard for node in self.nodes.list()}
        # Imported again, and with others, they keep their shards; a shard that was given is kept too.
        enrolment.enrol([*self.specs(7), *self.specs(2, 7), *self.specs(1, 9, shard="mine")])
        after = {node.name: node.shard for node in self.nodes.list()}
        self.assertEqual(before, {name: after[name] for name in before})
        self.assertEqual([("a", 3), ("b", 3), ("c", 3), ("mine", 1)], self.nodes.shards())
        enrolment.create(self.specs(1, 10)[0])
        self.assertEqual("a", self.nodes.get("n10").shard)

    def test_without_a_list_of_shards_those_that_are_in_use_are_chosen(self) -> None:
        enrolment = self.enrolment()
        enrolment.enrol(self.specs(2))
        self.assertEqual([(None, 2)], self.nodes.shards())
        enrolment.enrol(self.specs(1, 2, shard="x"))
        enrolment.enrol(self.specs(2, 3))
        self.assertEqual([("x", 3), (None, 2)], self.nodes.shards())

    def test_a_strategy_that_cannot_place_single_nodes_is_refused(self) -> None:
        with self.assertRaisesRegex(errors.ConfigError, "affinity cannot place a single node"):
            self.enrolment(strategy="affinity")

    def test_unless_it_is_wanted_nothing_is_assigned(self) -> None:
        self.enrolment(assign_at_enrolment=False).enrol(self.specs(2))
        self.assertEqual([(None, 2)], self.nodes.shards())


class TestChecks(Fleet):
    def fleet(self, *shards: str | None) -> None:
        self.enrolment(assign_at_enrolment=False)
        with self.database.write() as tx:
            tx.execute(sa.delete(nodes))
        for number, shard in enumerate(shards):
            with self.database.write() as tx:
                self.nodes.insert(tx, NodeSpec(uuid_of_name(f"n{number}"), f"n{number}", shard=shard))

    def code(self) -> Code:
        with mock.patch("moorage.db.Database.from_config", return_value=self.database):
            checks: Any = status.Checks()
            found = dict(checks._upgrade_checks)["shards"](checks)
        self.assertEqual(bool(problems(self.database)), bool(found.details))
        return Code(found.code)

    def test_no_shard_at_all_and_shards_for_all_are_fine(self) -> None:
        for shards in ((), (None, None), ("a", "b")):
            self.fleet(*shards)
            self.assertEqual(Code.SUCCESS, self.code())

    def test_some_without_a_shard_are_counted_and_named(self) -> None:
        self.fleet("a", None, None, *(None,) * 10)
        self.assertEqual(Code.WARNING, self.code())
        (said,) = problems(self.database)
        self.assertIn("12 of 13 nodes have no shard", said)
        self.assertIn(uuid_of_name("n1"), said)
        self.assertIn("...", said)

    def test_names_that_differ_in_case_or_that_no_query_finds_are_told(self) -> None:
        self.fleet("Rack", "rack", "other")
        (said,) = problems(self.database)
        self.assertIn("The shards Rack and rack differ in the case", said)
        self.fleet("a,b", "none", " x")
        self.assertEqual(3, len(problems(self.database)))
        self.assertEqual(Code.WARNING, self.code())

    def test_a_missing_index_is_told(self) -> None:
        self.fleet("a")
        with self.database.write() as tx:
            tx.execute(sa.text("DROP INDEX ix_nodes_shard_id"))
        self.assertEqual(Code.WARNING, self.code())
        self.assertIn("no index on shard", problems(self.database)[0])
