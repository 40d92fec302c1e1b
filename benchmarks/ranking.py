# SPDX-License-Identifier: Apache-2.0
"""What each preset does to a fleet with scarce resources, printed as one JSON object.

``python benchmarks/ranking.py [--nodes FILE] [--requests FILE] [--presets spread,pack,gpu,nova] [--seed N]``

Requests of the file are drawn at random, with replacement, and none is released, until requests for as many GPUs as the fleet has
were drawn: the fleet is then saturated, as in Weng et al., USENIX ATC 2023. For each preset:

* ``avoidable``: requests without GPUs that were put on a node with a free GPU although a node without any could take them.
* ``gpus_left``: GPUs that no request has at the end.
* ``refused``: requests that found no node.

It decides by the production pipeline and a view in memory; the store and the agents play no part.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from moorage import options
from moorage.client.workload import WorkloadRequest, read_requests
from moorage.clock import SystemClock
from moorage.fleet.importer import read_nodes
from moorage.scheduling import filter_and_weigh
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import Flavor, InstanceRecord, NodeState, RequestSpec
from moorage.scheduling.plugin_runner import PluginRunner

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
GPU = "PGPU"


class NoFailures:
    """Nothing hangs here."""

    def record(self, plugin: str) -> None: ...

    def count(self, plugin: str) -> int:
        return 0


def give_up(reason: str) -> None:
    raise SystemExit(reason)


def fleet_of(path: Path) -> list[NodeState]:
    """The nodes of a file, each with an agent of its own."""
    return [
        NodeState(
            spec.uuid,
            spec.name,
            f"agent-{spec.name}",
            {item.resource_class: item.capacity for item in spec.inventories},
            {},
        )
        for spec in read_nodes(path)
    ]


def saturate(preset: str, nodes: list[NodeState], requests: list[WorkloadRequest], seed: int) -> dict[str, Any]:
    """Fill the fleet under a preset."""
    line = filter_and_weigh.load(
        options.defaults(scheduling={"preset": preset, "enabled_filters": ["compute", "capacity", "required_traits"]})
    )
    runner = PluginRunner(
        SystemClock(), NoFailures(), give_up, deadline=600, threshold=1, window=60, skip_advisory=False, threads=1
    )
    view = FleetView()
    view.set_nodes(nodes)
    chance = random.Random(seed)
    gpus = sum(node.capacity.get(GPU, 0) for node in nodes)
    drawn = placed = refused = avoidable = without = 0
    while drawn < gpus:
        request = chance.choice(requests)
        drawn += request.resources.get(GPU, 0)
        fleet = view.snapshot()
        uuid = f"i-{placed + refused}"
        flavor = Flavor(request.flavorid, request.resources)
        ranking = line.run(runner, fleet, np.arange(fleet.size, dtype=np.intp), RequestSpec(uuid, flavor), most=1)
        if not len(ranking.rows):
            refused += 1
            continue
        row = int(ranking.rows[0])
        if GPU not in request.resources:
            without += 1
            enough = [fleet.free(name) >= units for name, units in request.resources.items()]
            elsewhere = np.logical_and.reduce([*enough, fleet.capacity(GPU) == 0]).any()
            avoidable += bool(fleet.free(GPU)[row] > 0 and elsewhere)
        node = nodes[row]
        view.put(InstanceRecord(uuid, node.host, node.name, flavor.flavorid, flavor.resources))
        placed += 1
    runner.close()
    left = float(view.snapshot().free(GPU).sum())
    return {
        "placed": placed,
        "refused": refused,
        "without_gpu": without,
        "avoidable": avoidable,
        "gpus_left": left,
        "gpus_left_percent": round(100 * left / gpus, 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=Path, default=DATA / "nodes_openb.jsonl")
    parser.add_argument("--requests", type=Path, default=DATA / "requests_openb.csv")
    parser.add_argument("--presets", default="spread,pack,gpu,nova")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    nodes, requests = fleet_of(given.nodes), read_requests(given.requests)
    print(
        json.dumps(
            {
                "seed": given.seed,
                "nodes": len(nodes),
                "gpus": sum(node.capacity.get(GPU, 0) for node in nodes),
                "presets": {
                    preset: saturate(preset, nodes, requests, given.seed) for preset in given.presets.split(",")
                },
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
