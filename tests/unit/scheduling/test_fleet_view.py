# SPDX-License-Identifier: Apache-2.0
"""The view of the fleet: what a snapshot shows is what was told until then, and stays so."""

from __future__ import annotations

import random as random_module
import sys
import threading
import unittest
from dataclasses import replace
from unittest import mock

import numpy as np

from moorage.scheduling import fleet_view, instance_index, snapshot
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import ExcludedTargets, FleetChanges, InstanceRecord, NodeState
from moorage.scheduling.snapshot import Snapshot
from tests import cases, seeded

SIZES = {"small": {"VCPU": 1, "MEMORY_MB": 512}, "large": {"VCPU": 4}, "gpu": {"PGPU": 1}}


def nodes(count: int, hosts: int = 0) -> list[NodeState]:
    return [
        NodeState(f"u{number}", f"n{number}", f"h{number % (hosts or count)}", {"VCPU": 64.0, "MEMORY_MB": 8192.0}, {})
        for number in range(count)
    ]


def record(uuid: str, at: NodeState, flavor: str = "small", **changes: object) -> InstanceRecord:
    made = InstanceRecord(uuid, at.host, at.name, flavor, SIZES[flavor], "p")
    return replace(made, **changes)  # type: ignore[arg-type]


def changed_node(random: random_module.Random, node: NodeState) -> NodeState:
    """The node after some write of the store."""
    change = random.randrange(5)
    if change == 0:
        return replace(node, used={"VCPU": random.randrange(20), "MEMORY_MB": 512 * random.randrange(4)})
    if change == 1:
        return replace(node, capacity={**node.capacity, "VCPU": float(random.randrange(1, 90))})
    if change == 2:
        return replace(node, can_host=not node.can_host)
    if change == 3:
        return replace(node, host=f"h{random.randrange(7)}")
    return replace(node, properties={"rack": str(random.randrange(5))})


class Model:
    """The same as plain dictionaries."""

    def __init__(self, of_nodes: list[NodeState]) -> None:
        self.nodes = of_nodes
        self.records: dict[str, InstanceRecord] = {}

    def frozen(self) -> Model:
        other = Model(self.nodes)
        other.records = dict(self.records)
        return other

    def check(self, test: unittest.TestCase, fleet: Snapshot) -> None:
        test.assertEqual([node.uuid for node in fleet.nodes], [node.uuid for node in self.nodes])
        for row, node in enumerate(self.nodes):
            here = {u: r for u, r in self.records.items() if (r.host, r.node) == (node.host, node.name)}
            test.assertEqual(dict(fleet.instances_on(row)), here)
            test.assertEqual(fleet.num_instances[row], len(here))
            test.assertEqual(fleet.num_io_ops[row], sum(each.busy for each in here.values()))
            for name, capacity in node.capacity.items():
                used = sum(each.resources.get(name, 0) for each in here.values())
                test.assertEqual(fleet.free(name)[row], capacity - used)
            for flavor in SIZES:
                count = sum(each.flavorid == flavor for each in here.values())
                test.assertEqual(fleet.flavor_counts(flavor)[row], count)
        row_of = {(node.host, node.name): row for row, node in enumerate(self.nodes)}
        expected = {u: row_of[r.host, r.node] for u, r in self.records.items() if (r.host, r.node) in row_of}
        test.assertEqual(fleet.locate([*self.records, "nobody"]), expected)


class SetTests(unittest.TestCase):
    def test_many_at_once_are_as_one_after_the_other(self) -> None:
        random = seeded()
        for _ in range(cases(300)):
            # Some of the nodes are not known.
            of_nodes = nodes(6, hosts=4)
            together, single, known = FleetView(), FleetView(), random.choice((5, 6))
            for view in (together, single):
                view.set_nodes(of_nodes[:known])
            kept: list[tuple[Snapshot, object]] = []
            for step in range(4):
                some = [
                    record(
                        f"i{random.randrange(60)}",
                        random.choice(of_nodes),
                        random.choice(sorted(SIZES)),
                        busy=random.random() < 0.3,
                        server_group=random.choice(("", "", "g")),
                    )
                    for _ in range(random.randrange(12))
                ]
                together.put_many(some)
                for each in some:
                    single.put(each)
                if random.random() < 0.5 or step == 3:
                    self.check_equal(together, single)
                    kept.append((together.snapshot(), self.seen(together.snapshot())))
            for earlier, seen in kept:
                self.assertEqual(seen, self.seen(earlier))

    def seen(self, fleet: Snapshot) -> object:
        return [dict(fleet.instances_on(row)) for row in range(fleet.size)], dict(
            fleet.locate(map("i{}".format, range(60)))
        )

    def check_equal(self, together: FleetView, single: FleetView) -> None:
        one, other = together.snapshot(), single.snapshot()
        uuids = [f"i{number}" for number in range(60)]
        self.assertEqual((len(together), one.locate(uuids)), (len(single), other.locate(uuids)))
        for row in range(one.size):
            self.assertEqual(dict(one.instances_on(row)), dict(other.instances_on(row)))
        for name in ("num_instances", "num_io_ops"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        for name in ("VCPU", "MEMORY_MB"):
            np.testing.assert_array_equal(one.free(name), other.free(name))
        for flavor in SIZES:
            np.testing.assert_array_equal(one.flavor_counts(flavor), other.flavor_counts(flavor))
        self.assertEqual(together._groups, single._groups)


class ModelTests(unittest.TestCase):
    def run_steps(self, random: random_module.Random, steps: int) -> None:
        all_nodes = nodes(9, hosts=7)
        view, model = FleetView(), Model(all_nodes)
        view.set_nodes(all_nodes)
        kept: list[tuple[Snapshot, Model]] = []
        for number in range(steps):
            action = random.random()
            if action < 0.55:
                made = record(
                    f"i{random.randrange(40)}",
                    random.choice(all_nodes),
                    random.choice(sorted(SIZES)),
                    busy=random.random() < 0.2,
                    server_group=random.choice(("", "", "g1", "g2")),
                )
                view.put(made)
                model.records[made.uuid] = made
            elif action < 0.8 and model.records:
                uuid = random.choice(sorted(model.records))
                self.assertTrue(view.drop(uuid))
                del model.records[uuid]
            elif action < 0.85:
                # Nodes come and go; instances whose node is away wait for it.
                model.nodes = sorted(random.sample(all_nodes, random.randrange(3, 10)), key=lambda node: node.uuid)
                view.set_nodes(model.nodes)
            else:
                kept.append((view.snapshot(), model.frozen()))
                if len(kept) > 5:
                    kept.pop(random.randrange(5))
            if number % 10 == 0:
                for snapshot, frozen in kept:
                    frozen.check(self, snapshot)
        model.check(self, view.snapshot())
        self.assertEqual(len(view), len(model.records))
        self.assertEqual({uuid: view.get(uuid) for uuid in model.records}, model.records)
        placed = {(node.host, node.name) for node in model.nodes}
        for group in ("g1", "g2"):
            members = {u for u, r in model.records.items() if r.server_group == group and (r.host, r.node) in placed}
            self.assertEqual(view.group_members("p", group), members)

    def test_snapshots_show_what_was_told_until_then_and_never_change(self) -> None:
        random = seeded()
        for _ in range(cases(15)):
            self.run_steps(random, 120)

    def test_also_when_little_may_be_noted_and_undone(self) -> None:
        random = seeded()
        with (
            mock.patch.object(fleet_view, "_NOTED", 5),
            mock.patch.object(fleet_view, "_KINDS", 2),
            mock.patch.object(fleet_view, "COUNTED_FLAVORS", 1),
            mock.patch.object(snapshot, "COUNTED_FLAVORS", 1),
            mock.patch.object(instance_index, "_MOST", 4),
        ):
            for _ in range(cases(15)):
                self.run_steps(random, 120)


class SnapshotTests(unittest.TestCase):
    def setUp(self) -> None:
        self.nodes = nodes(3)
        self.view = FleetView()
        self.view.set_nodes(self.nodes)

    def test_it_is_the_same_until_something_changes(self) -> None:
        before = self.view.snapshot()
        self.assertIs(self.view.snapshot(), before)
        self.view.put(record("a", self.nodes[0]))
        after = self.view.snapshot()
        self.assertIsNot(after, before)
        # What did not change is shared.
        self.assertIs(after.num_io_ops, before.num_io_ops)
        self.assertIs(after.capacities, before.capacities)

    def test_trying_out_leaves_it_alone(self) -> None:
        self.view.put(record("a", self.nodes[1]))
        before = self.view.snapshot()
        tried = before.with_placed(record("b", self.nodes[1], "large"), 1).with_placed(record("c", self.nodes[2]), 2)
        self.assertEqual(list(tried.free("VCPU")), [64, 59, 63])
        self.assertEqual(set(tried.instances_on(1)), {"a", "b"})
        self.assertEqual(tried.locate(["a", "b", "c"]), {"a": 1, "b": 1, "c": 2})
        self.assertEqual(list(tried.flavor_counts("large")), [0, 1, 0])
        self.assertEqual(list(before.free("VCPU")), [64, 63, 64])
        self.assertEqual(set(before.instances_on(1)), {"a"})
        self.assertEqual(before.locate(["b"]), {})

    def test_a_host_of_one_node_needs_no_node_name(self) -> None:
        self.view.put(record("a", self.nodes[2], node=""))
        self.assertEqual(set(self.view.snapshot().instances_on(2)), {"a"})

    def test_use_by_others_is_believed_when_two_readings_agree(self) -> None:
        used = [replace(self.nodes[0], used={"VCPU": 10}), *self.nodes[1:]]
        self.view.put(record("a", self.nodes[0], "large"))
        self.view.set_nodes(used)
        self.assertEqual(self.view.snapshot().free("VCPU")[0], 60)
        self.view.set_nodes(used)
        self.assertEqual(self.view.snapshot().free("VCPU")[0], 54)
        # Also when the rows are others meanwhile.
        self.view.set_nodes(used[::-1])
        self.assertEqual(self.view.snapshot().free("VCPU")[2], 54)

    def test_changes_give_the_view_that_a_reading_of_all_nodes_gives(self) -> None:
        random = seeded()
        for _ in range(cases(30)):
            self.compare_ways(random)

    def compare_ways(self, random: random_module.Random) -> None:
        by_changes, whole = FleetView(), FleetView()
        known = {node.uuid: node for node in nodes(9, hosts=7)}
        for view in (by_changes, whole):
            view.set_nodes(sorted(known.values(), key=lambda node: node.uuid))
        kept: list[tuple[Snapshot, list[float]]] = []
        for step in range(20):
            instance = record(
                f"i{random.randrange(12)}", random.choice(list(known.values())), random.choice(list(SIZES))
            )
            for view in (by_changes, whole):
                view.put(instance)
            changed = {
                uuid: changed_node(random, known[uuid]) for uuid in random.sample(sorted(known), random.randrange(3))
            }
            removed = set(random.sample(sorted(known), 1)) if random.random() < 0.1 and len(known) > 3 else set()
            if random.random() < 0.1:
                changed[f"x{step}"] = NodeState(f"x{step}", f"x{step}", "h1", {"VCPU": 8.0, "PGPU": 2.0}, {})
            known = {uuid: each for uuid, each in {**known, **changed}.items() if uuid not in removed}
            changes = FleetChanges(
                tuple(each for uuid, each in changed.items() if uuid not in removed), frozenset(removed | {"unknown"})
            )
            by_changes.change_nodes(changes)
            whole.set_nodes(sorted(known.values(), key=lambda node: node.uuid))
            states = ExcludedTargets(frozenset(random.sample(["h1", "h2"], random.randrange(2))))
            for view in (by_changes, whole):
                view.set_unavailable(states)
            one, other = by_changes.snapshot(), whole.snapshot()
            self.assertEqual(other.nodes, one.nodes)
            for name in ("VCPU", "MEMORY_MB", "PGPU"):
                self.assertEqual(other.free(name).tolist(), one.free(name).tolist(), name)
            self.assertEqual(other.available.tolist(), one.available.tolist())
            self.assertEqual(other.num_instances.tolist(), one.num_instances.tolist())
            kept.append((one, one.free("VCPU").tolist()))
        for fleet, free in kept:
            self.assertEqual(free, fleet.free("VCPU").tolist(), "a snapshot changed")

    def test_rows_that_are_not_among_the_changes_are_as_they_were(self) -> None:
        random = seeded()
        told = 0
        for _ in range(cases(60)):
            view, of_nodes = FleetView(), nodes(20, hosts=12)
            view.set_nodes(of_nodes)
            before = view.snapshot()
            moment, rows = view.changes(None)
            self.assertIsNone(rows)
            for step in range(12):
                for number in range(random.randrange(5)):
                    instance = record(
                        f"i{random.randrange(30)}",
                        random.choice(of_nodes),
                        random.choice(list(SIZES)),
                        busy=step % 2 == 0,
                    )
                    if random.random() < 0.5:
                        view.put(instance)
                    else:
                        view.hold(instance)
                        view.put_many([record(f"new{step}-{number}", of_nodes[number], "small")])
                    view.drop(f"i{number}")
                    view.let_go(f"i{random.randrange(30)}")
                if random.random() < 0.2:
                    view.set_unavailable(ExcludedTargets(frozenset(random.sample(["h1", "h2"], random.randrange(2)))))
                if random.random() < 0.1:
                    view.change_nodes(FleetChanges((changed_node(random, of_nodes[step]),), frozenset()))
                moment, rows = view.changes(moment)
                after = view.snapshot()
                if rows is not None:
                    same = np.setdiff1d(after.all_rows, rows)
                    self.assertEqual([before.nodes[row] for row in same], [after.nodes[row] for row in same])
                    for name in ("VCPU", "MEMORY_MB"):
                        self.assertEqual(before.free(name)[same].tolist(), after.free(name)[same].tolist())
                    for column in ("available", "num_instances", "num_io_ops"):
                        self.assertEqual(
                            getattr(before, column)[same].tolist(), getattr(after, column)[same].tolist(), column
                        )
                    told += 0 < len(rows) < 20
                before = after
        self.assertGreater(told, cases(60) * 4)

    def test_few_changes_are_remembered(self) -> None:
        view, (node,) = FleetView(), nodes(1)
        view.set_nodes([node])
        moment, _ = view.changes(None)
        with mock.patch.object(fleet_view, "_NOTED", 8):
            for number in range(20):
                view.put(record(f"i{number}", node, "small"))
                view.hold(record(f"held{number}", node, "small"))
            self.assertLess(len(view._changed_rows), 9)
        self.assertIsNone(view.changes(moment)[1])

    def test_readers_never_see_a_change_while_they_read(self) -> None:
        """Nova's fault 8: filters raised because the dictionary changed while they went through it."""
        interval = sys.getswitchinterval()
        self.addCleanup(sys.setswitchinterval, interval)
        sys.setswitchinterval(1e-5)
        stop = threading.Event()
        faults: list[str] = []

        def read() -> None:
            while not stop.is_set():
                fleet = self.view.snapshot()
                first = [sorted(fleet.instances_on(row)) for row in range(fleet.size)]
                counts = np.array([len(each) for each in first])
                again = [sorted(each for each in fleet.instances_on(row)) for row in range(fleet.size)]
                if first != again or (counts != fleet.num_instances).any():
                    faults.append(f"{first} {again} {fleet.num_instances}")

        threads = [threading.Thread(target=read) for _ in range(3)]
        for each in threads:
            each.start()
        random = seeded()
        for _ in range(cases(4000)):
            uuid = f"i{random.randrange(30)}"
            if random.random() < 0.5:
                self.view.put(record(uuid, random.choice(self.nodes)))
            else:
                self.view.drop(uuid)
        stop.set()
        for each in threads:
            each.join()
        self.assertEqual(faults, [])
