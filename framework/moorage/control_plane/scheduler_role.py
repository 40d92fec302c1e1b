# SPDX-License-Identifier: Apache-2.0
"""Wires the role ``scheduler`` from the families. A scheduler selects nodes and claims resources."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from oslo_config import cfg
from oslo_log import log as logging

from moorage import randomness, threads
from moorage.control_plane.cleanup_endpoints import CleanupEndpoint
from moorage.control_plane.factories import open_instances, open_store, open_workers
from moorage.control_plane.notifications import PlacementNotices, ask_agent, ask_agents
from moorage.control_plane.observing import of_decision
from moorage.control_plane.periodic_loop import Look, PeriodicLoop, SharedLook, run_logged
from moorage.control_plane.process import Platform, without_collection
from moorage.control_plane.store_fleet import StoreFleet
from moorage.fleet.aggregates import AggregateStore
from moorage.fleet.nodes import NodeStore
from moorage.instances.agent_messages import AgentMessages, cast_to_agent
from moorage.instances.availability import Availability
from moorage.instances.build_retries import BuildRetries, RetryStores
from moorage.instances.create import StoreClaimer, read_fields, read_residents
from moorage.instances.in_place import InPlace
from moorage.instances.interface import holds_of
from moorage.instances.move_claims import MoveClaimer
from moorage.instances.move_requests import MovesEndpoint
from moorage.instances.move_reverts import MoveReverts
from moorage.instances.observed_claims import ObservedClaimer, ObservedSetClaimer
from moorage.journal.sequencer import GATHER, LONGEST_REST, POLL, REST, Sequencer
from moorage.rpc.server import RpcDispatcher, endpoints_of
from moorage.scheduling import filter_and_weigh
from moorage.scheduling.decisions import StoredRefusals
from moorage.scheduling.epochs import ConfirmedEpochs
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.instance_fields import declared_fields
from moorage.scheduling.instance_tracker import InstanceTracker
from moorage.scheduling.plugin_failures import REFRESH_INTERVAL, StoredPluginFailures
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.scheduling.reporter import TOPIC as SCHEDULERS
from moorage.scheduling.reservations import Reservations
from moorage.scheduling.rpc import SchedulerEndpoint
from moorage.scheduling.scheduler import Scheduler
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage.scheduling.shared_placements import SharedPlacements
from moorage.scheduling.view_repair import UntrackedHosts, ViewReconciler
from moorage.services.liveness import LivenessObserver

__all__ = ["SchedulerRole"]

LOG = logging.getLogger(__name__)
#: Seconds between writings of refusals.
_REFUSALS = 1.0
#: Seconds between readings of the states of agents and nodes.
_STATES = 1.0
#: Seconds between looks for moves that wait for a dead destination.
_REVERTS = 10.0
_NUMBERING = "numbering of events"
#: Seconds between looks at the hosts whose view is in doubt.
_HEALING = 1.0


class SchedulerRole:
    """Selects and claims."""

    binary = "scheduler"
    owns_work = True

    def start(self, platform: Platform, conf: cfg.ConfigOpts) -> None:
        """Load the fleet and the instances, then serve."""
        self._platform = platform
        self._incidents = StoredPluginFailures(platform.database, lambda: self._breaker_window)
        self._policy = self._make_policy(conf)
        self._incidents.refresh()
        section = conf.scheduling
        store, instances = open_store(platform, conf), open_instances(platform, conf)
        observer = LivenessObserver(platform.clock, conf.services.service_down_time)
        aggregates = AggregateStore(platform.database)
        availability = Availability(platform.database, conf.services.service_down_time)
        source = StoreFleet(
            NodeStore(platform.database), store, availability, aggregates, lambda: self._scheduler.rest()
        )
        view = FleetView(tracked=section.track_instance_changes, step_rule=conf.allocation.step_size_rule)
        epochs = ConfirmedEpochs(platform.registry.epochs, platform.clock)
        reservations = Reservations()
        tracker = InstanceTracker(view, platform.clock, epochs, reservations.instances)
        silent = UntrackedHosts(tracker, instances, platform.clock, max_age=section.silent_hosts_age)
        cast = cast_to_agent(platform.sender)
        groups = GroupStore(platform.database)
        claimer = StoreClaimer(
            store, instances, open_workers(platform, conf), source, groups, availability, platform.database, cast,
            lambda: self._policy.alternates,
        )  # fmt: skip
        refused = StoredRefusals(platform.database)
        self._scheduler = Scheduler(
            view,
            source,
            ObservedSetClaimer(claimer, platform.tell),
            lambda: self._policy,
            platform.clock,
            randomness.generator(),
            decisions=section.decisions,
            reserver=tracker if section.track_instance_changes else None,
            refused=refused,
            freshen=silent.freshen if section.track_instance_changes else None,
            decided=lambda decision: platform.tell(of_decision(decision)),
            residents=read_residents(platform.database, store, instances),
            fields=read_fields(declared_fields(conf), platform.clock),
            lacking=availability.lacking,
            recount=functools.partial(tracker.reload_hosts, instances) if section.track_instance_changes else None,
            reservations=reservations,
        )

        messages = AgentMessages(cast, availability.lacking, platform.clock)
        self._notices = PlacementNotices(platform, messages, to_schedulers=section.track_instance_changes)
        placed = self._notices.add
        placements = SharedPlacements(self._scheduler, placed, store.claims_together, store.lanes)
        endpoint = SchedulerEndpoint(self._scheduler, tracker, placements, enabled=section.track_instance_changes)
        workers = open_workers(platform, conf)
        in_place = InPlace(platform.database, instances, workers, cast, availability.lacking)
        moves = MovesEndpoint(
            self._scheduler,
            lambda of, how: ObservedClaimer(
                MoveClaimer(store, instances, workers, source, groups, availability, platform.registry, of, how),
                platform.tell,
            ),
            instances,
            in_place,
            functools.partial(holds_of, store),
        )
        self._cleanup = CleanupEndpoint(platform, conf, open_workers(platform, conf), observer)
        # Messages are applied while instances are being loaded; the loader does not overwrite them.
        self._subscription = platform.transport.serve(
            SCHEDULERS,
            platform.name,
            RpcDispatcher(endpoints_of(endpoint, moves, self._cleanup)),
            threads=conf.rpc.threads,
        )
        self._periodic: list[PeriodicLoop] = []
        self._looks: dict[str, tuple[float, Look]] = {}
        with without_collection():
            self._scheduler.refresh()
            if section.track_instance_changes:
                began = platform.clock.monotonic()
                LOG.info("%d instances were loaded.", tracker.load(instances))
                silent.loaded(began)
        if section.track_instance_changes:
            healer = ViewReconciler(
                tracker, instances, ask_agent(platform), platform.clock, timeout=section.heal_timeout
            )
            self._on_demand("healing of the view", healer.tick, _HEALING, lambda transaction: healer.is_due)
            ask_agents(platform)
        endpoint.open()
        self._looks["count of hangs"] = REFRESH_INTERVAL, self._incidents.refresh_in
        self._on_demand("writing of refusals", refused.flush, _REFUSALS, lambda transaction: refused.waits)
        self._periodic.append(
            PeriodicLoop(platform, "sample of services", self._cleanup.sample, conf.services.service_down_time)
        )
        self._periodic.append(
            # Apart from the samples, which must not wait for it.
            PeriodicLoop(
                platform, "purge of the history of cleanup", self._cleanup.purge, conf.services.service_down_time
            )
        )
        self._sequencer = Sequencer(platform.database)
        recorded = platform.database.recorded
        self._on_demand(_NUMBERING, self._number_and_rest, POLL, self._sequencer.waits, wake=recorded, gather=GATHER)
        stores = RetryStores(platform.database, store, instances, workers, source, groups, availability)
        retries = BuildRetries(stores, self._scheduler, platform.clock, view.down_hosts, placed, cast, platform.tell)
        self._on_demand("retries of builds", retries.tick, _STATES, retries.found)
        reverts = MoveReverts(in_place, platform.clock)
        self._on_demand("reverts of moves", reverts.tick, _REVERTS, reverts.found)

        def read_states(transaction: Any) -> Callable[[], None]:
            # Not the present moment: the transaction sees what was committed when it began.
            read_at = self._look.began
            states = source.unavailable(transaction)
            return lambda: self._scheduler.apply_states(states, read_at)

        self._looks["states of agents and nodes"] = _STATES, read_states
        self._periodic.append(
            PeriodicLoop(
                platform,
                "refresh of the fleet",
                functools.partial(self._scheduler.refresh, gently=True),
                section.refresh_interval,
            )
        )
        # Schedulers that were started together look at different moments, so that one of them finds a build first.
        first = randomness.generator().uniform(0, _STATES)
        self._look = SharedLook(platform, self._looks, first=first)
        self._look.start()

    def _on_demand(
        self,
        name: str,
        work: Callable[[], object],
        seconds: float,
        is_due: Callable[[Any], bool],
        *,
        wake: threads.Event | None = None,
        gather: float = 0.0,
    ) -> None:
        """Call a function in a thread of its own when there is something to do.

        :param seconds: between two looks.
        :param is_due: whether there is, as a transaction shows. It is called in the thread that looks for all of them.
        """
        wake = wake or threads.event()
        self._periodic.append(PeriodicLoop(self._platform, name, work, None, wake=wake, gather=gather))
        self._looks[name] = seconds, lambda transaction: wake.set if is_due(transaction) else None

    def _number_and_rest(self) -> None:
        """Numbers events, then sleeps for a multiple of the time that this took."""
        clock = self._platform.clock
        began = clock.monotonic()
        self._sequencer.number()
        clock.sleep(min(LONGEST_REST, REST * (clock.monotonic() - began)))

    def reload(self, conf: cfg.ConfigOpts) -> None:
        """New filters, weighers and limits, all or (by an error) none; a request keeps what it began with."""
        self._policy = self._make_policy(conf)
        self._cleanup.reload(conf)

    def stop(self, drain_seconds: float) -> None:
        """End."""
        self._subscription.stop(drain_seconds)
        self._cleanup.stop()
        self._notices.stop()
        self._look.stop()
        self._scheduler.stop()
        for each in self._periodic:
            each.stop()
        # What was recorded until now need not wait for another scheduler.
        run_logged(_NUMBERING, self._sequencer.number)
        self._policy.guard.close()

    def _make_policy(self, conf: cfg.ConfigOpts) -> SchedulingPolicy:
        section = conf.scheduling
        loaded = filter_and_weigh.load(conf)
        if loaded.not_alone:
            LOG.info(
                "Each request is ranked by itself, which costs more than ranking requests alike together: %s do not declare "
                "judges_alone or weighs_alone, or promise limits.",
                ", ".join(loaded.not_alone),
            )
        elif loaded.reads_owner:
            LOG.info(
                "Only requests of the same project and user are ranked together: %s do not declare ignores_owner.",
                ", ".join(loaded.reads_owner),
            )
        self._breaker_window = section.breaker_window
        guard = PluginRunner(
            self._platform.clock,
            self._incidents,
            self._platform.fatal,
            deadline=section.plugin_deadline,
            threshold=section.breaker_threshold,
            window=section.breaker_window,
            skip_advisory=section.advisory_errors == "skip",
            threads=conf.rpc.threads,
        )
        return SchedulingPolicy(
            loaded,
            guard,
            section.host_subset_size,
            section.max_attempts,
            section.alternates,
            section.shuffle_best_same_weighed_hosts,
            section.sample_above,
        )
