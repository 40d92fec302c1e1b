# SPDX-License-Identifier: Apache-2.0
"""Answers what people ask of workloads that run: their consoles and what they use.

Questions cost the host something, and members of projects may ask. So an agent answers a bounded number of them a second, fewer of
one instance, and a bounded number at the same time, and says a bounded number of bytes. It refuses further questions at once. A
driver that hangs holds up nothing but further questions.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import TypeVar

from moorage import errors, threads
from moorage.bounded_pool import BoundedPool, Overdue
from moorage.clock import Clock
from moorage.drivers.interface import ComputeDriver, Console, DriverError, Usage, UsageReport

__all__ = ["Questions"]

R = TypeVar("R")
#: Questions that are answered at the same time, in one second, and in one second of one instance.
_AT_ONCE, _PER_SECOND, _OF_INSTANCE = 2, 10, 5
#: Seconds that one may take; bytes of a console; seconds for which the measured usage of all instances is kept.
_LIMIT, _BYTES, _KEPT = 10.0, 2**16, 1.0


class Questions:
    """Asks the driver of one host. Safe for use by several threads."""

    def __init__(self, driver: ComputeDriver, clock: Clock) -> None:
        self._driver = driver
        self._clock = clock
        self._pool = BoundedPool("questions to the compute driver", clock, _AT_ONCE)
        #: One for each question that the pool can answer now. A question that hangs keeps its place.
        self._places = threads.semaphore(_AT_ONCE)
        self._lock = threads.lock()
        #: When the present second began, and how many questions of each instance were let through in it.
        self._second, self._asked = 0.0, collections.Counter[str]()
        #: What the driver measured last, and when.
        self._usage: tuple[float, Mapping[str, Usage]] | None = None

    def console(self, uuid: str, lines: int) -> str:
        """Returns the last lines that a workload wrote, 64 KiB at most.

        :raises Conflict: the driver has no consoles, or there is none of this instance.
        :raises Unavailable: too much is asked, or the driver does not answer.
        """
        driver = self._driver
        if not isinstance(driver, Console):
            raise _lacks("console")
        written = self._ask(uuid, lambda: driver.console(uuid, lines))
        return written.encode("utf-8", "replace")[-_BYTES:].decode("utf-8", "ignore")

    def usage(self, uuid: str) -> dict[str, float]:
        """What a workload that runs uses: ``cpu_seconds`` and ``memory_bytes``, measured at most 1 second ago.

        :raises Conflict: the driver measures nothing, or the instance does not run.
        :raises Unavailable: too much is asked, or the driver does not answer.
        """
        driver = self._driver
        if not isinstance(driver, UsageReport):
            raise _lacks("usage")
        with self._lock:
            kept = self._usage
        if kept is None or self._clock.monotonic() - kept[0] >= _KEPT:
            kept = self._clock.monotonic(), self._ask(uuid, driver.usage)
            with self._lock:
                self._usage = kept
        found = kept[1].get(uuid)
        if found is None:
            raise errors.Conflict(f"Instance {uuid} does not run, or what it uses cannot be measured.", instance=uuid)
        return {"cpu_seconds": found.cpu_seconds, "memory_bytes": found.memory_bytes}

    def close(self) -> None:
        """Takes no further questions."""
        self._pool.close()

    def _ask(self, uuid: str, work: Callable[[], R]) -> R:
        self._count(uuid)
        # A caller that waited for a place would keep a thread of the agent from its messages.
        if not self._places.acquire(blocking=False):
            raise errors.Unavailable(
                f"The host of the instance answers {_AT_ONCE} questions at the same time, and has not answered these. Try again."
            )

        def answer() -> R:
            try:
                return work()
            finally:
                self._places.release()

        try:
            return self._pool.call(answer, _LIMIT)
        except Overdue as error:
            if not error.begun:
                self._places.release()
            raise errors.Unavailable(f"The compute driver has not answered within {_LIMIT:g} s. Try again.") from error
        except DriverError as error:
            raise errors.Conflict(f"The compute driver cannot answer: {error}") from error

    def _count(self, uuid: str) -> None:
        now = self._clock.monotonic()
        with self._lock:
            if now - self._second >= 1.0:
                self._second, self._asked = now, collections.Counter()
            for asked, most, of in (
                (self._asked[uuid], _OF_INSTANCE, "of one instance "),
                (self._asked.total(), _PER_SECOND, ""),
            ):
                if asked >= most:
                    raise errors.Unavailable(
                        f"The host of the instance answers {most} questions {of}a second. Try again in a second."
                    )
            self._asked[uuid] += 1


def _lacks(power: str) -> errors.Conflict:
    return errors.Conflict(f"The compute driver of the instance's host does not have the power compute.{power}.")
