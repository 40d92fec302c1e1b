# SPDX-License-Identifier: Apache-2.0
"""Sends the heartbeats of a service; :mod:`moorage.services.liveness` watches the heartbeats of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from oslo_log import log as logging

from moorage import errors, randomness, threads
from moorage.clock import Clock
from moorage.services.interface import ServiceIdentity
from moorage.services.options import check_times
from moorage.services.registry import ServiceRegistry

__all__ = ["Heartbeat", "HostLease"]

LOG = logging.getLogger(__name__)

#: A service stops by itself this share of service_down_time before others may take it for dead.
_MARGIN = 0.1


class HostLease(Protocol):
    """The lease of a host that fences itself, which the heartbeats of its agent renew. No method may block or raise."""

    def promised(self) -> float | None:
        """Seconds after which the host's workloads end unless it is renewed; None while some would not end."""

    def renewed(self, moment: float) -> None:
        """Called after the store confirmed a heartbeat.

        :param moment: of the clock's :meth:`~moorage.clock.Clock.boottime`, from before the heartbeat was sent.
        """

    def ended(self) -> None:
        """Called when no heartbeat is sent any more: the process has drained."""


class Heartbeat:
    """Sends heartbeats in a separate thread, and stops the service when it may no longer work.

    ``on_lost`` is called once, with the reason, when a beat changed no row (evicted, or a second process started under this
    name), or when no beat succeeded for ``service_down_time`` less a margin, counted from the start of the last good one:
    before another service may take over.

    :param owns_work: False for a service without work that others could take over. It may go on without the store, so only an
        evicted epoch ends it, and not silence.
    """

    def __init__(
        self,
        registry: ServiceRegistry,
        identity: ServiceIdentity,
        clock: Clock,
        *,
        interval: float,
        service_down_time: float,
        on_lost: Callable[[str], None],
        owns_work: bool = True,
    ) -> None:
        check_times(interval, service_down_time)
        self._registry = registry
        self._identity = identity
        self._clock = clock
        self._interval = interval
        self._patience = service_down_time * (1 - _MARGIN)
        self._on_lost = on_lost
        self._owns_work = owns_work
        self._stop = threads.event()
        self._thread = threads.thread(self._run, name="heartbeat")
        self._guard = threads.thread(self._watch, name="heartbeat-guard")
        self._good_from = clock.monotonic()
        self._told = threads.lock()
        self._lease: HostLease | None = None
        #: A moment before the last heartbeat that was confirmed, at first after the start was.
        self._confirmed = clock.boottime()

    def start(self) -> None:
        """Begin to beat."""
        self._good_from = self._clock.monotonic()
        self._thread.start()
        if self._owns_work:
            self._guard.start()

    def stop(self) -> None:
        """Beat no more; returns within one interval."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._interval + 1)
        if self._lease is not None:
            self._lease.ended()

    def renew(self, lease: HostLease) -> None:
        """Have the lease of the host promised with each heartbeat from now on, and renewed after each that is confirmed.

        It is renewed at once, too, by the last heartbeat that was confirmed.
        """
        self._lease = lease
        lease.renewed(self._confirmed)

    @property
    def valid_until(self) -> float:
        """Returns the time, on the clock's monotonic scale, until which no service can declare this service dead."""
        return self._good_from + self._patience

    def _run(self) -> None:
        # The first is early by a random part of the interval: services that were started together would always beat together.
        seconds = randomness.generator().uniform(0, self._interval)
        while not self._clock.wait(self._stop, seconds):
            seconds = self._interval
            began = self._clock.monotonic()
            try:
                if not self._beat():
                    self._lost(
                        f"epoch {self._identity.epoch} of service {self._identity.uuid} is over: it was evicted, or another "
                        f"process started as {self._identity.binary} {self._identity.host}"
                    )
                    return
                self._good_from = began
            except errors.Unavailable as error:
                LOG.warning("Heartbeat failed: %s", error.message)

    def _beat(self) -> bool:
        lease = self._lease
        # Before it is sent: the store counts from a moment that is later, whatever the answer takes. A heartbeat whose outcome is
        # not known raises, and renews nothing.
        moment = self._clock.boottime()
        if lease is None:
            beaten = self._registry.beat(self._identity)
        else:
            beaten = self._registry.beat_promising(self._identity, lease.promised())
        if beaten:
            self._confirmed = moment
            if lease is not None:
                lease.renewed(moment)
        return beaten

    def _watch(self) -> None:
        """In a thread of its own, because a beat can hang in the database's driver."""
        while not self._clock.wait(self._stop, max(0.0, self.valid_until - self._clock.monotonic())):
            if self._clock.monotonic() >= self.valid_until:
                self._lost(f"no heartbeat reached the store for {self._patience:.1f} seconds")
                return

    def _lost(self, reason: str) -> None:
        if not self._stop.is_set() and self._told.acquire(blocking=False):
            self._stop.set()
            self._on_lost(reason)
