# SPDX-License-Identifier: Apache-2.0
"""A bounded queue with threads that empty it: the back-pressure of the transports.

The executors of the standard library and of futurist queue without bound on bytes, cannot drop the oldest, and hold up the end of
the process for work that hangs; hence this one.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from oslo_log import log as logging

from moorage import plugin_isolation
from moorage import threads as threads_module
from moorage.clock import Clock

__all__ = ["OfferResult", "WorkQueue"]

LOG = logging.getLogger(__name__)
T = TypeVar("T")


class OfferResult(enum.Enum):
    """What became of something offered to a queue."""

    ACCEPTED = "accepted"
    FULL = "full"
    STOPPED = "stopped"


class WorkQueue(Generic[T]):
    """Items wait for one of ``threads`` daemon threads, started when they are first needed.

    One item is always let in, whatever its size. With one thread, items are worked on in the order of the offers.

    :param work: handles one item; what it raises is logged.
    :param threads: how many items are worked on at a time, in whatever threads.
    :param limit: items that may wait.
    :param byte_limit: sum of the sizes of items that may wait.
    :param drop_oldest: when full, drop the oldest waiting item and take the new one, instead of refusing it.
    :param name: for the names of the threads and for warnings.
    """

    def __init__(
        self,
        work: Callable[[T], None],
        *,
        threads: int,
        limit: int,
        byte_limit: int,
        name: str,
        clock: Clock,
        drop_oldest: bool = False,
    ) -> None:
        self._work = work
        self._most_threads = threads
        self._limit = limit
        self._byte_limit = byte_limit
        self._name = name
        self._clock = clock
        self._drop_oldest = drop_oldest
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._changed = threads_module.condition()
        #: Threads that wait and were not woken yet.
        self._idle = 0
        self._threads = 0
        self._running = 0
        self._stopped = False
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many items were dropped because newer ones came."""
        return self._dropped

    @property
    def waiting(self) -> int:
        """How many items wait."""
        return len(self._items)

    def offer(self, item: T, size: int, *, here: bool = False) -> OfferResult:
        """Hand over an item of ``size`` bytes; waits for no other item.

        :param here: if no item waits and fewer than ``threads`` are being worked on, handle it in this thread before the return.
        """
        if here and self._begin():
            self._do(item)
            with self._changed:
                self._staff()
            return OfferResult.ACCEPTED
        warn = 0
        with self._changed:
            if self._stopped:
                return OfferResult.STOPPED
            while self._items and (len(self._items) >= self._limit or self._bytes + size > self._byte_limit):
                if not self._drop_oldest:
                    return OfferResult.FULL
                self._bytes -= self._items.popleft()[1]
                self._dropped += 1
                # At 1, 2, 4, 8 ... so that a listener that is gone for a day does not fill the log.
                warn = self._dropped if self._dropped & (self._dropped - 1) == 0 else warn
            self._items.append((item, size))
            self._bytes += size
            self._staff()
            if not self._threads and self._running < self._most_threads:
                # No thread could be started, and none is there that comes to it later.
                self._items.pop()
                self._bytes -= size
                return OfferResult.FULL
        if warn:
            LOG.warning("%s is too slow or stopped: %d messages dropped so far, the oldest first.", self._name, warn)
        return OfferResult.ACCEPTED

    def stop(self, drain_seconds: float) -> tuple[bool, list[T]]:
        """Refuse new items and wait for the accepted ones to be done, at most ``drain_seconds``.

        :returns: whether everything was done, and the items that were never begun (they will not be).
        """
        deadline = self._clock.monotonic() + drain_seconds
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            while self._items or self._running:
                left = deadline - self._clock.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            left_over = [item for item, _size in self._items]
            self._items.clear()
            self._bytes = 0
            return not (left_over or self._running), left_over

    def _begin(self) -> bool:
        """Returns whether this thread may work on one more item."""
        with self._changed:
            free = not self._stopped and not self._items and self._running < self._most_threads
            self._running += free
            return free

    def _staff(self) -> None:
        """Wake or start a thread for an item that waits. Called with the lock held."""
        if not self._items or self._running >= self._most_threads:
            return
        if self._idle:
            self._idle -= 1
            self._changed.notify()
        elif self._threads < self._most_threads:
            name = f"{self._name}-{self._threads + 1}"
            self._threads += threads_module.try_start(self._loop, name=name) is not None

    def _loop(self) -> None:
        while (item := self._next()) is not None:
            self._do(item[0])
            del item  # a large message must not live until the next one comes

    def _do(self, item: T) -> None:
        try:
            with plugin_isolation.isolate_plugin_call(self._name):
                self._work(item)
        except Exception:
            LOG.exception("%s: a message was not handled.", self._name)
        with self._changed:
            self._running -= 1
            if self._stopped:
                self._changed.notify_all()

    def _next(self) -> tuple[T, int] | None:
        with self._changed:
            while not self._items or self._running >= self._most_threads:
                if self._stopped and not self._items:
                    return None
                self._idle += 1
                self._changed.wait()
            item = self._items.popleft()
            self._bytes -= item[1]
            self._running += 1
            return item
