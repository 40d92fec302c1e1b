# SPDX-License-Identifier: Apache-2.0
"""Detects rows that have not changed for a number of seconds, by the monotonic clock of the observing machine.

A time in a row that is over by the database's clock proves little: that clock may jump, and each node of a Galera cluster has its
own. A live service renews or announces its rows, which changes them. If a row is unchanged in two looks that are a timeout apart by
the observer's monotonic clock, no service has touched the row meanwhile, whatever the wall clocks say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moorage import threads
from moorage.clock import Clock

__all__ = ["StalenessTracker"]

#: Type and id of a resource.
Key = tuple[str, str]


class StalenessTracker:
    """Remembers since when rows have not changed. Safe for use by several threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threads.lock()
        self._seen: dict[Key, tuple[object, float]] = {}

    def unchanged(self, rows: Mapping[Key, object], seconds: float) -> frozenset[Key]:
        """Records the present rows by key, and returns the keys of rows that were the same in each call for so many seconds."""
        moment = self._clock.monotonic()
        found = set()
        with self._lock:
            for key, row in rows.items():
                before, since = self._seen.get(key, (None, moment))
                if before != row:
                    since = moment
                self._seen[key] = row, since
                if moment - since >= seconds:
                    found.add(key)
        return frozenset(found)

    def forget_others(self, keys: Iterable[Key]) -> None:
        """Keep what is known of these rows alone: there are no others any more."""
        with self._lock:
            self._seen = {key: self._seen[key] for key in keys if key in self._seen}

    def forget(self) -> None:
        """Begin again: who lives could not show it, because the store was away."""
        with self._lock:
            self._seen.clear()
