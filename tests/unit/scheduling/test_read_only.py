# SPDX-License-Identifier: Apache-2.0
"""Everything that a plugin can reach from its arguments is read-only: a plugin cannot change what other requests see."""

from __future__ import annotations

import copy
import json
import pickle
import types
import unittest
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.read_only import FrozenDict, FrozenList, frozen
from moorage.scheduling import filter_and_weigh as pipelines
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import (
    Aggregate,
    Flavor,
    Fleet,
    HostFilter,
    HostState,
    HostWeigher,
    InstanceRecord,
    NodeState,
    RequestSpec,
    Rows,
    ServerGroup,
)
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.scheduling.request import spec_from_json
from moorage.scheduling.snapshot import NO_INSTANCE, Snapshot

NODES = 6
INSTANCE = "00000000-0000-4000-8000-000000000001"
PLAIN = (str, bytes, int, float, type(None), np.generic)


class NoIncidents:
    def record(self, plugin: str) -> None: ...

    def count(self, plugin: str) -> int:
        return 0


def guard() -> PluginRunner:
    return PluginRunner(
        SystemClock(), NoIncidents(), lambda _: None, deadline=60, threshold=3, window=300, skip_advisory=False
    )


def view(*, tracked: bool = True) -> FleetView:
    """A view with two classes, nested properties, aggregates, instances on nodes and what others have claimed."""
    found = FleetView(tracked=tracked)
    nodes = [
        NodeState(
            f"u{row}",
            f"n{row}",
            f"h{row // 2}",
            {"VCPU": 64.0, "MEMORY_MB": 4096.0},
            {"VCPU": 9},
            can_host=row != 1,
            properties={
                "rack": f"r{row % 2}",
                "cpu_info": {"features": ["aes"], "topology": {"cores": 4}} if row % 2 else '{"features": ["aes"]}',
                "supported_instances": [["x86_64", "kvm", "hvm"]],
                "metrics": {"power": 2.0} if row else None,
            },
            aggregates=(Aggregate("fast", {"ssd": "true"}),),
        )
        for row in range(NODES)
    ]
    for _ in range(2):  # use by others is believed when two readings agree on it
        found.set_nodes(nodes)
    if tracked:
        found.put(
            InstanceRecord(
                INSTANCE, "h0", "n0", "m1", {"VCPU": 2}, "p", fields={"tags": ["a"]}, server_group="together"
            )
        )
    found.hold(InstanceRecord("held", "h1", "n2", "m1", {"VCPU": 1}, "p"))
    return found


def request() -> RequestSpec:
    return spec_from_json(
        {
            "flavor": {"flavorid": "m1", "resources": {"VCPU": 1}, "extra_specs": {"a": "b"}},
            "hints": {"same_host": INSTANCE, "many": ["a", "b"]},
            "image": {"id": "i", "properties": {"os": "linux"}},
            "server_group": {"name": "together", "policy": "soft-affinity", "members": [INSTANCE]},
            "force_hosts": ["h0"],
        },
        "p",
        "u",
    )


class Odd(HostFilter):
    """A filter with keys, for ``Snapshot.key_column``."""

    api_version = (1, 0)

    @override
    def host_key(self, host_state: HostState) -> str:
        return host_state.nodename

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return True


RECORD = InstanceRecord("new", "h1", "n3", "m1", {"VCPU": 1}, "p")


#: Arguments for every public method that is reachable; a method that is missing here fails the test.
def grouped() -> RequestSpec:
    """A request with a request group."""
    return RequestSpec(INSTANCE, Flavor("m2", {"VCPU": 2}, {"resources1:VCPU": "1"}))


ARGUMENTS: Mapping[str, tuple[tuple[Any, ...], ...]] = {
    "free": (("VCPU",), ("MEMORY_MB",), ("NONE",)),
    "capacity": (("VCPU",), ("NONE",)),
    "flavor_counts": (("m1",), ("none",)),
    "rows_of_instances": (([INSTANCE],), ([],)),
    "locate": (([INSTANCE, "unknown"],),),
    "rows_of_hosts": ((["h0"],), ([],)),
    "rows_of_folded_hosts": ((["H0"],), ([],)),
    "rows_of_nodes": ((["u1"],), ([],)),
    "property_column": (("rack",), ("cpu_info",), ("none",)),
    "property_numbers": (("rack",), ("metrics",)),
    "aggregate_column": (("ssd",), ("none",)),
    "host_state": ((0,), (2,), (5,)),
    "instances_on": ((0,), (1,)),
    "key_column": ((Odd(conf=None),),),
    "resolved": ((request(),),),
    "rows_where": (),  # answers a new array
    "get_scheduler_hint": (),  # answers a copy
    "fits": ((request(),), (grouped(),)),
    "free_by_provider": (("VCPU",), ("NONE",)),
    "asked_of_providers": ((grouped(), "VCPU"),),
    "have_trait": ((frozenset({"HW_GPU"}),),),
    "proposal": (),  # answers new data
    "shortage": (),  # answers text
    "with_more_on": (),  # these four are walked by a test of their own
    "with_placed": (),
    "with_residents": (),
    "without": (),
}


class Walker:
    """Follows attributes, items, properties and method results; collects what can be changed."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.arrays = self.mappings = 0
        self._seen: dict[int, Any] = {}

    def walk(self, value: Any, path: str) -> None:
        if isinstance(value, PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, np.ndarray):
            self.arrays += 1
            self._check(not value.flags.writeable, path)
        elif isinstance(value, Mapping):
            self.mappings += 1
            self._check(type(value) in (types.MappingProxyType, FrozenDict), path)
            for key, each in value.items():
                self.walk(key, f"{path} key {key!r}")
                self.walk(each, f"{path}[{key!r}]")
        elif isinstance(value, list | tuple | set | frozenset | bytearray):
            self._check(type(value) in (FrozenList, tuple, frozenset), path)
            for number, each in enumerate(value):
                self.walk(each, f"{path}[{number}]")
        else:
            self._walk_object(value, path)

    def _walk_object(self, value: Any, path: str) -> None:
        for name in (name for name in dir(value) if not name.startswith("_")):
            each = getattr(value, name)
            if callable(each):
                if name not in ARGUMENTS:
                    self.found.append(f"{path}.{name}() is not known to this test")
                for number, arguments in enumerate(ARGUMENTS.get(name, ())):
                    self.walk(each(*arguments), f"{path}.{name}()#{number}")
                continue
            try:
                setattr(value, name, each)
            except (AttributeError, TypeError):
                pass
            else:
                self.found.append(f"{path}.{name} can be set")
            self.walk(each, f"{path}.{name}")

    def _check(self, read_only: bool, path: str) -> None:
        if not read_only:
            self.found.append(path)


class WalkingFilter(HostFilter):
    """Walks everything that it is given, in every form in which a filter is asked."""

    api_version = (1, 0)

    def __init__(self, walker: Walker, form: str) -> None:
        super().__init__(conf=None)
        self.walker, self.form = walker, form
        self.called: set[str] = set()

    def _walk(self, form: str, *given: Any) -> None:
        self.called.add(form)
        for number, each in enumerate(given):
            if not isinstance(each, slice):
                self.walker.walk(each, f"{form} argument {number}")

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Rows | None:
        self._walk("prepare", spec, fleet)
        return fleet.rows_of_hosts(["h0", "h1"]) if self.form == "prepare" else None

    @override
    def mask_rows(self, fleet: Fleet, where: Any, spec: RequestSpec) -> Any:
        self._walk("mask_rows", fleet, where, spec)
        return fleet.capacity("VCPU")[where] > 0 if self.form == "mask_rows" else None

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        self._walk("host_passes", host_state, spec_obj)
        return True

    @override
    def limits(self, host_state: HostState, spec: RequestSpec) -> Mapping[str, Any]:
        self._walk("limits", host_state, spec)
        return {}


class BulkFilter(WalkingFilter):
    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows:
        self._walk("filter_rows", fleet, rows, spec)
        return rows


class WalkingWeigher(HostWeigher):
    api_version = (1, 0)

    def __init__(self, walker: Walker) -> None:
        super().__init__(conf=None)
        self.walker = walker

    @override
    def row_multipliers(self, fleet: Fleet, rows: Rows) -> Any:
        self.walker.walk(rows, "row_multipliers rows")
        return None

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Any:
        for number, each in enumerate((fleet, rows, spec)):
            self.walker.walk(each, f"weigh_rows argument {number}")
        return fleet.free("VCPU")[rows]


class Greedy(HostWeigher):
    """Changes the column that it gets, as a careless weigher does."""

    api_version = (1, 0)

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Any:
        free = fleet.free("VCPU")
        free -= 8
        return free[rows]


class ReadOnlyTests(unittest.TestCase):
    def test_nothing_reachable_from_a_fleet_or_a_request_can_be_changed(self) -> None:
        for tracked in (True, False):
            walker = Walker()
            fleet = view(tracked=tracked).snapshot()
            walker.walk(fleet, "fleet")
            walker.walk(fleet.with_placed(RECORD, 3).with_placed(RECORD, 4), "dry run")
            walker.walk(fleet.with_more_on(fleet.all_rows[:2], Flavor("f", {"VCPU": 1}), counted=tracked), "with more")
            walker.walk(fleet.with_residents(3, [RECORD]), "with residents")
            walker.walk(fleet.with_residents(3, [RECORD]).without([RECORD]), "without")
            walker.walk(request(), "spec")
            walker.walk(ServerGroup("g", "affinity"), "group")
            walker.walk(Flavor("f", {"VCPU": 1}, {"a": "b"}), "flavor")
            self.assertEqual([], walker.found)
            self.assertGreater(walker.arrays, 30)
            self.assertGreater(walker.mappings, 30)

    def test_nothing_that_the_pipeline_hands_to_plugins_can_be_changed(self) -> None:
        walker = Walker()
        filters = [
            WalkingFilter(walker, "mask_rows"),
            BulkFilter(walker, "filter_rows"),
            WalkingFilter(walker, "prepare"),
        ]
        pipeline = pipelines.of(filters, [WalkingWeigher(walker)])
        fleet = view().snapshot()
        for rows in (fleet.all_rows, np.array([0, 2, 3], dtype=np.intp)):
            ranking = pipeline.run(guard(), fleet, rows, request())
            self.assertLess(1, len(ranking.rows))
        pipeline.limits(guard(), fleet, 2, request())
        self.assertEqual([], walker.found)
        called = set().union(*(each.called for each in filters))
        self.assertEqual({"prepare", "mask_rows", "filter_rows", "host_passes", "limits"}, called)

    def test_a_weigher_that_writes_to_a_column_fails_and_changes_nothing(self) -> None:
        fleets = view()
        before = fleets.snapshot().free("VCPU").tolist()
        with self.assertRaises(errors.PluginFailed) as caught:
            pipelines.of([], [Greedy(conf=None)]).run(guard(), fleets.snapshot(), fleets.snapshot().all_rows, request())
        self.assertIn("Greedy", caught.exception.message)
        self.assertEqual(before, fleets.snapshot().free("VCPU").tolist())
        fleets.put(RECORD)
        self.assertEqual(sum(before) - 1, float(fleets.snapshot().free("VCPU").sum()))

    def test_a_fleet_keeps_what_it_was_given_when_the_caller_changes_its_copy(self) -> None:
        properties: dict[str, Any] = {"rack": "r1", "nested": {"list": [1]}}
        node = NodeState("u", "n", "h", {"VCPU": 1.0}, {}, properties=properties)
        properties["nested"]["list"].append(2)
        self.assertEqual({"rack": "r1", "nested": {"list": [1]}}, node.properties)

    def test_frozen_data_behaves_like_the_data_that_it_was_made_of(self) -> None:
        data = {"list": [1, {"a": "b"}], "nested": {"c": None}, "tuple": (1, 2)}
        made = frozen(data)
        self.assertEqual(data, made)
        self.assertIsInstance(made["nested"], dict)
        self.assertIsInstance(made["list"], list)
        self.assertEqual(json.loads(json.dumps(data)), json.loads(json.dumps(made)))
        for each in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
            self.assertEqual(data, each)
            self.assertIs(FrozenDict, type(each))
        self.assertIs(made, frozen(made))

    def test_every_method_that_changes_a_dict_or_a_list_is_refused(self) -> None:
        kinds: tuple[tuple[type, type, Any], ...] = ((FrozenDict, dict, {"a": 1}), (FrozenList, list, [1]))
        for kind, plain, values in kinds:
            made = kind(values)
            for name in set(dir(plain)) - set(dir(tuple)) - {"copy", "fromkeys", "get", "items", "keys", "values"}:
                if name in {"__reversed__", "__or__", "__ror__"}:  # make new objects
                    continue
                with self.subTest(kind=kind.__name__, name=name), self.assertRaises(TypeError):
                    getattr(made, name)()
                self.assertEqual(values, made)


class SnapshotIsWalkedTests(unittest.TestCase):
    def test_the_walker_finds_what_can_be_changed(self) -> None:
        walker = Walker()
        for value in ({"a": 1}, [1], {1}, np.zeros(2), types.SimpleNamespace(x=1)):
            walker.walk(value, type(value).__name__)
        self.assertEqual(["dict", "list", "set", "ndarray", "SimpleNamespace.x can be set"], walker.found)

    def test_every_method_of_a_fleet_is_walked(self) -> None:
        methods = {name for name in dir(Snapshot) if not name.startswith("_") and callable(getattr(Snapshot, name))}
        self.assertLessEqual(methods, ARGUMENTS.keys())


class OtherProjectTests(unittest.TestCase):
    def test_hints_and_groups_hide_instances_of_other_projects_unless_the_requester_sees_all(self) -> None:
        fleet = view().snapshot()
        mine = request()
        foreign = replace(mine, project_id="other", hints={"near": [INSTANCE, "unknown"]})
        for spec, members, values in (
            (replace(mine, all_projects=False), (INSTANCE,), [INSTANCE]),
            (replace(foreign, all_projects=True), (INSTANCE,), [INSTANCE, "unknown"]),
            (replace(foreign, all_projects=False), (), [NO_INSTANCE, "unknown"]),
        ):
            found = fleet.resolved(spec)
            assert found.server_group is not None
            self.assertEqual(members, found.server_group.members)
            self.assertEqual(values, found.hints["near" if spec.project_id == "other" else "same_host"])
            self.assertEqual(bool(members), bool(found.server_group.nodes))
