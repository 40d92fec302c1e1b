# SPDX-License-Identifier: Apache-2.0
"""Threads for work that may never come back: a file system that hangs, a hypervisor that does not answer.

Nobody waits for such a thread beyond a deadline; it is left behind, and counts as long as it lives, so that there are never more
threads than were asked for.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from oslo_log import log as logging

from moorage import foreign
from moorage.clock import Clock

__all__ = ["NOT_BEGUN", "OVERDUE", "Crew"]

LOG = logging.getLogger(__name__)
#: What stands for the result of work that has not ended in time, and of work that there was no thread for.
OVERDUE: Final = object()
NOT_BEGUN: Final = object()


class Crew:
    """Threads of one name. Safe for use by several threads."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._behind: list[threading.Thread] = []

    @property
    def behind(self) -> int:
        """How many threads were left behind and have not ended yet."""
        with self._lock:
            self._behind = [thread for thread in self._behind if thread.is_alive()]
            return len(self._behind)

    def run(self, works: Sequence[Callable[[], Any]], size: int, deadline: float | None) -> Iterator[tuple[int, Any]]:
        """The number and the result of each as it ends; what a work raises is logged, and its result is None.

        :param size: how many threads there may be, those that were left behind among them.
        :param deadline: seconds that one may take; None is for ever.
        """
        results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        ended = threading.Event()
        waiting = collections.deque(enumerate(works))
        running: dict[int, tuple[threading.Thread, float]] = {}
        while waiting or running:
            while waiting and len(running) + self.behind < size:
                number, work = waiting.popleft()
                thread = threading.Thread(
                    target=self._do, args=(number, work, results, ended), name=self._name, daemon=True
                )
                running[number] = thread, self._clock.monotonic()
                thread.start()
            if not running:
                yield from ((number, NOT_BEGUN) for number, _ in waiting)
                return
            oldest = min(began for _, began in running.values())
            patience = None if deadline is None else max(0.0, oldest + deadline - self._clock.monotonic())
            self._clock.wait(ended, patience)
            ended.clear()
            while not results.empty():
                number, result = results.get()
                if running.pop(number, None) is not None:
                    yield number, result
            for number in [] if deadline is None else self._late(running, deadline):
                thread, _ = running.pop(number)
                with self._lock:
                    self._behind.append(thread)
                yield number, OVERDUE

    def _late(self, running: dict[int, tuple[threading.Thread, float]], deadline: float) -> list[int]:
        limit = self._clock.monotonic() - deadline
        return [number for number, (_, began) in running.items() if began <= limit]

    def _do(
        self,
        number: int,
        work: Callable[[], Any],
        results: queue.SimpleQueue[tuple[int, Any]],
        ended: threading.Event,
    ) -> None:
        result = None
        try:
            with foreign.contained(self._name):
                result = work()
        except Exception:
            LOG.exception("Work of %s failed.", self._name)
        finally:
            results.put((number, result))
            ended.set()
