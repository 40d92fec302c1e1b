# SPDX-License-Identifier: Apache-2.0
"""How many GPU shares stay unused when a fleet is full, by the rule that places requests; printed as one JSON object.

``python benchmarks/gpu_fragmentation.py [--nodes FILE] [--requests FILE] [--policies random,best_fit,spread,fgd] [--seeds 1,2,3]
[--arrived 100,130]``

The comparison of Weng et al., "Beware of Fragmentation" (USENIX ATC 2023), on the data that they published. Requests of the file
are drawn at random, with replacement, and none is released, until requests for so many percent of the fleet's GPUs were drawn
(``--arrived``). Unused GPU shares are then counted in percent of all. A request takes a share of one GPU, or whole ones.

* ``random``: any node and any GPU on which the request fits.
* ``best_fit``: the node on which the least is left, each resource in parts of the largest node; the GPU with the least left.
* ``spread``: the default preset's weighers, as production runs them, on GPUs in thousandths; the GPU with the least left.
* ``fgd``: fragmentation gradient descent, by the functions of the weigher ``gpu_fragmentation`` on all shares of all GPUs. It
  expects the requests of the file by how often they are in it, the rarest 5 % left out as in the paper.

``decision_ms`` is the median time of the weigher itself, with its default options, on whole GPUs, at the fleet's size and at 10,000
nodes.
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
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moorage import options
from moorage.clock import SystemClock
from moorage.scheduling import pipeline
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import Flavor, InstanceRecord, NodeState, RequestSpec
from moorage.scheduling.plugin_runner import PluginRunner
from moorage_plugins.weighers.fragmentation import Task, fits, increase
from moorage_plugins.weighers.gpu_fragmentation import GpuFragmentationWeigher

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
#: Shares of a GPU are in thousandths, processors too.
WHOLE = 1000
GPU, CPU, MEMORY = "PGPU", "VCPU", "MEMORY_MB"
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

    def take(self, task: Task, row: int, device: int) -> None:
        for name, units in task.resources.items():
            self.free[name][row] -= units
        if task.devices:
            large = np.flatnonzero((self.shares[row] >= task.share) & (self.shares[row] > 0))
            self.shares[row, [device] if device >= 0 else large[: task.devices]] -= task.share

    def tightest(self, task: Task, row: int) -> int:
        """The GPU with the least left of those that are large enough; -1 for a request without one, or for several."""
        if task.devices != 1:
            return -1
        here = self.shares[row]
        return int(np.where(here >= task.share, here, np.inf).argmin())


#: Node and GPU for a request, out of the rows on which it fits.
Policy = Callable[[Task, npt.NDArray[np.intp]], tuple[int, int]]


def random_fit(nodes: Nodes, chance: random.Random) -> Policy:
    def choose(task: Task, rows: npt.NDArray[np.intp]) -> tuple[int, int]:
        row = int(chance.choice(rows))
        if task.devices != 1:
            return row, -1
        return row, int(chance.choice(np.flatnonzero(nodes.shares[row] >= task.share)))

    return choose


def best_fit(nodes: Nodes, chance: random.Random) -> Policy:
    def choose(task: Task, rows: npt.NDArray[np.intp]) -> tuple[int, int]:
        left = nodes.shares[rows].sum(axis=1) / nodes.largest[GPU]
        for name, column in nodes.free.items():
            left = left + column[rows] / nodes.largest[name]
        row = int(rows[left.argmin()])
        return row, nodes.tightest(task, row)

    return choose


def spread(nodes: Nodes, chance: random.Random) -> Policy:
    line = pipeline.load(options.defaults(scheduling={"preset": "spread", "enabled_filters": ["compute"]}))
    runner = PluginRunner(
        SystemClock(), NoFailures(), give_up, deadline=600, threshold=1, window=60, skip_advisory=False, threads=1
    )
    view = FleetView()
    columns = {**nodes.free, GPU: nodes.shares.sum(axis=1)}
    view.set_nodes(
        [
            NodeState(str(row), str(row), str(row), {name: column[row] for name, column in columns.items()}, {})
            for row in range(len(nodes.shares))
        ]
    )
    placed = iter(range(10**9))

    def choose(task: Task, rows: npt.NDArray[np.intp]) -> tuple[int, int]:
        amounts = {name: int(units) for name, units in task.resources.items()}
        if task.devices:
            amounts[GPU] = int(task.devices * task.share)
        uuid = str(next(placed))
        ranking = line.run(runner, view.snapshot(), rows, RequestSpec(uuid, Flavor(str(task), amounts)), most=1)
        row = int(ranking.rows[0])
        view.put(InstanceRecord(uuid, str(row), str(row), str(task), amounts))
        return row, nodes.tightest(task, row)

    return choose


def descent(expected: Sequence[tuple[Task, float]]) -> Callable[[Nodes, random.Random], Policy]:
    def policy(nodes: Nodes, chance: random.Random) -> Policy:
        # Only the nodes that changed since a request of this kind was placed last are looked at again.
        known: dict[str, tuple[int, Floats, npt.NDArray[np.intp]]] = {}
        changed: list[int] = []

        def choose(task: Task, rows: npt.NDArray[np.intp]) -> tuple[int, int]:
            size = len(nodes.shares)
            seen, raised, device = known.get(str(task), (0, np.zeros(size), np.zeros(size, dtype=np.intp)))
            stale = np.array(sorted(set(changed[seen:])), dtype=np.intp) if str(task) in known else np.arange(size)
            if len(stale):
                free = {name: column[stale] for name, column in nodes.free.items()}
                raised[stale], device[stale] = increase(task, nodes.shares[stale].T, free, expected)
            known[str(task)] = len(changed), raised, device
            row = int(rows[raised[rows].argmin()])
            changed.append(row)
            return row, int(device[row])

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
                row, device = choose(task, rows)
                nodes.take(task, row, device)
            else:
                refused += 1
        unused[str(percent)] = round(100 * float(nodes.shares.sum()) / nodes.capacity, 2)
    return {"unused_percent": unused, "refused": refused}


def decision_ms(given: Sequence[Mapping[str, Any]], size: int) -> float:
    """The time of the weigher on a fleet of so many nodes, a third of their GPUs taken."""
    chance = random.Random(1)
    view = FleetView()
    view.set_nodes(
        [
            NodeState(
                str(row), str(row), str(row), {GPU: node["gpus"], CPU: node["vcpus"], MEMORY: node["memory_mb"]}, {}
            )
            for row, node in enumerate(given[row % len(given)] for row in range(size))
        ]
    )
    for row in chance.sample(range(size), size // 3):
        view.put(InstanceRecord(str(row), str(row), str(row), "small", {GPU: 1, CPU: 8, MEMORY: 32768}))
    fleet, weigher = view.snapshot(), GpuFragmentationWeigher(conf=options.defaults())
    spec = RequestSpec("new", Flavor("small", {GPU: 1, CPU: 8, MEMORY: 32768}))
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
    parser.add_argument("--policies", default="random,best_fit,spread,fgd")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--arrived", default="100,130", help="percent of the GPUs")
    given = parser.parse_args()
    nodes = [json.loads(line) for line in given.nodes.read_text(encoding="utf-8").splitlines()]
    tasks = read_tasks(given.requests)
    policies = {"random": random_fit, "best_fit": best_fit, "spread": spread, "fgd": descent(popular(tasks))}
    arrived = [int(each) for each in given.arrived.split(",")]
    report: dict[str, Any] = {"nodes": len(nodes), "gpus": sum(each["gpus"] for each in nodes), "policies": {}}
    for name in given.policies.split(","):
        runs = {seed: saturate(nodes, tasks, policies[name], int(seed), arrived) for seed in given.seeds.split(",")}
        means = {
            str(percent): round(statistics.mean(run["unused_percent"][str(percent)] for run in runs.values()), 2)
            for percent in arrived
        }
        report["policies"][name] = {"mean_unused_percent": means, "seeds": runs}
    report["decision_ms"] = {str(size): decision_ms(nodes, size) for size in (len(nodes), 10_000)}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
