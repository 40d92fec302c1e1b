# SPDX-License-Identifier: Apache-2.0
"""The fanout side of transport ``local``: one thread and one bounded queue for each listener, so that none delays another."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Collection, Sequence

from oslo_log import log as logging

from moorage import errors, threads
from moorage.clock import Clock
from moorage.rpc.queues import OfferResult, WorkQueue
from moorage_plugins.transports.local_link import LINK_ERRORS, Link
from moorage_plugins.transports.local_listener import ListenerSettings
from moorage_plugins.transports.local_registry import SocketPath

__all__ = ["Fanouts"]

LOG = logging.getLogger(__name__)


class _Outbox:
    """Frames on their way to one listener."""

    def __init__(
        self,
        place: SocketPath,
        topic: str,
        open_link: Callable[[SocketPath, str], Link],
        settings: ListenerSettings,
        clock: Clock,
    ):
        self._place = place
        self._topic = topic
        self._open = open_link
        self._link: Link | None = None
        self._closing = threads.event()
        self.queue: WorkQueue[bytes] = WorkQueue(
            self._send,
            threads=1,
            limit=settings.queue_limit,
            byte_limit=settings.queue_bytes,
            name=f"A listener of topic '{topic}'",
            clock=clock,
            drop_oldest=True,
        )

    def close(self, drain_seconds: float) -> None:
        self.queue.stop(drain_seconds)
        # The thread may stand in a write to a stopped listener: without a link it goes on and ends.
        self._closing.set()
        link = self._link
        if link is not None:
            link.shutdown()

    def abandon(self) -> None:
        if self._link is not None:
            self._link.abandon()

    def _send(self, frame: bytes) -> None:
        for _attempt in range(2):
            if self._link is None and not self._connect():
                return
            assert self._link is not None  # noqa: S101  (for the type checker)
            try:
                # No time limit: a stopped listener that goes on gets its frames in order; meanwhile the queue drops the oldest.
                self._link.send(frame)
                return
            except LINK_ERRORS:
                # The frame did not arrive whole, so sending it again to the present listener cannot double it.
                self._link.close()
                self._link = None

    def _connect(self) -> bool:
        if self._closing.is_set():
            return False
        try:
            self._link = self._open(self._place, self._topic)
        except errors.NoListener:
            return False
        except (errors.MoorageError, multiprocessing.AuthenticationError) as error:
            LOG.warning("A fanout to topic '%s' missed a listener: %s", self._topic, error)
            return False
        if self._closing.is_set():
            self._link.shutdown()
        return True


class Fanouts:
    """The outboxes of one process; thread safe.

    :param open_link: connects to a place (for the topic named in errors); raises TransportError.
    """

    def __init__(self, open_link: Callable[[SocketPath, str], Link], settings: ListenerSettings, clock: Clock) -> None:
        self._open = open_link
        self._settings = settings
        self._clock = clock
        self._topics: dict[str, dict[str, _Outbox]] = {}
        self._lock = threads.lock()

    def send(
        self, topic: str, places: Sequence[SocketPath], frame: bytes, but: Collection[str | None] = frozenset()
    ) -> None:
        """Queue a frame for each place; never waits for a listener.

        :param but: paths of sockets that do not get it.
        """
        with self._lock:
            boxes = self._topics.setdefault(topic, {})
            gone = boxes.keys() - {place.socket for place in places}
            removed = [boxes.pop(path) for path in gone]
            for place in places:
                if place.socket in but:
                    continue
                box = boxes.get(place.socket)
                if box is None or box.queue.offer(frame, len(frame)) is OfferResult.STOPPED:
                    box = boxes[place.socket] = _Outbox(place, topic, self._open, self._settings, self._clock)
                    box.queue.offer(frame, len(frame))
        for box in removed:
            box.close(0.0)

    def dropped(self) -> int:
        """Frames that were dropped because listeners were too slow."""
        with self._lock:
            return sum(box.queue.dropped for boxes in self._topics.values() for box in boxes.values())

    def close(self, drain_seconds: float) -> None:
        """Send what is queued for at most ``drain_seconds`` altogether, then end."""
        until = self._clock.monotonic() + drain_seconds
        with self._lock:
            boxes = [box for boxes in self._topics.values() for box in boxes.values()]
            self._topics.clear()
        for box in boxes:
            box.close(max(0.0, until - self._clock.monotonic()))

    def abandon(self) -> None:
        """In the child of a fork: close inherited descriptors, without locks."""
        for boxes in list(self._topics.values()):
            for box in list(boxes.values()):
                box.abandon()
