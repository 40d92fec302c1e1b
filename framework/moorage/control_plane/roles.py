# SPDX-License-Identifier: Apache-2.0
"""The four roles. Each is wired here from the families; a process runs one of them (see :mod:`moorage.control_plane.process`)."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors
from moorage.allocation.interface import DETECTORS, STORES, AllocationStore, OrphanDetector
from moorage.cleanup.workers import WorkerStore
from moorage.clock import Clock
from moorage.control_plane.cleaning import AgentCleaning, SupervisorEndpoint
from moorage.control_plane.enrolment import StoreFleet
from moorage.control_plane.interface import AGENT_SERVICES, INSTANCE_STORES, AgentService, AgentTools, InstanceStore
from moorage.control_plane.observing import ObservedClaimer, of_decision
from moorage.control_plane.operations import InPlace, MoveClaimer, MovesEndpoint
from moorage.control_plane.periodic import PeriodicWork
from moorage.control_plane.periodic import check as check_periodic
from moorage.control_plane.placing import StoreClaimer, cast_to_agent, check_store
from moorage.control_plane.process import Platform
from moorage.db import Database
from moorage.fleet.aggregates import AggregateStore
from moorage.fleet.interface import Node, check_shard
from moorage.fleet.nodes import NodeStore
from moorage.rpc.interface import Subscription
from moorage.rpc.server import Dispatcher, endpoints_of, rpc_method
from moorage.scheduling import pipeline
from moorage.scheduling.decisions import StoredRefusals
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.guard import Guard
from moorage.scheduling.healing import Healer, SilentHosts
from moorage.scheduling.incidents import StoredIncidents
from moorage.scheduling.interface import declared_fields
from moorage.scheduling.options import sync_seconds
from moorage.scheduling.reporter import AGENTS, Reporter
from moorage.scheduling.reporter import TOPIC as SCHEDULERS
from moorage.scheduling.rpc import SchedulerEndpoint
from moorage.scheduling.scheduler import Policy, Scheduler, Selection
from moorage.scheduling.tracking import InstanceTracker, record_to_json
from moorage.services.heartbeat import LivenessObserver

__all__ = [
    "Agent",
    "Engine",
    "Periodic",
    "SchedulerRole",
    "load_store",
    "open_detectors",
    "open_instances",
    "open_store",
    "open_workers",
]

LOG = logging.getLogger(__name__)
ENGINES = "engine"
_PAGE = 1000
#: Seconds between writings of refusals.
_REFUSALS = 1.0
#: Seconds between looks at the hosts whose view is in doubt.
_HEALING = 0.5


def open_store(platform: Platform, conf: cfg.ConfigOpts) -> AllocationStore:
    """The allocation store that the configuration names."""
    return load_store(conf, platform.database, platform.clock)


def open_detectors(platform: Platform, conf: cfg.ConfigOpts) -> list[OrphanDetector]:
    """The detectors of orphans that the configuration names."""
    found: list[OrphanDetector] = []
    for each in DETECTORS.load_all(conf.allocation.orphan_detectors):
        found.append(each.build(conf=conf, database=platform.database, clock=platform.clock))
    return found


def load_store(conf: cfg.ConfigOpts, database: Database, clock: Clock) -> AllocationStore:
    """The same, where there is no role."""
    loaded = STORES.load(conf.allocation.store)
    opened = loaded.build(conf=conf, database=database, clock=clock)
    check_store(opened, loaded.name)
    return opened


def open_instances(platform: Platform, conf: cfg.ConfigOpts) -> InstanceStore:
    """The store of instances that the configuration names."""
    loaded = INSTANCE_STORES.load(conf.control_plane.instance_store)
    return loaded.build(conf=conf, database=platform.database, clock=platform.clock)


def open_workers(platform: Platform, conf: cfg.ConfigOpts) -> WorkerStore:
    """The leases of operations."""
    return WorkerStore(platform.database, lease_seconds=conf.cleanup.lease_seconds)


def nodes_of_agent(nodes: NodeStore, host: str, my_shard: str | None) -> Callable[[], Iterable[Node]]:
    """What an agent works on, read by pages each time: its shard where it has one, else its host.

    :raises ConfigError: ``my_shard`` is no name of a shard; it is not taken for "everything".
    """
    if my_shard is not None:
        try:
            check_shard(my_shard, "[sharding] my_shard")
        except errors.InvalidInput as error:
            raise errors.ConfigError(error.message) from error
    chosen: dict[str, Any] = {"host": host} if my_shard is None else {"shard": my_shard}

    def read() -> Iterable[Node]:
        after = ""
        while True:
            page = nodes.list(after=after, limit=_PAGE, **chosen)
            yield from page
            if len(page) < _PAGE:
                return
            after = page[-1].uuid

    return read


class Periodic:
    """Calls a function again and again in a thread of its own; an error is told in the log and ends nothing.

    :param first: seconds before the first call, ``seconds`` unless said.
    """

    def __init__(
        self, platform: Platform, name: str, work: Callable[[], object], seconds: float, *, first: float | None = None
    ) -> None:
        self._clock = platform.clock
        self._name = name
        self._work = work
        self._seconds = seconds
        self._first = seconds if first is None else first
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Call it no more; waits for a call that runs."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        seconds = self._first
        while not self._clock.wait(self._stop, seconds):
            seconds = self._seconds
            _attempt(self._name, self._work)


def _attempt(name: str, work: Callable[[], object]) -> None:
    try:
        work()
    except errors.Unavailable as error:
        LOG.warning("%s is put off: %s", name, error.message)
    except Exception:
        LOG.exception("%s failed.", name)


class SchedulerRole:
    """Selects and claims."""

    binary = "scheduler"
    owns_work = True

    def start(self, platform: Platform, conf: cfg.ConfigOpts) -> None:
        """Load the fleet and the instances, then serve."""
        self._platform = platform
        self._incidents = StoredIncidents(platform.database, platform.clock)
        self._policy = self._make_policy(conf)
        section = conf.scheduling
        store, instances = open_store(platform, conf), open_instances(platform, conf)
        observer = LivenessObserver(platform.clock, conf.services.service_down_time)
        aggregates = AggregateStore(platform.database)
        source = StoreFleet(NodeStore(platform.database), store, platform.registry, observer, aggregates)
        view = FleetView(tracked=section.track_instance_changes)
        tracker = InstanceTracker(view, platform.clock)
        silent = SilentHosts(tracker, instances, platform.clock, max_age=section.silent_hosts_age)
        cast = cast_to_agent(platform.sender)
        groups = GroupStore(platform.database)
        claimer = StoreClaimer(store, instances, open_workers(platform, conf), source, groups, platform.database, cast)
        refused = StoredRefusals(platform.database)
        self._scheduler = Scheduler(
            view,
            source,
            ObservedClaimer(claimer, platform.tell),
            lambda: self._policy,
            platform.clock,
            random.Random(),  # noqa: S311  (spreads equal choices, no secret)
            decisions=section.decisions,
            reserver=tracker if section.track_instance_changes else None,
            refused=refused,
            freshen=silent.freshen if section.track_instance_changes else None,
            decided=lambda decision: platform.tell(of_decision(decision)),
        )

        def placed(selection: Selection) -> None:
            cast(selection.record.host, "build_instance", selection.record.uuid)
            if section.track_instance_changes and not selection.repeated:
                tell_of_claim(platform, selection)

        endpoint = SchedulerEndpoint(self._scheduler, tracker, placed, enabled=section.track_instance_changes)
        workers = open_workers(platform, conf)
        moves = MovesEndpoint(
            self._scheduler,
            lambda of, how: ObservedClaimer(
                MoveClaimer(store, instances, workers, source, groups, of, how), platform.tell
            ),
            instances,
            InPlace(platform.database, instances, workers, cast),
        )
        self._cleanup = SupervisorEndpoint(platform, conf, open_workers(platform, conf), observer)
        # Messages are applied while instances are being loaded; the loader does not overwrite them.
        self._subscription = platform.transport.serve(
            SCHEDULERS,
            platform.name,
            Dispatcher(endpoints_of(endpoint, moves, self._cleanup)),
            threads=conf.rpc.threads,
        )
        self._scheduler.refresh()
        self._periodic: list[Periodic] = []
        if section.track_instance_changes:
            began = platform.clock.monotonic()
            LOG.info("%d instances were loaded.", tracker.load(instances))
            silent.loaded(began)
            healer = Healer(tracker, instances, ask_agent(platform), platform.clock, timeout=section.heal_timeout)
            self._periodic.append(Periodic(platform, "healing of the view", healer.tick, _HEALING))
            ask_agents(platform)
        endpoint.open()
        # What was read at the start stays: it need not be looked at by each collection of garbage.
        gc.collect()
        gc.freeze()
        self._periodic.append(Periodic(platform, "writing of refusals", refused.flush, _REFUSALS))
        self._periodic.append(
            Periodic(platform, "sample of services", self._cleanup.sample, conf.services.service_down_time)
        )
        self._periodic.append(
            Periodic(platform, "refresh of the fleet", self._scheduler.refresh, section.refresh_interval)
        )

    def reload(self, conf: cfg.ConfigOpts) -> None:
        """New filters, weighers and limits, all or (by an error) none; a request keeps what it began with."""
        self._policy = self._make_policy(conf)
        self._cleanup.reload(conf)

    def stop(self, drain_seconds: float) -> None:
        """End."""
        self._subscription.stop(drain_seconds)
        for each in self._periodic:
            each.stop()
        self._policy.guard.close()

    def _make_policy(self, conf: cfg.ConfigOpts) -> Policy:
        section = conf.scheduling
        guard = Guard(
            self._platform.clock,
            self._incidents,
            self._platform.fatal,
            deadline=section.plugin_deadline,
            threshold=section.breaker_threshold,
            window=section.breaker_window,
            skip_advisory=section.advisory_errors == "skip",
            threads=conf.rpc.threads,
        )
        return Policy(
            pipeline.load(conf),
            guard,
            section.host_subset_size,
            section.max_attempts,
            section.alternates,
            section.shuffle_best_same_weighed_hosts,
        )


def tell_of_claim(platform: Platform, selection: Selection) -> None:
    """Let the other schedulers know at once, so that they do not try the same room in vain."""
    try:
        args = {"host_name": selection.record.host, "instance": record_to_json(selection.record)}
        platform.sender.fanout(SCHEDULERS, "claimed_instance", args)
    except errors.TransportError as error:
        LOG.debug("Other schedulers were not told of a claim: %s", error)


def ask_agent(platform: Platform) -> Callable[[str, str], None]:
    """A function that tells the agent of a host to do something; raises TransportError where nobody heard it."""

    def ask(host: str, method: str) -> None:
        platform.sender.cast(AGENTS, method, {}, server=host)

    return ask


def ask_agents(platform: Platform) -> None:
    """Have all agents speak soon, so that this scheduler, which has just started, can trust what it has loaded."""
    try:
        platform.sender.fanout(AGENTS, "sync_instances", {"soon": True})
    except errors.TransportError as error:
        LOG.info("Agents were not asked to speak (%s); they do so by themselves.", error)


class Agent:
    """Does operations for one host."""

    binary = "agent"
    owns_work = True

    def start(self, platform: Platform, conf: cfg.ConfigOpts) -> None:
        """Finish what an earlier epoch left, then serve."""
        store = open_store(platform, conf)
        reporter = Reporter(
            platform.sender,
            platform.name,
            enabled=conf.scheduling.track_instance_changes,
            fields=declared_fields(conf),
        )
        tools = AgentTools(
            conf=conf,
            clock=platform.clock,
            database=platform.database,
            identity=platform.identity,
            workers=open_workers(platform, conf),
            instances=open_instances(platform, conf),
            release=store.release,
            reporter=reporter,
            nodes=nodes_of_agent(NodeStore(platform.database), platform.name, conf.sharding.my_shard),
            store=store,
            cast=cast_to_agent(platform.sender),
            tell=platform.tell,
        )
        self._cleaning = AgentCleaning(platform, conf, tools, open_workers(platform, conf))
        self._services: list[AgentService] = [
            loaded.build(tools) for loaded in AGENT_SERVICES.load_all(conf.agent.services)
        ]
        endpoints = [endpoint for service in self._services for endpoint in service.endpoints()]
        self._soon = threading.Event()
        self._subscription: Subscription = platform.transport.serve(
            AGENTS, platform.name, Dispatcher(endpoints_of(self, self._cleaning, *endpoints)), threads=conf.rpc.threads
        )
        for service in self._services:
            service.start()
        self._cleaning.start()
        self._periodic = [Periodic(platform, "sweep", self._sweep_all, conf.agent.sweep_interval)]
        seconds = sync_seconds(conf)
        if seconds is not None:
            # Agents that were started together must not all speak at once.
            first = random.uniform(0, seconds)  # noqa: S311  (no secret)
            self._periodic.append(
                Periodic(platform, "comparison of instances", self._tell_instances, seconds, first=first)
            )

    @rpc_method
    def sync_instances(self, soon: bool = False) -> None:
        """Have schedulers compare; with ``soon`` at the next sweep, so that not all agents read the store at once."""
        if soon:
            self._soon.set()
        else:
            self._tell_instances()

    @rpc_method
    def report_instances(self) -> None:
        """Tell all schedulers all instances of this host."""
        self._tell_instances(everything=True)

    def _tell_instances(self, *, everything: bool = False) -> None:
        for service in self._services:
            service.tell_instances(everything=everything)

    def reload(self, conf: cfg.ConfigOpts) -> None:
        """How it cleans; nothing else changes without a restart, the plugins are checked all the same."""
        AGENT_SERVICES.load_all(conf.agent.services)
        self._cleaning.reload(conf)

    def stop(self, drain_seconds: float) -> None:
        """Take nothing new, end what runs."""
        self._subscription.stop(drain_seconds)
        for each in self._periodic:
            each.stop()
        self._cleaning.stop()
        for service in self._services:
            service.stop()

    def _sweep_all(self) -> None:
        for service in self._services:
            # One that fails holds up no other one.
            _attempt(f"sweep of {type(service).__name__}", service.sweep)
        if self._soon.is_set():
            self._soon.clear()
            self._tell_instances()


class Engine:
    """Does its share of the periodic work."""

    binary = "engine"
    owns_work = True

    def start(self, platform: Platform, conf: cfg.ConfigOpts) -> None:
        """Begin."""
        self._work = PeriodicWork(platform, conf)
        self._work.start()
        self._subscription = platform.transport.serve(ENGINES, platform.name, Dispatcher(endpoints_of(_Ping())))

    def reload(self, conf: cfg.ConfigOpts) -> None:
        """Nothing of an engine changes without a restart; the configuration is checked all the same."""
        check_periodic(conf)

    def stop(self, drain_seconds: float) -> None:
        """End."""
        self._subscription.stop(drain_seconds)
        self._work.stop(drain_seconds)


class _Ping:
    """Lets others see that an engine answers."""

    @rpc_method
    def ping(self) -> Mapping[str, str]:
        """An answer."""
        return {"answer": "pong"}


def tell_schedulers(platform: Platform) -> Callable[[], None]:
    """A function that has all schedulers read the fleet anew."""

    def tell() -> None:
        try:
            platform.sender.fanout(SCHEDULERS, "fleet_changed")
        except errors.TransportError as error:
            LOG.info("No scheduler was told of new nodes (%s); they read them by themselves.", error)

    return tell
