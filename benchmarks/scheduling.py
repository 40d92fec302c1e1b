# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of scheduling, printed as one JSON object, beside a naive loop that gives the same answers.

``python benchmarks/scheduling.py [--nodes 1000 10000] [--per-node 10] [--load 1000000] [--repeat 9]``

The naive loop is what filters and weighers mean: for each node and each filter in order a method call, then each weigher over the
nodes that passed, stretched to 0..1, and a stable sort. Nova's own filters take about 1.5 times the time of such a loop (measured
on Nova 34); ``ratio`` is against the loop as it is here. All times are medians of processor time of one process, and the answers
are compared before anything is measured. Read the ratios; times are the machine's.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import statistics
import time
import tracemalloc
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from oslo_config import cfg

from moorage.clock import SystemClock
from moorage.rpc.interface import Message, Origin
from moorage.rpc.server import RpcDispatcher, endpoints_of
from moorage.scheduling import filter_and_weigh as pipelines
from moorage.scheduling import options as scheduling_options
from moorage.scheduling.alike import AlikeRequests, what_is_asked
from moorage.scheduling.decisions import Decision, Decisions
from moorage.scheduling.digest import instance_digest
from moorage.scheduling.filter_and_weigh import Pipeline
from moorage.scheduling.fleet_refresher import FleetRefresher
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.instance_tracker import InstanceTracker
from moorage.scheduling.interface import (
    ClaimResult,
    ExcludedTargets,
    Flavor,
    FleetChanges,
    HostFilter,
    InstanceRecord,
    InstanceSource,
    NodeState,
    RequestSpec,
)
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.scheduling.ranker import Ranker
from moorage.scheduling.reservations import Reservations
from moorage.scheduling.rpc import SchedulerEndpoint
from moorage.scheduling.scheduler import Scheduler
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage_plugins.filters.affinity import DifferentHostFilter, SameHostFilter
from moorage_plugins.filters.capacity import CapacityFilter
from moorage_plugins.filters.compute import ComputeFilter
from moorage_plugins.filters.type_affinity import TypeAffinityFilter
from moorage_plugins.weighers import options as weigher_options
from moorage_plugins.weighers.free_resources import CpuWeigher, RamWeigher

FLAVORS = [Flavor(f"f{size}", {"VCPU": size, "MEMORY_MB": 1024 * size, "DISK_GB": 10}) for size in (1, 2, 4)]
TOP = 3


class NoIncidents:
    def record(self, plugin: str) -> None: ...

    def count(self, plugin: str) -> int:
        return 0


class _Forgetful(Decisions):
    """Remembers no decision, to show what remembering costs."""

    def add(self, decision: Decision) -> None: ...


class NoNodes:
    def nodes(self) -> list[NodeState]:
        return []

    def changes(self, *, compare: bool = False) -> FleetChanges | None:
        return None

    def unavailable(self) -> ExcludedTargets:
        return ExcludedTargets()


class Grants:
    """Claims that always hold."""

    def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
        return ClaimResult(node_uuid)

    def earlier(self, spec: RequestSpec, request_id: str) -> ClaimResult | None:
        return None

    def release(self, instance_uuid: str) -> None: ...


class PlainFilter(HostFilter):
    """A filter of somebody else's, that only knows how to look at one node."""

    api_version = (1, 0)

    def host_passes(self, host_state: Any, spec_obj: RequestSpec) -> bool:
        return bool(host_state.num_instances < 50)


class NaiveHost:
    """What a scheduler without columns would keep of a node; the attributes that the filters read."""

    def __init__(self, node: NodeState, instances: dict[str, InstanceRecord]) -> None:
        self.host = node.host
        self.nodename = node.name
        self.uuid = node.uuid
        self.instances = instances
        self.num_instances = len(instances)
        self.num_io_ops = sum(each.busy for each in instances.values())
        self.capacity = dict(node.capacity)
        self.free = dict(node.capacity)
        for record in instances.values():
            for name, amount in record.resources.items():
                self.free[name] -= amount
        self.service_up, self.service_enabled, self.can_host = node.up, node.enabled, node.can_host
        self.properties, self.aggregates = node.properties, node.aggregates
        self.providers = node.own_and_nested

    def fits(self, spec: RequestSpec) -> bool:
        """As of a node with one provider: what is free tells all."""
        return True


def naive(hosts: Sequence[NaiveHost], filters: Sequence[Any], weighers: Sequence[Any], spec: RequestSpec) -> list[str]:
    """The answer of a plain loop: nodes, best first."""
    for each in filters:
        hosts = [host for host in hosts if each.host_passes(host, spec)]
    if not weighers or len(hosts) < 2:
        return [host.uuid for host in hosts][: TOP if weighers else None]
    totals = [0.0] * len(hosts)
    for each in weighers:
        raw = [host.free[each.resource_class] for host in hosts]
        low, high = min(raw), max(raw)
        if high > low:
            multiplier = each.multiplier
            for number, value in enumerate(raw):
                totals[number] += multiplier * ((value - low) / (high - low))
    order = sorted(range(len(hosts)), key=lambda number: -totals[number])
    return [hosts[number].uuid for number in order[:TOP]]


def seconds(work: Callable[[], object], repeat: int) -> float:
    """Median of one call, after one that does not count; short calls are made several times in a row."""
    work()
    begun = time.process_time()
    work()
    calls = max(1, int(0.002 / max(time.process_time() - begun, 1e-7)))
    taken = []
    for _ in range(repeat):
        begun = time.process_time()
        for _ in range(calls):
            work()
        taken.append((time.process_time() - begun) / calls)
    return statistics.median(taken)


class Bench:
    def __init__(self, nodes: int, per_node: int, repeat: int) -> None:
        self.repeat = repeat
        self.random = random.Random(7)
        self.conf = cfg.ConfigOpts()
        scheduling_options.register_opts(self.conf)
        for group, opts in weigher_options.list_opts():
            self.conf.register_opts(opts, group=getattr(group, "name", group))
        self.conf([], project="moorage", default_config_files=[], default_config_dirs=[])
        self.nodes = [
            NodeState(
                str(uuid.UUID(int=self.random.getrandbits(128))),
                f"node-{number}",
                f"host-{number}",
                {"VCPU": 64.0, "MEMORY_MB": 262144.0, "DISK_GB": 2000.0},
                {},
                up=number % 50 != 0,
            )
            for number in range(nodes)
        ]
        self.view = FleetView()
        self.view.set_nodes(self.nodes)
        self.tracker = InstanceTracker(self.view)
        self.records = [
            self.record(node) for node in self.nodes for _ in range(self.random.randrange(2 * per_node + 1))
        ]
        self.view.put_many(self.records)
        by_node: dict[str, dict[str, InstanceRecord]] = {node.name: {} for node in self.nodes}
        for record in self.records:
            by_node[record.node][record.uuid] = record
        self.hosts = [NaiveHost(node, by_node[node.name]) for node in self.nodes]
        self.guard = PluginRunner(
            SystemClock(), NoIncidents(), lambda _: None, deadline=60.0, threshold=3, window=300.0, skip_advisory=True
        )
        self.weighers = [CpuWeigher(conf=self.conf), RamWeigher(conf=self.conf)]

    def record(self, node: NodeState) -> InstanceRecord:
        flavor = self.random.choice(FLAVORS)
        name = str(uuid.UUID(int=self.random.getrandbits(128)))
        return InstanceRecord(name, node.host, node.name, flavor.flavorid, flavor.resources, "project", {})

    def spec(self, **hints: list[str]) -> RequestSpec:
        return RequestSpec(str(uuid.uuid4()), FLAVORS[1], "project", hints=hints)

    def pipeline(self, filters: Sequence[HostFilter], *, weighed: bool) -> Pipeline:
        return Pipeline(
            [
                pipelines._Filter(type(each).__name__, "moorage.filters", "bench", "plugin", False, each)
                for each in filters
            ],
            [
                pipelines._Weigher(type(each).__name__, "moorage.weighers", "bench", "plugin", each)
                for each in (self.weighers if weighed else ())
            ],
        )

    def compare(self, filters: Sequence[HostFilter], spec: RequestSpec, *, weighed: bool) -> dict[str, float]:
        """The same answer by the pipeline and by the loop, and how long each takes."""
        pipeline = self.pipeline(filters, weighed=weighed)
        fleet = self.view.snapshot()
        everything = fleet.all_rows
        most = TOP if weighed else None

        def ours() -> Any:
            return pipeline.run(self.guard, fleet, everything, spec, most=most)

        def loop() -> list[str]:
            return naive(self.hosts, filters, self.weighers if weighed else (), spec)

        found = [fleet.nodes[row].uuid for row in ours().rows]
        if found != loop():
            raise AssertionError(f"{[type(each).__name__ for each in filters]}: the answers differ")

        def per_host() -> object:
            # The same methods on the states that plugins get: what a filter sees that looks at one node at a time.
            hosts: list[Any] = [fleet.host_state(row) for row in range(fleet.size)]
            for each in filters:
                hosts = [host for host in hosts if each.host_passes(host, spec)]
            return hosts

        mine, other = seconds(ours, self.repeat), seconds(loop, max(3, self.repeat // 3))
        plain = seconds(per_host, 3)
        return {
            "us": round(mine * 1e6, 1),
            "naive_us": round(other * 1e6, 1),
            "ratio": round(other / mine, 1),
            "filters_on_host_states_us": round(plain * 1e6, 1),
        }

    def filters(self) -> dict[str, object]:
        some = [record.uuid for record in self.random.sample(self.records, 10)]
        conf = self.conf
        same, apart = self.spec(same_host=some[:1]), self.spec(different_host=some)
        chain = [ComputeFilter(conf=conf), CapacityFilter(conf=conf), DifferentHostFilter(conf=conf)]
        alone = {
            "compute": ([ComputeFilter(conf=conf)], self.spec()),
            "capacity": ([CapacityFilter(conf=conf)], self.spec()),
            "type_affinity": ([TypeAffinityFilter(conf=conf)], self.spec()),
            "same_host_1": ([SameHostFilter(conf=conf)], same),
            "different_host_10": ([DifferentHostFilter(conf=conf)], apart),
            "chain": (chain, apart),
            "plain_host_passes": ([PlainFilter(conf=conf)], self.spec()),
        }
        weighed = {
            "weighers_alone": ([], self.spec()),
            "chain": (chain, apart),
            "same_host_1": ([SameHostFilter(conf=conf), *chain], same),
            "plain_after_same_host": ([PlainFilter(conf=conf), SameHostFilter(conf=conf)], same),
        }
        return {
            "filters": {name: self.compare(list(case[0]), case[1], weighed=False) for name, case in alone.items()},
            f"filters_weighers_top_{TOP}": {
                name: self.compare(list(case[0]), case[1], weighed=True) for name, case in weighed.items()
            },
        }

    def requests(self) -> dict[str, object]:
        """Whole requests in process: a message came in before each, so each makes a snapshot of its own."""
        chain = [ComputeFilter(conf=self.conf), CapacityFilter(conf=self.conf), SameHostFilter(conf=self.conf)]
        chain.append(DifferentHostFilter(conf=self.conf))
        policy = SchedulingPolicy(self.pipeline(chain, weighed=True), self.guard, 1, 16)

        scheduler = Scheduler(self.view, NoNodes(), Grants(), lambda: policy, SystemClock(), random.Random(1))
        hint = {"different_host": [record.uuid for record in self.records[:3]]}
        placed: list[str] = []

        def place() -> None:
            spec = RequestSpec(str(uuid.uuid4()), FLAVORS[0], "project", hints=hint)
            placed.append(scheduler.place(spec, spec.instance_uuid).record.uuid)

        def dry_run() -> None:
            scheduler.select(self.spec(**hint), 1)

        kept, forgetful = scheduler._decisions, _Forgetful(1)
        costs: dict[str, list[float]] = {"place_ms": [], "place_without_decisions_ms": []}
        for _ in range(4 * self.repeat):
            # In turns, so that both meet the same machine.
            for name, decisions in (("place_ms", kept), ("place_without_decisions_ms", forgetful)):
                scheduler._decisions = decisions
                costs[name].append(seconds(place, 1))
        scheduler._decisions = kept
        answer = {name: round(statistics.median(taken) * 1e3, 3) for name, taken in costs.items()}
        with_, without = answer["place_ms"], answer["place_without_decisions_ms"]
        answer["remembering_costs_percent"] = round(100 * (with_ - without) / without, 1)
        answer["dry_run_ms"] = round(seconds(dry_run, self.repeat) * 1e3, 3)

        def host_states() -> None:
            # What a scheduler without columns does for each request: states built again, then the loop.
            hosts = [NaiveHost(node, host.instances) for node, host in zip(self.nodes, self.hosts, strict=True)]
            naive(hosts, chain, self.weighers, self.spec(**hint))

        other = seconds(host_states, 3)
        answer["naive_ms"] = round(other * 1e3, 1)
        answer["ratio"] = round(answer["naive_ms"] / answer["place_ms"], 1)
        for each in placed:
            self.view.drop(each)
        return answer

    def alike(self) -> dict[str, float]:
        """Microseconds to choose a node for each of several requests alike, set after set, by the size of the sets."""
        policy = SchedulingPolicy(
            self.pipeline([ComputeFilter(conf=self.conf), CapacityFilter(conf=self.conf)], weighed=True),
            self.guard,
            1,
            16,
        )
        clock, spec = SystemClock(), self.spec()
        ranker = Ranker(self.view, FleetRefresher(self.view, NoNodes(), clock, None), Reservations(), clock)
        requests = AlikeRequests(ranker, self.view, policy, what_is_asked(spec), clock)
        placed: list[str] = []

        def one_set(size: int) -> None:
            requests.begin(size)
            for _ in range(size):
                one = replace(spec, instance_uuid=str(uuid.uuid4()))
                fleet, ranking = requests.rank(one, ())
                row = int(ranking.rows[0])
                node = fleet.nodes[row]
                placed.append(one.instance_uuid)
                self.view.put(
                    InstanceRecord(
                        one.instance_uuid, node.host, node.name, one.flavor.flavorid, one.flavor.resources, busy=True
                    )
                )
                requests.take(row)

        answer = {
            str(size): round(seconds(functools.partial(one_set, size), 4 * self.repeat) / size * 1e6, 1)
            for size in (1, 2, 6, 16, 64)
        }
        for each in placed:
            self.view.drop(each)
        return answer

    def messages(self) -> dict[str, object]:
        """Messages per second: as the tracker takes them, and as the dispatcher gets them from a transport."""
        records = [self.record(self.random.choice(self.nodes)) for _ in range(50_000)]
        numbers: dict[str, int] = {}
        tracker, answer = self.tracker, {}

        def rate(name: str, work: Callable[[Any], object], wanted: Sequence[Any], make: Callable[[Any], Any]) -> None:
            # As the scheduler does after it has loaded: what is there will stay.
            gc.collect()
            gc.freeze()
            taken = 0.0
            for start in range(0, len(wanted), 100):
                # A message is new when it is applied: it has just been read.
                fresh = [make(each) for each in wanted[start : start + 100]]
                begun = time.process_time()
                for each in fresh:
                    work(each)
                taken += time.process_time() - begun
            answer[name] = round(len(wanted) / taken)

        origins = {node.host: f"service-{node.host}" for node in self.nodes}

        def origin(host: str) -> Origin:
            numbers[host] = numbers.get(host, 0) + 1
            return Origin(origins[host], 1, numbers[host])

        def update(record: InstanceRecord) -> tuple[Any, ...]:
            told = InstanceRecord(
                f"{record.uuid} "[:-1], record.host, record.node, record.flavorid, record.resources, record.project_id
            )
            return record.host, [told], origin(record.host)

        rate("update_per_s", lambda each: tracker.update(*each), records, update)
        rate("update_known_per_s", lambda each: tracker.update(*each), records, update)
        digests = {}
        for node in self.nodes[:2000]:
            known = self.view.of_host(node.host)
            digests[node.host] = (list(known), instance_digest((each.uuid, each.flavorid) for each in known.values()))
        rate(
            "sync_per_s",
            lambda each: tracker.sync(*each),
            [*digests] * 10,
            lambda host: (host, *digests[host], origin(host)),
        )
        rate(
            "delete_per_s",
            lambda each: tracker.delete(*each),
            records,
            lambda record: (record.host, record.uuid, origin(record.host)),
        )
        endpoint = SchedulerEndpoint(None, tracker, lambda _: None)  # type: ignore[arg-type]
        dispatch = RpcDispatcher(endpoints_of(endpoint))

        def message(record: InstanceRecord) -> Message:
            told = {
                "uuid": record.uuid, "host": record.host, "node": record.node, "flavorid": record.flavorid,
                "resources": dict(record.resources), "project_id": record.project_id,
            }  # fmt: skip
            args = {"host_name": record.host, "instance_or_list": [told]}
            return Message("update_instance_info", args, origin(record.host))

        rate("dispatched_update_per_s", dispatch, records[:20_000], message)
        for record in records:
            self.view.drop(record.uuid)
        return answer


class Counted(InstanceSource):
    """Instances as a store would give them: new texts and mappings each; counts the time that it takes itself."""

    def __init__(self, count: int, nodes: Sequence[NodeState]) -> None:
        self.count = count
        self.nodes = nodes
        self.seconds = 0.0
        self.given = 0

    def all(self, *, after: str = "", limit: int = 1000) -> Sequence[InstanceRecord]:
        begun = time.process_time()
        page = []
        for number in range(self.given, min(self.count, self.given + limit)):
            node, flavor = self.nodes[number * 7919 % len(self.nodes)], FLAVORS[number % 3]
            page.append(
                InstanceRecord(
                    f"{number:08d}-0000-4000-8000-{number:012d}", "".join(list(node.host)), "".join(list(node.name)),
                    flavor.flavorid, dict(flavor.resources), "".join(["pro", "ject"]), {},
                )
            )  # fmt: skip
        self.given += len(page)
        self.seconds += time.process_time() - begun
        return page

    def by_hosts(self, hosts: Sequence[str]) -> Sequence[InstanceRecord]:
        return []


def loading(count: int, nodes: Sequence[NodeState]) -> dict[str, object]:
    """Time to load instances, beyond that of the source; then the memory of a tenth of them."""
    view = FleetView()
    view.set_nodes(nodes)
    source = Counted(count, nodes)
    begun = time.process_time()
    InstanceTracker(view).load(source)
    view.snapshot()
    taken = time.process_time() - begun - source.seconds
    del view
    gc.collect()
    few = max(1, count // 10)
    view = FleetView()
    view.set_nodes(nodes)
    tracker = InstanceTracker(view)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracker.load(Counted(few, nodes))
    records = [record for row in range(len(nodes)) for record in view.snapshot().instances_on(row).values()]
    loaded = tracemalloc.get_traced_memory()[0] - before
    del records
    for number, each in enumerate(list(view._index.records())):
        tracker.update(each.host, [each], Origin(f"service-{each.host}", 1, number + 1))
    told = tracemalloc.get_traced_memory()[0] - before
    flat = churn(view, tracker, nodes, few)
    tracemalloc.stop()
    return {
        "instances": count,
        "load_s": round(taken, 2),
        "source_s": round(source.seconds, 2),
        "instances_measured": few,
        "bytes_per_instance_loaded": round(loaded / few),
        "bytes_per_instance_told": round(told / few),
        **flat,
    }


def churn(view: FleetView, tracker: InstanceTracker, nodes: Sequence[NodeState], known: int) -> dict[str, object]:
    """Instances come and go, with snapshots between: what is kept after each of three rounds, in bytes."""
    sizes, number = [], 10**9
    for _ in range(3):
        for _ in range(60_000):
            node, flavor = nodes[number % len(nodes)], FLAVORS[number % 3]
            name = str(uuid.UUID(int=number))
            record = InstanceRecord(name, node.host, node.name, flavor.flavorid, flavor.resources, "project")
            tracker.update(node.host, [record], Origin(f"service-{node.host}", 1, number))
            tracker.delete(node.host, name, Origin(f"service-{node.host}", 1, number + 1))
            number += 2
            if number % 50 == 0:
                view.snapshot()
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    return {"bytes_after_churn": sizes, "messages_per_round": 120_000}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory of scheduling.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--per-node", type=int, default=10, help="instances on a node, on average")
    parser.add_argument("--load", type=int, default=1_000_000, help="instances that are loaded at a start")
    parser.add_argument("--repeat", type=int, default=9)
    arguments = parser.parse_args()
    report: dict[str, object] = {}
    for nodes in arguments.nodes:
        bench = Bench(nodes, arguments.per_node, arguments.repeat)
        found = report[f"{nodes} nodes"] = {"instances": len(bench.records), **bench.filters()}
        found["whole_request"] = bench.requests()
        found["requests_alike_us"] = bench.alike()
        found["messages"] = bench.messages()
        bench.guard.close()
    report["load"] = loading(arguments.load, bench.nodes)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
