# SPDX-License-Identifier: Apache-2.0
"""Decides whether a service is up, by watching its heartbeats.

Whether a dead service's work may be taken is decided by :mod:`moorage.cleanup.coordinator`, with this and a fence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moorage import threads
from moorage.clock import Clock
from moorage.services.interface import Service

__all__ = ["LivenessObserver"]


@dataclass(slots=True)
class _Seen:
    beat: int
    since: float


class LivenessObserver:
    """Says who is up, by timing unchanged counts of beats on its own monotonic clock.

    A new observer has seen nothing change yet: it needs a whole ``service_down_time`` before it says that a service is down.
    Clocks of other machines play no part. Safe for use by several threads.

    :param service_down_time: ``[services] service_down_time`` in seconds, readable as ``down_time``.
    """

    def __init__(self, clock: Clock, service_down_time: float) -> None:
        self._clock = clock
        self.down_time = service_down_time
        self._seen: dict[str, _Seen] = {}
        self._lock = threads.lock()

    def observe(self, rows: Iterable[Service]) -> dict[str, bool]:
        """Take note of rows that were read just now; uuid -> whether the service is up."""
        now = self._clock.monotonic()
        with self._lock:
            return {row.uuid: self._one(row, now) for row in rows}

    def silent_for(self, uuid: str) -> float:
        """Seconds for which the count of the service's beats has not changed under this observer's eyes."""
        with self._lock:
            seen = self._seen.get(uuid)
        return 0.0 if seen is None else self._clock.monotonic() - seen.since

    def _one(self, row: Service, now: float) -> bool:
        seen = self._seen.get(row.uuid)
        # A start counts its first beat. An epoch that rises alone is an eviction, and no sign of life.
        if seen is None or seen.beat != row.beat:
            seen = self._seen[row.uuid] = _Seen(row.beat, now)
        return not row.forced_down and not row.stopped and now - seen.since < self.down_time
