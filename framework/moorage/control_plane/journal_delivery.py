# SPDX-License-Identifier: Apache-2.0
"""Delivery of the journal in engines, wired from the configuration: to webhooks, and to observers that follow the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oslo_config import cfg

from moorage import plugin_isolation
from moorage.control_plane.observing import close_unused, open_observers, source_of
from moorage.control_plane.process import Platform
from moorage.db import RecordedEvent
from moorage.extensions import Loaded
from moorage.journal import options
from moorage.journal.delivery import POLL, DeliveryLoop, Selection, Sink
from moorage.journal.sender import WebhookSink
from moorage.journal.webhooks import WebhookStore
from moorage.observers.interface import Observer

__all__ = ["Delivery"]

#: Events that one call of an observer gets at most.
_BATCH = 100


class ObserverSink:
    """Gives the journal to an observer that follows it."""

    batch = _BATCH
    wanted = Selection()

    def __init__(self, loaded: Loaded[Observer], observer: Observer, limit: float) -> None:
        self.name = f"observer/{loaded.name}"
        self.limit = limit
        self.opened = loaded, observer

    def deliver(self, events: Sequence[RecordedEvent], missed: int) -> None:
        """Call the plugin; raises what it raises."""
        loaded, observer = self.opened
        with plugin_isolation.isolate_plugin_call(loaded.who):
            observer.follow(events, missed)


class Delivery:
    """The delivery of one process, as its configuration says. Starts with :meth:`start`.

    :param poll: seconds between two looks for events; None: the caller calls :meth:`look` instead.
    :raises ConfigError: the options of the journal, or an observer that follows it, cannot be used.
    """

    def __init__(self, platform: Platform, conf: cfg.ConfigOpts, *, poll: float | None = POLL) -> None:
        networks, timeout = options.allowed_networks(conf), float(conf.journal.webhook_timeout)
        webhooks = WebhookStore(platform.database)
        opened = open_observers(conf, platform.clock, source_of(platform.identity), following=True)
        self._observers = [ObserverSink(*each, float(conf.observers.deadline)) for each in opened]

        def sinks() -> Iterator[Sink]:
            yield from self._observers
            for each in webhooks.enabled():
                yield WebhookSink(each, platform.clock, networks, timeout)

        self._loop = DeliveryLoop(platform.database, platform.clock, platform.identity, sinks, poll=poll)
        self.start = self._loop.start

    def look(self, transaction: Any) -> Callable[[], None] | None:
        """Looks for events to deliver. Call it each :data:`~moorage.journal.delivery.POLL` seconds.

        :returns: what delivers them, or None; call it after the transaction.
        """
        return self._loop.wake if self._loop.has_work(transaction) else None

    def stop(self, seconds: float) -> None:
        """End after the calls that run, or after so many seconds. An observer whose call still runs is not closed."""
        left = self._loop.stop(seconds)
        close_unused([each.opened for each in self._observers if each.name not in left])
