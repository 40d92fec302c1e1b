# SPDX-License-Identifier: Apache-2.0
"""Requests alike that are ranked together get the nodes that they would get if the plugins were asked for each of them."""

from __future__ import annotations

import functools
import random
import unittest
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from moorage import options
from moorage.clock import SystemClock
from moorage.inventory import InventoryItem
from moorage.scheduling import alike as alike_module
from moorage.scheduling import filter_and_weigh
from moorage.scheduling.alike import AlikeRequests, AlikeSets, what_is_asked
from moorage.scheduling.decisions import Decision
from moorage.scheduling.filter_and_weigh import Pipeline
from moorage.scheduling.fleet_refresher import FleetRefresher
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import (
    Flavor,
    Fleet,
    HostFilter,
    HostState,
    HostWeigher,
    InstanceRecord,
    Mask,
    NodeState,
    ProviderState,
    RequestSpec,
    Rows,
    ServerGroup,
    Where,
)
from moorage.scheduling.placement import Placement
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.scheduling.ranker import Ranker
from moorage.scheduling.reservations import Reservations
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage.testing.clock import ManualClock
from moorage_plugins.filters.capacity import CapacityFilter
from moorage_plugins.weighers.free_resources import CpuWeigher
from moorage_plugins.weighers.load import IoOpsWeigher, NumInstancesWeigher
from tests import cases, seeded
from tests.unit.scheduling.test_sample import FLAVORS, some_nodes, some_record
from tests.unit.scheduling.test_scheduler import Nodes, NoIncidents

Found = Sequence[tuple[int, list[int], list[float], int, int, dict[str, int]]]


class AlikeTests(unittest.TestCase):
    def setUp(self) -> None:
        self.guard = PluginRunner(
            SystemClock(), NoIncidents(), self.fail, deadline=60, threshold=3, window=300, skip_advisory=True
        )
        self.addCleanup(self.guard.close)
        self.random = seeded()
        # A full fleet is not read again: the nodes of the test's store have neither states nor what is placed here.
        self.enterContext(mock.patch.object(FleetRefresher, "before_refusal"))

    def policy(self, pipeline: Pipeline, sample_above: int = 0) -> SchedulingPolicy:
        return SchedulingPolicy(pipeline, self.guard, host_subset_size=1, max_attempts=3, sample_above=sample_above)

    def ranker(self, view: FleetView, nodes: list[NodeState], sampler: Any = None) -> Ranker:
        source, clock = Nodes(), SystemClock()
        source.all = nodes
        return Ranker(view, FleetRefresher(view, source, clock, None), Reservations(), clock, sampler)

    def place(
        self,
        view: FleetView,
        spec: RequestSpec,
        count: int,
        rank: Callable[[RequestSpec], Any],
        take: Callable[[int], object],
        stay: str = "",
    ) -> Found:
        """Places instances alike, each on top of the ones before; what each ranking said.

        :param stay: the instances have this before their numbers, and stay in the view.
        """
        found = []
        for number in range(count):
            one = replace(spec, instance_uuid=f"{stay or 'new'}{number}")
            fleet, ranking = rank(one)
            if not len(ranking.rows):
                break
            row = int(ranking.rows[0])
            found.append(
                (
                    row, ranking.rows.tolist(), [round(each, 9) for each in ranking.weights.tolist()], ranking.considered,
                    ranking.passed, {name: each for name, each in ranking.removed.items() if each},
                )
            )  # fmt: skip
            node, propose = fleet.nodes[row], fleet.proposal(row, one)
            record = InstanceRecord(
                one.instance_uuid, node.host, node.name, spec.flavor.flavorid, spec.flavor.resources, busy=True
            )
            view.put(record if propose is None else replace(record, holds=propose(frozenset())))
            take(row)
        for number in range(0 if stay else count):
            view.drop(f"new{number}")
        return found

    def both(
        self,
        view: FleetView,
        nodes: list[NodeState],
        pipeline: Pipeline,
        spec: RequestSpec,
        count: int,
        sampler: Any = None,
    ) -> tuple[Found, Found, int]:
        """What requests alike get together, and each by itself, and how often the fleet was ranked for the former.

        :param sampler: fleets of more than 300 nodes are sampled by it; None: no fleet is.
        """
        policy = self.policy(pipeline, sample_above=0 if sampler is None else 300)
        ranker = self.ranker(view, nodes, sampler)
        alike = AlikeRequests(ranker, view, policy, what_is_asked(spec), SystemClock())
        alike.begin(count)
        with mock.patch.object(Pipeline, "run", autospec=True, side_effect=Pipeline.run) as run:
            together = self.place(view, spec, count, lambda one: alike.rank(one, ()), alike.take)
        asked = sum(each.kwargs["most"] != 0 for each in run.call_args_list)
        each = self.place(view, spec, count, lambda one: ranker.rank(policy, one, None, ()), lambda row: None)
        return together, each, asked

    def view(self, nodes: list[NodeState], instances: int) -> FleetView:
        view = FleetView()
        view.set_nodes(nodes)
        view.put_many([some_record(self.random, nodes, f"i{number}") for number in range(instances)])
        return view

    def pipelines(self) -> Sequence[Pipeline]:
        conf = options.defaults()
        busy, crowded = IoOpsWeigher(conf=conf), NumInstancesWeigher(conf=conf)
        crowded._general = -0.5
        packing = CpuWeigher(conf=conf)
        packing._general = -1.0
        capacity = CapacityFilter(conf=conf)
        return [
            filter_and_weigh.load(conf),
            filter_and_weigh.of([capacity], [busy, crowded]),
            filter_and_weigh.of([capacity], [packing]),
            filter_and_weigh.of([capacity]),
        ]

    def test_they_get_what_each_would_get_by_itself(self) -> None:
        fewer = 0
        for _ in range(cases(25)):
            nodes = some_nodes(self.random, self.random.choice((3, 40, 200)))
            view = self.view(nodes, self.random.choice((0, 20, 300)))
            spec = RequestSpec("", self.random.choice(FLAVORS), "p")
            count = self.random.choice((2, 10, 60))
            for number, pipeline in enumerate(self.pipelines()):
                together, each, asked = self.both(view, nodes, pipeline, spec, count)
                self.assertEqual(each, together, (number, spec))
                fewer += asked < len(each) / 2
        self.assertGreater(fewer, cases(25), "the plugins are asked for nearly each request")

    def test_sets_get_what_each_would_get_by_itself_whatever_changes_between_them(self) -> None:
        kept = 0
        for _ in range(cases(12)):
            nodes = some_nodes(self.random, self.random.choice((40, 200)))
            view, spec = self.view(nodes, self.random.choice((0, 300))), RequestSpec("", FLAVORS[0], "p")
            pipeline = self.random.choice(self.pipelines())
            policy, ranker = self.policy(pipeline), self.ranker(view, nodes)
            alike = AlikeRequests(ranker, view, policy, what_is_asked(spec), ManualClock())
            one_by_one = functools.partial(_ranked_alone, ranker, policy)
            for number in range(12):
                count = self.random.choice((1, 2, 5, 20))
                alike.begin(count)
                with mock.patch.object(Pipeline, "run", autospec=True, side_effect=Pipeline.run) as run:
                    together = self.place(view, spec, count, functools.partial(alike.rank, refused=()), alike.take)
                kept += all(each.kwargs["most"] == 0 for each in run.call_args_list)
                each = self.place(view, spec, count, one_by_one, lambda row: None)
                self.assertEqual(each, together, (number, count))
                nodes = self.changed(view, nodes, number)
        self.assertGreater(kept, cases(12) * 4, "the fleet is ranked for nearly each set")

    def changed(self, view: FleetView, nodes: list[NodeState], number: int) -> list[NodeState]:
        """Changes a fleet in a way that schedulers see; the nodes after it."""
        kind = self.random.randrange(6)
        some = [some_record(self.random, nodes, f"more{number}-{each}") for each in range(self.random.randrange(1, 9))]
        if kind == 0:
            view.put_many(some)
        elif kind == 1:
            for each in some:
                view.hold(each)
        elif kind == 2:
            for gone in range(self.random.randrange(300)):
                view.drop(f"i{gone}")
        elif kind == 3:
            for each in some:
                view.put(each)
                view.put(replace(each, busy=not each.busy))
        elif kind == 4:
            place = self.random.randrange(len(nodes))
            nodes = [*nodes[:place], replace(nodes[place], up=not nodes[place].up), *nodes[place + 1 :]]
            view.set_nodes(nodes)
        return nodes

    def test_sets_get_what_each_would_get_where_the_instances_of_earlier_sets_stay(self) -> None:
        sets = silent = 0
        for _ in range(cases(12)):
            nodes = some_nodes(self.random, self.random.choice((40, 200)))
            spec, pipeline = RequestSpec("", FLAVORS[0], "p"), self.random.choice(self.pipelines())
            records = [some_record(self.random, nodes, f"i{number}") for number in range(100)]
            views = FleetView(), FleetView()
            for view in views:
                view.set_nodes(nodes)
                view.put_many(records)
            policy, ranker = self.policy(pipeline), self.ranker(views[0], nodes)
            alike = AlikeRequests(ranker, views[0], policy, what_is_asked(spec), ManualClock())
            one_by_one = functools.partial(_ranked_alone, self.ranker(views[1], nodes), policy)
            for number in range(12):
                count = self.random.choice((1, 2, 5, 20))
                alike.begin(count)
                rank = functools.partial(alike.rank, refused=())
                with mock.patch.object(Pipeline, "run", autospec=True, side_effect=Pipeline.run) as run:
                    together = self.place(views[0], spec, count, rank, alike.take, stay=f"{number}-")
                sets, silent = sets + 1, silent + (not run.called)
                each = self.place(views[1], spec, count, one_by_one, lambda row: None, stay=f"{number}-")
                self.assertEqual(each, together, (number, count))
                if self.random.randrange(2):
                    self.change_placed(views, [f"{number}-{placed}" for placed in range(len(each))])
        self.assertGreater(silent, sets / 8, "the plugins are asked for nearly each set")

    def change_placed(self, views: Sequence[FleetView], uuids: Sequence[str]) -> None:
        """Changes some of the instances in all views, as agents report it: they are not busy any more, or gone."""
        for uuid in self.random.sample(uuids, self.random.randrange(len(uuids) + 1)):
            gone = self.random.randrange(2)
            for view in views:
                record = view.get(uuid)
                assert record is not None
                if gone:
                    view.drop(uuid)
                else:
                    view.put(replace(record, busy=False))

    def test_a_chosen_node_is_asked_about_again_only_if_it_shows_another_use_than_foreseen(self) -> None:
        room = {"VCPU": 64.0, "MEMORY_MB": 65536.0, "DISK_GB": 4096.0}
        nodes = [NodeState(f"u{number:02}", f"n{number}", "h", room, {}) for number in range(60)]
        view, spec = FleetView(), RequestSpec("", FLAVORS[0], "p")
        view.set_nodes(nodes)
        policy, ranker = self.policy(self.pipelines()[0]), self.ranker(view, nodes)
        alike = AlikeRequests(ranker, view, policy, what_is_asked(spec), ManualClock())

        def asked(number: int) -> list[int]:
            """How many nodes the plugins are asked about, each time, by a further set of four requests."""
            alike.begin(4)
            with mock.patch.object(Pipeline, "run", autospec=True, side_effect=Pipeline.run) as run:
                placed = self.place(view, spec, 4, lambda one: alike.rank(one, ()), alike.take, stay=f"{number}-")
            self.assertEqual(4, len(placed))
            return [each.args[2].size for each in run.call_args_list]

        # All nodes, and the likely ones with one more instance.
        self.assertEqual([60, 60], asked(0))
        self.assertEqual([], asked(1))
        record = view.get("1-2")
        assert record is not None
        view.put(replace(record, busy=False))
        self.assertEqual([1], asked(2))
        view.drop("2-0")
        view.put(InstanceRecord("other", "h", "n50", "f", {"VCPU": 1}))
        self.assertEqual([2], asked(3)[:1])

    def test_answers_are_kept_for_a_second(self) -> None:
        nodes, clock, spec = some_nodes(self.random, 60), ManualClock(), RequestSpec("new", FLAVORS[0], "p")
        view, plugin = self.view(nodes, 0), Charging(conf=None)
        policy = self.policy(filter_and_weigh.of([plugin]))
        alike = AlikeRequests(self.ranker(view, nodes), view, policy, what_is_asked(spec), clock)
        passed = []
        for seconds in (0.0, 0.9, 0.2):
            clock.advance(seconds)
            alike.begin(1)
            passed.append(bool(len(alike.rank(spec, ())[1].rows)))
            plugin.passes = False
        self.assertEqual([True, True, False], passed)

    def test_nodes_that_are_read_while_others_are_asked_about_do_no_harm(self) -> None:
        nodes, spec = some_nodes(self.random, 60), RequestSpec("", FLAVORS[0], "p")
        view, policy = self.view(nodes, 0), self.policy(self.pipelines()[0])
        ranker = self.ranker(view, nodes)
        alike = AlikeRequests(ranker, view, policy, what_is_asked(spec), ManualClock())
        alike.begin(2)
        self.place(view, spec, 2, lambda one: alike.rank(one, ()), alike.take)
        real = view.changes

        def read_after(moment: Any) -> Any:
            found = real(moment)
            if len(view.snapshot().nodes) == 60:
                view.set_nodes(nodes[::-1][:20])
            return found

        alike.begin(2)
        with mock.patch.object(view, "changes", read_after):
            together = self.place(view, spec, 2, lambda one: alike.rank(one, ()), alike.take)
        each = self.place(view, spec, 2, lambda one: ranker.rank(policy, one, None, ()), lambda row: None)
        self.assertEqual((20, each), (each[0][3], together))

    def test_a_sample_is_made_for_as_many_requests_as_came_while_the_last_one_was_kept(self) -> None:
        nodes = [NodeState(f"u{number:05}", f"n{number}", "h", {"VCPU": 64.0}, {}) for number in range(20000)]
        view, spec, clock = self.view(nodes, 0), RequestSpec("", Flavor("tiny", {"VCPU": 1}), "p"), ManualClock()
        policy, sampler = self.policy(self.pipelines()[0], sample_above=300), _AnyRows(self.random)
        alike = AlikeRequests(self.ranker(view, nodes, sampler), view, policy, what_is_asked(spec), clock)
        for number, seconds in ((4, 0.0), (7, 0.0), (1, 1.5), (90, 3.0)):
            clock.advance(seconds)
            for _ in range(number):
                alike.begin(2)
                self.place(view, spec, 2, lambda one: alike.rank(one, ()), alike.take)
        # 64 nodes that pass are enough for a request, so those for 2 serve 8. A sample has at most half of the nodes.
        self.assertEqual([256 * each for each in (2, 16, 14, 2, 16, 39)], sampler.asked)

    def test_one_sample_serves_all_of_them_as_the_plugins_would_by_the_same_nodes(self) -> None:
        runs = requests = 0
        for _ in range(cases(10)):
            nodes = [replace(each, can_host=True, up=True, enabled=True) for each in some_nodes(self.random, 4000)]
            view, flavor = self.view(nodes, self.random.choice((0, 3000))), Flavor("tiny", {"VCPU": 1})
            spec, count = RequestSpec("", flavor, "p"), self.random.choice((2, 3, 7))
            for number, pipeline in enumerate(self.pipelines()[:2]):
                sampler = _SameRows(self.random)
                together, each, asked = self.both(view, nodes, pipeline, spec, count, sampler)
                self.assertEqual((256 * count, 256 * count), (sampler.asked[0], together[0][3]))
                self.assertEqual(each, together, (number, spec))
                runs, requests = runs + asked, requests + count
        self.assertLess(2 * runs, requests, "the plugins are asked for nearly each request")

    def test_all_nodes_are_ranked_for_many_of_them_and_where_each_is_asked_for(self) -> None:
        nodes = [replace(each, can_host=True, up=True, enabled=True) for each in some_nodes(self.random, 1000)]
        view, spec = self.view(nodes, 0), RequestSpec("", Flavor("tiny", {"VCPU": 1}), "p")
        for pipeline, count, considered in (
            (self.pipelines()[0], 1, 256),
            (self.pipelines()[0], 2, 1000),
            (filter_and_weigh.of([OneByOne(conf=None)]), 2, 256),
        ):
            policy = self.policy(pipeline, sample_above=300)
            sampler = _SameRows(self.random)
            ranker = self.ranker(view, nodes, sampler)
            alike = AlikeRequests(ranker, view, policy, what_is_asked(spec), SystemClock())
            alike.begin(count)
            self.assertEqual(considered, alike.rank(replace(spec, instance_uuid="new"), ())[1].considered, count)

    def test_the_plugins_are_asked_twice_for_many_that_go_to_different_nodes(self) -> None:
        # One fleet: in others a node gets two of them, and the plugins are asked once more.
        nodes = some_nodes(random.Random(1), 200)
        view = self.view(nodes, 0)
        with mock.patch.object(
            CapacityFilter, "mask_rows", autospec=True, side_effect=CapacityFilter.mask_rows
        ) as asked:
            self.both(view, nodes, self.pipelines()[1], RequestSpec("", FLAVORS[0], "p"), 1)
            self.assertEqual(2, asked.call_count, "one by itself, and the one to compare with")
            asked.reset_mock()
            together, _, runs = self.both(view, nodes, self.pipelines()[1], RequestSpec("", FLAVORS[0], "p"), 50)
        self.assertEqual((50, 1, 50 + 2), (len(together), runs, asked.call_count))

    def test_where_each_instance_fills_a_node_the_fleet_is_ranked_once(self) -> None:
        nodes = [replace(each, capacity={"VCPU": 1.0}, can_host=True, up=True) for each in some_nodes(self.random, 60)]
        view, spec = self.view(nodes, 0), RequestSpec("", Flavor("all", {"VCPU": 1}), "p")
        together, each, asked = self.both(view, nodes, self.pipelines()[0], spec, 40)
        self.assertEqual((each, 1), (together, asked))

    def test_requests_that_all_nodes_must_be_asked_for_are_not_ranked_together(self) -> None:
        nodes = some_nodes(self.random, 60)
        small = RequestSpec("", FLAVORS[0], "p")
        for name, of_nodes, pipeline, spec in (
            ("named", nodes, self.pipelines()[0], replace(small, hints={"different_host": ["i1"]})),
            ("group", nodes, self.pipelines()[0], replace(small, server_group=ServerGroup("g", "affinity"))),
            ("order", nodes, filter_and_weigh.of([Ordered(conf=None)]), small),
            ("shown the fleet", nodes, filter_and_weigh.of([Crowd(conf=None)]), small),
            ("host_passes alone", nodes, filter_and_weigh.of([OneByOne(conf=None)]), small),
            ("weigher", nodes, filter_and_weigh.of([], [Rank(conf=None)]), small),
            ("limits", nodes, filter_and_weigh.of([Limiting(conf=None)]), small),
        ):  # fmt: skip
            with self.subTest(name):
                together, each, asked = self.both(self.view(of_nodes, 30), of_nodes, pipeline, spec, 8)
                self.assertEqual(each, together)
                self.assertGreaterEqual(asked, max(2, len(together)))

    def test_they_get_what_each_would_get_where_some_nodes_have_several_providers(self) -> None:
        fewer = placed = 0
        for _ in range(cases(25)):
            nodes = [self.nested(each) for each in some_nodes(self.random, self.random.choice((10, 40, 200)))]
            view = self.view(nodes, self.random.choice((0, 20)))
            spec, count = RequestSpec("", self.random.choice(FLAVORS), "p"), self.random.choice((2, 10, 60))
            for number, pipeline in enumerate(self.pipelines()):
                together, each, asked = self.both(view, nodes, pipeline, spec, count)
                self.assertEqual(each, together, (number, spec))
                fewer += asked < len(each) / 2
                placed += any(len(nodes[row].providers) > 1 for row, *_ in each)
        self.assertGreater(fewer, cases(25) // 2, "the plugins are asked for nearly each request")
        self.assertGreater(placed, cases(25) // 2, "nothing goes to nodes with several providers")

    def nested(self, node: NodeState) -> NodeState:
        """The node, perhaps with a device, or with its processors in two cells."""
        own = {name: InventoryItem(name, int(total)) for name, total in node.capacity.items()}
        below, kind = f"{node.uuid}-1", self.random.randrange(8)
        if kind == 0:
            gpu = ProviderState(below, node.uuid, (InventoryItem("PGPU", 1),), {})
            return replace(node, providers=(ProviderState(node.uuid, None, tuple(own.values()), {}), gpu))
        if kind == 1 and "VCPU" in own:
            total = own.pop("VCPU").total
            cells = [
                ProviderState(f"{node.uuid}-{each}", node.uuid, (InventoryItem("VCPU", max(1, total // 2)),), {})
                for each in range(2)
            ]
            return replace(node, providers=(ProviderState(node.uuid, None, tuple(own.values()), {}), *cells))
        return node

    def test_a_node_that_refused_one_is_ranked_again_for_the_others(self) -> None:
        nodes = some_nodes(self.random, 60)
        view, policy = self.view(nodes, 0), self.policy(self.pipelines()[0])
        spec = RequestSpec("new", FLAVORS[0], "p")
        alike = AlikeRequests(self.ranker(view, nodes), view, policy, what_is_asked(spec), SystemClock())
        alike.begin(4)
        fleet, ranking = alike.rank(spec, ())
        best = int(ranking.rows[0])
        alike.take(None)
        _, without = alike.rank(spec, [fleet.nodes[best].uuid])
        self.assertNotIn(best, without.rows.tolist())
        alike.take(None)
        self.assertEqual(best, int(alike.rank(spec, ())[1].rows[0]))

    def test_what_a_weigher_answers_is_not_written_to(self) -> None:
        kept = Kept(conf=None)
        nodes = some_nodes(self.random, 60)
        together, each, _ = self.both(
            self.view(nodes, 0), nodes, filter_and_weigh.of([], [kept]), RequestSpec("", FLAVORS[0]), 5
        )
        self.assertEqual(each, together)
        for names, column in kept.answers.items():
            self.assertEqual([float(name[1:]) for name in names], column.tolist())

    def test_a_weigher_that_raises_when_it_is_asked_again_does_no_harm(self) -> None:
        nodes = some_nodes(self.random, 60)
        broken = Broken(conf=options.defaults())
        together, each, asked = self.both(
            self.view(nodes, 0), nodes, filter_and_weigh.of([], [broken]), RequestSpec("", FLAVORS[0]), 6
        )
        self.assertEqual((each, 1), (together, asked))

    def test_what_is_asked_is_all_but_the_instance(self) -> None:
        spec = RequestSpec("one", FLAVORS[0], "p", properties={"name": "a", "command": ["true"]})
        other = replace(spec, instance_uuid="other", properties={"name": "b", "command": ["true"]})
        self.assertEqual(what_is_asked(spec), what_is_asked(other))
        for change in (
            {"flavor": FLAVORS[1]}, {"project_id": "q"}, {"user_id": "u"}, {"hints": {"a": ["b"]}}, {"image": {"id": "x"}},
            {"ignore_hosts": ("h1",)}, {"ignore_nodes": ("n1",)}, {"availability_zone": "z"}, {"properties": {"a": 1}},
            {"all_projects": False}, {"powers": ("compute.commands",)}, {"rebuild": True},
        ):  # fmt: skip
            self.assertNotEqual(what_is_asked(spec), what_is_asked(replace(spec, **change)), change)
        asked = [what_is_asked(replace(spec, image={"properties": {"hw": value}})) for value in (True, 1, 1.0, "1")]
        self.assertEqual([True] * 4, [asked.count(each) == 1 for each in asked])

    def test_whose_request_it_is_counts_only_for_plugins_that_read_it(self) -> None:
        spec = RequestSpec("one", FLAVORS[0], "p", "u")
        theirs = replace(spec, project_id="q", user_id="v")
        self.assertEqual(what_is_asked(spec, ignores_owner=True), what_is_asked(theirs, ignores_owner=True))
        capacity, cpu = CapacityFilter(conf=None), CpuWeigher(conf=options.defaults())
        self.assertEqual((), filter_and_weigh.of([capacity], [cpu]).reads_owner)
        for other in (Tenants(conf=None), Mine(conf=None), OneByOne(conf=None)):
            self.assertEqual(1, len(filter_and_weigh.of([capacity, other], [cpu]).reads_owner), other)
        ranked = filter_and_weigh.of([capacity, Crowd(conf=None)], [cpu, Rank(conf=None)])
        self.assertEqual(2, len(ranked.reads_owner))
        self.assertEqual(ranked.reads_owner, ranked.not_alone)

    def test_requests_of_several_projects_are_alike_unless_a_plugin_reads_the_project(self) -> None:
        nodes = some_nodes(self.random, 40)
        view = self.view(nodes, 0)
        for more, groups in (([], [[0, 1, 2, 3]]), ([Tenants(conf=None)], [[0, 2], [1, 3]])):
            policy = self.policy(filter_and_weigh.of([CapacityFilter(conf=None), *more], []))
            sets = AlikeSets(self.ranker(view, nodes), view, ManualClock())
            works = [self.work(policy, RequestSpec(f"i{each}", FLAVORS[0], "pq"[each % 2])) for each in range(4)]
            self.assertEqual(groups, [list(places) for _, places in sets.divide(works)])

    def test_the_kinds_that_were_asked_last_are_kept(self) -> None:
        nodes = some_nodes(self.random, 40)
        view = self.view(nodes, 0)
        policy = self.policy(filter_and_weigh.of([CapacityFilter(conf=None)], []))
        sets = AlikeSets(self.ranker(view, nodes), view, ManualClock())

        def kept_of(name: str) -> AlikeRequests:
            works = [self.work(policy, RequestSpec(f"{name}{number}", Flavor(name, {}))) for number in range(2)]
            return next(requests for requests, _ in sets.divide(works))

        with mock.patch.object(alike_module, "_KINDS", 2):
            first, second = kept_of("a"), kept_of("b")
            self.assertIs(first, kept_of("a"))
            third = kept_of("c")
            self.assertIs(third, kept_of("c"))
            self.assertIs(first, kept_of("a"))
            self.assertIsNot(second, kept_of("b"))

    def test_answers_are_kept_about_so_many_nodes_and_for_so_long(self) -> None:
        nodes = some_nodes(self.random, 40)
        view, clock = self.view(nodes, 0), ManualClock()
        policy = self.policy(filter_and_weigh.of([CapacityFilter(conf=None)], []))
        sets = AlikeSets(self.ranker(view, nodes), view, clock)

        def ask(name: str) -> AlikeRequests:
            spec = RequestSpec(name, Flavor(name, {}))
            requests = next(requests for requests, _ in sets.divide([self.work(policy, spec)] * 2))
            requests.rank(spec, ())
            return requests

        kinds = [ask(name) for name in "abc"]
        size = kinds[0].kept
        self.assertGreater(size, 10)
        self.assertEqual([size] * 3, [each.kept for each in kinds])
        with mock.patch.object(alike_module, "_NODES", 2 * size):
            self.assertIs(kinds[2], ask("c"))
            self.assertIs(kinds[1], ask("b"))
            self.assertIsNot(kinds[0], ask("a"))
        with mock.patch.object(alike_module, "_NODES", size - 1):
            self.assertIsNot(kinds[1], ask("b"))
        kept = ask("c")
        clock.advance(1.5)
        kept.drop_expired()
        self.assertEqual(size, kept.kept)
        clock.advance(1.0)
        kept.drop_expired()
        self.assertEqual(0, kept.kept)

    def test_a_single_request_is_ranked_by_kept_answers_if_it_is_not_the_only_one_of_a_second(self) -> None:
        nodes = [NodeState(f"u{number:03}", f"n{number}", "h", {"VCPU": 64.0}, {}) for number in range(200)]
        view, clock, policy = self.view(nodes, 0), ManualClock(), self.policy(self.pipelines()[0])
        sets = AlikeSets(self.ranker(view, nodes), view, clock)
        spec, other = (RequestSpec("", Flavor(name, {"VCPU": 1}), "p") for name in "ab")

        def asked(kind: RequestSpec, *uuids: str) -> list[int] | None:
            """The number of nodes of each question to the plugins for a set of requests. None: it is not ranked as a set."""
            ranked = False
            works = [self.work(policy, replace(kind, instance_uuid=each)) for each in uuids]
            with mock.patch.object(Pipeline, "run", autospec=True, side_effect=Pipeline.run) as run:
                for requests, _ in sets.divide(works):
                    rank = functools.partial(requests.rank, refused=())
                    self.place(view, kind, len(works), rank, requests.take, stay=uuids[0])
                    ranked = True
            return [each.args[2].size for each in run.call_args_list] if ranked else None

        self.assertIsNone(asked(spec, "only"))
        clock.advance(1.0)
        self.assertIsNone(asked(spec, "late"))
        self.assertIsNone(asked(other, "other"), "none of its kind came before")
        self.assertEqual([200], asked(spec, "soon"))
        found = [asked(spec, f"single{number}-") for number in range(20)]
        self.assertNotIn(None, found)
        self.assertNotIn(200, [size for each in found for size in each or ()])
        self.assertGreater(found.count([]), 15, "the plugins are asked for nearly each request")
        clock.advance(1.0)
        self.assertIsNone(asked(spec, "much later"), "the answers have expired")
        self.assertEqual([200], (asked(spec, "two", "more") or [])[:1])
        self.assertEqual([], asked(spec, "after two"))

    def test_a_single_request_is_ranked_by_itself_for_a_while_where_answers_cannot_be_kept(self) -> None:
        nodes = some_nodes(self.random, 60)
        view, clock, policy = self.view(nodes, 0), ManualClock(), self.policy(self.pipelines()[0])
        sets = AlikeSets(self.ranker(view, nodes), view, clock)
        spec = RequestSpec("one", Flavor("too large", {"VCPU": 10**6}), "p")

        def is_ranked() -> bool:
            found = list(sets.divide([self.work(policy, spec)]))
            for requests, _ in found:
                self.assertFalse(len(requests.rank(spec, ())[1].rows))
            return bool(found)

        answers = []
        for seconds in (0.0, 0.5, 0.5, *(0.9,) * 10, 0.9):
            clock.advance(seconds)
            answers.append(is_ranked())
        self.assertEqual([1, 13], [place for place, each in enumerate(answers) if each])

    def work(self, policy: SchedulingPolicy, spec: RequestSpec) -> Placement:
        return Placement(policy, spec, Decision("r", spec), mock.Mock(), None, "r", 1)


class _SameRows:
    """Chooses the same nodes each time, as many as it was first asked for."""

    def __init__(self, random: Any) -> None:
        self._random = random
        self._rows: Rows | None = None
        self.asked: list[int] = []

    def choose(self, count: int, size: int) -> Rows:
        self.asked.append(count)
        if self._rows is None:
            self._rows = np.array(sorted(self._random.sample(range(size), count)), dtype=np.intp)
        return self._rows


def _ranked_alone(ranker: Ranker, policy: SchedulingPolicy, spec: RequestSpec) -> Any:
    return ranker.rank(policy, spec, None, ())


class _AnyRows:
    """Chooses any nodes."""

    def __init__(self, random: Any) -> None:
        self._random = random
        self.asked: list[int] = []

    def choose(self, count: int, size: int) -> Rows:
        self.asked.append(count)
        return np.array(sorted(self._random.sample(range(size), count)), dtype=np.intp)


class Charging(HostFilter):
    """Answers by something that the fleet does not show."""

    judges_alone = True
    passes = True

    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return self.passes

    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        return np.full(len(fleet.available[where]), self.passes)


class Ordered(CapacityFilter):
    needs_order = True


class Crowd(CapacityFilter):
    """Sees the other nodes, and does not declare anything."""

    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        free = fleet.free("VCPU")
        return (free >= np.median(free))[where]


class Tenants(HostFilter):
    """Reads the project, and declares no more than that it judges each node alone."""

    judges_alone = True

    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return host_state.nodename[-1] in "02468" or spec_obj.project_id == "q"

    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        even = np.array([fleet.host_state(row).nodename[-1] in "02468" for row in range(fleet.size)])
        return (even | (spec.project_id == "q"))[where]


class Mine(CapacityFilter):
    """Overrides what the class that declares ``ignores_owner`` answers."""

    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return super().host_passes(host_state, spec_obj) and spec_obj.project_id != "r"


class OneByOne(HostFilter):
    """Follows from one node, but perhaps also from the instance of the request."""

    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return host_state.free.get("VCPU", 0) > 2


class Limiting(CapacityFilter):
    judges_alone = True

    def limits(self, host_state: HostState, spec: RequestSpec) -> dict[str, Any]:
        return {"free": host_state.free.get("VCPU", 0)}


class Rank(CpuWeigher):
    """Weighs by the others, and does not declare anything."""

    def __init__(self, *, conf: Any) -> None:
        super().__init__(conf=options.defaults())

    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Any:
        return np.argsort(np.argsort(fleet.free("VCPU")[rows], kind="stable"), kind="stable").astype(np.float64)


class Kept(HostWeigher):
    """Answers the same array each time that it is asked about the same nodes."""

    weighs_alone = True

    def __init__(self, *, conf: Any) -> None:
        super().__init__(conf=conf)
        self.answers: dict[tuple[str, ...], Any] = {}

    def weigh_rows(self, fleet: Any, rows: Rows, spec: RequestSpec) -> Any:
        names = tuple(fleet.nodes[row].name for row in rows.tolist())
        return self.answers.setdefault(names, np.array([float(name[1:]) for name in names]))


class Broken(CpuWeigher):
    """Raises once, the second time."""

    weighs_alone = True
    calls = 0

    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise LookupError("broken")
        return super().weigh_rows(fleet, rows, spec)
