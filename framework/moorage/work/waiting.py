# SPDX-License-Identifier: Apache-2.0
"""Keeps the operations of a work loop that wait to be taken, each once, in the order in which they were found.

Messages ask for operations, and sweeps find those in the store whose messages were lost. The queue is bounded: what it has no room
for stays in the store, and is read again when half of the queue is free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moorage import threads
from moorage.clock import Clock
from moorage.work.interface import Operation
from moorage.work.job import Key, Work

__all__ = ["WaitingOperations", "drain", "drain_more"]

LOG = logging.getLogger(__name__)
#: Operations that a sweep reads at a time.
_PAGE = 500
#: Seconds before a sweep takes a failed operation again: after its first owner, and at most. It doubles with each owner.
_FIRST_BACKOFF, _LONGEST_BACKOFF = 1.0, 300.0


class WaitingOperations:
    """The queue of the operations that wait for one work loop. One thread takes; any thread may call the other methods.

    :param name: of the loop, for log lines.
    :param limit: how many operations may wait.
    :param keeps: whether the loop renews the lease of an operation: resource type, resource id and token -> bool.
    """

    def __init__(
        self, name: str, work: Work[Any], clock: Clock, limit: int, keeps: Callable[[str, str, int], bool]
    ) -> None:
        self._name = name
        self._work = work
        self._clock = clock
        self._limit = limit
        self._keeps = keeps
        self._lock = threads.lock()
        self._keys: threads.Queue[Key | None] = threads.queue()
        #: What is in the queue, with the moment when a message asked for it; 0 for what a sweep has found.
        self._told_at: dict[Key, int] = {}
        #: How many operations the queue had no room for since it last held all that wait.
        self._left_out = 0
        #: By type, the last id that was queued before the queue was full.
        self._begin_after: dict[str, str] = {}
        #: When a sweep may queue a failed operation again, on the monotonic clock.
        self._not_before: dict[Key, float] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._told_at)

    @property
    def is_behind(self) -> bool:
        """Whether operations wait in the store for which the queue had no room."""
        return self._left_out > 0

    def add(self, key: Key, told_at: int = 0) -> bool:
        """Puts an operation into the queue; False if there is no room.

        :param told_at: when a message asked for it, in microseconds of the wall clock; 0: none did.
        """
        with self._lock:
            self._not_before.pop(key, None)
            if key in self._told_at:
                self._told_at[key] = self._told_at[key] or told_at
                return True
            if len(self._told_at) >= self._limit:
                if not self._left_out:
                    LOG.warning("%s: %d operations wait; more are left to the store for now.", self._name, self._limit)
                self._left_out += 1
                return False
            self._told_at[key] = told_at
        self._keys.put(key)
        return True

    def put_off(self, key: Key, owners: int) -> None:
        """Has sweeps leave a failed operation alone for a pause.

        :param owners: how many owners the operation has had; the pause doubles with each.
        """
        pause = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2.0 ** min(owners - 1, 16))
        with self._lock:
            self._not_before[key] = self._clock.monotonic() + pause
            while len(self._not_before) > self._limit:
                del self._not_before[next(iter(self._not_before))]

    def end_pauses(self, keys: Sequence[Key]) -> None:
        """Forgets the pauses of operations that have ended."""
        with self._lock:
            for key in keys:
                self._not_before.pop(key, None)

    # -- taking -----------------------------------------------------------------------------------------------------

    def drain(self, limit: Callable[[], int]) -> tuple[list[Key], bool]:
        """Waits for operations and returns them; they stay in the queue until :meth:`leave`. False after :meth:`end`.

        :param limit: how many are returned at most; asked when the first one is there.
        """
        return drain(self._keys, limit)

    def leave(self, keys: Sequence[Key]) -> Mapping[Key, int]:
        """Takes operations out of the queue. Messages for the same resource are queued again from now on.

        :returns: the operations that are due, with the moments when messages asked for them (0: none did). An operation that failed
            while its key was in the queue is not due; a sweep finds it after its pause.
        """
        with self._lock:
            now = self._clock.monotonic()
            told_at = {key: self._told_at.pop(key, 0) for key in keys}
            return {key: at for key, at in told_at.items() if now >= self._not_before.get(key, float("-inf"))}

    def end(self) -> None:
        """Ends :meth:`drain`."""
        self._keys.put(None)

    # -- finding ----------------------------------------------------------------------------------------------------

    @property
    def should_look(self) -> bool:
        """Whether there is room for operations that were left to the store."""
        return self.is_behind and len(self._told_at) <= self._limit // 2

    def look(self) -> None:
        """Queues the due operations of the store until the queue is full. Several threads may call this method at once."""
        with self._lock:
            left_out = self._left_out
        for kind, page in self._pages():
            with self._lock:
                queued = [each for each in page if (kind, each.resource_id) in self._told_at]
            if queued:
                self._work.waits(kind, queued)
            # Ends at the first operation that the queue has no room for.
            if not all(self.add((kind, each.resource_id)) for each in page if self._is_due(each)):
                return
            self._begin_after[kind] = page[-1].resource_id if page else ""
        self._begin_after.clear()
        with self._lock:
            if self._left_out == left_out:
                # All that waits is queued.
                self._left_out = 0

    def _pages(self) -> Iterator[tuple[str, Sequence[Operation]]]:
        """Yields the type and a page of its operations in the store. The types take turns, so that no type waits for all others."""
        sources = {kind: self._pages_of(kind) for kind in self._work.types}
        # Most types have one page. One transaction reads the first pages of all types.
        with self._work.database.shared_read():
            found = {kind: next(pages, None) for kind, pages in sources.items()}
        while found:
            for kind, page in found.items():
                if page is not None:
                    yield kind, page
            found = {kind: next(sources[kind], None) for kind, page in found.items() if page is not None}

    def _pages_of(self, kind: str) -> Iterator[Sequence[Operation]]:
        """Yields all operations of one type by pages. The first page follows the last id that was queued before the queue was full.

        Otherwise the resources with the lowest ids would always come first.
        """
        for after in dict.fromkeys((self._begin_after.get(kind, ""), "")):
            while True:
                page = self._work.source(kind, after, _PAGE)
                yield page
                if len(page) < _PAGE:
                    break
                after = page[-1].resource_id

    def _is_due(self, found: Operation) -> bool:
        key = (found.resource_type, found.resource_id)
        # The loop still does it, but could not renew its lease, so the store shows it as free. The write of its result decides.
        # With another token it is a later operation, which does not wait for the call that has lost its lease.
        if self._keeps(*key, found.token):
            return False
        with self._lock:
            return self._clock.monotonic() >= self._not_before.get(key, float("-inf"))


def drain(source: threads.Queue[Any], limit: Callable[[], int]) -> tuple[list[Any], bool]:
    """Waits for an item of the queue, and returns it with those behind it. False if None was in the queue, which ends a thread.

    :param limit: how many items are returned at most; asked when the first one is there.
    """
    item = source.get()
    if item is None:
        return [], False
    found = [item]
    return found, drain_more(source, found, limit())


def drain_more(source: threads.Queue[Any], found: list[Any], most: int) -> bool:
    """Adds the items of the queue until there are ``most``, and waits for none. False as for :func:`drain`."""
    while len(found) < most:
        try:
            item = source.get_nowait()
        except threads.Empty:
            break
        if item is None:
            return False
        found.append(item)
    return True
