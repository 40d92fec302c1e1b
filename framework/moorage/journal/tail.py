# SPDX-License-Identifier: Apache-2.0
"""Reads the newest events once for all requests that wait for events."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from oslo_log import log as logging

from moorage import errors, threads
from moorage.clock import Clock
from moorage.db import Database, RecordedEvent
from moorage.journal.reader import JournalReader, page_statement

__all__ = ["Tail"]

LOG = logging.getLogger(__name__)
#: Readings without a watcher after which the reader ends; a watcher that has its answer asks again at once.
_IDLE_ROUNDS = 4


class Tail:
    """Keeps the newest events of the journal in memory for requests that wait.

    One thread reads them for all requests, and only while a request waits.

    :param poll: seconds between readings.
    :param kept: number of events that are kept in memory.
    """

    def __init__(self, database: Database, clock: Clock, *, poll: float = 0.25, kept: int = 5000) -> None:
        self._database = database
        self._reader = JournalReader(database)
        self._clock = clock
        self._poll = poll
        self._kept = kept
        self._changed = threads.condition()
        self._waiting = 0
        self._stopping = threads.event()
        self._thread: threads.Thread | None = None
        #: The events above ``_floor``, without a gap, up to ``_last``.
        self._events: list[RecordedEvent] = []
        self._floor = 0
        self._last = 0

    def after(self, cursor: int, seconds: float) -> Sequence[RecordedEvent] | None:
        """Waits until there are events after the cursor, and returns them; empty after so many seconds without one.

        None: they are not in memory. The caller reads them from the database.
        """
        with self._changed:
            self._waiting += 1
            try:
                if self._thread is None and not self._stopping.is_set():
                    self._thread = threads.try_start(self._run, name="journal-tail")
                if self._last <= cursor and not self._stopping.is_set():
                    self._changed.wait(seconds)
                if self._last <= cursor:
                    return ()
                if cursor < self._floor:
                    return None
                return self._events[bisect.bisect_right(self._events, cursor, key=lambda each: each.number) :]
            finally:
                self._waiting -= 1

    def stop(self) -> None:
        """Answer what waits, and return when nothing is read any more."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
            reader = self._thread
        if reader is not None:
            reader.join()

    def _run(self) -> None:
        idle = 0
        self._restart()
        while True:
            with self._changed:
                idle = 0 if self._waiting else idle + 1
                if idle > _IDLE_ROUNDS or self._stopping.is_set():
                    self._thread = None
                    return
            try:
                self._read()
            except errors.Unavailable as error:
                LOG.warning("The newest events cannot be read: %s", error.message)
            except Exception:
                LOG.exception("The newest events cannot be read.")
            self._clock.wait(self._stopping, self._poll)

    def _restart(self) -> None:
        """Begin at the end: who waits for older events reads them from the database."""
        try:
            last = self._reader.last()
        except Exception as error:  # noqa: BLE001  (the next reading says it)
            LOG.debug("The end of the journal cannot be read: %s", error)
            last = self._last
        with self._changed:
            self._events, self._floor, self._last = [], last, last
            self._changed.notify_all()

    def _read(self) -> None:
        values = {"after": self._last, "page": self._kept, "since": None}
        rows = self._database.read_run(lambda tx: tx.execute(page_statement((), False), values).all())
        if not rows:
            return
        found = [RecordedEvent(*row) for row in rows]
        with self._changed:
            if found[0].number != self._last + 1:
                # Numbers have no gaps, so this reader stood still until events between were purged: who waits for them must
                # learn it from the database.
                self._events, self._floor = [], found[0].number - 1
            self._events += found
            surplus = len(self._events) - self._kept
            if surplus > 0:
                self._floor = self._events[surplus - 1].number
                del self._events[:surplus]
            self._last = found[-1].number
            self._changed.notify_all()
