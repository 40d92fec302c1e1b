# SPDX-License-Identifier: Apache-2.0
"""Cleanup in the roles: the coordinator in schedulers, the cleaner in agents."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors, plugin_isolation, randomness, threads
from moorage.cleanup.cleaner import Cleaner, Policy
from moorage.cleanup.conditions import (
    ExpiredLease,
    NeverStarted,
    OrphanSelector,
    OrphansOfService,
)
from moorage.cleanup.coordinator import CleanupCoordinator, CleanupFilter
from moorage.cleanup.dry_run import Key
from moorage.cleanup.interface import CLEANUP_HANDLERS, CleanupHandler, CleanupTools
from moorage.cleanup.orphans import OrphanStore
from moorage.cleanup.requests import CleanupRequest, RequestStore
from moorage.cleanup.views import Forecast, OperationViews
from moorage.control_plane.observing import of_service, tell_of_request
from moorage.control_plane.process import Platform
from moorage.extensions import Loaded
from moorage.instances.agent_messages import AGENT_TOPIC
from moorage.observers.interface import CleanupFinished
from moorage.rpc.server import rpc_method
from moorage.scheduling.reporter import TOPIC as SCHEDULERS
from moorage.services.interface import Service
from moorage.services.liveness import LivenessObserver
from moorage.work.fences import FencePurge
from moorage.work.interface import Operation
from moorage.work.operations import SqlOperationStore

__all__ = ["AgentCleaning", "CleanupEndpoint", "check"]

LOG = logging.getLogger(__name__)
#: Seconds for which the end of what is being cleaned is waited for when the agent stops.
_PATIENCE = 10.0
#: Sweeps that an operation must have waited for before it counts as unclaimed.
_SWEEPS = 3


def check(conf: cfg.ConfigOpts) -> Sequence[Loaded[CleanupHandler]]:
    """Returns the enabled handlers; refuses a configuration that no agent could clean with.

    :raises ConfigError: a handler or a number cannot be used, or an option names a type that no installed handler cleans.
    """
    loaded = CLEANUP_HANDLERS.load_all(conf.cleanup.enabled_handlers)
    policy = Policy.from_config(conf.cleanup)
    known = CLEANUP_HANDLERS.installed()
    for option, names in (("paused", policy.paused - {"*"}), ("limits", policy.limits or {})):
        for name in sorted(names):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                meant = f" {near[0]} was meant?" if near else ""
                raise errors.ConfigError(f"[cleanup] {option} names {name}, which no installed handler cleans.{meant}")
    return loaded


class AgentCleaning:
    """The cleaner of one agent. At its start it cleans after itself, later after others, by a message or an open request.

    :param is_behind: whether more operations wait for the services of the agent than they have queued.

    Each type of resource is cleaned in a thread of its own. Another one looks again every ``[cleanup] interval`` seconds: for
    requests whose message was lost, for leases of other cleaners that have expired, and for tries that are due.
    """

    def __init__(
        self,
        platform: Platform,
        conf: cfg.ConfigOpts,
        tools: CleanupTools,
        workers: SqlOperationStore,
        is_behind: Callable[[], bool],
    ) -> None:
        self._is_behind = is_behind
        self._identity = platform.identity
        self._clock = platform.clock
        self._tell = platform.tell
        self._interval = float(conf.cleanup.interval)
        # An agent that has an operation in its queue says so when it sweeps.
        self._announced_within = _SWEEPS * float(conf.agent.sweep_interval)
        self._lease_seconds = workers.lease_seconds
        loaded = check(conf)
        self._orphans = OrphanStore(platform.database, workers, platform.identity, platform.clock)
        self._cleaner = Cleaner(
            self._orphans,
            {each.name: each.build(tools) for each in loaded},
            platform.clock,
            randomness.generator(),
            Policy.from_config(conf.cleanup),
        )
        self._requests = RequestStore(platform.database, platform.registry)
        self._registry = platform.registry
        self._views = OperationViews(platform.database, workers)
        self._stop = threads.event()
        self._wake = threads.event()
        self._thread = threads.thread(self._run, name="cleaner")
        #: By type, the thread that cleans it, or did.
        self._passes: dict[str, threads.Thread] = {}
        self._starting = threads.lock()

    def start(self) -> None:
        """Starts, first with what an earlier epoch of this service left."""
        self._thread.start()

    def reload(self, conf: cfg.ConfigOpts) -> None:
        """Another policy from now on; the handlers are checked, and stay.

        :raises ConfigError: something of it cannot be used.
        """
        check(conf)
        self._cleaner.policy = Policy.from_config(conf.cleanup)

    def stop(self) -> None:
        """Stops after the present operations, or if these take too long: then other cleaners clean them up."""
        self._stop.set()
        self._wake.set()
        self._cleaner.stop(_PATIENCE)
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE)
            self._end_of_passes(_PATIENCE)

    @rpc_method
    def clean_up(self, request: str) -> None:
        """Wakes the cleaner, because there is a request."""
        LOG.debug("Received a message about the cleanup request %s.", request)
        self._wake.set()

    @rpc_method
    def would_clean_up(
        self, service: str, dead: bool, resource_type: str | None, resource_id: str | None
    ) -> dict[str, Any]:
        """Predicts what this agent would do with each orphan of a service, if cleanup after the service was requested."""
        own = service == self._identity.uuid

        def predict(transaction: Any, rows: Sequence[Operation]) -> Mapping[Key, str]:
            return self._cleaner.predict(transaction, rows, own=own)

        row = self._registry.get(service)
        return asdict(self._views.would_clean(row, dead, resource_type, resource_id, predict=predict))

    def _run(self) -> None:
        # Agents that were started together would always look together.
        seconds = randomness.generator().uniform(0, self._interval)
        while not self._stop.is_set():
            self._wake.clear()
            try:
                with plugin_isolation.isolate_plugin_call():
                    self._close(self._begin())
            except errors.Unavailable as error:
                self._put_off(error)
            except Exception:
                LOG.exception("Cleaning failed.")
            self._clock.wait(self._wake, seconds)
            seconds = self._interval

    def look(self) -> None:
        """Runs one pass: cleans all that there is to clean. A pass without work costs one read."""
        requests = self._begin()
        self._end_of_passes()
        self._close(requests)

    def _begin(self) -> Sequence[CleanupRequest]:
        """Cleans each type of resource that has orphans in its own thread, so that a slow type delays no other type.

        Returns the open requests.
        """
        found: dict[str, list[tuple[OrphanSelector, bool]]] = {}
        with self._orphans.database.shared_read():
            requests = self._requests.open_for(self._identity.host, self._identity.cluster)
            for wanted, own in self._all_wanted(requests):
                for kind in self._orphans.types(wanted):
                    found.setdefault(kind, []).append((wanted, own))
        for kind, passes in found.items():
            # Several threads may look at once: one of them starts the pass, and each waits for it.
            with self._starting:
                before = self._passes.get(kind)
                # A pass that still runs began with an earlier look; the next pass comes after it.
                if not self._stop.is_set() and (before is None or not before.is_alive()):
                    started = threads.try_start(self._pass, name=f"cleaner-{kind}", args=(kind, passes))
                    if started is not None:
                        self._passes[kind] = started
        return requests

    def _all_wanted(self, requests: Sequence[CleanupRequest]) -> Iterator[tuple[OrphanSelector, bool]]:
        """Yields the selectors of all orphans, each with whether this service itself left them."""
        me = self._identity
        yield OrphansOfService(me.uuid, me.epoch), True
        yield ExpiredLease(me.uuid, me.epoch, self._lease_seconds), True
        if self._is_behind():
            # This agent takes the operations that it has not queued later. They are not unclaimed.
            self._orphans.forget_looks(NeverStarted)
        else:
            names = (me.host,) if me.cluster is None else (me.host, me.cluster)
            yield NeverStarted(names, max(self._cleaner.policy.unclaimed_timeout, self._announced_within)), True
        for request in requests:
            for wanted in request.wanted:
                yield wanted, request.service == me.uuid

    def _pass(self, kind: str, passes: Sequence[tuple[OrphanSelector, bool]]) -> None:
        done = 0
        try:
            with plugin_isolation.isolate_plugin_call(kind):
                for wanted, own in passes:
                    done += sum(self._cleaner.clean(wanted, own=own, types={kind}).values())
        except errors.Unavailable as error:
            self._put_off(error)
        except Exception:
            LOG.exception("Cleaning the type %s failed.", kind)
        if done:
            # A request may be at its end.
            self._wake.set()

    def _put_off(self, error: errors.Unavailable) -> None:
        LOG.warning("Cleaning is put off: %s", error.message)
        self._orphans.forget_looks()

    def _end_of_passes(self, patience: float | None = None) -> None:
        end = None if patience is None else self._clock.monotonic() + patience
        for thread in list(self._passes.values()):
            thread.join(None if end is None else max(0.0, end - self._clock.monotonic()))

    def _close(self, requests: Sequence[CleanupRequest]) -> None:
        """Ends the requests that have no orphans left."""
        for request in requests:
            if self._requests.close_if_done(request):
                LOG.info("The cleanup request %s is done.", request.uuid)
                self._tell(CleanupFinished(request.uuid, request.service, request.epoch))


class CleanupEndpoint:
    """The coordinator of one scheduler, and what is asked of it by messages."""

    def __init__(
        self, platform: Platform, conf: cfg.ConfigOpts, workers: SqlOperationStore, observer: LivenessObserver
    ) -> None:
        self._platform = platform
        self._section = conf.cleanup
        self._requests = RequestStore(platform.database, platform.registry)
        self._fences = FencePurge(platform.database, platform.clock)
        self._stopping = threads.event()
        self.coordinator = CleanupCoordinator(
            platform.registry,
            observer,
            self._requests,
            OperationViews(platform.database, workers),
            tell=self._tell,
            announce=self._announce,
            requested=lambda service, request: tell_of_request(platform.tell, service, request),
            changed=lambda service, up: platform.tell(of_service(service, up)),
            checks=lambda: int(self._section.auto_cleanup_checks),
            automatic=lambda: bool(self._section.auto_cleanup_enabled),
            predict=self._foresee,
        )
        self._views = OperationViews(platform.database, workers)

    def reload(self, conf: cfg.ConfigOpts) -> None:
        """Other options from now on."""
        self._section = conf.cleanup

    def sample(self) -> None:
        """Samples the heartbeats of services. Called every ``service_down_time`` seconds."""
        self.coordinator.sample()

    def purge(self) -> None:
        """Removes history, ended requests and unused fences older than ``[cleanup] history_days``, in short transactions."""
        days = int(self._section.history_days)
        while not self._stopping.is_set() and self._requests.purge(days):
            pass
        while not self._stopping.is_set() and self._fences.step(days):
            pass

    def stop(self) -> None:
        """Stops a purge; the next one continues."""
        self._stopping.set()

    @rpc_method
    def request_cleanup(self, filters: Mapping[str, Any], requested_by: str, dry_run: bool = False) -> dict[str, Any]:
        """Requests cleanup after the services that match the filters."""
        return self.coordinator.request(CleanupFilter(**filters), requested_by, dry_run=dry_run)

    @rpc_method
    def auto_cleanup(self, requested_by: str, dry_run: bool = False) -> dict[str, Any]:
        """Requests cleanup after the services that have been dead for long enough."""
        return self.coordinator.automatic(requested_by, dry_run=dry_run)

    @rpc_method
    def cleanup_requested(self, service: str, epoch: int, by: str) -> None:
        """Notes that a scheduler has requested cleanup after a service."""
        if by != self._platform.identity.uuid:
            self.coordinator.heard(service, epoch)

    def _tell(self, host: str, request: str) -> None:
        try:
            self._platform.sender.cast(AGENT_TOPIC, "clean_up", {"request": request}, server=host)
        except errors.TransportError as error:
            LOG.warning(
                "Agent %s got no message about cleanup request %s (%s); it finds it by itself.", host, request, error
            )

    def _foresee(self, host: str, service: Service, dead: bool, filters: CleanupFilter) -> Forecast:
        of_type, of_id = filters.resource_type, filters.resource_id
        args = {"service": service.uuid, "dead": dead, "resource_type": of_type, "resource_id": of_id}
        try:
            return Forecast(**self._platform.sender.call(AGENT_TOPIC, "would_clean_up", args, server=host))
        except errors.TransportError as error:
            text = f"perhaps: {host}, which would clean it, does not answer ({error.message})"

        def unknown(_transaction: Any, rows: Sequence[Operation]) -> Mapping[Key, str]:
            return {(each.resource_type, each.resource_id): text for each in rows}

        return self._views.would_clean(service, dead, of_type, of_id, predict=unknown)

    def _announce(self, service: str, epoch: int) -> None:
        args = {"service": service, "epoch": epoch, "by": self._platform.identity.uuid}
        try:
            self._platform.sender.fanout(SCHEDULERS, "cleanup_requested", args)
        except errors.TransportError as error:
            LOG.info("Other schedulers got no message about a cleanup (%s); they find its row.", error)
