# SPDX-License-Identifier: Apache-2.0
"""Filters that judge instances are asked again about the node that is claimed, and the claim names what they judged."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.scheduling import filter_and_weigh
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.instance_tracker import InstanceTracker
from moorage.scheduling.interface import (
    ClaimResult,
    ExcludedTargets,
    Flavor,
    FleetChanges,
    HostFilter,
    HostState,
    InstanceRecord,
    NodeState,
    RequestSpec,
    Residents,
    ServerGroup,
)
from moorage.scheduling.nova.adapter import adapted_filter
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.scheduling.scheduler import Scheduler
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage_plugins.filters.affinity import DifferentHostFilter, SameHostFilter
from moorage_plugins.filters.limits import IoOpsFilter, NumInstancesFilter
from moorage_plugins.filters.server_groups import ServerGroupAffinityFilter, ServerGroupAntiAffinityFilter
from moorage_plugins.filters.type_affinity import TypeAffinityFilter
from tests.unit.scheduling.test_scheduler import NoIncidents

SMALL, LARGE = Flavor("small", {"VCPU": 1}), Flavor("large", {"VCPU": 2})
FEW = {"filter_num_instances": {"max_instances_per_host": 3}, "filter_io_ops": {"max_io_ops_per_host": 2}}
FILTERS: Sequence[HostFilter] = (
    SameHostFilter(conf=None),
    DifferentHostFilter(conf=None),
    TypeAffinityFilter(conf=None),
    NumInstancesFilter(conf=FEW),
    IoOpsFilter(conf=FEW),
    ServerGroupAffinityFilter(conf=None),
    ServerGroupAntiAffinityFilter(conf=None),
)


def node_of(row: int) -> NodeState:
    return NodeState(f"u{row}", f"n{row}", f"h{row}", {"VCPU": 100.0}, {})


def record_of(uuid: str, row: int, flavorid: str = "small", *, busy: bool = False, group: str = "") -> InstanceRecord:
    return InstanceRecord(uuid, f"h{row}", f"n{row}", flavorid, {"VCPU": 1}, "red", busy=busy, server_group=group)


class Store:
    """Instances by node with versions; a claim with an old version is refused."""

    def __init__(self, rows: int) -> None:
        self.lock = threading.Lock()
        self.nodes: dict[str, dict[str, InstanceRecord]] = {f"u{row}": {} for row in range(rows)}
        self.versions = dict.fromkeys(self.nodes, 0)
        self.reads: list[str] = []
        self.claims: list[RequestSpec] = []
        #: Called before each claim is decided.
        self.before: Callable[[str], object] = lambda node_uuid: None

    def put(self, record: InstanceRecord) -> None:
        node = f"u{record.node[1:]}"
        with self.lock:
            self.nodes[node][record.uuid] = record
            self.versions[node] += 1

    def residents(self, node_uuid: str) -> Residents:
        self.reads.append(node_uuid)
        with self.lock:
            return Residents(self.versions[node_uuid], tuple(self.nodes[node_uuid].values()))

    def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
        self.before(node_uuid)
        self.claims.append(spec)
        with self.lock:
            if spec.residents not in (None, self.versions[node_uuid]):
                raise errors.ResidentsChanged("changed", provider=node_uuid)
        self.put(record_of(spec.instance_uuid, int(node_uuid[1:]), spec.flavor.flavorid))
        return ClaimResult(node_uuid)

    def earlier(self, spec: RequestSpec, request_id: str) -> ClaimResult | None:
        return None

    def release(self, instance_uuid: str) -> None: ...


class Nodes:
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def nodes(self) -> list[NodeState]:
        return [node_of(row) for row in range(self.rows)]

    def changes(self, *, compare: bool = False) -> FleetChanges | None:
        return None

    def unavailable(self) -> ExcludedTargets:
        return ExcludedTargets()


class OnlyFree:
    """As written for Nova: reads no instances."""

    def host_passes(self, host_state: Any, spec_obj: Any) -> bool:
        return bool(host_state.vcpus_total)


class Quiet:
    """As written for Nova: reads how many instances there are."""

    def host_passes(self, host_state: Any, spec_obj: Any) -> bool:
        return bool(host_state.num_instances == 0)


class QuietTogether:
    """As written for Nova: decides over all hosts at once, and leaves the better half."""

    def filter_all(self, hosts: Any, spec: Any) -> Any:
        hosts = sorted(hosts, key=lambda each: each.num_instances)
        return hosts[: max(1, len(hosts) // 2)] if len(hosts) > 1 else []


class Hanging(HostFilter):
    """Lets one request wait inside of the filter."""

    api_version = (1, 0)

    def __init__(self) -> None:
        super().__init__(conf=None)
        self.hook: Callable[[RequestSpec], object] = lambda spec: None

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        self.hook(spec_obj)
        return True


class PromiseTests(unittest.TestCase):
    def setUp(self) -> None:
        self.guard = PluginRunner(
            SystemClock(), NoIncidents(), self.fail, deadline=60, threshold=3, window=300, skip_advisory=True, threads=8
        )
        self.addCleanup(self.guard.close)

    def scheduler(self, rows: int, *filters: HostFilter, tracked: bool = True) -> Scheduler:
        self.store = Store(rows)
        self.view = FleetView()
        self.view.set_nodes([node_of(row) for row in range(rows)])
        self.tracker = InstanceTracker(self.view)
        policy = SchedulingPolicy(filter_and_weigh.of(filters), self.guard, host_subset_size=1, max_attempts=16)
        return Scheduler(
            self.view,
            Nodes(rows),
            self.store,
            lambda: policy,
            SystemClock(),
            random.Random(3),
            reserver=self.tracker,
            residents=self.store.residents,
        )

    def place(self, scheduler: Scheduler, uuid: str, flavor: Flavor = SMALL, **more: Any) -> str:
        spec = RequestSpec(uuid, flavor, "red", **more)
        return scheduler.place(spec, uuid).node_uuid

    def test_an_instance_that_the_view_does_not_know_is_judged(self) -> None:
        scheduler = self.scheduler(2, TypeAffinityFilter(conf=None))
        self.store.put(record_of("other", 0, "large"))
        self.assertEqual("u1", self.place(scheduler, "a"))
        self.assertEqual(["u0", "u1"], self.store.reads)
        # The view knows it from now on.
        self.assertEqual("u0", self.place(scheduler, "b", LARGE))
        self.assertEqual(["u0", "u1", "u0"], self.store.reads)

    def test_the_refusal_of_the_second_judgement_is_kept_with_the_decision(self) -> None:
        scheduler = self.scheduler(1, TypeAffinityFilter(conf=None))
        self.store.put(record_of("other", 0, "large"))
        with self.assertRaises(errors.NoValidHost):
            self.place(scheduler, "a")
        (refusal,) = scheduler.decision("a")["claims_refused"]
        self.assertEqual({"node": "n0", "provider": "u0", "filter": "TypeAffinityFilter"}, refusal)
        self.assertEqual([], self.store.claims)

    def test_a_node_that_changes_before_the_claim_is_judged_again(self) -> None:
        scheduler = self.scheduler(2, TypeAffinityFilter(conf=None))
        rivals = [record_of("same", 0), record_of("other", 0, "large")]

        def disturb(node_uuid: str) -> None:
            if rivals and node_uuid == "u0":
                self.store.put(rivals.pop(0))

        self.store.before = disturb
        self.assertEqual("u1", self.place(scheduler, "a"))
        # After the first rival the flavor still fits; after the second it does not.
        self.assertEqual(["u0", "u0", "u0", "u1"], self.store.reads)
        self.assertEqual([0, 1, 0], [each.residents for each in self.store.claims])

    def test_a_node_that_changes_all_the_time_is_given_up(self) -> None:
        scheduler = self.scheduler(2, TypeAffinityFilter(conf=None))

        def disturb(node_uuid: str) -> None:
            if node_uuid == "u0":
                self.store.put(record_of(f"i{len(self.store.reads)}", 0))

        self.store.before = disturb
        self.assertEqual("u1", self.place(scheduler, "a"))
        self.assertEqual(10, self.store.reads.count("u0"))

    def test_a_request_without_such_filters_reads_nothing(self) -> None:
        for filters in (
            (),
            (SameHostFilter(conf=None), DifferentHostFilter(conf=None)),
            (adapted_filter(OnlyFree)(conf=None),),
        ):
            scheduler = self.scheduler(2, *filters)
            self.place(scheduler, "a")
            self.assertEqual(([], [None]), (self.store.reads, [each.residents for each in self.store.claims]))

    def test_forced_requests_are_not_asked(self) -> None:
        scheduler = self.scheduler(2, TypeAffinityFilter(conf=None))
        self.store.put(record_of("other", 0, "large"))
        self.assertEqual("u0", self.place(scheduler, "a", force_hosts=("h0",)))
        self.assertEqual([], self.store.reads)

    def test_a_class_of_nova_that_reads_instances_is_asked_again(self) -> None:
        for found in (Quiet, QuietTogether):
            scheduler = self.scheduler(4, adapted_filter(found)(conf=None))
            self.store.put(record_of("other", 0, "large"))
            if found is QuietTogether:
                # Shown all four hosts again, it leaves two others.
                self.store.put(record_of("another", 1, "large"))
            self.assertNotIn(self.place(scheduler, "a"), {"u0"}, found)
            self.assertIn("u0", self.store.reads)

    def test_two_requests_do_not_exclude_each_other_everywhere(self) -> None:
        hanging = Hanging()
        scheduler = self.scheduler(1, TypeAffinityFilter(conf=None), hanging)
        ranked, reserved = threading.Event(), threading.Event()
        results: dict[str, Any] = {}

        def hook(spec: RequestSpec) -> None:
            # The first request is ranking while the second one reserves the only node.
            if spec.instance_uuid == "first" and not ranked.is_set():
                ranked.set()
                reserved.wait(60)

        hanging.hook = hook
        claiming = threading.Event()

        def before(node_uuid: str) -> None:
            if not reserved.is_set():
                reserved.set()
                claiming.wait(0.2)

        self.store.before = before

        def run(name: str, flavor: Flavor) -> None:
            try:
                results[name] = self.place(scheduler, name, flavor)
            except errors.NoValidHost as error:
                results[name] = error

        first = threading.Thread(target=run, args=("first", SMALL))
        first.start()
        self.assertTrue(ranked.wait(60))
        second = threading.Thread(target=run, args=("second", LARGE))
        second.start()
        first.join(60)
        second.join(60)
        placed = [name for name, found in results.items() if found == "u0"]
        self.assertEqual(1, len(placed), results)

    @contextlib.contextmanager
    def held(self, scheduler: Scheduler, number: int, record: InstanceRecord) -> Iterator[None]:
        with scheduler._reservations.holding() as hold:
            hold(number, record)
            yield

    def test_a_reservation_of_a_later_request_does_not_count(self) -> None:
        scheduler = self.scheduler(1, TypeAffinityFilter(conf=None))
        other = record_of("later", 0, "large")
        self.tracker.reserve(other)
        with self.held(scheduler, 1_000_000, other):
            self.assertEqual("u0", self.place(scheduler, "a"))

    def test_an_earlier_request_that_fails_is_awaited(self) -> None:
        scheduler = self.scheduler(1, TypeAffinityFilter(conf=None))
        other = record_of("earlier", 0, "large")
        self.tracker.reserve(other)
        with self.held(scheduler, -1, other):
            placed: list[str] = []
            thread = threading.Thread(target=lambda: placed.append(self.place(scheduler, "a")))
            thread.start()
            thread.join(0.1)
            self.assertEqual([], placed)
            self.tracker.unreserve(other)
        thread.join(60)
        self.assertEqual(["u0"], placed)

    def test_a_full_fleet_refuses_at_once_beside_reservations(self) -> None:
        scheduler = self.scheduler(1, TypeAffinityFilter(conf=None))
        self.view.put(record_of("there", 0, "large"))
        other = record_of("earlier", 0, "large")
        self.tracker.reserve(other)
        began = SystemClock().monotonic()
        with self.held(scheduler, -1, other), self.assertRaises(errors.NoValidHost):
            self.place(scheduler, "a")
        self.assertLess(SystemClock().monotonic() - began, 1.0)

    def test_a_move_is_reserved_under_another_uuid_until_it_is_claimed(self) -> None:
        scheduler = self.scheduler(2, TypeAffinityFilter(conf=None))
        self.view.put(record_of("a", 0, "small"))
        seen: list[set[str]] = []
        self.store.before = lambda node: seen.append(set(self.view.snapshot().instances_on(1)))
        held = InstanceRecord("moving-a", "", "", "large", {"VCPU": 2}, "red")
        scheduler.place(RequestSpec("a", LARGE, "red", ignore_nodes=("u0",)), "r", claimer=self.store, held=held)
        self.assertEqual([{"moving-a"}], seen)
        self.assertEqual((set(), {"a"}), tuple(set(self.view.snapshot().instances_on(row)) for row in (1, 0)))

    @given(st.data())
    def test_on_an_unchanged_store_no_filter_refuses_what_it_passed(self, data: st.DataObject) -> None:
        rows = data.draw(st.integers(1, 4))
        flavors, groups = st.sampled_from(["small", "large"]), st.sampled_from(["", "g"])
        places = data.draw(st.lists(st.tuples(st.integers(0, rows - 1), flavors, st.booleans(), groups), max_size=10))
        records = [
            record_of(f"i{number}", row, flavorid, busy=busy, group=group)
            for number, (row, flavorid, busy, group) in enumerate(places)
        ]
        uuids = st.lists(st.sampled_from([each.uuid for each in records] + ["unknown"]), max_size=2)
        hints = {name: found for name in ("same_host", "different_host") if (found := data.draw(uuids))}
        policy = data.draw(st.sampled_from(["", "affinity", "anti-affinity"]))
        members = tuple(each.uuid for each in records if each.server_group)
        group = ServerGroup("g", policy, data.draw(st.integers(1, 2)), members) if policy else None
        spec = RequestSpec("new", data.draw(st.sampled_from([SMALL, LARGE])), "red", hints=hints, server_group=group)
        chosen = data.draw(st.lists(st.sampled_from(FILTERS), unique=True))
        view = FleetView()
        view.set_nodes([node_of(row) for row in range(rows)])
        view.put_many(records)
        fleet, line = view.snapshot(), filter_and_weigh.of(chosen)
        ranking = line.run(self.guard, fleet, fleet.all_rows, spec)
        for row in ranking.rows.tolist():
            # As the store has them: other objects, in another order.
            stored = [dataclasses.replace(each) for each in reversed(records) if each.node == f"n{row}"]
            again = fleet.with_residents(row, stored)
            self.assertEqual("", line.refused_by(self.guard, again, row, spec, ranking))
            self.check_same(fleet, again)

    @given(st.data())
    def test_a_fleet_with_other_residents_is_as_if_it_had_been_loaded_so(self, data: st.DataObject) -> None:
        def draw(prefix: str) -> list[InstanceRecord]:
            found = data.draw(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.booleans()), max_size=6))
            return [
                record_of(f"{prefix}{number}", row, flavorid, busy=busy)
                for number, (row, flavorid, busy) in enumerate(found)
            ]

        before, row = draw("old"), data.draw(st.integers(0, 2))
        after = [dataclasses.replace(each, host=f"h{row}", node=f"n{row}") for each in draw("new")]
        after += [each for each in before if each.node == f"n{row}" and data.draw(st.booleans())]
        fleets = []
        for records in (before, [each for each in before if each.node != f"n{row}"] + after):
            view = FleetView()
            view.set_nodes([node_of(each) for each in range(3)])
            view.put_many(records)
            fleets.append(view.snapshot())
        found = fleets[0].with_residents(row, after)
        self.check_same(fleets[1], found)
        gone = [each for each in found.instances_on(row).values() if data.draw(st.booleans())]
        left = {each.uuid for each in found.instances_on(row).values()} - {each.uuid for each in gone}
        self.assertEqual(left, set(found.without(gone).instances_on(row)))
        self.assertEqual(len(left), found.without(gone).num_instances[row])

    def check_same(self, wanted: Any, found: Any) -> None:
        for column in ("num_instances", "num_io_ops"):
            self.assertEqual(getattr(wanted, column).tolist(), getattr(found, column).tolist())
        self.assertEqual(wanted.free("VCPU").tolist(), found.free("VCPU").tolist())
        uuids: set[str] = set()
        for row in range(wanted.size):
            self.assertEqual(dict(wanted.instances_on(row)), dict(found.instances_on(row)))
            uuids |= set(wanted.instances_on(row))
        self.assertEqual(dict(wanted.locate(uuids)), dict(found.locate(uuids)))
        for flavorid in ("a", "b", "c", "small", "large"):
            self.assertEqual(wanted.flavor_counts(flavorid).tolist(), found.flavor_counts(flavorid).tolist())
