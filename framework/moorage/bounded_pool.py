# SPDX-License-Identifier: Apache-2.0
"""Runs calls that may hang in a bounded number of threads, and continues without the threads that hang.

A thread of Python cannot be stopped. The pool abandons a call that exceeds its limit: its caller goes on, the thread ends when the
call returns. Until then the thread counts, so the number of threads stays bounded however many calls hang.

Limits are measured by :class:`~moorage.hang_detector.HangDetector`.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from oslo_log import log as logging

from moorage import errors, plugin_isolation, threads
from moorage.clock import Clock, ThreadTime
from moorage.hang_detector import LOOKS, HangDetector, Progress

__all__ = ["BoundedPool", "Overdue", "PooledCall"]

LOG = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")

#: Seconds without work after which a thread ends.
_IDLE = 10.0


class Overdue(TimeoutError):
    """A call did not return within its limit, or no thread was free to begin it."""

    def __init__(self, name: str, seconds: float, *, begun: bool) -> None:
        what = "has not returned" if begun else "was not begun, because earlier calls have not returned,"
        super().__init__(f"{name} {what} within {seconds:g} seconds")
        self.begun = begun


class PooledCall(Generic[R]):
    """Holds one call, its state and its result.

    :param ended: set when the call has returned, beside ``has_ended``; None: nobody waits for it.
    :param measured: whether :meth:`processor_seconds` is asked for.
    """

    __slots__ = (
        "_before",
        "_ended",
        "_measured",
        "_time",
        "_work",
        "abandoned",
        "began",
        "error",
        "has_ended",
        "result",
        "thread",
    )

    def __init__(
        self, work: Callable[[], R], began: float, ended: threads.Event | None = None, *, measured: bool = False
    ) -> None:
        self._work = work
        self._ended = ended
        self._measured = measured
        self.has_ended = False
        #: When it was asked for, and from when a thread has taken it: when that began.
        self.began = began
        #: The number of the thread that has taken it; 0: none yet.
        self.thread = 0
        self._time: ThreadTime | None = None
        self.abandoned = False
        self.error: BaseException | None = None
        self.result: R

    def run(self, name: str) -> None:
        """Makes the call, and stores its result or its error. Never raises."""
        if self._measured:
            time = ThreadTime()
            self._before, self._time = time.seconds(), time
        try:
            with plugin_isolation.isolate_plugin_call(name):
                self.result = self._work()
        except BaseException as error:  # noqa: BLE001  (given to the caller)
            self.error = error
        finally:
            # The work may refer to this call. Only a garbage collection would free the two then, and it stops all threads.
            del self._work
            self.has_ended = True
            if self._ended is not None:
                self._ended.set()

    def processor_seconds(self) -> float:
        """Returns the seconds of processor time that the call has used."""
        return 0.0 if self._time is None else self._time.seconds() - self._before


class BoundedPool:
    """Runs calls that may hang in a bounded number of threads. Safe for use by several threads.

    Threads are started when they are needed, and kept for later calls.

    :ivar size: how many calls may run at once. May be changed at any time.
    :param spare: how many abandoned calls do not count against ``size``; each one more lowers it by one.
    """

    def __init__(self, name: str, clock: Clock, size: int, *, spare: int = 0) -> None:
        self.size = size
        self._name = name
        self._clock = clock
        self._spare = spare
        self._changed = threads.condition()
        self._waiting: collections.deque[PooledCall[Any]] = collections.deque()
        #: Threads that take jobs; how many of these have none; threads whose call was abandoned.
        self._threads = self._idle = self._abandoned = 0
        self._closed = False

    @property
    def room(self) -> int:
        """Returns how many calls can run at once, without the abandoned calls."""
        with self._changed:
            return self._room()

    @property
    def stuck(self) -> bool:
        """Returns whether so many calls hang that no other call can start."""
        return self.room <= 0

    def start(self, work: Callable[[], object], ended: threads.Event | None = None) -> PooledCall[None]:
        """Starts a call as soon as a thread is free, and logs what it raises. Does not wait.

        :param ended: set when it has returned.
        :raises Unavailable: the pool has no thread, and the system starts none now.
        """
        job = PooledCall(functools.partial(_logged, work, self._name), self._clock.monotonic(), ended)
        self._put(job)
        return job

    def abandon(self, job: PooledCall[Any]) -> bool:
        """Abandons a call that may hang. Returns False if the call has just ended."""
        with self._changed:
            if job.has_ended:
                return False
            job.abandoned = True
            if job.thread:
                self._threads -= 1
                self._abandoned += 1
                self._staff()
            else:
                self._waiting.remove(job)
            return True

    def call(
        self,
        work: Callable[[], R],
        limit: float | None,
        progress: Callable[[int], Progress] | None = None,
        *,
        processor: float | None = None,
    ) -> R:
        """Makes a call in a thread of the pool, and returns or raises what the call does.

        :param limit: seconds that it may take, with the wait for a thread; None: for ever.
        :param progress: for work of several steps: from the number of the thread that does the work (0: not begun) to the step
            that ``limit`` applies to. Without it the whole call is one step.
        :param processor: seconds of processor time that the call's thread may use.
        :raises Overdue: a limit was exceeded. The call may still return; its result is dropped.
        :raises Unavailable: the pool has no thread, and the system starts none now.
        """
        asked, ended = self._clock.monotonic(), threads.event()
        job = PooledCall(work, asked, ended, measured=processor is not None)
        self._put(job)
        if limit is None:
            self._clock.wait(ended, None)
        else:
            self._watch(job, ended, limit, progress or (lambda thread: (job, asked)), processor)
        if job.error is not None:
            raise job.error
        return job.result

    def for_each(
        self,
        items: Iterable[T],
        work: Callable[[T], object],
        limit: float | None = None,
        overdue: Callable[[T], object] = lambda item: None,
    ) -> list[T]:
        """Calls ``work(item)`` for all items, up to ``size`` at a time. Returns when each call has returned or was abandoned.

        :param work: what it raises is logged.
        :param limit: seconds that one call may take; None: for ever.
        :param overdue: called in this thread with each item whose call was abandoned.
        :returns: the items that were not begun, because too many calls hang or the system starts no thread now.
        """
        run = _Run(items, work, self._name, self._clock, limit)
        lanes: dict[PooledCall[None], _Lane[T]] = {}
        while True:
            while run.waiting and len(lanes) < self.room:
                lane = _Lane(run)
                job = PooledCall(lane.run, self._clock.monotonic(), run.news)
                try:
                    self._put(job)
                except errors.Unavailable:
                    break
                lanes[job] = lane
            if not lanes:
                return list(run.waiting)
            self._clock.wait(run.news, run.pause)
            run.news.clear()
            for job, lane in list(lanes.items()):
                if job.has_ended:
                    del lanes[job]
                elif lane.abandon_if_it_hangs():
                    self.abandon(job)
                    del lanes[job]
                    overdue(lane.item)

    def close(self) -> None:
        """Closes the pool: it accepts no further calls, and its threads end after the waiting calls. Does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- threads --------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        return min(self.size, self.size + self._spare - self._abandoned)

    def _put(self, job: PooledCall[Any]) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError(f"The pool {self._name} is closed.")
            self._waiting.append(job)
            self._staff()
            if not self._threads and self._room() > 0:
                self._waiting.remove(job)
                raise errors.Unavailable(f"No thread can be started for {self._name} now; try again.")

    def _staff(self) -> None:
        """Wakes or starts a thread for the newest call. The caller holds the lock."""
        if self._idle >= len(self._waiting):
            self._changed.notify()
        elif self._threads < self._room():
            self._threads += threads.try_start(self._run, name=self._name) is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                # A busy thread may have taken the call for which this one was woken.
                while not self._waiting and not self._closed and self._changed.wait(_IDLE):
                    pass
                self._idle -= 1
                if not self._waiting or self._threads > max(1, self.size):
                    self._threads -= 1
                    # Another thread may not know yet of the call that waits.
                    self._changed.notify()
                    return
                job = self._waiting.popleft()
                job.began, job.thread = self._clock.monotonic(), threads.identity()
            job.run(self._name)
            if self._left(job):
                return

    def _watch(
        self,
        job: PooledCall[Any],
        ended: threads.Event,
        limit: float,
        progress: Callable[[int], Progress],
        processor: float | None,
    ) -> None:
        """Waits until a call has ended.

        :raises Overdue: the call hangs, and was abandoned.
        """
        detector = HangDetector(self._clock, limit)
        pause = detector.pause if processor is None else min(detector.pause, processor / LOOKS)
        while not self._clock.wait(ended, pause):
            spent = processor is not None and job.processor_seconds() > processor
            if (detector.look(progress(job.thread)) or spent) and self.abandon(job):
                raise Overdue(self._name, limit, begun=job.thread != 0)

    def _left(self, job: PooledCall[Any]) -> bool:
        """Returns whether a call was abandoned, so that another thread has replaced this thread."""
        with self._changed:
            if job.abandoned:
                self._abandoned -= 1
                self._staff()
            return job.abandoned


class _Run(Generic[T]):
    """Holds the items and the work of one call of :meth:`BoundedPool.for_each`."""

    def __init__(
        self, items: Iterable[T], work: Callable[[T], object], name: str, clock: Clock, limit: float | None
    ) -> None:
        self.waiting = collections.deque(items)
        self.news = threads.event()
        self.pause = None if limit is None else limit / LOOKS
        self.work = work
        self.name = name
        self.clock = clock
        self.limit = limit
        self.lock = threads.lock()


class _Lane(Generic[T]):
    """Does items of a run in one thread, one after the other."""

    def __init__(self, run: _Run[T]) -> None:
        self.item: T
        self._run = run
        self._detector = HangDetector(run.clock, run.limit or 0.0)
        self._step: tuple[int, float] | None = None
        self._number = 0
        self._abandoned = False

    def run(self) -> None:
        """Does waiting items until none is left, or until the lane was abandoned."""
        while self._next():
            _logged(functools.partial(self._run.work, self.item), self._run.name)

    def abandon_if_it_hangs(self) -> bool:
        """Abandons the lane if the call for its present item hangs. Returns whether it does."""
        with self._run.lock:
            self._abandoned = self._run.limit is not None and self._detector.look(self._step)
            return self._abandoned

    def _next(self) -> bool:
        with self._run.lock:
            self._step = None
            if self._abandoned or not self._run.waiting:
                return False
            self.item = self._run.waiting.popleft()
            self._number += 1
            self._step = self._number, self._run.clock.monotonic()
            return True


def _logged(work: Callable[[], object], name: str) -> None:
    try:
        with plugin_isolation.isolate_plugin_call(name):
            work()
    except Exception:
        LOG.exception("Work of %s failed.", name)
