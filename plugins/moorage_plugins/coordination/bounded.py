# SPDX-License-Identifier: Apache-2.0
"""Calls that return in time, of libraries that do not."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from moorage import errors
from moorage.clock import Clock

__all__ = ["Bounded"]

T = TypeVar("T")


class _Call:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class Bounded:
    """Runs calls one after the other in a thread of its own; a caller waits for as long as it likes to.

    A call that hangs keeps the thread, and every later call is refused until it returns. (Measured: a heartbeat blocked 14 s on
    ZooKeeper and 8 s on Redis, a connection to Redis 57 s.) So whoever gives up on it makes a new one, and this one's thread ends
    when its call returns.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self._clock = clock
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T], seconds: float) -> T:
        """What ``work`` returns or raises; the seconds are for its turn and for itself.

        :raises Unavailable: not in time; it may still happen.
        """
        until = self._clock.monotonic() + seconds
        if not self._turn.acquire(timeout=seconds):
            raise errors.Unavailable(f"An earlier call has not returned for more than {seconds:g} seconds.")
        call = _Call(work)
        self._calls.put(call)
        if not call.done.wait(max(0.0, until - self._clock.monotonic())):
            # The turn stays taken until the call returns.
            threading.Thread(target=self._pass_on, args=(call,), name="late-call", daemon=True).start()
            raise errors.Unavailable(f"No answer within {seconds:g} seconds.")
        self._turn.release()
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def end(self, last: Callable[[], object]) -> None:
        """Run ``last`` after whatever runs, then end the thread; waits for nothing."""

        def quietly() -> None:
            with contextlib.suppress(Exception):
                last()

        self._calls.put(_Call(quietly))
        self._calls.put(None)

    def _pass_on(self, call: _Call) -> None:
        call.done.wait()
        self._turn.release()

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            try:
                call.result = call.work()
            except BaseException as error:  # noqa: BLE001  (given to the caller)
                call.error = error
            finally:
                call.done.set()
