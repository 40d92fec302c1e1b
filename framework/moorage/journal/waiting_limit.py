# SPDX-License-Identifier: Apache-2.0
"""Limits how many requests of one caller wait for events, so that no caller uses all threads of a process for itself."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator

from typing_extensions import override

from moorage import errors, threads

__all__ = ["WaitingLimit"]


class WaitingLimit:
    """The requests of a process that wait for events. Safe for use by several threads.

    :param most: requests of one caller that may wait at the same time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threads.lock()
        #: By caller. An answer that is dropped before it began is not closed; it leaves its set by itself.
        self._waiting: dict[str, weakref.WeakSet[_Waiting]] = {}

    def admit(self, caller: str, parts: Generator[bytes, None, None]) -> Iterator[bytes]:
        """Returns the parts of an answer that waits. The request counts until the answer is closed.

        :param caller: for people, as ``the project 2f6e``.
        :raises Unavailable: as many requests of the caller wait already.
        """
        with self._lock:
            waiting = self._waiting.setdefault(caller, weakref.WeakSet())
            if len(waiting) >= self._most:
                raise errors.Unavailable(
                    f"{self._most} requests of {caller} wait for events in this process already. Let one request wait for several "
                    "watchers, or end some."
                )
            found = _Waiting(self, caller, parts)
            waiting.add(found)
            return found

    def leave(self, caller: str, waiting: _Waiting) -> None:
        """A request waits no longer; harmless when it has left before."""
        with self._lock:
            others = self._waiting.get(caller)
            if others is not None:
                others.discard(waiting)
                if not others:
                    del self._waiting[caller]


class _Waiting(Iterator[bytes]):
    def __init__(self, waiters: WaitingLimit, caller: str, parts: Generator[bytes, None, None]) -> None:
        self._waiters = waiters
        self._caller = caller
        self._parts = parts

    @override
    def __next__(self) -> bytes:
        return next(self._parts)

    def close(self) -> None:
        """The answer has ended, or the client has left."""
        self._waiters.leave(self._caller, self)
        self._parts.close()
