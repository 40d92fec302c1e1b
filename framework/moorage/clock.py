# SPDX-License-Identifier: Apache-2.0
"""Time and waiting, passed in, so that a simulator can drive the production code.

Nothing in Moorage calls :mod:`time` directly. A clock measures durations and waits; it never orders events between processes
(tokens and epochs do) and never dates anything in the store (the database's own clock does, see :mod:`moorage.db.time`).
"""

from __future__ import annotations

import time
from typing import Protocol

from moorage import threads

__all__ = ["Clock", "SystemClock", "ThreadTime"]


class ThreadTime:
    """Measures the processor time of the thread that makes it, for other threads to read."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threads.identity())

    def seconds(self) -> float:
        """Processor time that the thread has used; 0 when the thread has ended."""
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return 0.0


class Clock(Protocol):
    """What production code may know of time."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment of this process; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Wait; returns at once for zero or less."""

    def wait(self, event: threads.Event, seconds: float | None) -> bool:
        """Wait until the event is set or the seconds are over; True when it is set."""

    def boottime(self) -> float:
        """Seconds since the machine started, also those while it was suspended; all processes of the machine see the same."""

    def wall(self) -> float:
        """Seconds since the Unix epoch, for people to read (logs, reports); decides nothing."""


class SystemClock:
    """The machine's clock."""

    #: Without a method around it: each request and each operation asks several times.
    monotonic = staticmethod(time.monotonic)

    def sleep(self, seconds: float) -> None:
        """Sleep in this thread."""
        if seconds > 0:
            time.sleep(seconds)

    def wait(self, event: threads.Event, seconds: float | None) -> bool:
        """Wait for the event in this thread."""
        return event.wait(seconds)

    def boottime(self) -> float:
        """Seconds of the clock ``CLOCK_BOOTTIME`` of Linux."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        """Seconds of :func:`time.time`."""
        return time.time()
