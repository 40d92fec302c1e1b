# SPDX-License-Identifier: Apache-2.0
"""Time and waiting, passed in, so that a simulator can drive the production code.

Nothing in Moorage calls :mod:`time` directly. A clock measures durations and waits; it never orders events between processes
(tokens and epochs do) and never dates anything in the store (the database's own clock does, see :mod:`moorage.db.time`).
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

__all__ = ["Clock", "SignalEvent", "SystemClock"]


class SignalEvent(threading.Event):
    """An event that a signal's handler may set.

    A handler runs in the main thread, between any two steps of what that does; where that waits for a plain event it may hold the
    event's lock, for which the handler would wait for ever. Wait for this one with a timeout: what is set just before the wait
    begins wakes nobody.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())


class Clock(Protocol):
    """What production code may know of time."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment of this process; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Wait; returns at once for zero or less."""

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Wait until the event is set or the seconds are over; True when it is set."""

    def wall(self) -> float:
        """Seconds since the Unix epoch, for people to read (logs, reports); decides nothing."""


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds of :func:`time.monotonic`."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep in this thread."""
        if seconds > 0:
            time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Wait for the event in this thread."""
        return event.wait(seconds)

    def wall(self) -> float:
        """Seconds of :func:`time.time`."""
        return time.time()
