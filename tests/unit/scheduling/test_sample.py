# SPDX-License-Identifier: Apache-2.0
"""Samples of large fleets: a sample is the small fleet of its nodes, and decides only what a small fleet can decide."""

from __future__ import annotations

import functools
import random as random_module
import unittest
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from moorage import errors, options
from moorage.clock import SystemClock
from moorage.inventory import InventoryItem
from moorage.scheduling import filter_and_weigh, ranker
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import (
    Aggregate,
    Flavor,
    Fleet,
    HostFilter,
    HostState,
    InstanceRecord,
    Mask,
    NodeState,
    ProviderState,
    RequestSpec,
    Rows,
    ServerGroup,
    Skip,
    Where,
)
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.scheduling.sample import Sampler, may_sample
from moorage.scheduling.scheduler import Scheduler
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage.scheduling.snapshot import Snapshot
from moorage_plugins.filters.capacity import CapacityFilter
from moorage_plugins.weighers.free_resources import CpuWeigher
from tests import cases, seeded
from tests.unit.scheduling.test_scheduler import Claims, Nodes, NoIncidents

FLAVORS = [Flavor("small", {"VCPU": 1, "MEMORY_MB": 512}), Flavor("large", {"VCPU": 4}), Flavor("gpu", {"PGPU": 1})]
TRAITS = (frozenset[str](), frozenset({"HW_A"}), frozenset({"HW_A", "HW_B"}))


def some_nodes(random: random_module.Random, count: int) -> list[NodeState]:
    """Nodes of several kinds, two on each host."""
    return [
        NodeState(
            f"u{number:05}",
            f"n{number}",
            f"h{number // 2}",
            {"VCPU": float(random.randrange(1, 64)), "MEMORY_MB": 8192.0, "PGPU": random.choice((0.0, 0.0, 2.0))},
            {},
            can_host=random.random() < 0.9,
            up=random.random() < 0.9,
            properties={"rack": random.randrange(4)} if random.random() < 0.8 else {},
            aggregates=(Aggregate("fast", {"cpu_weight_multiplier": "2"}),) if random.random() < 0.3 else (),
            traits=random.choice(TRAITS),
        )
        for number in range(count)
    ]


def some_record(random: random_module.Random, nodes: list[NodeState], uuid: str) -> InstanceRecord:
    node, flavor = random.choice(nodes), random.choice(FLAVORS)
    busy = random.random() < 0.3
    return InstanceRecord(uuid, node.host, node.name, flavor.flavorid, flavor.resources, "p", busy=busy)


class SampleTests(unittest.TestCase):
    def small_fleet(self, nodes: list[NodeState], records: dict[str, InstanceRecord]) -> Snapshot:
        """The fleet that has these nodes and no others."""
        here = {(node.host, node.name) for node in nodes}
        view = FleetView()
        view.set_nodes(nodes)
        view.put_many([each for each in records.values() if (each.host, each.node) in here])
        return view.snapshot()

    def given(self, rows: Rows, size: int) -> Rows:
        return rows

    def check_equal(self, sample: Snapshot, small: Snapshot, records: dict[str, InstanceRecord]) -> None:
        self.assertEqual(list(sample.nodes), list(small.nodes))
        self.assertEqual(dict(sample.row_of_node), dict(small.row_of_node))
        for name in ("VCPU", "MEMORY_MB", "PGPU"):
            np.testing.assert_array_equal(sample.free(name), small.free(name))
            np.testing.assert_array_equal(sample.capacity(name), small.capacity(name))
        for column in ("available", "can_host", "nested", "num_instances", "num_io_ops"):
            np.testing.assert_array_equal(getattr(sample, column), getattr(small, column))
        for flavor in FLAVORS:
            np.testing.assert_array_equal(
                sample.flavor_counts(flavor.flavorid), small.flavor_counts(flavor.flavorid), flavor.flavorid
            )
        self.assertEqual(sample.locate([*records, "nobody"]), small.locate([*records, "nobody"]))
        for row in range(small.size):
            self.assertEqual(dict(sample.instances_on(row)), dict(small.instances_on(row)))
        hosts = [f"h{number}" for number in range(0, 40, 3)]
        np.testing.assert_array_equal(sample.rows_of_hosts(hosts), small.rows_of_hosts(hosts))
        upper = [host.upper() for host in hosts]
        np.testing.assert_array_equal(sample.rows_of_folded_hosts(upper), small.rows_of_folded_hosts(upper))
        uuids = [node.uuid for node in small.nodes[::2]]
        np.testing.assert_array_equal(sample.rows_of_nodes([*uuids, "none"]), small.rows_of_nodes([*uuids, "none"]))
        mine, others = self.said(sample), self.said(small)
        for name, values in others.items():
            self.assertEqual(mine[name], values, name)
        np.testing.assert_array_equal(sample.property_numbers("rack"), small.property_numbers("rack"))
        names = frozenset({"HW_B"})
        np.testing.assert_array_equal(sample.have_trait(names), small.have_trait(names))

    def said(self, fleet: Snapshot) -> dict[str, list[Any]]:
        """What columns say of each row."""
        columns = {
            "rack": fleet.property_column("rack"),
            "multiplier": fleet.aggregate_column("cpu_weight_multiplier"),
            "aggregates": fleet.aggregates,
            "traits": fleet.traits,
        }
        return {name: [column.values[code] for code in column.codes] for name, column in columns.items()}

    def test_is_the_small_fleet_of_its_nodes_whatever_comes_before_and_after(self) -> None:
        random = seeded()
        conf = options.defaults()
        every = filter_and_weigh.load(conf)
        conf.set_override("enabled_weighers", ["cpu", "ram"], "scheduling")
        without_least_waste, compared = filter_and_weigh.load(conf), 0
        guard = PluginRunner(
            SystemClock(), NoIncidents(), self.fail, deadline=60, threshold=3, window=300, skip_advisory=True
        )
        self.addCleanup(guard.close)
        for _ in range(cases(15)):
            nodes = some_nodes(random, 60)
            view, records = FleetView(), dict[str, InstanceRecord]()
            view.set_nodes(nodes)
            kept: list[tuple[Snapshot, Snapshot, dict[str, InstanceRecord]]] = []
            for _ in range(60):
                for _ in range(random.choice((0, 1, 3, 100))):
                    uuid = f"i{random.randrange(80)}"
                    if random.random() < 0.7:
                        records[uuid] = some_record(random, nodes, uuid)
                        view.put(records[uuid])
                    elif records.pop(uuid, None) is not None:
                        view.drop(uuid)
                action = random.random()
                if action < 0.1:
                    place = random.randrange(len(nodes))
                    nodes[place] = replace(nodes[place], properties={"rack": 9}, up=not nodes[place].up)
                    view.set_nodes(nodes)
                elif action < 0.3:
                    view.snapshot()
                rows = np.array(sorted(random.sample(range(60), random.randrange(1, 30))), dtype=np.intp)
                small = self.small_fleet([nodes[row] for row in rows], records)
                kept.append((view.sample(functools.partial(self.given, rows), "small"), small, dict(records)))
                spec = RequestSpec("new", random.choice(FLAVORS), "p")
                # Which classes are scarce is said of the whole fleet, which the small one may not tell.
                alike = set(kept[-1][0].scarce_classes) == set(small.scarce_classes)
                pipeline = every if alike else without_least_waste
                compared += alike
                answers = [pipeline.run(guard, each, each.all_rows, spec) for each in kept[-1][:2]]
                self.assertEqual(answers[0].rows.tolist(), answers[1].rows.tolist())
                self.assertEqual(answers[0].weights.tolist(), answers[1].weights.tolist())
                self.assertEqual(answers[0].removed, answers[1].removed)
            for sample, small, then in kept:
                self.check_equal(sample, small, then)
                tried = sample.with_placed(some_record(random, [sample.nodes[0]], "tried"), 0)
                self.assertIn("tried", tried.instances_on(0))
                self.assertEqual(tried.num_instances[0], sample.num_instances[0] + 1)
        self.assertGreater(compared, cases(15) * 10, "hardly any small fleet has the scarce classes of its fleet")

    def test_columns_cannot_be_written(self) -> None:
        view = FleetView()
        view.set_nodes(some_nodes(seeded(), 20))
        sample = view.sample(lambda size: np.arange(0, size, 2), "small")
        for column in (sample.free("VCPU"), sample.num_instances, sample.available, sample.flavor_counts("small")):
            with self.assertRaises(ValueError):
                column[0] = 1


class SamplerTests(unittest.TestCase):
    def test_takes_each_node_once_before_one_a_second_time(self) -> None:
        sampler = Sampler(seeded())
        rows = [sampler.choose(10, 100) for _ in range(10)]
        self.assertEqual(sorted(np.concatenate(rows).tolist()), list(range(100)))
        for each in rows:
            self.assertEqual(each.tolist(), sorted(set(each.tolist())))

    def test_shows_every_node_about_equally_often_whatever_the_sizes_are(self) -> None:
        random = seeded()
        for sizes in ((256,), (256, 2048), (100, 256, 700)):
            for size in (4096, 4097, 5000):
                sampler, shown, asked = Sampler(random), np.zeros(size), 0
                while asked < 40 * size:
                    count = sizes[asked % len(sizes)] if len(sizes) < 2 else random.choice(sizes)
                    shown[sampler.choose(count, size)] += 1
                    asked += count
                self.assertGreater(shown.min(), 10, (sizes, size))
                self.assertLess(shown.max(), 80, (sizes, size))

    def test_takes_distinct_rows_of_fleets_of_any_size(self) -> None:
        random = seeded()
        for _ in range(cases(50)):
            sampler = Sampler(random)
            for _ in range(5):
                size, count = random.randrange(1, 50), random.randrange(1, 60)
                rows = sampler.choose(count, size)
                self.assertEqual(len(set(rows.tolist())), min(size, count))
                self.assertTrue(set(rows.tolist()) <= set(range(size)))

    def test_two_schedulers_take_different_nodes(self) -> None:
        random = seeded()
        first, second = (set(Sampler(random).choose(50, 10_000).tolist()) for _ in range(2))
        self.assertLess(len(first & second), 10)


class MaySampleTests(unittest.TestCase):
    def test_only_requests_that_most_nodes_can_take(self) -> None:
        plain = RequestSpec("i", FLAVORS[0], "p")
        self.assertTrue(may_sample(plain))
        self.assertTrue(may_sample(replace(plain, ignore_hosts=("h1",), ignore_nodes=("n1",))))
        grouped = Flavor("grouped", {"VCPU": 1, "PGPU": 1}, {"resources1:PGPU": "1"})
        for change in (
            {"hints": {"same_host": ["i2"]}},
            {"force_hosts": ("h1",)},
            {"force_nodes": ("n1",)},
            {"requested_host": "h1"},
            {"requested_node": "n1"},
            {"server_group": ServerGroup("g", "anti-affinity")},
            {"rebuild": True},
            {"flavor": grouped},
        ):
            self.assertFalse(may_sample(replace(plain, **change)), change)


class PolicyTests(unittest.TestCase):
    def test_only_where_all_weighers_spread(self) -> None:
        for preset, spreads in (("spread", True), ("pack", False), ("gpu", False), ("nova", False)):
            pipeline = filter_and_weigh.load(options.defaults(scheduling={"preset": preset}))
            self.assertEqual(pipeline.spreads, spreads, preset)

    def test_only_where_all_filters_judge_each_host_alone(self) -> None:
        class Alone(HostFilter):
            api_version = (1, 0)

            def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
                return True

        class Prepares(Alone):
            def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
                return None

        class Masks(CapacityFilter):
            def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
                return fleet.available[where]

        class Declares(Masks):
            judges_alone = True

        class Same(CapacityFilter):
            pass

        conf = options.defaults()
        for kind, spreads in (
            (Alone, True),
            (Prepares, False),
            (CapacityFilter, True),
            (Masks, False),
            (Declares, True),
            (Same, True),
        ):
            self.assertEqual(filter_and_weigh.of([kind(conf=conf)], []).spreads, spreads, kind)

    def test_a_weigher_below_a_spreading_one_that_weighs_in_another_way_does_not_spread(self) -> None:
        class Packs(CpuWeigher):
            def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> npt.NDArray[np.float64]:
                return -fleet.free("VCPU")[rows]

        class Same(CpuWeigher):
            pass

        conf = options.defaults()
        for kind, spreads in ((CpuWeigher, True), (Same, True), (Packs, False)):
            self.assertEqual(filter_and_weigh.of([], [kind(conf=conf)]).spreads, spreads, kind)


class RankerTests(unittest.TestCase):
    size = 400

    def setUp(self) -> None:
        self.guard = PluginRunner(
            SystemClock(), NoIncidents(), self.fail, deadline=60, threshold=3, window=300, skip_advisory=True
        )
        self.addCleanup(self.guard.close)
        self.shown: list[int] = []
        patched = mock.patch.multiple(ranker, _SAMPLE=40, _ENOUGH=10)
        patched.start()
        self.addCleanup(patched.stop)

    def scheduler(self, nodes: list[NodeState], claims: Claims | None = None, sample_above: int = 300) -> Scheduler:
        view = FleetView()
        view.set_nodes(nodes)
        pipeline = filter_and_weigh.load(options.defaults())
        policy = SchedulingPolicy(pipeline, self.guard, 1, 10, sample_above=sample_above)
        run = pipeline.run

        def watched(guard: Any, fleet: Snapshot, rows: Rows, spec: RequestSpec, **more: Any) -> Any:
            self.shown.append(fleet.size)
            return run(guard, fleet, rows, spec, **more)

        pipeline.run = watched  # type: ignore[method-assign]
        return Scheduler(view, Nodes(), claims or Claims(), lambda: policy, SystemClock(), seeded())

    def nodes(self, roomy: int) -> list[NodeState]:
        """So many nodes with room, and others that are full."""
        return [
            NodeState(f"u{row}", f"n{row}", f"h{row}", {"VCPU": 8.0 if row < roomy else 0.0, "MEMORY_MB": 4096.0}, {})
            for row in range(self.size)
        ]

    def place(self, scheduler: Scheduler, uuid: str = "i", **more: Any) -> str:
        self.shown.clear()
        return scheduler.place(RequestSpec(uuid, FLAVORS[0], "p", **more), uuid).record.node

    def test_looks_at_a_sample_of_a_large_fleet(self) -> None:
        self.place(self.scheduler(self.nodes(self.size)))
        self.assertEqual(self.shown, [40])

    def test_looks_at_all_of_a_fleet_that_is_not_larger_than_the_option_says(self) -> None:
        self.place(self.scheduler(self.nodes(self.size), sample_above=self.size))
        self.place(self.scheduler(self.nodes(self.size), sample_above=0), "other")
        self.assertEqual(self.shown, [self.size])

    def test_looks_at_all_nodes_where_some_have_several_providers(self) -> None:
        nodes = self.nodes(self.size)
        own = nodes[0].own_and_nested
        nodes[0] = replace(nodes[0], providers=(*own, ProviderState("gpu", "u0", (InventoryItem("PGPU", 1),), {})))
        self.place(self.scheduler(nodes))
        self.assertEqual(self.shown, [self.size])

    def test_looks_at_all_nodes_when_few_have_room_and_finds_the_only_one(self) -> None:
        self.assertEqual(self.place(self.scheduler(self.nodes(1))), "n0")
        self.assertEqual(self.shown, [40, self.size])

    def test_looks_at_all_nodes_for_a_request_that_names_one(self) -> None:
        self.assertEqual(self.place(self.scheduler(self.nodes(self.size)), requested_node="n7"), "n7")
        self.assertEqual(self.shown, [self.size])

    def test_looks_at_all_nodes_where_an_aggregate_fills_its_nodes(self) -> None:
        nodes = self.nodes(self.size)
        for multiplier, shown in (("2", [40]), ("-1", [self.size])):
            nodes[7] = replace(nodes[7], aggregates=(Aggregate("a", {"cpu_weight_multiplier": multiplier}),))
            self.place(self.scheduler(nodes))
            self.assertEqual(self.shown, shown, multiplier)

    def test_wastes_nothing_scarce_while_any_node_has_room_that_wastes_nothing(self) -> None:
        random = seeded()
        for plain in (0, 1, 5, 40, 399):
            chosen = set(random.sample(range(self.size), plain))
            nodes = [
                NodeState(
                    f"u{row}", f"n{row}", f"h{row}", {"VCPU": 8.0 if row in chosen else 64.0, "MEMORY_MB": 4096.0}
                    | ({} if row in chosen else {"PGPU": 2.0}), {},
                )
                for row in range(self.size)
            ]  # fmt: skip
            scheduler = self.scheduler(nodes)
            found = [int(self.place(scheduler, f"i{number}")[1:]) for number in range(min(8 * plain, 60))]
            self.assertLessEqual(set(found), chosen)

    def test_looks_at_all_nodes_after_those_of_the_sample_refused(self) -> None:
        scheduler = self.scheduler(self.nodes(self.size), Claims(tuple(f"u{row}" for row in range(self.size))))
        with self.assertRaises(errors.NoValidHost):
            self.place(scheduler)
        self.assertEqual(self.shown[:2], [40, self.size])
        self.assertNotIn(40, self.shown[1:])

    def test_leaves_out_nodes_that_refused_and_finds_the_one_that_does_not(self) -> None:
        refusing = tuple(f"u{row}" for row in range(self.size) if row != 123)
        for _ in range(3):
            # 40 nodes are tried for a request; the last one that has room is found when the others have been ranked.
            scheduler = self.scheduler(self.nodes(self.size), Claims(refusing[:30]))
            found = self.place(scheduler)
            self.assertNotIn(f"u{found[1:]}", refusing[:30])

    def test_chooses_among_the_best(self) -> None:
        """A node of a sample of 40 is among the best 15 % of the fleet but for 1 of 600 times."""
        random = seeded()
        order = random.sample(range(self.size), self.size)
        nodes = [
            NodeState(f"u{row}", f"n{row}", f"h{row}", {"VCPU": 100.0 + order[row], "MEMORY_MB": 4096.0}, {})
            for row in range(self.size)
        ]
        scheduler = self.scheduler(nodes)
        better = [self.size - 1 - order[int(self.place(scheduler, f"i{number}")[1:])] for number in range(40)]
        self.assertLess(sorted(better)[36], 0.15 * self.size)

    def test_claims_that_are_made_one_after_the_other_fill_the_fleet(self) -> None:
        scheduler = self.scheduler(self.nodes(self.size))
        found = [self.place(scheduler, f"i{number}") for number in range(8 * self.size)]
        self.assertEqual({found.count(node.name) for node in self.nodes(self.size)}, {8})


if __name__ == "__main__":
    unittest.main()
