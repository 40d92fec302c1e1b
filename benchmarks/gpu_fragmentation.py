# SPDX-License-Identifier: Apache-2.0
"""How many GPU shares stay unused when a fleet is full, by the rule that places requests; printed as one JSON object.

``python benchmarks/gpu_fragmentation.py [--nodes FILE] [--requests FILE] [--policies random,best_fit,spread,fgd,weigher,gpu]
[--seeds 1,2,3] [--arrived 100,130]``

The comparison of Weng et al., "Beware of Fragmentation" (USENIX ATC 2023), on the data that they published. Requests of the file
are drawn at random, with replacement, and none is released, until requests for so many percent of the fleet's GPUs were drawn
(``--arrived``). Unused GPU shares are then counted in percent of all. A request takes a share of one GPU, or whole ones.

* ``random``: any node and any GPU on which the request fits.
* ``best_fit``: the node on which the least is left, each resource in parts of the largest node; the GPU with the least left.
* ``fgd``: fragmentation gradient descent as in the paper, on all shares of all GPUs: node and GPU that raise the fragmentation
  least. It expects the requests of the file by how often they are in it, the rarest 5 % left out as in the paper.
* ``spread`` and ``weigher``: filters, weighers and the choice of GPUs as production runs them, on trees with a provider for each
  GPU. ``spread`` is the default preset. ``weigher`` is ``gpu_fragmentation`` alone with ``shares = true``, which expects what
  ``fgd`` expects. ``gpu`` is the preset of this name with the same options.

``decision_ms`` is the median time of the weigher itself, with its default options, on whole GPUs, at the fleet's size and at 10,000
nodes. ``shares_ms`` is the same with shares of GPUs, for a request and five expected ones.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moorage import options
from moorage.clock import SystemClock
from moorage.instances.providers import offer
from moorage.inventory import InventoryItem
from moorage.scheduling import filter_and_weigh
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import Flavor, FleetChanges, InstanceRecord, NodeState, ProviderState, RequestSpec
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.scheduling.resource_request import with_held_resources
from moorage_plugins.weighers.fragmentation import Task, fits, increase
from moorage_plugins.weighers.gpu_fragmentation import GpuFragmentationWeigher

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
#: Shares of a GPU are in thousandths, processors too.
WHOLE = 1000
GPU, CPU, MEMORY, MILLI = "PGPU", "VCPU", "MEMORY_MB", "CUSTOM_GPU_MILLI"
#: Nodes that change before the scheduler reads them again.
_UNREAD = 64
#: The part of all requests that the expected ones stand for.
POPULAR = 0.95
Floats = npt.NDArray[np.float64]


class NoFailures:
    """Nothing hangs here."""

    def record(self, plugin: str) -> None: ...

    def count(self, plugin: str) -> int:
        return 0


def give_up(reason: str) -> None:
    raise SystemExit(reason)


class Nodes:
    """What is free of a fleet."""

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        gpus = np.array([each["gpus"] for each in given])
        self.shares: Floats = WHOLE * (np.arange(gpus.max()) < gpus[:, np.newaxis]).astype(np.float64)
        self.free: dict[str, Floats] = {
            CPU: np.array([1000.0 * each["vcpus"] for each in given]),
            MEMORY: np.array([float(each["memory_mb"]) for each in given]),
        }
        self.capacity = float(self.shares.sum())
        self.largest = {name: column.max() for name, column in self.free.items()} | {GPU: WHOLE * gpus.max()}

    def take(self, task: Task, row: int, devices: Sequence[int]) -> None:
        for name, units in task.resources.items():
            self.free[name][row] -= units
        if len(set(devices)) != task.devices or (self.shares[row, devices] < task.share).any():
            raise SystemExit(f"GPUs {devices} of node {row} cannot give {task} what it asks for.")
        self.shares[row, devices] -= task.share

    def large_enough(self, task: Task, row: int) -> list[int]:
        """The GPUs of a node that could give the request its share, those with the least left first."""
        here = self.shares[row]
        found = np.flatnonzero((here >= task.share) & (here > 0))
        return [int(each) for each in found[np.argsort(here[found], kind="stable")]]


#: Node and GPUs for a request, out of the rows on which it fits.
Policy = Callable[[Task, npt.NDArray[np.intp]], tuple[int, Sequence[int]]]


def random_fit(nodes: Nodes, chance: random.Random) -> Policy:
    def choose(task: Task, rows: npt.NDArray[np.intp]) -> tuple[int, Sequence[int]]:
        row = int(chance.choice(rows))
        return row, chance.sample(nodes.large_enough(task, row), task.devices)

    return choose


def best_fit(nodes: Nodes, chance: random.Random) -> Policy:
    def choose(task: Task, rows: npt.NDArray[np.intp]) -> tuple[int, Sequence[int]]:
        left = nodes.shares[rows].sum(axis=1) / nodes.largest[GPU]
        for name, column in nodes.free.items():
            left = left + column[rows] / nodes.largest[name]
        row = int(rows[left.argmin()])
        return row, nodes.large_enough(task, row)[: task.devices]

    return choose


class Trees:
    """The nodes as a scheduler knows them: each GPU is a provider below its node. It reads the store now and then."""

    def __init__(self, nodes: Nodes) -> None:
        self._used: dict[str, dict[str, int]] = {}
        self._changed: set[int] = set()
        self._inventories = [
            {
                str(row): (*(InventoryItem(name, int(column[row])) for name, column in nodes.free.items()),),
                **{
                    f"{row}-{gpu}": (InventoryItem(MILLI, WHOLE),)
                    for gpu in range(int(np.count_nonzero(nodes.shares[row])))
                },
            }
            for row in range(len(nodes.shares))
        ]
        self.view = FleetView()
        self.view.set_nodes([self._node(row) for row in range(len(nodes.shares))])

    def _node(self, row: int) -> NodeState:
        providers = tuple(
            ProviderState(uuid, None if uuid == str(row) else str(row), items, self._used.get(uuid, {}))
            for uuid, items in self._inventories[row].items()
        )
        # Names that sort as the rows do.
        return NodeState(f"{row:06}", str(row), str(row), *offer(providers), providers=providers)

    def put(self, record: InstanceRecord, row: int) -> None:
        self.view.put(record)
        for uuid, taken in (record.holds or {}).items():
            used = self._used.get(uuid, {})
            self._used[uuid] = used | {name: used.get(name, 0) + units for name, units in taken.items()}
        self._changed.add(row)
        if len(self._changed) >= _UNREAD:
            changes = FleetChanges(tuple(map(self._node, sorted(self._changed))))
            self.view.change_nodes(changes, held=self.view.held())
            self._changed = set()


def spec_of(task: Task, uuid: str) -> RequestSpec:
    """A request with a group for each GPU."""
    specs = {f"resources{number}:{MILLI}": str(int(task.share)) for number in range(task.devices)}
    if task.devices > 1:
        specs["group_policy"] = "isolate"
    resources = {name: int(units) for name, units in task.resources.items()}
    body: Any = {"flavor": {"flavorid": str(task), "resources": resources, "extra_specs": specs}}
    return RequestSpec(uuid, Flavor(str(task), with_held_resources(body)["flavor"]["resources"], specs))


def production(expected: Sequence[tuple[Task, float]], **scheduling: Any) -> Callable[[Nodes, random.Random], Policy]:
    """Filters, weighers and the choice of the GPUs as a scheduler runs them."""
    texts = [
        f"{popularity}:{MILLI}={task.devices}x{int(task.share)}"
        + "".join(f":{name}={int(units)}" for name, units in task.resources.items() if units)
        for task, popularity in expected
    ]
    options_of_weigher = {"resource_class": MILLI, "shares": True, "expected": texts}
    line = filter_and_weigh.load(
        options.defaults(
            scheduling={"enabled_filters": ["compute", "capacity"], **scheduling},
            weigher_gpu_fragmentation=options_of_weigher,
        )
    )

    def policy(nodes: Nodes, chance: random.Random) -> Policy:
        runner = PluginRunner(
            SystemClock(), NoFailures(), give_up, deadline=600, threshold=1, window=60, skip_advisory=False, threads=1
        )
        trees, placed = Trees(nodes), iter(range(10**9))

        def choose(task: Task, rows: npt.NDArray[np.intp]) -> tuple[int, Sequence[int]]:
            fleet, spec = trees.view.snapshot(), spec_of(task, str(next(placed)))
            ranking = line.run(runner, fleet, fleet.all_rows, spec, most=1)
            if ranking.passed != len(rows):
                raise SystemExit(f"{ranking.passed} nodes pass the filters for {task}, which fits on {len(rows)}.")
            row = int(ranking.rows[0])
            propose = fleet.proposal(row, spec)
            holds = {str(row): spec.flavor.resources} if propose is None else propose(frozenset())
            if holds is None:
                raise SystemExit(f"No providers of node {row} are proposed for {task}.")
            name = str(row)
            trees.put(
                InstanceRecord(spec.instance_uuid, name, name, str(task), spec.flavor.resources, holds=holds), row
            )
            return row, [int(uuid.partition("-")[2]) for uuid in holds if "-" in uuid]

        return choose

    return policy


def descent(expected: Sequence[tuple[Task, float]]) -> Callable[[Nodes, random.Random], Policy]:
    def policy(nodes: Nodes, chance: random.Random) -> Policy:
        # Only the nodes that changed since a request of this kind was placed last are looked at again.
        known: dict[str, tuple[int, Floats, npt.NDArray[np.intp]]] = {}
        changed: list[int] = []

        def choose(task: Task, rows: npt.NDArray[np.intp]) -> tuple[int, Sequence[int]]:
            size = len(nodes.shares)
            seen, raised, device = known.get(str(task), (0, np.zeros(size), np.zeros(size, dtype=np.intp)))
            stale = np.array(sorted(set(changed[seen:])), dtype=np.intp) if str(task) in known else np.arange(size)
            if len(stale):
                free = {name: column[stale] for name, column in nodes.free.items()}
                raised[stale], device[stale] = increase(task, nodes.shares[stale].T, free, expected)
            known[str(task)] = len(changed), raised, device
            row = int(rows[raised[rows].argmin()])
            changed.append(row)
            return row, [int(device[row])] if task.devices == 1 else nodes.large_enough(task, row)[: task.devices]

        return choose

    return policy


def read_tasks(path: Path) -> list[Task]:
    """The requests of a file, in the format of openb."""
    with path.open(encoding="utf-8") as stream:
        return [
            Task(
                int(row["gpus"]),
                float(row["gpu_milli"]),
                {CPU: float(row["cpu_milli"]), MEMORY: float(row["memory_mib"])},
            )
            for row in csv.DictReader(stream)
        ]


def popular(tasks: Sequence[Task]) -> list[tuple[Task, float]]:
    """Requests with GPUs and how often they are asked for, the most popular ones."""
    counts = collections.Counter(str(task) for task in tasks if task.devices)
    by_name = {str(task): task for task in tasks}
    found: list[tuple[Task, float]] = []
    enough = POPULAR * counts.total()
    for name, count in counts.most_common():
        if sum(weight for _, weight in found) >= enough:
            break
        found.append((by_name[name], float(count)))
    return found


def saturate(
    given: Sequence[Mapping[str, Any]],
    tasks: Sequence[Task],
    policy: Callable[[Nodes, random.Random], Policy],
    seed: int,
    arrived: Sequence[int],
) -> dict[str, Any]:
    """Unused GPU shares in percent when so many percent of all were asked for, and how many requests found no node."""
    draws, nodes = random.Random(seed), Nodes(given)
    choose = policy(nodes, random.Random(seed))
    asked, refused, unused = 0.0, 0, {}
    for percent in arrived:
        while asked < nodes.capacity * percent / 100:
            task = draws.choice(tasks)
            asked += task.devices * task.share
            rows = np.flatnonzero(fits(task, nodes.shares.T, nodes.free))
            if len(rows):
                row, devices = choose(task, rows)
                nodes.take(task, row, devices)
            else:
                refused += 1
        unused[str(percent)] = round(100 * float(nodes.shares.sum()) / nodes.capacity, 2)
    return {"unused_percent": unused, "refused": refused}


def fleet_of(given: Sequence[Mapping[str, Any]], size: int, *, shares: bool) -> FleetView:
    """So many nodes, a third of which have one GPU taken, or half of it."""
    repeated = [given[row % len(given)] for row in range(size)]
    taken = set(random.Random(1).sample(range(size), size // 3))
    view = FleetView(tracked=False)
    if not shares:
        view.set_nodes(
            [
                NodeState(
                    str(row),
                    str(row),
                    str(row),
                    {GPU: node["gpus"], CPU: node["vcpus"], MEMORY: node["memory_mb"]},
                    {GPU: 1, CPU: 8, MEMORY: 32768} if row in taken else {},
                )
                for row, node in enumerate(repeated)
            ]
        )
        return view
    nodes = Nodes(repeated)
    for row in taken:
        nodes.free[CPU][row] -= 4000
    view.set_nodes(
        [
            replace(
                node,
                providers=tuple(
                    replace(each, used={MILLI: WHOLE // 2}) if each.uuid == f"{row}-0" and row in taken else each
                    for each in node.providers
                ),
            )
            for row, node in enumerate(Trees(nodes).view.snapshot().nodes)
        ]
    )
    return view


def decision_ms(given: Sequence[Mapping[str, Any]], size: int, *, shares: bool = False) -> float:
    """The time of the weigher on a fleet of so many nodes, a third of their GPUs taken."""
    fleet = fleet_of(given, size, shares=shares).snapshot()
    values: dict[str, Any] = {}
    spec = RequestSpec("new", Flavor("small", {GPU: 1, CPU: 8, MEMORY: 32768}))
    if shares:
        texts = [f"{8 // count}:{MILLI}={count}x{WHOLE}:{CPU}={8000 * count}" for count in (1, 2, 4, 8)]
        values = {"resource_class": MILLI, "shares": True, "expected": [*texts, f"8:{MILLI}={WHOLE // 2}:{CPU}=4000"]}
        spec = spec_of(Task(1, WHOLE // 2, {CPU: 4000, MEMORY: 16384}), "new")
    weigher = GpuFragmentationWeigher(conf=options.defaults(weigher_gpu_fragmentation=values))
    rows, times = np.arange(size, dtype=np.intp), []
    for _ in range(50):
        begun = time.process_time()
        weigher.weigh_rows(fleet, rows, spec)
        times.append(1000 * (time.process_time() - begun))
    return round(statistics.median(times), 2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=Path, default=DATA / "nodes_openb.jsonl")
    parser.add_argument("--requests", type=Path, default=DATA / "requests_openb.csv")
    parser.add_argument("--policies", default="random,best_fit,spread,fgd,weigher,gpu")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--arrived", default="100,130", help="percent of the GPUs")
    given = parser.parse_args()
    nodes = [json.loads(line) for line in given.nodes.read_text(encoding="utf-8").splitlines()]
    tasks = read_tasks(given.requests)
    expected = popular(tasks)
    policies = {
        "random": random_fit,
        "best_fit": best_fit,
        "spread": production(expected, preset="spread"),
        "fgd": descent(expected),
        "weigher": production(expected, enabled_weighers=["gpu_fragmentation"]),
        "gpu": production(expected, preset="gpu"),
    }
    arrived = [int(each) for each in given.arrived.split(",")]
    report: dict[str, Any] = {"nodes": len(nodes), "gpus": sum(each["gpus"] for each in nodes), "policies": {}}
    for name in given.policies.split(","):
        runs = {seed: saturate(nodes, tasks, policies[name], int(seed), arrived) for seed in given.seeds.split(",")}
        means = {
            str(percent): round(statistics.mean(run["unused_percent"][str(percent)] for run in runs.values()), 2)
            for percent in arrived
        }
        report["policies"][name] = {"mean_unused_percent": means, "seeds": runs}
    sizes = (len(nodes), 10_000)
    report["decision_ms"] = {str(size): decision_ms(nodes, size) for size in sizes}
    report["shares_ms"] = {str(size): decision_ms(nodes, size, shares=True) for size in sizes}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
