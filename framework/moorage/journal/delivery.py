# SPDX-License-Identifier: Apache-2.0
"""Delivers the journal to followers: each event at least once, in order, by one process at a time for each follower.

A follower is a :class:`Sink`. Every engine runs a :class:`DeliveryLoop`. The loop looks for subscriptions that are behind the
journal, holds the lease of each, and calls the sink with one batch after the other. It moves the cursor after each batch. No
transaction is open while a sink is called. A sink that raises is tried again after a pause, which doubles up to five minutes; it
holds up no other sink.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from oslo_log import log as logging

from moorage import errors, plugin_isolation, threads
from moorage.bounded_pool import BoundedPool, PooledCall
from moorage.clock import Clock
from moorage.db import Database, RecordedEvent
from moorage.hang_detector import HangDetector, Progress
from moorage.journal.reader import EventFilter, EventPage, JournalReader
from moorage.journal.subscriptions import Subscription, SubscriptionStore
from moorage.services.interface import ServiceIdentity

__all__ = ["DeliveryLoop", "Selection", "Sink"]

LOG = logging.getLogger(__name__)

#: Seconds between looks for events to deliver.
POLL = 1.0
#: Events that are read at once.
PAGE = 1000
#: Subscriptions that one process delivers at the same time, and calls that may hang beside them.
_AT_ONCE, _HANGING = 16, 16
#: Seconds that a lease lasts at least. It lasts twice as long as a call of the sink may take.
_SHORTEST_LEASE = 10.0
_ALL = EventFilter()


@dataclass(frozen=True, slots=True)
class Selection:
    """Which events a follower wants; empty: all.

    :param kinds: kinds of events (``instance.create``); ``instance.*``: all kinds that begin with ``instance.``.
    :param projects: ids of the projects whose events are wanted.
    """

    kinds: frozenset[str] = frozenset()
    projects: frozenset[str] = frozenset()

    def wants(self, event: RecordedEvent) -> bool:
        """Returns whether the event is one of these."""
        if self.projects and event.project_id not in self.projects:
            return False
        return not self.kinds or event.kind in self.kinds or f"{event.kind.partition('.')[0]}.*" in self.kinds


class Sink(Protocol):
    """Takes the events of one subscription. One thread of a process calls it at a time."""

    @property
    def name(self) -> str:
        """The name of the subscription."""

    @property
    def wanted(self) -> Selection:
        """Which events it gets."""

    @property
    def batch(self) -> int:
        """Events that one call gets at most."""

    @property
    def limit(self) -> float:
        """Seconds after which one call counts as hanging."""

    def deliver(self, events: Sequence[RecordedEvent], missed: int) -> None:
        """Take the events, in the order given. A later call may repeat them.

        :param missed: how many events of the journal were purged, so far, before they were delivered to this follower.
        :raises Exception: they were not taken. The text is shown to administrators, so it must not contain secrets.
        """


class _Delivery:
    """The delivery of one page of the journal to one sink, in a thread of the pool.

    :ivar held: the row of the subscription as this process wrote it last; None before the lease is held.
    :ivar progress: the call of the sink that runs, and since when.
    """

    def __init__(
        self,
        sink: Sink,
        store: SubscriptionStore,
        reader: JournalReader,
        clock: Clock,
        stopping: threads.Event,
        lease: float,
    ) -> None:
        self._sink = sink
        self._store = store
        self._reader = reader
        self._clock = clock
        self._stopping = stopping
        self._lease = lease
        self._detector = HangDetector(clock, sink.limit)
        self._renewed = float("-inf")
        self.held: Subscription | None = None
        self.progress: Progress = None
        self.call: PooledCall[None] | None = None
        #: Set when the call has returned.
        self.ended = threads.event()

    def run(self, row: Subscription, me: ServiceIdentity, token: int | None = None) -> bool:
        """Hold the lease and deliver; whether there is more to deliver at once.

        :param token: of the lease that the loop holds already, if it does.
        :raises Unavailable: the store is away.
        """
        held = self._store.hold(row, me, self._lease, token)
        if held is None:
            return False
        self._note(held)
        # A look may have read the row before an earlier delivery failed, and must not shorten the pause.
        if held.retry_at != row.retry_at:
            return False
        page = self._page(held)
        if page is None:
            return False
        wanted = [event for event in page.events if self._sink.wanted.wants(event)]
        for start in range(0, len(wanted), self._sink.batch):
            if not self._deliver(wanted[start : start + self._sink.batch]):
                return False
        return self._pass_over(page.cursor) and len(page.events) == PAGE

    def hangs(self) -> bool:
        """Returns whether the call of the sink hangs. Called by one thread, until it does."""
        return self.held is not None and self._detector.look(self.progress)

    def give_up(self) -> None:
        """Note in the store that the call of the sink hangs. Should the call return, it may still move the cursor.

        :raises Unavailable: the store is away.
        """
        held = self._now_held()
        text = f"The delivery has not returned for {self._sink.limit:g} seconds."
        LOG.error("%s: %s This process begins no other delivery of it before this one returns.", held.name, text)
        self._store.failed(held, text, self._lease)

    def _page(self, held: Subscription) -> EventPage | None:
        """The events after the cursor. Moves the cursor to the oldest event, and says so, where those before were purged."""
        try:
            return self._reader.page(held.position, _ALL, PAGE)
        except errors.Gone as error:
            purged = int(error.details["oldest"]) - 1
        if purged <= held.position:
            # A server of a cluster has not seen yet what another one has committed.
            return None
        LOG.error(
            "%s: the events %d to %d were purged before they were delivered. It goes on with the oldest event that is left. Raise "
            "[journal] retention_days if followers may be away for longer.",
            held.name, held.position + 1, purged,
        )  # fmt: skip
        if not self._store.skip(held, purged, self._lease):
            return None
        self._note(replace(held, position=purged, missed=held.missed + purged - held.position))
        return self._page(self._now_held())

    def _deliver(self, events: Sequence[RecordedEvent]) -> bool:
        held = self._now_held()
        # The process may have been paused since it renewed the lease. Then the next look holds the lease again.
        if self._stopping.is_set() or self._clock.monotonic() - self._renewed > self._lease / 2:
            return False
        try:
            with plugin_isolation.isolate_plugin_call(held.name):
                self.progress = events[0].number, self._clock.monotonic()
                self._sink.deliver(events, held.missed)
        except Exception as error:  # noqa: BLE001  (whatever a plugin or a network may raise)
            text = error.message if isinstance(error, errors.MoorageError) else plugin_isolation.format_exception(error)
            LOG.warning("%s: events from number %d on were not delivered: %s", held.name, events[0].number, text)
            self._store.failed(held, text, self._lease)
            return False
        finally:
            self.progress = None
        if not self._store.delivered(held, events[-1].number, self._lease):
            LOG.info("%s: another process delivers, or the cursor was set. This process stops.", held.name)
            return False
        self._note(replace(held, position=events[-1].number, failures=0))
        return True

    def _pass_over(self, position: int) -> bool:
        """Move the cursor over events that the sink does not want."""
        held = self._now_held()
        return position == held.position or self._store.pass_over(held, position, self._lease)

    def _note(self, held: Subscription) -> None:
        self.held, self._renewed = held, self._clock.monotonic()

    def _now_held(self) -> Subscription:
        assert self.held is not None  # noqa: S101  (for the type checker)
        return self.held


class DeliveryLoop:
    """Delivers the journal to the sinks of one process.

    :param me: the service that holds the leases.
    :param sinks: returns all sinks there are now; called by the first look, and when a subscription is behind.
    :param poll: seconds between two looks; None: it looks only after :meth:`wake`.
    :param shortest_lease: seconds for which a process that has died keeps others from its subscriptions, at least.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        me: ServiceIdentity,
        sinks: Callable[[], Iterable[Sink]],
        *,
        poll: float | None = POLL,
        shortest_lease: float = _SHORTEST_LEASE,
    ) -> None:
        self._store = SubscriptionStore(database)
        self._reader = JournalReader(database)
        self._clock = clock
        self._me = me
        self._sinks = sinks
        self._poll = poll
        self._shortest_lease = shortest_lease
        self._pool = BoundedPool("deliver", clock, _AT_ONCE, spare=_HANGING)
        self._lock = threads.lock()
        #: By the name of the subscription. A delivery that hangs stays here until its call returns.
        self._running: dict[str, _Delivery] = {}
        #: The tokens of the leases that this loop has taken. Another loop of the process, before a reload, had its own.
        self._tokens: dict[str, int] = {}
        #: Whether all sinks of the start have subscriptions.
        self._begun = False
        self._stopping = threads.event()
        self._wake = threads.event()
        self._thread = threads.thread(self._run, name="delivery")

    def start(self) -> None:
        """Start the thread that delivers."""
        self._thread.start()

    def stop(self, seconds: float) -> frozenset[str]:
        """End after the calls that run, or after so many seconds, and leave the subscriptions to other processes.

        :returns: the names of the subscriptions whose calls still run.
        """
        self._stopping.set()
        self._wake.set()
        if not self._thread.ident:
            return frozenset()
        end = self._clock.monotonic() + seconds
        self._thread.join(seconds)
        with self._lock:
            running = [(name, each.ended) for name, each in self._running.items() if each.call is not None]
        for name, ended in running:
            if not self._clock.wait(ended, max(0.0, end - self._clock.monotonic())):
                LOG.warning("The delivery of %s has not ended within %g seconds and is left behind.", name, seconds)
        self._pool.close()
        with self._lock:
            left = frozenset(self._running)
        idle = {name: token for name, token in self._tokens.items() if name not in left}
        for name, token in idle.items():
            try:
                self._store.release(name, token)
            except errors.Unavailable as error:
                # The lease expires by itself.
                LOG.warning("The lease of the subscription %s could not be released: %s", name, error.message)
        return left

    def look(self) -> None:
        """Begin the deliveries that are due, and give up those that hang."""
        self._give_up_hung()
        rows, *moment = self._store.list()
        due = self._due(rows, *moment)
        # The first look makes subscriptions of observers. Those of webhooks are made with the webhooks.
        if not due and self._begun:
            return
        sinks = {each.name: each for each in self._sinks()}
        for name in sinks.keys() - {row.name for row in rows}:
            self._store.begin(name)
        self._begun = True
        for row in due:
            if row.name in sinks:
                self._begin(sinks[row.name], row)

    def has_work(self, transaction: Any) -> bool:
        """Returns whether :meth:`look` would find something to do. One statement."""
        if self._running or not self._begun:
            return True
        return bool(self._due(*self._store.list_in(transaction)))

    def wake(self) -> None:
        """Look now, in the thread that delivers."""
        self._wake.set()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _due(self, rows: Iterable[Subscription], last: int, moment: int) -> list[Subscription]:
        return [row for row in rows if row.position < last and row.retry_at <= moment and self._may_hold(row, moment)]

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.look()
            except errors.Unavailable as error:
                LOG.warning("The delivery of events is put off: %s", error.message)
            except Exception:
                LOG.exception("The delivery of events failed.")
            self._clock.wait(self._wake, self._poll)
            self._wake.clear()

    def _may_hold(self, row: Subscription, moment: int) -> bool:
        return row.expires_at < moment or (row.owner == self._me.uuid and row.epoch <= self._me.epoch)

    def _begin(self, sink: Sink, row: Subscription) -> None:
        lease = max(self._shortest_lease, 2 * sink.limit)
        delivery = _Delivery(sink, self._store, self._reader, self._clock, self._stopping, lease)
        with self._lock:
            if row.name in self._running:
                return
            self._running[row.name] = delivery
        try:
            delivery.call = self._pool.start(functools.partial(self._deliver, delivery, row), delivery.ended)
        except errors.Unavailable:
            with self._lock:
                del self._running[row.name]
            raise

    def _deliver(self, delivery: _Delivery, row: Subscription) -> None:
        more = False
        try:
            with self._lock:
                token = self._tokens.get(row.name)
            more = delivery.run(row, self._me, token)
        except errors.Unavailable as error:
            LOG.warning("The delivery of %s is put off: %s", row.name, error.message)
        finally:
            with self._lock:
                del self._running[row.name]
                if delivery.held is not None:
                    self._tokens[row.name] = delivery.held.token
            if more:
                self._wake.set()

    def _give_up_hung(self) -> None:
        with self._lock:
            running = [(each, each.call) for each in self._running.values() if each.call is not None]
        for delivery, call in running:
            if not call.abandoned and delivery.hangs() and self._pool.abandon(call):
                delivery.give_up()
