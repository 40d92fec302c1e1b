# SPDX-License-Identifier: Apache-2.0
"""Plans on each database: carried out once, reported where somebody interferes, resumed after a kill, taken back."""

from __future__ import annotations

import subprocess
import sys
import unittest
from concurrent import futures
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.fleet.interface import uuid_of_name
from moorage.fleet.tables import nodes
from moorage.sharding.plans import PlanRequest, Progress
from tests.functional.sharding.case import FleetCase, make_plans
from tests.servers import wait_until


class PlanCase(FleetCase):
    def plan(self, shards: Any = ("a", "b", "c"), **more: Any) -> str:
        return self.plans.make(PlanRequest(shards=shards, **more)).uuid

    def test_a_plan_is_carried_out_verified_and_taken_back(self) -> None:
        self.fleet(a=20, b=4, _=3)
        before = self.homes()
        plan = self.plan()
        self.assertEqual(before, self.homes())
        stored = self.plans.get(plan)
        self.assertEqual(("planned", {"pending": 14}), (stored.status, stored.moves))
        self.assertEqual(14, stored.summary["lower_bound"])
        self.assertFalse(self.plans.verify(plan)["ok"])
        self.assertEqual(Progress("applied", 14, 0, 0), self.plans.apply(plan, 1000))
        self.assertEqual({"a": 9, "b": 9, "c": 9}, self.sizes())
        self.assertTrue(self.plans.verify(plan)["ok"])
        self.assertEqual(Progress("applied", 0, 0, 0), self.plans.apply(plan, 1000))
        self.assertFalse(self.plans.compute(PlanRequest(shards=("a", "b", "c"))).needed)
        self.assertEqual(Progress("undone", 14, 0, 0), self.plans.rollback(plan, 1000))
        self.assertEqual(before, self.homes())
        with self.assertRaisesRegex(errors.Conflict, "undone"):
            self.plans.apply(plan, 10)

    def test_limits_and_batches_add_up(self) -> None:
        self.fleet(a=40)
        plan = self.plan(("a", "b"))
        self.assertEqual(Progress("applying", 7, 0, 13), self.plans.apply(plan, 7))
        self.assertEqual(Progress("applying", 12, 0, 1), self.plans.apply(plan, 12))
        self.assertEqual(Progress("applied", 1, 0, 0), self.plans.apply(plan, 12))
        self.assertEqual(Progress("undoing", 15, 0, 5), self.plans.rollback(plan, 15))
        with self.assertRaisesRegex(errors.Conflict, "undoing"):
            self.plans.apply(plan, 10)
        self.assertEqual(Progress("undone", 5, 0, 0), self.plans.rollback(plan, 15))
        self.assertEqual({"a": 40}, self.sizes())

    def test_what_somebody_else_changed_is_left_alone_and_said(self) -> None:
        self.fleet(a=8)
        plan = self.plan(("a", "b"))
        moving = [row.name for row in self.plans.moves(plan)]
        self.write(moving[0], shard="elsewhere")
        self.write(moving[1], instance_uuid="00000000-0000-4000-8000-000000000001")
        self.write(moving[2], reservation="agent-1")
        self.enrolment.remove(uuid_of_name(moving[3]))
        self.assertEqual(Progress("applied", 0, 4, 0), self.plans.apply(plan, 100))
        notes = {row.node_uuid: row.note for row in self.plans.moves(plan, status="conflict")}
        self.assertEqual(
            [
                "it is in elsewhere by now",
                "instance 00000000-0000-4000-8000-000000000001 is on it: give --include-instances",
                "agent-1 has reserved it",
                "the node is gone",
            ],
            [notes[uuid_of_name(name)] for name in moving],
        )
        self.assertEqual({"a": 6, "elsewhere": 1}, self.sizes())
        self.assertFalse(self.plans.verify(plan)["ok"])

    def test_an_edit_of_something_else_does_not_stop_a_move(self) -> None:
        self.fleet(a=4)
        plan = self.plan(("a", "b"))
        for row in self.plans.moves(plan):
            self.write(row.name, description="edited")
        self.assertEqual(Progress("applied", 2, 0, 0), self.plans.apply(plan, 100))

    def test_taking_back_leaves_alone_what_was_changed_since(self) -> None:
        self.fleet(a=8)
        plan = self.plan(("a", "b"))
        self.plans.apply(plan, 100)
        moved = [row.name for row in self.plans.moves(plan)]
        self.write(moved[0], shard="c")
        self.assertEqual(1, self.plans.verify(plan)["elsewhere"])
        self.assertEqual(Progress("undone", 3, 1, 0), self.plans.rollback(plan, 100))
        self.assertEqual({"a": 7, "c": 1}, self.sizes())

    def test_several_who_carry_out_one_plan_do_each_move_once(self) -> None:
        self.fleet(a=60)
        plan = self.plan(("a", "b", "c"))
        with futures.ThreadPoolExecutor(4) as pool:
            every = list(pool.map(lambda _: make_plans(self.database, batch=3).apply(plan, 1000), range(4)))
        self.assertEqual((40, 0), (sum(each.done for each in every), sum(each.conflicts for each in every)))
        self.assertEqual({"a": 20, "b": 20, "c": 20}, self.sizes())

    def test_a_fleet_in_use_gets_its_shards(self) -> None:
        self.fleet(_=6)
        self.write("_-000", instance_uuid="00000000-0000-4000-8000-000000000001")
        self.instance("_-001")
        self.instance("_-002", status="error")
        self.write("_-003", reservation="agent-1")
        before = self.homes()
        plan = self.plan(("a", "b"))
        self.assertEqual(Progress("applied", 5, 0, 0), self.plans.apply(plan, 100))
        found = self.plans.verify(plan)
        self.assertEqual((False, 1), (found["ok"], found["without_shard"]))
        self.write("_-003", reservation=None)
        self.assertEqual(Progress("undone", 5, 0, 0), self.plans.rollback(plan, 100))
        self.assertEqual(before, self.homes())
        whole = self.plan(("a", "b"))
        self.plans.apply(whole, 100)
        found = self.plans.verify(whole)
        self.assertEqual((True, 0), (found["ok"], found["without_shard"]))
        held = PlanRequest(shards=("c",), locks=("occupied",))
        self.assertEqual(3, len(self.plans.compute(held).moves))

    def test_an_occupied_node_leaves_its_shard_when_its_agent_is_dead_or_instances_are_included(self) -> None:
        self.fleet(a=5)
        for number, host in enumerate(("h1", "h1", "h2", "h2", "h2")):
            with self.database.write() as tx:
                tx.execute(sa.update(nodes).where(nodes.c.name == f"a-{number:03}").values(host=host))
        agents = {host: self.registry.enlist("agent", host, rpc_version="1.0") for host in ("h1", "h2")}
        self.write("a-000", instance_uuid="00000000-0000-4000-8000-000000000001")
        self.instance("a-001", "h1")
        for number in (2, 3, 4):
            self.instance(f"a-00{number}", "h2")
        request = PlanRequest(shards=("b",))
        self.assertEqual((0, 5), (len(self.plans.compute(request).moves), self.plans.compute(request).locked))
        self.registry.set(agents["h1"].uuid, forced_down=True)
        found = self.plans.make(request)
        self.assertEqual({"pending": 2}, found.moves)
        # It lives again: the condition is in the statement, so nothing moves.
        self.registry.set(agents["h1"].uuid, forced_down=False)
        self.assertEqual(Progress("applied", 0, 2, 0), self.plans.apply(found.uuid, 100))
        notes = sorted(row.note for row in self.plans.moves(found.uuid))
        self.assertEqual("instances are on it: declare its agent dead (moorage service set agent:h1 --forced-down) or give "
                         "--include-instances", notes[1])  # fmt: skip
        self.registry.set(agents["h1"].uuid, forced_down=True)
        self.assertEqual(Progress("applied", 2, 0, 0), self.plans.apply(self.plans.make(request).uuid, 100))
        self.assertEqual({"a": 3, "b": 2}, self.sizes())
        every = self.plans.make(PlanRequest(shards=("b",), include_instances=True))
        self.assertEqual(Progress("applied", 3, 0, 0), self.plans.apply(every.uuid, 100))
        self.assertEqual(Progress("undone", 3, 0, 0), self.plans.rollback(every.uuid, 100))

    def test_a_node_to_which_an_instance_moves_is_occupied(self) -> None:
        self.fleet(a=2)
        uuid = self.instance("a-000", "h", "active")
        self.assertEqual(1, len(self.plans.compute(PlanRequest(shards=("b",))).moves))
        pending = {"operation": "live_migrate", "node_uuid": uuid_of_name("a-001"), "host": "h"}
        with self.database.write() as tx:
            self.assertTrue(self.instances.change(tx, uuid, 1, {"status": "migrating", "pending": pending}))
        self.assertEqual(0, len(self.plans.compute(PlanRequest(shards=("b",))).moves))

    def test_an_instance_that_arrives_after_the_plan_keeps_its_node(self) -> None:
        self.fleet(a=4)
        plan = self.plan(("a", "b"))
        moving = [row.name for row in self.plans.moves(plan)]
        self.instance(moving[0])
        self.assertEqual(Progress("applied", 1, 1, 0), self.plans.apply(plan, 100))
        self.assertEqual("a", self.nodes.get(moving[0]).shard)

    def test_locked_nodes_are_in_no_plan(self) -> None:
        self.fleet(a=6)
        self.write("a-000", instance_uuid="00000000-0000-4000-8000-000000000001")
        self.write("a-001", reservation="agent-1")
        self.write("a-002", maintenance=True)
        self.write("a-003", provision_state="deploying")
        self.instance("a-004")
        plans = make_plans(self.database)
        free = PlanRequest(shards=("b",))
        self.assertEqual(3, len(plans.compute(free).moves))
        every = PlanRequest(shards=("b",), locks=("maintenance", "state", "occupied"))
        self.assertEqual([uuid_of_name("a-005")], [move.node for move in plans.compute(every).moves])
        named = PlanRequest(shards=("b",), locked=("a-005", uuid_of_name("a-004")))
        self.assertEqual(2, len(plans.compute(named).moves))  # a-002 and a-003
        with self.assertRaises(errors.InvalidInput):
            plans.compute(PlanRequest(shards=("b",), locks=("weather",)))

    def test_shards_are_named_counted_or_found(self) -> None:
        with self.assertRaisesRegex(errors.InvalidInput, "No node has a shard"):
            self.plan(None)
        self.fleet(a=3, b=2, c=1)
        self.assertEqual(("a", "b", "c"), self.plans.compute(PlanRequest()).shards)
        self.assertEqual(("a", "b"), self.plans.compute(PlanRequest(shards=2)).shards)
        self.assertEqual(("a", "b", "c", "shard-1"), self.plans.compute(PlanRequest(shards=4)).shards)
        for shards in ((), ("none",), ("a", "a"), ("a,b",)):
            with self.assertRaises(errors.InvalidInput):
                self.plan(shards)

    def test_only_the_newest_plans_are_kept(self) -> None:
        self.fleet(a=2)
        kept = [self.plan(("a", "b")) for _ in range(7)]
        self.assertEqual(kept[:1:-1], [plan.uuid for plan in self.plans.list()])
        with self.assertRaises(errors.NotFound):
            self.plans.get(kept[0])

    def test_killed_in_the_middle_it_is_resumed_and_then_taken_back_to_the_start(self) -> None:
        self.fleet(a=60, _=4)
        before = self.homes()
        plan = self.plan(("a", "b", "c"))
        total = self.plans.get(plan).moves["pending"]
        self.kill(plan, "apply")
        counts = dict(self.plans.get(plan).moves)
        self.assertEqual(total, counts["moved"] + counts["pending"])

        def agree() -> bool:
            homes = self.homes()
            moves = self.plans.moves(plan)
            return all(homes[row.node_uuid] == (row.target if row.status == "moved" else row.source) for row in moves)

        # A commit that was on its way when the process was killed may come between the two reads.
        wait_until(agree, "the plan and the nodes say the same")
        self.assertEqual(0, self.plans.apply(plan, 1000).conflicts)
        self.assertTrue(self.plans.verify(plan)["ok"])
        self.kill(plan, "rollback")
        self.assertEqual(0, self.plans.rollback(plan, 1000).conflicts)
        self.assertEqual(before, self.homes())

    def kill(self, plan: str, way: str) -> None:
        """Begin, and kill -9 it after the first batches, wherever it is then."""
        command = [sys.executable, "-m", "tests.functional.sharding.apply_process", self.url, plan, way]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(2):
                self.assertTrue(process.stdout.readline().strip().isdecimal())
            process.kill()


class TestSqlite(PlanCase, unittest.TestCase):
    pass


class TestPostgresql(PlanCase, unittest.TestCase):
    kind = "postgresql"


class TestMariadb(PlanCase, unittest.TestCase):
    kind = "mariadb"
