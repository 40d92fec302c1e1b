# SPDX-License-Identifier: Apache-2.0
"""Events as numbers, for Prometheus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

import prometheus_client
from typing_extensions import override

from moorage import errors
from moorage.observers.interface import (
    ClaimRefused,
    ClaimWon,
    Notice,
    Observer,
    ObserverTools,
    RequestDecided,
    WorkReported,
)

__all__ = ["MetricsObserver"]

_ATTEMPTS = (1, 2, 3, 5, 10)
_TOGETHER = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class MetricsObserver(Observer):
    """Counts events in a file for each process, which node_exporter's textfile collector and other programs can read.

    ``moorage_events_total`` by kind, ``moorage_claims_refused_total`` by reason, ``moorage_request_attempts`` (claims that a
    decision took), ``moorage_claims_together`` (claims by how many their transaction made), ``moorage_events_dropped``, and
    ``moorage_operation*`` of each work loop. The file is replaced as a whole, after half a second of quiet and every ``interval``
    seconds.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: ObserverTools) -> None:
        super().__init__(tools)
        section = tools.conf.observer_metrics
        folder = Path(section.folder or Path(tools.conf.control_plane.state_dir) / "metrics")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise errors.ConfigError(
                f"[observer_metrics] folder = {folder} cannot be made: {error.strerror}."
            ) from error
        source = tools.source
        self._path = folder / f"{_plain(source.binary)}-{_plain(source.host)}.prom"
        self._interval = float(section.interval)
        self._written = float("-inf")
        self._registry = prometheus_client.CollectorRegistry()
        labels = {"binary": source.binary, "host": source.host}
        self._events = self._counter("moorage_events", "Events", "kind")
        self._refused = self._counter("moorage_claims_refused", "Claims that the store refused", "reason")
        self._attempts = prometheus_client.Histogram(
            "moorage_request_attempts", "Claims that were tried for a decision", tuple(labels),
            buckets=_ATTEMPTS, registry=self._registry,
        ).labels(**labels)  # fmt: skip
        self._together = prometheus_client.Histogram(
            "moorage_claims_together", "Claims by how many claims their transaction made", tuple(labels),
            buckets=_TOGETHER, registry=self._registry,
        ).labels(**labels)  # fmt: skip
        self._dropped = prometheus_client.Gauge(
            "moorage_events_dropped",
            "Events that were not counted: they came too fast",
            tuple(labels),
            registry=self._registry,
        ).labels(**labels)
        self._operations = self._counter(
            "moorage_operations", "Operations, by what became of them", "service", "outcome"
        )
        self._seconds = self._counter(
            "moorage_operation_seconds", "Time that operations took which have ended", "service"
        )
        self._waiting = self._gauge("moorage_operations_waiting", "Operations in a queue", "service")
        self._running = self._gauge("moorage_operations_running", "Operations that are held", "service")
        self._longest = self._gauge("moorage_operation_longest_seconds", "Age of the oldest held operation", "service")
        self._labels = labels

    @override
    def observe(self, notice: Notice) -> None:
        event = notice.event
        self._events.labels(**self._labels, kind=event.kind).inc()
        self._dropped.set(notice.dropped)
        if isinstance(event, ClaimRefused):
            self._refused.labels(**self._labels, reason=event.reason).inc()
        elif isinstance(event, RequestDecided):
            self._attempts.observe(event.attempts)
        elif isinstance(event, ClaimWon):
            self._together.observe(event.together)
        elif isinstance(event, WorkReported):
            self._count_work(event)
        if self.tools.clock.monotonic() - self._written >= self._interval:
            self.flush()

    @override
    def flush(self) -> None:
        prometheus_client.write_to_textfile(str(self._path), self._registry)
        self._written = self.tools.clock.monotonic()

    @override
    def close(self) -> None:
        self.flush()

    def _count_work(self, event: WorkReported) -> None:
        labels = {**self._labels, "service": event.service}
        for outcome, number in {"taken": event.taken, "hung": event.hung, **event.ended}.items():
            self._operations.labels(**labels, outcome=outcome).inc(number)
        self._seconds.labels(**labels).inc(event.milliseconds / 1000)
        self._waiting.labels(**labels).set(event.waiting)
        self._running.labels(**labels).set(event.running)
        self._longest.labels(**labels).set(event.longest_milliseconds / 1000)

    def _counter(self, name: str, text: str, *labels: str) -> prometheus_client.Counter:
        return prometheus_client.Counter(name, text, ("binary", "host", *labels), registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> prometheus_client.Gauge:
        return prometheus_client.Gauge(name, text, ("binary", "host", *labels), registry=self._registry)


def _plain(text: str) -> str:
    """As part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)
