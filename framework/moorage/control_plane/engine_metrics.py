# SPDX-License-Identifier: Apache-2.0
"""Counts engines in the store for each request of ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oslo_log import log as logging
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from moorage import errors
from moorage.coordination.api import EngineDirectory
from moorage.coordination.membership import MemberId
from moorage.coordination.ring_ledger import Adoption, RingRow, SqlRingLedger
from moorage.coordination.task_store import COUNTS, TaskStore
from moorage.db import MICROSECONDS, Database
from moorage.services.interface import Service

__all__ = ["EngineCollector"]

LOG = logging.getLogger(__name__)


class EngineCollector:
    """Periodic tasks, rings and engines, as engines have written them down: so one place is asked for all of them.

    Four statements, and two for each ring. Totals survive the purge of task runs and restarts of engines.

    :param names: hosts and heartbeats of services. :param services: all of them, each with whether it is up.
    """

    def __init__(
        self, database: Database, names: EngineDirectory, services: Callable[[], Sequence[tuple[Service, bool]]]
    ) -> None:
        self._tasks = TaskStore(database)
        self._ledger = SqlRingLedger(database)
        self._names = names
        self._services = services

    def describe(self) -> list[Any]:
        """Nothing beforehand: no statement runs when it is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Returns the metrics; none when the store is away."""
        try:
            found = [*self._of_tasks(), *self._of_rings()]
        except errors.MoorageError as error:
            LOG.warning("The metrics of engines cannot be read: %s", error.message)
            return
        yield from found

    def _of_tasks(self) -> list[Any]:
        sweeps = CounterMetricFamily("moorage_periodic_sweeps", "Sweeps, by how they ended", labels=["task", "ended"])
        objects = CounterMetricFamily(
            "moorage_periodic_objects", "Objects of sweeps, by what came of them", labels=["task", "outcome"]
        )
        seconds = CounterMetricFamily("moorage_periodic_seconds", "Time that sweeps took", labels=["task"])
        lag = GaugeMetricFamily(
            "moorage_periodic_since_tick_seconds", "Age of the last tick that a sweep was begun for", labels=["task"]
        )
        paused = GaugeMetricFamily("moorage_periodic_paused", "Tasks that an operator has paused", labels=["task"])
        moment, controls = self._tasks.look()
        for row in self._tasks.totals():
            task = row["task"]
            for column, ended in (("complete", "complete"), ("stale", "stale"), ("broken", "failed")):
                sweeps.add_metric([task, ended], row[column])
            for outcome in COUNTS:
                objects.add_metric([task, outcome], row[outcome])
            seconds.add_metric([task], row["milliseconds"] / 1000)
            if row["tick"] is not None:
                lag.add_metric([task], max(0, moment - row["tick"]) / MICROSECONDS)
        for task, control in sorted(controls.items()):
            paused.add_metric([task], int(control.paused))
        return [sweeps, objects, seconds, lag, paused]

    def _of_rings(self) -> list[Any]:
        generation = GaugeMetricFamily("moorage_ring_generation", "Token of the ring", labels=["group"])
        members = GaugeMetricFamily("moorage_ring_members", "Members on the ring", labels=["group"])
        behind = GaugeMetricFamily(
            "moorage_ring_member_behind", "Changes of the ring that a member has not taken over", labels=_MEMBER
        )
        age = GaugeMetricFamily(
            "moorage_ring_member_heartbeat_age_seconds",
            "Time since the member's service was seen to beat",
            labels=_MEMBER,
        )
        engines = GaugeMetricFamily("moorage_engines", "Engines by state", labels=["state"])
        on_ring: set[str] = set()
        for group, row, adoptions in self._ledger.groups():
            generation.add_metric([group], row.token)
            members.add_metric([group], len(row.members))
            on_ring |= self._members(group, row, adoptions, behind, age)
        states = {"working": 0, "absent": 0, "down": 0}
        for service, up in self._services():
            if service.binary == "engine":
                states["down" if not up else "working" if service.uuid in on_ring else "absent"] += 1
        for state, count in states.items():
            engines.add_metric([state], count)
        return [generation, members, behind, age, engines]

    def _members(self, group: str, row: RingRow, adoptions: Sequence[Adoption], behind: Any, age: Any) -> set[str]:
        tokens = {each.member: each.token for each in adoptions}
        ids = {member: MemberId.parse(member) for member in row.members if MemberId.known(member)}
        known = self._names.of([each.service for each in ids.values()])
        for member, parts in ids.items():
            host, silent_for = known.get(parts.service, ("", None))
            labels = [group, host, parts.service, str(parts.worker)]
            behind.add_metric(labels, max(0, row.token - tokens.get(member, 0)))
            if silent_for is not None:
                age.add_metric(labels, silent_for)
        return {each.service for each in ids.values()}


_MEMBER = ["group", "host", "service", "worker"]
