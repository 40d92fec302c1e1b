# SPDX-License-Identifier: Apache-2.0
"""Fragmentation by columns against the formulas of Weng et al. (USENIX ATC 2023), said node by node and device by device."""

from __future__ import annotations

import dataclasses
import math
import random
import unittest
from collections.abc import Sequence
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies

from moorage.instances.providers import offer
from moorage.inventory import InventoryItem
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import (
    WEIGHERS,
    Flavor,
    HostWeigher,
    InstanceRecord,
    NodeState,
    ProviderState,
    RequestSpec,
)
from moorage.scheduling.resource_request import with_held_resources
from moorage_plugins.weighers.fragmentation import Task, expected_fragmentation, fits, increase
from tests.conformance.scheduling.configuration import plugin_conf

WHOLE = 1000
MILLI = "CUSTOM_GPU_MILLI"
#: Free shares of the devices of a node, and its free processors.
Node = tuple[tuple[float, ...], int]
Expected = Sequence[tuple[Task, float]]

shares = strategies.sampled_from((0, 0, 190, 300, 500, 530, 810, WHOLE, WHOLE))
nodes = strategies.lists(
    strategies.tuples(strategies.lists(shares, max_size=4).map(tuple), strategies.integers(0, 6)),
    min_size=1,
    max_size=5,
)


@strategies.composite
def tasks(draw: Any) -> Task:
    devices = draw(strategies.sampled_from((0, 1, 1, 1, 2, 3)))
    share = WHOLE if devices > 1 else draw(strategies.sampled_from((190, 300, 500, 810, WHOLE)))
    return Task(devices, share if devices else 0, {"VCPU": draw(strategies.integers(0, 4))})


expected_tasks = strategies.lists(strategies.tuples(tasks(), strategies.integers(1, 9)), min_size=1, max_size=4)


def naive_fits(task: Task, node: Node) -> bool:
    free, processors = node
    large = [share for share in free if share > 0 and share >= task.share]
    return processors >= task.resources["VCPU"] and len(large) >= task.devices


def naive_fragmentation(node: Node, expected: Expected) -> float:
    total = 0.0
    for task, popularity in expected:
        for share in node[0]:
            if not naive_fits(task, node) or share < task.share:
                total += popularity * share
    return total / sum(popularity for _, popularity in expected)


def naive_increase(task: Task, node: Node, expected: Expected, *, tightest: bool = False) -> float:
    if not naive_fits(task, node):
        return math.inf
    free, processors = node
    large = [number for number, share in enumerate(free) if share > 0 and share >= task.share]
    if tightest:
        large = sorted(large, key=lambda number: free[number])[: task.devices]
    ways = [large[: task.devices]] if task.devices != 1 else [[number] for number in large]
    after = [tuple(share - task.share * (n in way) for n, share in enumerate(free)) for way in ways]
    before = naive_fragmentation(node, expected)
    left = processors - int(task.resources["VCPU"])
    return min(naive_fragmentation((each, left), expected) - before for each in after)


def columns(given: Sequence[Node]) -> tuple[Any, dict[str, Any]]:
    widest = max((len(free) for free, _ in given), default=0)
    matrix = np.zeros((len(given), widest))
    for row, (free, _) in enumerate(given):
        matrix[row, : len(free)] = free
    return matrix.T, {"VCPU": np.array([processors for _, processors in given], dtype=np.float64)}


class TestFormulas(unittest.TestCase):
    @hypothesis.given(nodes, expected_tasks)
    def test_expected_fragmentation_is_that_of_every_node_and_device(self, given: list[Node], expected: Any) -> None:
        found = expected_fragmentation(*columns(given), expected)
        np.testing.assert_allclose(found, [naive_fragmentation(each, expected) for each in given])

    @hypothesis.given(nodes, tasks())
    def test_a_task_fits_where_it_fits(self, given: list[Node], task: Task) -> None:
        self.assertEqual([naive_fits(task, each) for each in given], list(fits(task, *columns(given))))

    @hypothesis.given(nodes, tasks(), expected_tasks)
    def test_the_increase_is_that_of_the_best_device(self, given: list[Node], task: Task, expected: Any) -> None:
        found, device = increase(task, *columns(given), expected)
        np.testing.assert_allclose(found, [naive_increase(task, each, expected) for each in given], atol=1e-9)
        for (free, processors), raised, chosen in zip(given, found, device, strict=True):
            if task.devices == 1 and math.isfinite(raised):
                after = tuple(share - task.share * (n == chosen) for n, share in enumerate(free))
                left = processors - int(task.resources["VCPU"])
                before = naive_fragmentation((free, processors), expected)
                self.assertAlmostEqual(raised, naive_fragmentation((after, left), expected) - before)

    def test_where_all_fit_there_is_no_remainder_of_rounding(self) -> None:
        expected = [(Task(1, 100 * number, {"VCPU": number}), number / 10) for number in (1, 3, 3, 7, 9)]
        matrix = np.full((8, 1), 1000.0)
        self.assertEqual([0.0], list(expected_fragmentation(matrix, {"VCPU": np.array([9.0])}, expected)))

    def test_half_a_device_goes_to_the_half_that_is_left_of_another(self) -> None:
        matrix = np.array([[1000.0, 1000.0], [500.0, 1000.0]])
        free = {"VCPU": np.array([8.0, 8.0])}
        raised, device = increase(Task(1, 500, {"VCPU": 1}), matrix, free, [(Task(1, 1000, {"VCPU": 1}), 1)])
        self.assertEqual([-500.0, 500.0], list(raised))
        self.assertEqual([1, 0], list(device))


def tree(number: int, node: Node) -> NodeState:
    """A node with processors, and GPUs with free shares as given; the rest of each is used."""
    free, processors = node
    own = ProviderState(
        f"node-{number}", None, (InventoryItem("VCPU", max(processors, 1)),), {"VCPU": 1 - bool(processors)}
    )
    gpus = [
        ProviderState(f"gpu-{number}-{gpu}", own.uuid, (InventoryItem(MILLI, WHOLE),), {MILLI: WHOLE - int(share)})
        for gpu, share in enumerate(free)
    ]
    capacity, used = offer([own, *gpus])
    return NodeState(own.uuid, own.uuid, f"agent-{number}", capacity, used, providers=(own, *gpus))


def asking(devices: int, share: int, processors: int) -> RequestSpec:
    """A request for a share of so many GPUs each, and for processors."""
    specs = {f"resources{number}:{MILLI}": str(share) for number in range(devices)} | {"group_policy": "isolate"}
    body: Any = {"flavor": {"flavorid": "f", "resources": {"VCPU": processors}, "extra_specs": specs}}
    held = with_held_resources(body)["flavor"]["resources"]
    return RequestSpec("new", Flavor("f", held, specs))


class TestShares(unittest.TestCase):
    """GPUs that are shared: a provider for each."""

    def weigher(self, *expected: str) -> HostWeigher:
        made: Any = WEIGHERS.load("gpu_fragmentation").plugin
        options = {"resource_class": MILLI, "shares": True, "expected": list(expected)}
        return made(
            conf=plugin_conf(**{f"weigher_gpu_fragmentation__{name}": value for name, value in options.items()})
        )

    @hypothesis.given(nodes, tasks(), expected_tasks, strategies.randoms(use_true_random=False))
    def test_the_weight_is_the_increase_by_the_devices_that_a_claim_takes(
        self, given: list[Node], task: Task, expected: Any, chance: random.Random
    ) -> None:
        processors = max(1, int(task.resources["VCPU"]))
        expected = [
            (dataclasses.replace(each, resources={"VCPU": max(1, each.resources["VCPU"])}), popularity)
            for each, popularity in expected
        ]
        weigher = self.weigher(
            *(
                f"{popularity}:VCPU={int(each.resources['VCPU'])}"
                + (f":{MILLI}={each.devices}x{int(each.share)}" if each.devices else "")
                for each, popularity in expected
            )
        )
        view = FleetView(tracked=False)
        view.set_nodes([tree(number, each) for number, each in enumerate(given)])
        fleet = view.snapshot()
        rows = np.array(sorted(chance.sample(range(len(given)), chance.randint(1, len(given)))), dtype=np.intp)
        spec = asking(task.devices, int(task.share), processors)
        task = dataclasses.replace(task, resources={"VCPU": processors})
        for row, weight in zip(rows.tolist(), weigher.weigh_rows(fleet, rows, spec), strict=True):
            raised = naive_increase(task, given[row], expected, tightest=True)
            self.assertAlmostEqual(raised if math.isfinite(raised) else sum(given[row][0]), weight)
            if math.isfinite(raised) and task.devices == 1:
                propose = fleet.proposal(row, spec)
                assert propose is not None
                taken = [uuid for uuid in propose(frozenset()) or {} if uuid.startswith("gpu")]
                least = min(share for share in given[row][0] if share >= task.share)
                self.assertEqual([least], [given[row][0][int(uuid.rpartition("-")[2])] for uuid in taken])

    def test_what_was_claimed_since_the_reading_is_not_free(self) -> None:
        view = FleetView()
        view.set_nodes([tree(0, ((1000, 400), 8)), tree(1, ((), 8))])
        holds = {"gpu-0-0": {MILLI: 300}, "node-0": {"VCPU": 1}}
        view.put(InstanceRecord("i", "agent-0", "node-0", "f", {MILLI: 300, "VCPU": 1}, holds=holds))
        found = view.snapshot().free_by_provider(MILLI)
        self.assertEqual(([0, 0], [700.0, 400.0]), (found.rows.tolist(), found.free.tolist()))
        moved = view.snapshot().with_residents(0, [])
        self.assertEqual([1000.0, 400.0], moved.free_by_provider(MILLI).free.tolist())
        self.assertEqual([], view.snapshot().free_by_provider("CUSTOM_NONE").free.tolist())
        with self.assertRaises(ValueError):
            found.free[0] = 0

    def test_a_node_with_one_provider_counts_what_its_instances_hold(self) -> None:
        view = FleetView()
        view.set_nodes([NodeState("n", "n", "h", {MILLI: 1000.0}, {}), tree(1, ((500,), 8))])
        view.put(InstanceRecord("i", "h", "n", "f", {MILLI: 300}))
        found = view.snapshot().free_by_provider(MILLI)
        self.assertEqual(([0, 1], [700.0, 500.0]), (found.rows.tolist(), found.free.tolist()))

    def test_half_a_gpu_goes_where_the_other_half_is_taken(self) -> None:
        view = FleetView()
        view.set_nodes([tree(0, ((1000, 1000), 8)), tree(1, ((500, 1000), 8))])
        fleet = view.snapshot()
        weigher = self.weigher(f"1:{MILLI}=1000:VCPU=1")
        weights = weigher.weigh_rows(fleet, np.arange(2, dtype=np.intp), asking(1, 500, 1))
        self.assertEqual([500.0, -500.0], list(weights))


class TestWeigher(unittest.TestCase):
    def weigher(self, **options: Any) -> HostWeigher:
        made: Any = WEIGHERS.load("gpu_fragmentation").plugin
        return made(
            conf=plugin_conf(**{f"weigher_gpu_fragmentation__{name}": value for name, value in options.items()})
        )

    def fleet(self, *capacities: dict[str, float]) -> FleetView:
        view = FleetView()
        view.set_nodes(
            [NodeState(f"uuid-{n}", f"node-{n}", f"agent-{n}", each, {}) for n, each in enumerate(capacities)]
        )
        return view

    def weights(self, view: FleetView, weigher: HostWeigher, **resources: int) -> list[float]:
        fleet = view.snapshot()
        spec = RequestSpec("new", Flavor("asked", resources))
        return list(weigher.weigh_rows(fleet, np.arange(fleet.size, dtype=np.intp), spec))

    @hypothesis.given(
        strategies.lists(
            strategies.tuples(strategies.integers(0, 4), strategies.integers(1, 12)), min_size=1, max_size=6
        ),
        strategies.integers(0, 3),
        strategies.integers(1, 12),
        strategies.lists(
            strategies.tuples(strategies.integers(1, 9), strategies.integers(1, 4), strategies.integers(1, 6)),
            min_size=1,
            max_size=3,
        ),
    )
    def test_the_weight_is_the_increase_of_the_formula_for_whole_devices(
        self, given: list[tuple[int, int]], devices: int, processors: int, wanted: list[tuple[int, int, int]]
    ) -> None:
        weigher = self.weigher(expected=[f"{weight}:PGPU={gpus}:VCPU={cpus}" for weight, gpus, cpus in wanted])
        view = self.fleet(*({"PGPU": float(gpus), "VCPU": float(cpus)} for gpus, cpus in given))
        asked = {"VCPU": processors} | ({"PGPU": devices} if devices else {})
        expected = [(Task(gpus, 1, {"VCPU": cpus}), float(weight)) for weight, gpus, cpus in wanted]
        task = Task(devices, 1 if devices else 0, {"VCPU": processors})
        for (gpus, cpus), weight in zip(given, self.weights(view, weigher, **asked), strict=True):
            raised = naive_increase(task, ((1,) * gpus, cpus), expected)
            if gpus and math.isfinite(raised):
                self.assertAlmostEqual(raised, weight)
            elif not gpus:
                self.assertEqual(0.0, weight)

    def test_one_gpu_goes_where_it_breaks_up_no_group_of_free_ones(self) -> None:
        node = {"PGPU": 8.0, "VCPU": 96.0}
        view = self.fleet(node, node)
        view.put(InstanceRecord("there", "agent-1", "node-1", "small", {"PGPU": 7, "VCPU": 7}))
        whole, broken = self.weights(view, self.weigher(expected=["1:PGPU=1", "1:PGPU=8"]), PGPU=1, VCPU=1)
        self.assertGreater(whole, broken)

    def test_processors_that_gpus_need_are_kept_from_requests_without_gpus(self) -> None:
        view = self.fleet({"PGPU": 2.0, "VCPU": 16.0}, {"PGPU": 2.0, "VCPU": 64.0}, {"VCPU": 16.0})
        scarce, plenty, none = self.weights(view, self.weigher(expected=["1:PGPU=1:VCPU=16"]), VCPU=8)
        self.assertEqual((2.0, 0.0, 0.0), (scarce, plenty, none))

    def test_an_expected_request_that_is_none_is_refused_at_the_start(self) -> None:
        for text in (
            "PGPU=1",
            "1",
            "0:PGPU=1",
            "nan:PGPU=1",
            "1:PGPU",
            "1:PGPU=0",
            "1:=3",
            "1:PGPU=x",
            "1:PGPU=0x3",
            "1:PGPU=2x",
        ):
            with self.assertRaisesRegex(ValueError, "write POPULARITY:CLASS=UNITS"):
                self.weigher(expected=[text])
