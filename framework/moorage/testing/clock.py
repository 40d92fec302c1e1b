# SPDX-License-Identifier: Apache-2.0
"""A clock that shows what a test says."""

from __future__ import annotations

import threading

from moorage.clock import SystemClock

__all__ = ["ManualClock"]


class ManualClock(SystemClock):
    """Time passes by sleeping, which takes none, and by :meth:`advance`. Safe for use by several threads.

    Waiting for an event is done in the machine's time, since another thread sets it; the wait does not advance the clock.

    :param now: what it shows at first, in seconds.
    :param shortest: seconds that a sleep moves it by at least.
    :ivar slept: seconds of all sleeps, as they were asked for.
    """

    def __init__(self, now: float = 0.0, *, shortest: float = 0.0) -> None:
        self.now = now
        self.slept: list[float] = []
        self._shortest = shortest
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        """What it shows."""
        return self.now

    def boottime(self) -> float:
        """What it shows: this clock knows no suspended time."""
        return self.now

    def wall(self) -> float:
        """What it shows, as seconds since 1970."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move it on."""
        with self._lock:
            self.slept.append(seconds)
            self.now += max(seconds, self._shortest)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        with self._lock:
            self.now += seconds
