# SPDX-License-Identifier: Apache-2.0
"""Makes the threads, locks, events and queues of Moorage's own code.

No other module of Moorage calls :mod:`threading` or :mod:`queue`; ``make check`` refuses it. So one call of :func:`use` puts a
simulated scheduler under the whole control plane: every object that is made afterwards comes from it. Libraries make their own.
"""

from __future__ import annotations

import queue as queue_module
import threading
from collections.abc import Callable, Mapping
from queue import Empty, Full
from types import TracebackType
from typing import Any, Protocol, TypeVar

from oslo_log import log as logging

__all__ = [
    "Condition",
    "Empty",
    "Event",
    "Full",
    "Latch",
    "Lock",
    "Primitives",
    "Queue",
    "Semaphore",
    "Thread",
    "condition",
    "current",
    "event",
    "identity",
    "in_main_thread",
    "local",
    "lock",
    "queue",
    "rlock",
    "semaphore",
    "signal_event",
    "start",
    "thread",
    "try_start",
    "use",
]

LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Lock(Protocol):
    """Mutual exclusion, as :class:`threading.Lock` and ``RLock`` have it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; False when it was not free within ``timeout`` seconds (-1: no limit)."""

    def release(self) -> None:
        """Free the lock."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...


class Semaphore(Protocol):
    """A counter that blocks at zero, as :class:`threading.Semaphore`."""

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Lower the counter by one; wait while it is zero."""

    def release(self, n: int = 1) -> None:
        """Raise the counter by ``n``."""


class Event(Protocol):
    """A flag to wait for, as :class:`threading.Event`."""

    def is_set(self) -> bool:
        """Returns whether the flag is set."""

    def set(self) -> None:
        """Set the flag and wake every thread that waits."""

    def clear(self) -> None:
        """Unset the flag."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, at most ``timeout`` seconds; whether it is set."""


class Condition(Protocol):
    """A lock with notification, as :class:`threading.Condition`."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Free the lock, wait for a notification, take the lock again; False after ``timeout`` seconds."""

    def notify(self, n: int = 1) -> None:
        """Wake up to ``n`` threads that wait."""

    def notify_all(self) -> None:
        """Wake every thread that waits."""


class Queue(Protocol[T]):
    """A first-in, first-out queue between threads, as :class:`queue.Queue` without task counting."""

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Append; raises :class:`Full` when there is no room in time."""

    def put_nowait(self, item: T) -> None:
        """Append; raises :class:`Full` when there is no room now."""

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Remove the first item; raises :class:`Empty` when there is none in time."""

    def get_nowait(self) -> T:
        """Remove the first item; raises :class:`Empty` when there is none now."""

    def qsize(self) -> int:
        """Returns how many items wait, about."""

    def empty(self) -> bool:
        """Returns whether no item waits, about."""


class Thread(Protocol):
    """A thread, as :class:`threading.Thread`."""

    name: str

    @property
    def ident(self) -> int | None:
        """The thread's number; None before it was started."""

    def start(self) -> None:
        """Begin to run."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, at most ``timeout`` seconds."""

    def is_alive(self) -> bool:
        """Returns whether the thread runs."""


class _SignalEvent(threading.Event):
    """An event that a signal's handler may set.

    A handler runs in the main thread, between any two steps of that thread. Where the main thread waits for a plain event it may
    hold the event's lock, and the handler would wait for that lock for ever. Wait for this event with a timeout: a flag that is
    set just before the wait begins wakes no thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())


class Primitives:
    """Makes what this module hands out, of the operating system's threads. The simulation derives its own from it."""

    def thread(
        self, target: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, daemon: bool
    ) -> Thread:
        """Returns a thread that was not started yet."""
        return threading.Thread(target=target, args=args, kwargs=kwargs, name=name, daemon=daemon)

    def lock(self) -> Lock:
        """Returns a lock."""
        return threading.Lock()

    def rlock(self) -> Lock:
        """Returns a lock that its owner may take again."""
        return threading.RLock()

    def condition(self) -> Condition:
        """Returns a condition with a lock of its own, which its owner may not take again."""
        return threading.Condition(threading.Lock())

    def event(self) -> Event:
        """Returns an event, not set."""
        return threading.Event()

    def signal_event(self) -> Event:
        """Returns an event that a signal handler may set. Wait for it with a timeout."""
        return _SignalEvent()

    def semaphore(self, value: int) -> Semaphore:
        """Returns a semaphore that begins at ``value``."""
        return threading.Semaphore(value)

    def queue(self, limit: int) -> Queue[Any]:
        """Returns a queue; ``limit`` 0 is none."""
        return queue_module.Queue(limit) if limit else queue_module.SimpleQueue()

    def local(self) -> Any:
        """Attributes of which each thread has its own."""
        return threading.local()

    def current(self) -> Thread:
        """Returns the thread that calls."""
        return threading.current_thread()

    def identity(self) -> int:
        """Returns the number of the thread that calls."""
        return threading.get_ident()

    def in_main_thread(self) -> bool:
        """Returns whether the process's main thread calls."""
        return threading.current_thread() is threading.main_thread()


class Latch:
    """Blocks one thread until another thread calls :meth:`set`. It takes a third of the time of an event.

    At most one thread waits at a time, and :meth:`set` must not be called again before that thread has returned from :meth:`wait`.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wakes the waiting thread; if no thread waits yet, the next call of :meth:`wait` returns at once."""
        self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Waits at most ``timeout`` seconds for :meth:`set`, and returns whether it was called. Resets the latch."""
        return self._lock.acquire(timeout=timeout)


_primitives = Primitives()


def use(primitives: Primitives) -> Primitives:
    """Make everything from ``primitives`` from now on; returns those that were used before."""
    global _primitives
    before, _primitives = _primitives, primitives
    return before


def thread(
    target: Callable[..., object],
    *,
    name: str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    daemon: bool = True,
) -> Thread:
    """Returns a thread that was not started yet; by default it does not hold up the end of the process."""
    return _primitives.thread(target, args, kwargs or {}, name, daemon)


def start(target: Callable[..., object], *, name: str, args: tuple[Any, ...] = ()) -> Thread:
    """Start a daemon thread."""
    made = thread(target, name=name, args=args)
    made.start()
    return made


def try_start(target: Callable[..., object], *, name: str, args: tuple[Any, ...] = ()) -> Thread | None:
    """Start a daemon thread; None, with a word in the log, where the system starts no more threads now."""
    try:
        return start(target, name=name, args=args)
    except RuntimeError as error:
        LOG.warning("The thread %s was not started: %s. What limits the threads of this process?", name, error)
        return None


def lock() -> Lock:
    """Returns a lock."""
    return _primitives.lock()


def rlock() -> Lock:
    """Returns a lock that its owner may take again."""
    return _primitives.rlock()


def condition() -> Condition:
    """Returns a condition with a lock of its own, which its owner may not take again."""
    return _primitives.condition()


def event() -> Event:
    """Returns an event, not set."""
    return _primitives.event()


def signal_event() -> Event:
    """Returns an event that a signal handler may set. Wait for it with a timeout."""
    return _primitives.signal_event()


def semaphore(value: int) -> Semaphore:
    """Returns a semaphore that begins at ``value``."""
    return _primitives.semaphore(value)


def queue(limit: int = 0) -> Queue[Any]:
    """Returns a queue of at most ``limit`` items; 0 is no limit."""
    return _primitives.queue(limit)


def local() -> Any:
    """Attributes of which each thread has its own."""
    return _primitives.local()


def current() -> Thread:
    """Returns the thread that calls."""
    return _primitives.current()


def identity() -> int:
    """Returns the number of the thread that calls."""
    return _primitives.identity()


def in_main_thread() -> bool:
    """Returns whether the process's main thread calls."""
    return _primitives.in_main_thread()
