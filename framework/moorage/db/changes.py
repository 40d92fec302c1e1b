# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of a table that were written since a moment, so that a copy of the table is kept at the cost of its changes.

Every write of such a table sets ``updated_at`` to the database's time and raises a version. A transaction may commit later than the
time that it has written. A reader therefore asks again for the last :data:`OVERLAP` seconds, and skips the rows whose version it
knows. It compares all versions at a longer distance, which finds what was committed later still. The count of rows shows that some
were removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from moorage.db.time import MICROSECONDS, now

__all__ = ["OVERLAP", "ChangeReader", "KnownRows", "RecentRows"]

#: Seconds between the time that a row carries and its commit for which a reader waits.
OVERLAP = 60.0
#: Microseconds: several writes of a row within this time may carry the same ``updated_at``. SQLite's clock counts milliseconds.
_GRAIN = 50_000


@dataclass(frozen=True, slots=True)
class RecentRows:
    """The rows that were written since a moment.

    :param at: the database's time of the reading, in microseconds.
    :param count: the number of all rows of the table.
    :param versions: uuid -> a number that changes with each write; 0 for a row that was written so lately that it may not.
    """

    at: int
    count: int
    versions: Mapping[str, int]

    @property
    def next_since(self) -> int:
        """Returns the moment from which on the next reading must read, in microseconds."""
        return max(0, self.at - int(OVERLAP * MICROSECONDS))


class ChangeReader:
    """The statements that read the changes of one table; built once.

    :param table: has the columns ``uuid`` and ``updated_at``.
    :param versions: the columns that count writes.
    """

    def __init__(self, table: sa.Table, *versions: sa.Column[int]) -> None:
        self._count = sa.select(now(), sa.func.count()).select_from(table)
        self._rows = sa.select(table.c.uuid, table.c.updated_at, *versions).where(
            table.c.updated_at >= sa.bindparam("since", type_=sa.BigInteger)
        )
        self._uuids = sa.select(table.c.uuid)

    def read(self, transaction: sa.Connection, since: int) -> RecentRows:
        """Reads what was written since then; 0 reads the versions of all rows. Two statements."""
        at, count = transaction.execute(self._count).one()
        rows = transaction.execute(self._rows, {"since": since}).all()
        fresh = at - _GRAIN
        return RecentRows(at, count, {row[0]: hash(row) if row[1] < fresh else 0 for row in rows})

    def uuids(self, transaction: sa.Connection) -> frozenset[str]:
        """Reads the uuids of all rows."""
        return frozenset(transaction.execute(self._uuids).scalars())


class KnownRows:
    """The versions of a table's rows as a reader has them. For one thread."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        #: The moment from which on the next reading must read, in microseconds.
        self.since = 0

    def start(self, everything: RecentRows) -> None:
        """Knows exactly these rows."""
        self._versions, self.since = dict(everything.versions), everything.next_since

    def changed(self, recent: RecentRows) -> set[str]:
        """Returns the uuids whose version is another one than the known one, or that are not known."""
        known = self._versions
        return {uuid for uuid, version in recent.versions.items() if not version or known.get(uuid) != version}

    def misses(self, recent: RecentRows) -> bool:
        """Returns whether known rows were removed."""
        new = sum(uuid not in self._versions for uuid in recent.versions)
        return len(self._versions) + new != recent.count

    def gone(self, present: frozenset[str]) -> set[str]:
        """Returns the known rows that are not present."""
        return self._versions.keys() - present

    def take(self, recent: RecentRows, gone: Iterable[str] = ()) -> None:
        """Knows what was read, and no longer what is gone."""
        self._versions.update(recent.versions)
        for uuid in gone:
            self._versions.pop(uuid, None)
        self.since = recent.next_since

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._versions
