# SPDX-License-Identifier: Apache-2.0
"""Threads, locks, events and queues of simulated processes. See :mod:`moorage.threads`."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from moorage import threads
from tests.simulation.kernel import Kernel, SimThread

__all__ = ["SimPrimitives"]


class SimLock:
    """A lock that its owner may take again when ``again`` is true. A point where it has to wait."""

    def __init__(self, kernel: Kernel, again: bool = False) -> None:
        self._kernel = kernel
        self._again = again
        self._owner: SimThread | None = None
        self._count = 0
        self._waiters: list[SimThread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = self._kernel
        me = kernel.current
        if self._again and self._count and self._owner is me:
            self._count += 1
            return True
        while self._count:
            if not blocking:
                return False
            if not kernel.block(self._waiters, None if timeout < 0 else timeout, "lock") and self._count:
                return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
            # All wait for it again: the scheduler chooses, and one that was killed meanwhile holds up no other.
            wake_all(self._kernel, self._waiters)

    def locked(self) -> bool:
        return self._count > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimEvent:
    """A flag."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._set = False
        self._waiters: list[SimThread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        if not self._set:
            self._set = True
            wake_all(self._kernel, self._waiters)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._kernel.block(self._waiters, timeout, "wait")
        return self._set


class SimCondition:
    """A lock with notification."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._lock = SimLock(kernel)
        self._waiters: list[SimThread] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        self._lock.release()
        woken = self._kernel.block(self._waiters, timeout, "condition")
        self._lock.acquire()
        return woken

    def notify(self, n: int = 1) -> None:
        for each in [each for each in self._waiters if each.state == "blocked"][:n]:
            self._waiters.remove(each)
            self._kernel.wake(each)

    def notify_all(self) -> None:
        wake_all(self._kernel, self._waiters)


class SimSemaphore:
    """A counter that blocks at zero."""

    def __init__(self, kernel: Kernel, value: int) -> None:
        self._kernel = kernel
        self._value = value
        self._waiters: list[SimThread] = []

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        while self._value <= 0:
            if not blocking or (not self._kernel.block(self._waiters, timeout, "semaphore") and self._value <= 0):
                return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        wake_all(self._kernel, self._waiters)


class SimQueue:
    """First in, first out."""

    def __init__(self, kernel: Kernel, limit: int) -> None:
        self._kernel = kernel
        self._limit = limit
        self._items: collections.deque[Any] = collections.deque()
        self._waiters: list[SimThread] = []
        self._putters: list[SimThread] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        while self._limit and len(self._items) >= self._limit:
            if not block or not self._kernel.block(self._putters, timeout, "put"):
                raise threads.Full
        self._items.append(item)
        wake_all(self._kernel, self._waiters)
        self._kernel.point("put")

    def put_nowait(self, item: Any) -> None:
        self.put(item, False)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while not self._items:
            if not block or (not self._kernel.block(self._waiters, timeout, "get") and not self._items):
                raise threads.Empty
        item = self._items.popleft()
        wake_all(self._kernel, self._putters)
        return item

    def get_nowait(self) -> Any:
        return self.get(False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


def wake_all(kernel: Kernel, waiters: list[SimThread]) -> None:
    found = list(waiters)
    waiters.clear()
    for each in found:
        kernel.wake(each)


class SimPrimitives(threads.Primitives):
    """Makes what belongs to the process that acts."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    @override
    def thread(
        self, target: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, daemon: bool
    ) -> threads.Thread:
        return SimThread(self._kernel, self._kernel.in_process(), name, lambda: target(*args, **kwargs))

    @override
    def lock(self) -> threads.Lock:
        return SimLock(self._kernel)

    @override
    def rlock(self) -> threads.Lock:
        return SimLock(self._kernel, True)

    @override
    def condition(self) -> threads.Condition:
        return SimCondition(self._kernel)

    @override
    def event(self) -> threads.Event:
        return SimEvent(self._kernel)

    @override
    def signal_event(self) -> threads.Event:
        return SimEvent(self._kernel)

    @override
    def semaphore(self, value: int) -> threads.Semaphore:
        return SimSemaphore(self._kernel, value)

    @override
    def queue(self, limit: int) -> threads.Queue[Any]:
        return SimQueue(self._kernel, limit)

    @override
    def current(self) -> threads.Thread:
        found: threads.Thread = self._kernel.current or threading.current_thread()
        return found

    @override
    def identity(self) -> int:
        return self._kernel.current.number if self._kernel.current is not None else 0

    @override
    def in_main_thread(self) -> bool:
        return False
