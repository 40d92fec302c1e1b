# SPDX-License-Identifier: Apache-2.0
"""Loads observers in the roles, and sends them events. The families do not know observers; this module creates the events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, plugin_isolation
from moorage.cleanup.requests import LEFTOVERS, CleanupRequest
from moorage.clock import Clock
from moorage.extensions import Loaded
from moorage.observers.hub import ObserverSettings
from moorage.observers.interface import (
    OBSERVERS,
    CleanupRequested,
    Observer,
    ObserverEvent,
    ObserverTools,
    OperationHung,
    ProcessIdentity,
    RequestDecided,
    RequestRefused,
    ServiceDown,
    ServiceFenced,
    ServiceUp,
    WorkReported,
)
from moorage.scheduling.decisions import Decision
from moorage.services.interface import Service, ServiceIdentity
from moorage.work.job import Job, WorkObserver, WorkReport

__all__ = [
    "LoopEvents",
    "Tell",
    "of_decision",
    "of_service",
    "open_observers",
    "settings_of",
    "source_of",
    "tell_of_request",
]

LOG = logging.getLogger(__name__)
#: Tells every observer; never waits, never raises.
Tell = Callable[[ObserverEvent], None]


def source_of(identity: ServiceIdentity) -> ProcessIdentity:
    """Identifies the process that sends events."""
    return ProcessIdentity(identity.uuid, identity.binary, identity.host, identity.epoch)


def settings_of(conf: Any) -> ObserverSettings:
    """How much observers may cost."""
    section = conf.observers
    return ObserverSettings(int(section.queue), int(section.max_errors), float(section.deadline))


def open_observers(
    conf: Any, clock: Clock, source: ProcessIdentity, *, following: bool = False
) -> list[tuple[Loaded[Observer], Observer]]:
    """Returns the observers of the configuration that want events, in their order.

    :param following: those that follow the journal instead.
    :raises PluginLoadError: one of them cannot be used; those that were built are closed.
    :raises ConfigError: its options cannot.
    """
    tools = ObserverTools(conf, clock, source)
    built: list[tuple[Loaded[Observer], Observer]] = []
    try:
        for loaded in OBSERVERS.load_all(conf.observers.enabled):
            plugin = loaded.plugin
            if (plugin.follow is Observer.follow) if following else plugin.kinds == frozenset():
                continue
            built.append((loaded, loaded.build(tools)))
    except errors.MoorageError:
        close_unused(built)
        raise
    return built


def close_unused(built: list[tuple[Loaded[Observer], Observer]]) -> None:
    """Observers that will not be used after all."""
    for loaded, observer in built:
        try:
            with plugin_isolation.isolate_plugin_call(loaded.name):
                observer.close()
        except Exception:
            LOG.exception("The %s could not be closed.", loaded.who)


def of_decision(decision: Decision) -> ObserverEvent:
    """What a scheduler has decided."""
    spec = decision.spec
    if decision.node:
        return RequestDecided(
            decision.request_id, spec.instance_uuid, spec.project_id, decision.host, decision.node,
            len(decision.refusals) + 1, decision.considered, decision.passed,
        )  # fmt: skip
    reasons = {name: count for name, count in decision.removed.items() if count}
    summary = decision.outcome.removeprefix("refused: ")
    return RequestRefused(
        decision.request_id, spec.instance_uuid, spec.project_id, summary, decision.considered, reasons
    )


class LoopEvents(WorkObserver):
    """Tells the observers what a work loop does."""

    def __init__(self, name: str, tell: Tell) -> None:
        self._name = name
        self._tell = tell

    @override
    def report(self, report: WorkReport) -> None:
        self._tell(
            WorkReported(
                self._name, report.taken, report.ended, report.hung, round(report.seconds * 1000), report.waiting,
                report.running, round(report.longest * 1000),
            )
        )  # fmt: skip

    @override
    def hung(self, job: Job[Any], seconds: float) -> None:
        self._tell(OperationHung(self._name, *job.key, job.lease.operation, round(seconds)))


def of_service(service: Service, up: bool) -> ObserverEvent:
    """A service has come to life, or has fallen silent, in a scheduler's eyes."""
    if up:
        return ServiceUp(service.uuid, service.binary, service.host, service.epoch)
    reason = "stopped" if service.stopped else "silent"
    return ServiceDown(service.uuid, service.binary, service.host, service.epoch, reason)


def tell_of_request(tell: Tell, service: Service, request: CleanupRequest) -> None:
    """A service shall be cleaned after; it was declared dead for that, unless it has come back by itself."""
    if request.kind != LEFTOVERS:
        reason = f"declared dead for the cleanup request {request.uuid}"
        tell(ServiceFenced(service.uuid, service.binary, service.host, request.epoch - 1, reason))
    tell(CleanupRequested(request.uuid, request.service, request.epoch, request.kind, request.requested_by))
