# SPDX-License-Identifier: Apache-2.0
"""Doing several things at a time, and not waiting for one that hangs."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from moorage.clock import Clock

__all__ = ["Lanes"]

T = TypeVar("T")

#: Threads that may hang, of one task and beyond its width, before nothing more is begun.
_HANGING = 16


class _Lane(Generic[T]):
    """One thread's present item, and since when; ``left`` once nobody waits for it."""

    def __init__(self) -> None:
        self.item: T | None = None
        self.since = 0.0
        self.left = False


class Lanes(Generic[T]):
    """Runs ``work(item)`` for items in up to ``width`` threads. ``work`` must not raise.

    :param timeout: seconds after which an item is given up: its thread ends when the work returns.
    :param overdue: told of each item that was given up.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        width: int,
        timeout: float,
        work: Callable[[T], None],
        overdue: Callable[[T], None],
    ) -> None:
        self._name = name
        self._clock = clock
        self._width = width
        self._timeout = timeout
        self._work = work
        self._overdue = overdue
        self._items: collections.deque[T] = collections.deque()
        self._changed = threading.Condition()
        self._lanes: list[_Lane[T]] = []
        #: Threads that were given up and have not ended.
        self._hanging = 0

    def run(self, items: Iterable[T]) -> int:
        """Do them all; returns when each has ended or was given up.

        With too many threads that hang nothing more is begun: how many were left undone.
        """
        most = _HANGING + self._width
        with self._changed:
            self._items.extend(items)
            while self._items or self._lanes:
                while self._items and len(self._lanes) < self._width and self._hanging + len(self._lanes) < most:
                    self._begin()
                if not self._lanes:
                    # All threads hang. What is left waits for another time.
                    left = len(self._items)
                    self._items.clear()
                    return left
                self._changed.wait(self._until_overdue())
                self._give_up_overdue()
        return 0

    @property
    def stuck(self) -> bool:
        """Whether as many threads hang as may."""
        with self._changed:
            return self._hanging >= _HANGING + self._width

    def _begin(self) -> None:
        lane: _Lane[T] = _Lane()
        self._lanes.append(lane)
        self._take(lane)
        threading.Thread(target=self._run, args=(lane,), name=self._name, daemon=True).start()

    def _take(self, lane: _Lane[T]) -> bool:
        if lane.left or not self._items:
            return False
        lane.item, lane.since = self._items.popleft(), self._clock.monotonic()
        return True

    def _run(self, lane: _Lane[T]) -> None:
        going = True
        while going:
            item = lane.item
            assert item is not None  # noqa: S101  (taken under the lock)
            self._work(item)
            with self._changed:
                going = self._take(lane)
                if lane.left:
                    self._hanging -= 1
                elif not going:
                    self._lanes.remove(lane)
                    self._changed.notify_all()

    def _until_overdue(self) -> float:
        oldest = min(lane.since for lane in self._lanes)
        return max(0.01, oldest + self._timeout - self._clock.monotonic())

    def _give_up_overdue(self) -> None:
        late = [lane for lane in self._lanes if self._clock.monotonic() - lane.since >= self._timeout]
        for lane in late:
            lane.left = True
            self._hanging += 1
            self._lanes.remove(lane)
            if lane.item is not None:
                self._overdue(lane.item)
