# SPDX-License-Identifier: Apache-2.0
"""Decisions on a recorded fleet whose GPUs are providers below their nodes, printed as one JSON object.

``python benchmarks/trees.py [--nodes FILE] [--requests FILE] [--fleet N] [--rounds N] [--cases N] [--seed N]``

* ``ms``: the median processor time of a decision (default filters and weighers) on N nodes that repeat the recorded ones:
  ``flat`` on nodes without providers below them; then on trees: ``without`` devices, with ``devices`` (a request group for each
  GPU, isolated), and with ``traits`` besides (the model of the GPU), with the model ``forbidden``, or with any of two (``in``).
* ``numa_ms``: the same on N nodes of four NUMA cells with two GPUs each, which differ in use, for one to three pairs of processors
  and a GPU in the same cell, isolated and not.
* ``ratio``: of the requests with devices to ``without``, and of ``without`` to ``flat``.
* ``differences``: of so many random cases, how often the scheduler and the candidates of the allocation store disagree on which
  nodes can take a recorded request, on parts of the recorded fleet that recorded requests have filled at random.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import statistics
import time
import uuid as uuid_module
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.memory_store.store import MemoryStore

from moorage import errors, options
from moorage.allocation.interface import CandidateQuery, ClaimRequest, InventoryItem, ResourceProvider
from moorage.client.workload import WorkloadRequest, read_requests
from moorage.clock import SystemClock
from moorage.fleet.importer import read_nodes
from moorage.instances.providers import offer, read_providers
from moorage.scheduling import filter_and_weigh
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import Flavor, InstanceRecord, NodeState, ProviderState, RequestSpec
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.scheduling.resource_request import resource_request, with_held_resources
from moorage_plugins.filters.capacity import CapacityFilter
from moorage_plugins.filters.traits import RequiredTraitsFilter

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
GPU = "PGPU"
_GPUS = uuid_module.UUID(int=17)
#: Nodes of one part of the fleet, and cases that are decided on it.
_PART, _CASES = 24, 50


class NoFailures:
    """Nothing hangs here."""

    def record(self, plugin: str) -> None: ...

    def count(self, plugin: str) -> int:
        return 0


def give_up(reason: str) -> None:
    raise SystemExit(reason)


@functools.cache
def runner() -> PluginRunner:
    """What runs plugins."""
    return PluginRunner(
        SystemClock(), NoFailures(), give_up, deadline=600, threshold=1, window=60, skip_advisory=False, threads=1
    )


def models_of(path: Path) -> dict[str, str]:
    """Node -> trait of the model of its GPUs."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    return {row["uuid"]: f"CUSTOM_GPU_{row['gpu_model']}" for row in rows if row.get("gpu_model")}


def tree_of(
    uuid: str, items: Sequence[InventoryItem], model: str | None
) -> list[tuple[ResourceProvider, frozenset[str]]]:
    """A node's provider and its GPUs, with their traits."""
    own = tuple(item for item in items if item.resource_class != GPU)
    count = sum(item.total for item in items if item.resource_class == GPU)
    names = [str(uuid_module.uuid5(_GPUS, f"{uuid}-{number}")) for number in range(count)]
    gpus = [ResourceProvider(name, name, False, inventories=(InventoryItem(GPU, 1),), parent=uuid) for name in names]
    traits = frozenset() if model is None else frozenset({model})
    return [(ResourceProvider(uuid, uuid, inventories=own), frozenset()), *((gpu, traits) for gpu in gpus)]


def node_of(uuid: str, providers: tuple[ProviderState, ...]) -> NodeState:
    """A node with an agent of its own."""
    capacity, used = offer(providers)
    return NodeState(uuid, uuid, f"agent-{uuid}", capacity, used, traits=providers[0].traits, providers=providers)


def fleet_of(path: Path, size: int, *, nested: bool) -> list[NodeState]:
    """So many nodes that repeat those of a file."""
    specs, models = list(read_nodes(path)), models_of(path)
    nodes = []
    for number in range(size):
        spec = specs[number % len(specs)]
        uuid = f"{spec.uuid}-{number}"
        if nested:
            tree = tree_of(uuid, spec.inventories, models.get(spec.uuid))
            states = [ProviderState(each.uuid, each.parent, each.inventories, {}, traits) for each, traits in tree]
        else:
            states = [ProviderState(uuid, None, tuple(spec.inventories), {})]
        nodes.append(node_of(uuid, tuple(states)))
    return sorted(nodes, key=lambda node: node.uuid)


def numa_fleet(size: int, seed: int) -> list[NodeState]:
    """Nodes of four NUMA cells, of which each has processors and two GPUs; use is drawn."""
    chance = random.Random(seed)
    nodes = []
    for number in range(size):
        uuid = str(uuid_module.uuid5(_GPUS, f"numa-{number}"))
        states = [ProviderState(uuid, None, (InventoryItem("MEMORY_MB", 2**20),), {})]
        for cell in range(4):
            name = f"{uuid}-{cell}"
            states.append(ProviderState(name, uuid, (InventoryItem("VCPU", 16),), {"VCPU": chance.randrange(13)}))
            gpus = [{GPU: int(chance.random() < 1 / 4)} for _ in range(2)]
            states += [
                ProviderState(f"{name}-{gpu}", name, (InventoryItem(GPU, 1),), used) for gpu, used in enumerate(gpus)
            ]
        nodes.append(node_of(uuid, tuple(states)))
    return sorted(nodes, key=lambda node: node.uuid)


def pairs_of(count: int, policy: str) -> RequestSpec:
    """A request for so many pairs of processors and a GPU in the same cell."""
    specs = {"group_policy": policy}
    for number in range(count):
        specs |= {f"resources_c{number}:VCPU": "4", f"resources_g{number}:{GPU}": "1"}
        specs[f"same_subtree{number}"] = f"_c{number},_g{number}"
    return _request({"MEMORY_MB": 1024}, specs)


def spec_of(resources: dict[str, int], gpus: int, trait: str | None = None, word: str = "required") -> RequestSpec:
    """A request with a group for each GPU."""
    specs = {f"resources{number}:{GPU}": "1" for number in range(gpus)}
    if trait is not None:
        specs |= {f"trait{number}:{trait}": word for number in range(gpus)}
    if gpus > 1:
        specs["group_policy"] = "isolate"
    return _request(resources, specs)


def _request(resources: dict[str, int], specs: dict[str, str]) -> RequestSpec:
    body: Any = {"flavor": {"flavorid": "f", "resources": resources, "extra_specs": specs}}
    flavor = with_held_resources(body)["flavor"]
    return RequestSpec(str(uuid_module.uuid4()), Flavor("f", flavor["resources"], specs))


def measure(nodes: Sequence[NodeState], specs: dict[str, RequestSpec], rounds: int) -> dict[str, float]:
    """Median milliseconds of a decision of each request; the requests take turns. A claim changes the view before each."""
    line = filter_and_weigh.load(options.defaults())
    view = FleetView()
    view.set_nodes(nodes)
    taken: dict[str, list[float]] = {name: [] for name in specs}
    node = nodes[0]
    for number in range(rounds):
        for name, spec in specs.items():
            view.hold(_held(f"{number}-{name}", node))
            began = time.process_time()
            fleet = view.snapshot()
            ranking = line.run(runner(), fleet, fleet.all_rows, spec, most=3)
            row = int(ranking.rows[0])
            propose = fleet.proposal(row, spec)
            if propose is not None and propose(frozenset()) is None:
                raise SystemExit("A node passed that cannot take the request.")
            taken[name].append(time.process_time() - began)
            view.let_go(f"{number}-{name}")
    return {name: round(1000 * statistics.median(times), 3) for name, times in taken.items()}


def _held(uuid: str, node: NodeState) -> InstanceRecord:
    holds = {each.uuid: {item.resource_class: 1 for item in each.inventories} for each in node.providers[:2]}
    return InstanceRecord(
        uuid, node.host, node.name, "f", {"VCPU": 1}, holds=holds if len(node.providers) > 1 else None
    )


def differences(nodes: Path, requests: Sequence[WorkloadRequest], cases: int, seed: int) -> int:
    """How often scheduler and store disagree."""
    chance = random.Random(seed)
    specs, models = list(read_nodes(nodes)), models_of(nodes)
    traits = sorted(set(models.values()))
    wrong, store_limit = 0, options.defaults().allocation.max_candidates
    for _ in range(0, cases, _CASES):
        store = MemoryStore(conf=options.defaults())
        for trait in traits:
            store.create_trait(trait)
        roots = []
        for spec in chance.sample(specs, min(_PART, len(specs))):
            for provider, of_provider in tree_of(spec.uuid, spec.inventories, models.get(spec.uuid)):
                store.create_provider(provider)
                store.set_traits(provider.uuid, of_provider)
            roots.append(spec.uuid)
        for _ in range(_CASES):
            request = chance.choice(requests)
            asked = _case(chance, request, traits)
            query = resource_request(asked)
            found = store.candidates(query).candidates
            expected = {each.anchor for each in found}
            whole = len(found) < store_limit
            if not whole:
                # Eight isolated GPUs of one node can be named in 40320 ways. Each node is asked for one.
                expected = {uuid for uuid in roots if store.candidates(_within(query, uuid)).candidates}
            view = FleetView(tracked=False)
            providers = read_providers(store, store.usages(providers=roots))
            view.set_nodes([node_of(uuid, providers[uuid]) for uuid in sorted(roots)])
            fleet = view.snapshot()
            line = filter_and_weigh.of(_filters())
            passed = _passed(line, fleet, asked)
            proposed = (
                _proposals_fit(fleet, passed, asked, found) if whole else _can_be_claimed(store, fleet, passed, asked)
            )
            wrong += {fleet.nodes[row].uuid for row in passed} != expected or not proposed
            if found:
                # It is claimed, so that the next case finds another fleet.
                chosen = chance.choice(found)
                try:
                    store.claim(ClaimRequest(asked.instance_uuid, chosen.allocations))
                except errors.Conflict:
                    wrong += 1
    return wrong


def _case(chance: random.Random, request: WorkloadRequest, traits: Sequence[str]) -> RequestSpec:
    """A recorded request, with a random model where it has GPUs, sometimes in one group."""
    resources = {name: units for name, units in request.resources.items() if name != GPU}
    gpus = min(request.resources.get(GPU, 0), 8)
    trait = chance.choice([None, *traits]) if gpus else None
    return spec_of(resources, gpus, trait)


def _filters() -> list[Any]:
    return [CapacityFilter(conf=None), RequiredTraitsFilter(conf=None)]


def _passed(line: Any, fleet: Any, spec: RequestSpec) -> list[int]:
    rows: list[int] = line.run(runner(), fleet, np.arange(fleet.size, dtype=np.intp), spec).rows.tolist()
    return rows


def _proposals_fit(fleet: Any, rows: Sequence[int], spec: RequestSpec, found: Sequence[Any]) -> bool:
    """Whether what is proposed for each node is one of the store's candidates."""
    known = [{uuid: dict(taken) for uuid, taken in each.allocations.items()} for each in found]
    for row in rows:
        propose = fleet.proposal(row, spec)
        holds = {fleet.nodes[row].uuid: dict(spec.flavor.resources)} if propose is None else propose(frozenset())
        if holds not in known:
            return False
    return True


def _within(query: CandidateQuery, uuid: str) -> CandidateQuery:
    """The query for one candidate of one tree."""
    groups = tuple(dataclasses.replace(group, in_tree=uuid) for group in query.groups)
    return dataclasses.replace(query, groups=groups, limit=1)


def _can_be_claimed(store: MemoryStore, fleet: Any, rows: Sequence[int], spec: RequestSpec) -> bool:
    """Whether the store takes what is proposed for each node."""
    for row in rows:
        try:
            store.claim(ClaimRequest(spec.instance_uuid, fleet.proposal(row, spec)(frozenset())))
        except errors.Conflict:
            return False
        store.release(spec.instance_uuid)
    return True


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=Path, default=DATA / "nodes_openb.jsonl")
    parser.add_argument("--requests", type=Path, default=DATA / "requests_openb.csv")
    parser.add_argument("--fleet", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    resources = {"VCPU": 8, "MEMORY_MB": 16384}
    (trait, _), (second, _) = Counter(models_of(given.nodes).values()).most_common(2)
    flat = measure(fleet_of(given.nodes, given.fleet, nested=False), {"flat": spec_of(resources, 0)}, given.rounds)
    asked = {
        "without": spec_of(resources, 0),
        "devices": spec_of(resources, 2),
        "traits": spec_of(resources, 2, trait),
        "forbidden": spec_of(resources, 2, trait, "forbidden"),
        "in": spec_of(resources, 2, f"in:{trait},{second}"),
    }
    ms = flat | measure(fleet_of(given.nodes, given.fleet, nested=True), asked, given.rounds)
    pairs = {f"{count} {policy}": pairs_of(count, policy) for count in (1, 2, 3) for policy in ("none", "isolate")}
    numa = measure(numa_fleet(given.fleet, given.seed), pairs, min(given.rounds, 20))
    wrong = differences(given.nodes, read_requests(given.requests), given.cases, given.seed)
    runner().close()
    print(
        json.dumps(
            {
                "fleet": given.fleet,
                "ms": ms,
                "numa_ms": numa,
                "ratio": {
                    **{name: round(ms[name] / ms["without"], 2) for name in asked if name != "without"},
                    "without": round(ms["without"] / ms["flat"], 2),
                },
                "cases": given.cases,
                "differences": wrong,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
