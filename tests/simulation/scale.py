# SPDX-License-Identifier: Apache-2.0
"""Runs a large fleet in simulated time and prints curves of its load as JSON: ``python -m tests.simulation.scale``.

Production's schedulers, agents and stores run as in ``make simulate``. No fault is drawn. A scenario says what happens:

* ``day``: the requests of one recorded day arrive, and their instances are deleted at their ends.
* ``partition``: messages between two halves of the fleet are lost for the time of 2.5 comparisons, in which requests arrive.
  Then the network heals.
* ``herd``: all agents are killed and start again at one moment; later all schedulers.

The network delays a message by up to 3.5 ms. All processes share one processor and one SQLite file: each statement takes 0.2 ms of
virtual time. At the end the invariants of the workload ``placement`` are checked, and the laws of :func:`laws`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import gc
import gzip
import json
import logging
import os
import random
import resource
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from typing_extensions import override

from moorage import errors, threads
from moorage.clock import SystemClock
from moorage.control_plane import agent_role, cleanup_endpoints, scheduler_role
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.factories import load_store
from moorage.control_plane.scheduler_client import Schedulers
from moorage.control_plane.scheduler_role import SchedulerRole
from moorage.db import Database
from moorage.fleet.interface import InventoryItem, NodeSpec, uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.instances.delete import Deleter
from moorage.journal import sequencer
from moorage.rpc.server import rpc_method
from moorage.services import heartbeat
from moorage.services.registry import ServiceRegistry
from moorage_plugins.compute.agent import ComputeAgent
from tests.simulation import runner
from tests.simulation.kernel import Process, Stalled, Violation
from tests.simulation.schedules import RandomChoice
from tests.simulation.workloads.base import open_deleter
from tests.simulation.workloads.placement import Placement, _History
from tests.simulation.world import Base, World

__all__ = ["MISTAKES", "Arrival", "Curves", "Law", "Plan", "Scale", "laws", "run"]

#: Recorded data beside the checkout; the project does not carry them.
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
#: Seconds in which the services answer what happened, times the stretch; see :func:`laws`.
AFTERMATH = 30.0
#: Requests that one API works on at a time.
_WORKERS = 16
#: What is counted of the points of the kernel, and its name in the curves.
_KINDS = {"read": "statements", "write": "statements", "writer": "transactions", "send": "sends"}


class Arrival(NamedTuple):
    """A request: when it comes, how long its instance lives (seconds), and what it needs."""

    at: float
    lifetime: float
    vcpus: int
    memory_mb: int


@dataclass(frozen=True)
class Plan:
    """What is simulated.

    :ivar population: instances that exist before the scenario begins.
    :ivar stretch: how many times longer than their defaults the periods of all services are.
    :ivar comparison: seconds between the comparisons of an agent.
    """

    scenario: str
    nodes: int = 10_000
    agents: int = 100
    schedulers: int = 3
    apis: int = 2
    population: int = 2000
    arrivals: Sequence[Arrival] = ()
    stretch: float = 1.0
    comparison: float = 120.0


def settings(plan: Plan) -> dict[tuple[str, str], Any]:
    """Options: the defaults, times the stretch."""
    return {
        ("services", "report_interval"): 10.0 * plan.stretch,
        ("services", "service_down_time"): 60.0 * plan.stretch,
        ("agent", "sweep_interval"): 5.0 * plan.stretch,
        ("agent", "services"): ["compute"],
        ("cleanup", "enabled_handlers"): ["instance"],
        ("cleanup", "interval"): 60.0 * plan.stretch,
        ("cleanup", "lease_seconds"): 60.0 * plan.stretch,
        ("scheduling", "refresh_interval"): 60.0 * plan.stretch,
        ("scheduling", "scheduler_instance_sync_interval"): int(plan.comparison * plan.stretch),
    }


def hosts_of(plan: Plan) -> list[str]:
    """The hosts of the agents."""
    return [f"agent-{number}" for number in range(1, plan.agents + 1)]


def shapes() -> list[tuple[int, int]]:
    """VCPUs and memory (MB) of real nodes where the recorded data are there."""
    file = DATA / "nodes_openb.jsonl"
    if not file.exists():
        return [(64, 262_144), (96, 393_216)]
    found = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [(int(each["vcpus"]), int(each["memory_mb"])) for each in found]


def enrol(plan: Plan, database: Database, conf: Any) -> None:
    """Write the nodes, divided among the agents."""
    clock, hosts, sizes = SystemClock(), hosts_of(plan), shapes()
    store = load_store(conf, database, clock)
    enrolment = Enrolment(database, NodeStore(database), store, ServiceRegistry(database, clock), lambda: None)
    for start in range(0, plan.nodes, 500):
        enrolment.enrol(
            [
                NodeSpec(
                    uuid_of_name(f"node-{number}"), f"node-{number}", hosts[number % len(hosts)],
                    inventories=(
                        InventoryItem("VCPU", sizes[number % len(sizes)][0]),
                        InventoryItem("MEMORY_MB", sizes[number % len(sizes)][1]),
                    ),
                )
                for number in range(start, min(start + 500, plan.nodes))
            ]
        )  # fmt: skip


def recorded(path: Path, day: int) -> list[Arrival]:
    """The requests of one day of a file with the columns arrival_s, lifetime_s, vcpus and memory_mb."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        rows = [
            Arrival(
                float(row["arrival_s"]) - 86400.0 * day,
                *(float(row["lifetime_s"]), round(float(row["vcpus"])), int(row["memory_mb"])),
            )
            for row in csv.DictReader(file)
        ]
    return sorted(each for each in rows if 0 <= each.at < 86400)


def drawn(seed: str, count: int, seconds: float) -> list[Arrival]:
    """Requests at random moments, all of which end within the time."""
    draw = random.Random(seed)
    found = (
        Arrival(draw.uniform(0, seconds), draw.uniform(0.1, 0.5) * seconds, draw.choice((1, 2, 4)), 1024)
        for _ in range(count)
    )
    return sorted(found)


@dataclass
class Curves:
    """Counts by virtual second, and what statements and messages they were by phase. Takes the place of a kernel's time line."""

    phase: str = "start"
    seconds: dict[int, Counter[str]] = field(default_factory=dict)
    gauges: dict[int, dict[str, int]] = field(default_factory=dict)
    statements: dict[str, Counter[str]] = field(default_factory=dict)
    messages: dict[str, Counter[str]] = field(default_factory=dict)
    phases: list[tuple[float, str]] = field(default_factory=list)

    def append(self, line: tuple[float, str, str, str]) -> None:
        """Count a point of the kernel."""
        now, who, kind, text = line
        name = _KINDS.get(kind)
        if name is None:
            return
        self.add(now, name)
        if name == "statements":
            role = who.partition("-")[0]
            self.statements.setdefault(self.phase, Counter())[f"{role}: {text.partition(' (')[0][:60]}"] += 1

    def add(self, now: float, name: str, count: int = 1) -> None:
        """Count in the second of the moment."""
        self.seconds.setdefault(int(now), Counter())[name] += count

    def message(self, now: float, method: str, copies: int) -> None:
        """Count a message with its copies."""
        self.add(now, f"messages {method}", copies)
        self.messages.setdefault(self.phase, Counter())[method] += copies

    def begin(self, now: float, phase: str) -> None:
        """What is counted from now on belongs to another phase."""
        self.phase = phase
        self.phases.append((now, phase))

    def series(self, width: int) -> dict[str, Any]:
        """All counts and gauges, by spans of so many seconds: sums of counts, maxima of gauges."""
        last = max((*self.seconds, *self.gauges)) // width + 1
        found: dict[str, list[int]] = {}
        for second, counts in sorted(self.seconds.items()):
            for name, count in counts.items():
                found.setdefault(name, [0] * last)[second // width] += count
        for second, values in sorted(self.gauges.items()):
            for name, value in values.items():
                of = found.setdefault(name, [0] * last)
                of[second // width] = max(of[second // width], value)
        return {"seconds_each": width, **{name: found[name] for name in sorted(found)}}

    def peak(self, name: str, since: float, until: float) -> int:
        """The most in one second of a time."""
        return max((self.seconds.get(second, Counter())[name] for second in range(int(since), int(until))), default=0)

    def total(self, name: str, since: float, until: float) -> int:
        """The sum over a time."""
        return sum(self.seconds.get(second, Counter())[name] for second in range(int(since), int(until)))


class Scale(Placement):
    """One scenario."""

    def __init__(self, world: World, plan: Plan) -> None:
        super().__init__(world)
        self.plan = plan
        self.hosts = tuple(hosts_of(plan))
        self.schedulers = tuple(f"scheduler-{number}" for number in range(1, plan.schedulers + 1))
        self.curves = Curves()
        self.kernel.timeline = self.curves  # type: ignore[assignment]
        self.kernel.policy = RandomChoice(world.random.schedule, 0.2)
        world.at_refusal = lambda scheduler, fleet, work, began: self._fact("refused")
        world.at_claim = lambda scheduler, work, made: None
        self.convergence: dict[str, float] = {}
        self._requests: list[Any] = []
        #: Requests that were not answered yet.
        self.waiting = 0
        self._ends: list[tuple[float, _History]] = []

    def _fact(self, name: str, count: int = 1) -> None:
        self.facts[name] = self.facts.get(name, 0) + count

    @override
    def check_step(self) -> None:
        """Nothing: the fleet is too large to look at after each commit."""

    # -- the scenario ---------------------------------------------------------------------------------------------

    @override
    def run(self) -> str:
        with self._periods():
            return super().run()

    @contextlib.contextmanager
    def _periods(self) -> Iterator[None]:
        """Production's periods of schedulers, times the stretch; the world would replace them by others."""
        names = ("_REFUSALS", "_STATES", "_HEALING", "_REVERTS", "REFRESH_INTERVAL", "POLL")
        periods = {name: getattr(scheduler_role, name) * self.plan.stretch for name in names}
        # Not a period: how long events gather.
        periods["GATHER"] = sequencer.GATHER
        active = self.world.active

        @contextlib.contextmanager
        def with_periods() -> Iterator[None]:
            with active(), mock.patch.multiple(scheduler_role, **periods):
                yield

        with mock.patch.object(self.world, "active", with_periods):
            yield

    @override
    def begin(self) -> None:
        self.histories = []
        for name in self.schedulers:
            self.start_role(name, SchedulerRole)
        for host in self.hosts:
            self.start_role(host, Agent)

    @override
    def _main(self) -> None:
        self.curves.begin(self.kernel.now, "start")
        self._sample()
        self.begin()
        self._sleep_until(lambda: self._makers.keys() <= self._ready, 3000.0, "the roles did not start")
        for number in range(1, self.plan.apis + 1):
            self._start_api(f"api-{number}")
        self._phase("population")
        self._populate()
        self._settle("population")
        self._watch_quiet("quiet")
        getattr(self, f"_{self.plan.scenario}")()
        self.check()

    def _phase(self, name: str) -> None:
        self.curves.begin(self.kernel.now, name)
        gc.collect()

    def _populate(self) -> None:
        draw = random.Random(f"{self.world.seed}/population")
        for number in range(self.plan.population):
            self._ask(Arrival(0, 0, draw.choice((1, 2, 4)), 1024), forever=True)
            if number % 20 == 19:
                self.kernel.block(None, 0.5, "sleep")
        self._sleep_until(lambda: not self.waiting, 3000.0, "requests were not answered")

    def _replay(self, arrivals: Sequence[Arrival]) -> None:
        """Have the requests arrive, and their instances deleted at their ends."""
        began = self.kernel.now
        last = max((each.at for each in arrivals), default=0.0)
        collected = began
        waits = list(reversed(arrivals))
        while waits or self.kernel.now < began + last:
            now = self.kernel.now - began
            while waits and waits[-1].at <= now:
                self._ask(waits.pop())
            self._delete_due()
            if self.kernel.now > collected + 3600:
                collected = self.kernel.now
                gc.collect()
                self.check_room()
            upcoming = [began + waits[-1].at] if waits else []
            upcoming += [min(each[0] for each in self._ends)] if self._ends else []
            soon = min(upcoming, default=began + last)
            self.kernel.block(None, max(0.05, min(soon - self.kernel.now, 60.0)), "sleep")

    def _delete_due(self) -> None:
        due = [each for each in self._ends if each[0] <= self.kernel.now]
        self._ends = [each for each in self._ends if each[0] > self.kernel.now]
        for _, history in due:
            history.delete_asked = True
            self._give("delete", history)

    def _day(self) -> None:
        """The requests arrive at their times."""
        self._phase("day")
        self._replay(self.plan.arrivals)
        self._sleep_until(lambda: not self.waiting, 3000.0, "requests were not answered")
        self._settle("day")

    def _partition(self) -> None:
        """Half of the services hear nothing of the other half."""
        self._phase("partition")
        names = [each.name for each in self.kernel.processes if each.alive and each.name != "main"]
        one, other = names[::2], names[1::2]
        cuts = {(source, target) for source in one for target in other}
        self.world.network.cuts |= cuts | {(target, source) for source, target in cuts}
        end = self.kernel.now + 2.5 * self.plan.comparison * self.plan.stretch
        self._replay(self.plan.arrivals)
        # The clients are done: what follows are the services' own messages.
        self.kernel.block(None, max(0.0, end - self.kernel.now), "sleep")
        self._sleep_until(lambda: not self.waiting, 3000.0, "requests were not answered")
        self._fact("views that differed", sum(bool(self._difference(name)) for name in self.schedulers))
        self.world.network.cuts.clear()
        self._phase("healed")
        self._settle("healed")
        self._watch_quiet("quiet after healed")

    def _herd(self) -> None:
        """All agents start at one moment, then all schedulers."""
        for name, members in (("agents", self.hosts), ("schedulers", self.schedulers)):
            self._phase(f"restart of {name}")
            self._ready -= set(members)
            for process in [each for each in self.kernel.processes if each.alive]:
                if process.name.partition("#")[0] in members:
                    self.kernel.kill(process)
                    self.kernel.later(1.0, functools.partial(self.restart, process))
            self._sleep_until(lambda: self._makers.keys() <= self._ready, 3000.0, "the roles did not start")
            self._settle(f"restart of {name}")
            self._watch_quiet(f"quiet after restart of {name}")

    def _settle(self, what: str) -> None:
        """Wait until all is at rest; remembers the seconds."""
        began = self.kernel.now
        while why := self.quiet():
            self.require(
                self.kernel.now < began + 1000.0 * self.plan.stretch, f"not at rest after {what}: {why[:2000]}"
            )
            self.kernel.block(None, 0.5, "sleep")
        self.convergence[what] = round(self.kernel.now - began, 1)

    def _watch_quiet(self, phase: str) -> None:
        """Look at the fleet for the time of two comparisons, when what was to follow has followed."""
        self.kernel.block(None, AFTERMATH * self.plan.stretch, "sleep")
        self._phase(phase)
        self.kernel.block(None, 2 * self.plan.comparison * self.plan.stretch, "sleep")

    def _difference(self, name: str) -> bool:
        """Whether the view of a scheduler differs from the store."""
        return bool(self.seen(name) != self.stored())

    # -- requests -------------------------------------------------------------------------------------------------

    def _start_api(self, name: str) -> None:
        process = self.world.process(name)
        queue: Any = threads.queue()
        self._requests.append(queue)

        def begin() -> None:
            platform = self.world.platform(process, "api", beats=False)
            self._watch(platform.transport)
            conf = self.world.conf
            deleter = open_deleter(platform, conf)
            control = conf.control_plane
            schedulers = Schedulers(platform.sender, platform.clock, control.create_attempts, control.create_timeout)
            for number in range(_WORKERS):
                self.world.spawn(
                    process, f"{name}-{number}", lambda: self._serve(queue, schedulers, deleter, platform.clock)
                )

        self.world.spawn(process, name, begin)

    def _ask(self, arrival: Arrival, *, forever: bool = False) -> None:
        draw = self.world.workload()
        made = _History(f"{draw.getrandbits(32):08x}-0000-4000-8000-000000000000", arrival.vcpus, asked=True)
        self.histories.append(made)
        self._give("create", (made, arrival, forever))

    def _give(self, what: str, item: Any) -> None:
        self.waiting += 1
        self._fact(f"{what}s")
        self._requests[self.facts[f"{what}s"] % len(self._requests)].put((what, item))

    def _serve(self, queue: Any, schedulers: Schedulers, deleter: Deleter, clock: Any) -> None:
        while True:
            what, item = queue.get()
            try:
                if what == "create":
                    self._create_one(schedulers, clock, *item)
                else:
                    self._delete_one(deleter, clock, item)
            finally:
                self.waiting -= 1

    def _create_one(self, schedulers: Schedulers, clock: Any, made: _History, arrival: Arrival, forever: bool) -> None:
        resources = {"VCPU": arrival.vcpus, "MEMORY_MB": arrival.memory_mb}
        extra = {"sim:delay_ms": "1000"}
        request = {
            "uuid": made.uuid,
            "flavor": {"flavorid": f"f{arrival.vcpus}", "resources": resources, "extra_specs": extra},
        }
        for attempt in range(10):
            try:
                schedulers.create(request, f"req-{made.uuid}")
            except errors.NoValidHost:
                return
            except errors.MoorageError as error:
                self._fact(f"create: {type(error).__name__}")
                clock.sleep(1.0 + attempt)
                continue
            made.created = True
            if not forever:
                self._ends.append((self.kernel.now + arrival.lifetime, made))
            return

    def _delete_one(self, deleter: Deleter, clock: Any, made: _History) -> None:
        for attempt in range(100):
            try:
                deleter.delete(made.uuid, force=False)
            except errors.NotFound:
                break
            except errors.MoorageError as error:
                self._fact(f"delete: {type(error).__name__}")
                clock.sleep(1.0 + attempt)
                continue
            break
        made.deleted = True

    # -- looking --------------------------------------------------------------------------------------------------

    @override
    def make_platform(self, role: Any, process: Process, name: str) -> Any:
        made = super().make_platform(role, process, name)
        self._watch(made.transport)
        return made

    def _watch(self, transport: Any) -> None:
        """Count what a process sends."""
        fanout, cast, call = transport.fanout, transport.cast, transport.call

        def counted_fanout(topic: str, message: Any) -> None:
            self.curves.message(self.kernel.now, message.method, len(transport.hub.of(topic)))
            fanout(topic, message)

        def counted_cast(topic: str, message: Any, **more: Any) -> None:
            self.curves.message(self.kernel.now, message.method, 1)
            cast(topic, message, **more)

        def counted_call(topic: str, message: Any, **more: Any) -> Any:
            self.curves.message(self.kernel.now, message.method, 1)
            return call(topic, message, **more)

        transport.fanout, transport.cast, transport.call = counted_fanout, counted_cast, counted_call

    def _sample(self) -> None:
        """Looks at all queues each virtual second; waits for nothing."""
        kernel, site = self.kernel, self.world.site
        queues = [each for each in self.world.network._queues.values() if each.requests._clock._process.alive]  # type: ignore[attr-defined]
        loops = [each.loop for host in self.hosts if host in self.roles for each in self.roles[host]._services]
        self.curves.gauges[int(kernel.now)] = {
            "waiting requests": self.waiting,
            "waiting messages": sum(each.requests.waiting + each.fanouts.waiting for each in queues),
            "longest queue of messages": max(
                (max(each.requests.waiting, each.fanouts.waiting) for each in queues), default=0
            ),
            "waiting writers": len(site.turn._waiters),  # type: ignore[attr-defined]
            "waiting operations": sum(len(each._waiting._told_at) for each in loops),
            "ready threads": len(kernel.ready),
        }
        kernel.later(1.0, self._sample)


class Law(NamedTuple):
    """A bound of the load."""

    name: str
    measured: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the load is within the bound."""
        return self.measured <= self.bound


def laws(scale: Scale) -> list[Law]:
    """The laws of the scenario, with what was measured. They hold for fleets of any size from about 20 agents on."""
    plan, curves = scale.plan, scale.curves
    spans = {
        name: (since, until)
        for (since, name), (until, _) in zip(curves.phases, [*curves.phases[1:], (scale.kernel.now, "")], strict=True)
    }
    pairs = plan.agents * plan.schedulers
    gauges = list(curves.gauges.values())
    waiting = [number for name, number in gauges[-1].items() if name != "ready threads"]
    # A thread of periodic work may just be ready in one sample. Threads that do not come to rest are ready in all of them.
    waiting.append(min(each["ready threads"] for each in gauges[-5:]))
    found = [Law("nothing waits at the end", max(waiting), 0)]

    def mean(name: str, phase: str) -> float:
        since, until = spans[phase]
        return curves.total(name, since, until) / (int(until) - int(since))

    for phase in (each for each in spans if each.startswith("quiet") and plan.scenario != "day"):
        # Services that were started together do not do their periodic work together.
        for name, times in (("statements", 3), ("transactions", 5)):
            peak = curves.peak(name, *spans[phase])
            found.append(Law(f"{phase}: busiest second, {name}", peak, times * mean(name, phase)))
    if plan.scenario == "partition":
        since, until = spans["healed"][0], spans["quiet after healed"][0]
        periods = (until - since) / (plan.comparison * plan.stretch)
        # Each agent compares with each scheduler once a period. Half of the schedulers missed something of an agent: each asks
        # once, and an answer goes to all schedulers. That grows neither with the instances nor with the messages that were missed.
        bound = pairs * (periods + 1 + (1 + plan.schedulers) / 2)
        found.append(Law("healed: messages", curves.total("sends", since, until), bound))
        found.append(Law("healed: busiest second, messages", curves.peak("sends", since, until), 0.4 * pairs))
        found.append(
            Law(
                "healed: seconds until views converge",
                scale.convergence["healed"],
                (plan.comparison + 15) * plan.stretch,
            )
        )
        found.append(
            Law("healed: statements a second", mean("statements", "healed"), 1.5 * mean("statements", "quiet"))
        )
    elif plan.scenario == "herd":
        # However many nodes and instances there are: an agent reads its own by one statement each. A scheduler reads the fleet by
        # pages of 1,000 nodes.
        starts = (("agents", plan.agents, 25), ("schedulers", plan.schedulers, 60 + plan.nodes / 100))
        for members, count, most in starts:
            since, until = spans[f"restart of {members}"][0], spans[f"quiet after restart of {members}"][0]
            idle = mean("statements", "quiet") * (until - since)
            extra = curves.total("statements", since, until) - idle
            found.append(Law(f"restart of {members}: statements of each", extra / count, most))
            # Each agent speaks at its start, and once when asked: what several schedulers ask at once is answered once.
            bound = pairs * ((until - since) / (plan.comparison * plan.stretch) + 3)
            found.append(Law(f"restart of {members}: messages", curves.total("sends", since, until), bound))
    else:
        since, until = spans["day"]
        extra = curves.total("statements", since, until) - mean("statements", "quiet") * (until - since)
        requests = scale.facts["creates"] + scale.facts["deletes"] - plan.population
        found.append(Law("day: statements of each request", extra / requests, 40))
        found.append(Law("day: requests that wait", max(each["waiting requests"] for each in gauges), 200))
    return found


def run(plan: Plan, seed: str = "1") -> dict[str, Any]:
    """Run a scenario, and say what came of it."""
    base = Base(settings(plan), functools.partial(enrol, plan))
    scale = Scale(World(base, f"scale/{seed}", 1), plan)
    began, verdict, trace = time.perf_counter(), "", ""
    try:
        trace = scale.run()
    except (Violation, Stalled) as error:
        verdict = f"{type(error).__name__}: {error}"
    judged = [] if verdict else laws(scale)
    return {
        "scenario": plan.scenario,
        "seed": seed,
        "nodes": plan.nodes,
        "agents": plan.agents,
        "schedulers": plan.schedulers,
        "population": plan.population,
        "stretch": plan.stretch,
        "verdict": verdict[:4000],
        "laws": [{**each._asdict(), "holds": each.holds} for each in judged],
        "seconds": round(time.perf_counter() - began, 1),
        "virtual_seconds": round(scale.kernel.now, 1),
        "steps": scale.kernel.steps,
        "trace": trace,
        "facts": scale.facts,
        "seconds_until_rest": scale.convergence,
        "phases": [{"at": round(at, 1), "phase": phase} for at, phase in scale.curves.phases],
        "messages": {phase: dict(counts.most_common()) for phase, counts in scale.curves.messages.items()},
        "statements": {phase: dict(counts.most_common(20)) for phase, counts in scale.curves.statements.items()},
        "curves": scale.curves.series(60 if plan.scenario == "day" else 1),
    }


class _NoJitter(random.Random):
    """Draws the largest number."""

    @override
    def uniform(self, a: float, b: float) -> float:
        return b


def _together() -> None:
    source = types.SimpleNamespace(generator=_NoJitter)
    for module in (agent_role, cleanup_endpoints, heartbeat):
        setattr(module, "randomness", source)  # noqa: B010  (three modules, whose attribute is an import)


def _answered_apart() -> None:
    @rpc_method
    def sync_instances(self: Agent, soon: bool = False) -> None:
        self._tell_instances()

    Agent.sync_instances = sync_instances  # type: ignore[method-assign]


def _told_apart() -> None:
    """Has agents report each instance by a message of its own before each comparison."""
    tell = ComputeAgent._tell

    def tell_apart(self: Any) -> None:
        for each in self._tools.instances.by_hosts([self._tools.identity.host]):
            self._tools.reporter.created([each])
        tell(self)

    ComputeAgent._tell = tell_apart  # type: ignore[method-assign]


#: Errors to plant, which the laws must find.
MISTAKES: Mapping[str, Callable[[], None]] = {
    "services that were started together work together": _together,
    "each scheduler that starts is answered apart": _answered_apart,
    "a comparison tells each instance by itself": _told_apart,
}


def main() -> int:
    """Run what the arguments ask for; 1 when an invariant or a law was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.scale", description="Runs a large fleet in virtual time."
    )
    parser.add_argument("scenario", choices=("day", "partition", "herd"))
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--schedulers", type=int, default=3)
    parser.add_argument("--population", type=int, default=1000, help="instances that exist before the scenario begins")
    parser.add_argument("--stretch", type=float, help="of all periods; default: 24 for a day, else 1")
    parser.add_argument("--arrivals", type=int, default=300, help="requests during a partition")
    parser.add_argument("--comparison", type=float, default=120.0, help="seconds between comparisons of instances")
    parser.add_argument("--requests", type=Path, default=DATA / "requests_surf_month.csv.gz", help="for a day")
    parser.add_argument("--day", type=int, default=12, help="which day of these requests")
    parser.add_argument("--seed", default="1")
    parser.add_argument(
        "--mistake",
        choices=sorted(MISTAKES),
        action="append",
        default=[],
        help="plant this error, which the laws must find",
    )
    parser.add_argument("--no-curves", action="store_true", help="leave the curves out of the output")
    options = parser.parse_args()
    runner.pinned()
    logging.disable(logging.CRITICAL)
    threading.stack_size(512 * 1024)
    # Each simulated process has connections of its own.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for each in options.mistake:
        MISTAKES[each]()
    day = options.scenario == "day"
    plan = Plan(
        options.scenario,
        nodes=options.nodes,
        agents=options.agents,
        schedulers=options.schedulers,
        population=options.population,
        arrivals=recorded(options.requests, options.day)
        if day
        else drawn(options.seed, options.arrivals, 2.0 * options.comparison),
        stretch=options.stretch or (24.0 if day else 1.0),
        comparison=options.comparison,
    )
    result = run(plan, options.seed)
    if options.no_curves:
        del result["curves"]
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    sys.stdout.flush()
    # Thousands of threads wait for ever, and nobody joins them.
    os._exit(int(bool(result["verdict"]) or not all(each["holds"] for each in result["laws"])))


if __name__ == "__main__":
    sys.exit(main())
