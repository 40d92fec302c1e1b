# SPDX-License-Identifier: Apache-2.0
"""Numbers committed events, so that readers see every event once and in one order.

Writers insert events without a number. The sequencer finds what is committed and gives it the next numbers, in a transaction of its
own. An event that commits late gets a later number; a reader that has read up to a number never misses one below it.

Several schedulers run a sequencer; one of them holds the lease. Each numbering updates the row of the sequence on the condition
that its token and its last number are as they were read. So a sequencer that was paused while another one numbered writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from oslo_log import log as logging

from moorage import randomness
from moorage.db import MICROSECONDS, Database, Duplicate, now
from moorage.db.tables import event_sequence, events

__all__ = ["GATHER", "LONGEST_REST", "POLL", "REST", "Sequencer"]

LOG = logging.getLogger(__name__)

#: Seconds between looks for events that other processes recorded.
POLL = 1.0
#: Seconds that events of this process wait for others, so that one transaction numbers them all.
GATHER = 0.1
#: The rest after a numbering: so many times its duration, and at most so many seconds. Other writers of SQLite wait while events
#: are numbered. At some hundred requests per second the rests are short, so that no request waits long. Where writers always wait,
#: the rests are long: a few large numberings cost less than many small ones.
REST, LONGEST_REST = 4.0, 0.4
#: Seconds that the lease lasts after each numbering.
_LEASE = 5.0
#: Events that one transaction numbers, and how many of these batches it numbers at most when it is behind.
_BATCH, _MOST_BATCHES = 1000, 16

_FIND = (
    sa.select(events.c.id)
    .where(events.c.number.is_(None))
    .order_by(events.c.id)
    .limit(sa.bindparam("page", type_=sa.Integer))
)
_SEQUENCE = sa.select(
    event_sequence.c.last, event_sequence.c.token, event_sequence.c.owner, event_sequence.c.expires_at, now()
)
_OWNER = sa.bindparam("me", type_=sa.String)
_SEEN = sa.bindparam("seen_token", type_=sa.BigInteger)
_LAST = sa.bindparam("seen_last", type_=sa.BigInteger)
_UNTIL = now() + sa.bindparam("lease_micros", type_=sa.BigInteger)
_TAKE = (
    sa.update(event_sequence)
    .where(event_sequence.c.token == _SEEN, event_sequence.c.expires_at < now())
    .values(token=event_sequence.c.token + 1, owner=_OWNER, expires_at=_UNTIL)
)
_ADVANCE = (
    sa.update(event_sequence)
    .where(event_sequence.c.token == _SEEN, event_sequence.c.owner == _OWNER, event_sequence.c.last == _LAST)
    .values(last=event_sequence.c.last + sa.bindparam("count", type_=sa.BigInteger), expires_at=_UNTIL)
)
#: The ids are named, and not given as a range: a range would lock what another transaction has inserted between them (MariaDB).
_NUMBER = (
    sa.update(events)
    .where(events.c.id.in_(sa.bindparam("ids", expanding=True)))
    .values(number=events.c.id + sa.bindparam("offset", type_=sa.BigInteger))
)
_BEGIN = sa.insert(event_sequence).values(id=1, last=0, purged=0, token=0, owner="", expires_at=0)


class Sequencer:
    """Numbers events. For one thread at a time.

    :param lease_seconds: how long other sequencers leave the work to this one after each numbering.
    """

    def __init__(self, database: Database, *, lease_seconds: float = _LEASE, batch: int = _BATCH) -> None:
        self._database = database
        self._me = randomness.new_uuid()
        self._lease = int(lease_seconds * MICROSECONDS)
        self._batch = batch

    def number(self) -> int:
        """Number all committed events; returns how many. 0 while another sequencer holds the lease.

        One statement when there is nothing to number. Each transaction that leaves events without a number is followed by one of
        twice the size: where writers take turns, so many events may be recorded between two turns that readers would fall behind.
        """
        total, batches = 0, 1
        while True:
            with self._database.read() as tx:
                waiting = self.waits(tx)
                row = tx.execute(_SEQUENCE).first() if waiting else None
            if not waiting:
                return total
            token = self._hold(row)
            count = self._number_once(token, batches * self._batch) if token is not None else 0
            total += count
            if count < batches * self._batch:
                return total
            batches = min(2 * batches, _MOST_BATCHES)

    def _number_once(self, token: int, most: int) -> int:
        return self._database.run(lambda tx: self._number(tx, token, most))

    @staticmethod
    def waits(tx: sa.Connection) -> bool:
        """Returns whether there is a committed event without a number. One statement."""
        return tx.execute(_FIND, {"page": 1}).first() is not None

    def _hold(self, row: Any) -> int | None:
        """Hold the lease; returns its token, or None while another sequencer holds it.

        :param row: of the sequence, as it was read a moment ago; None: it has not begun.
        """
        if row is None:
            self._begin()
            with self._database.read() as tx:
                row = tx.execute(_SEQUENCE).one()
        if row.owner == self._me:
            return int(row.token)
        if row.expires_at >= row[4]:
            return None
        values = {"seen_token": row.token, "me": self._me, "lease_micros": self._lease}
        taken = self._database.run(lambda tx: tx.execute(_TAKE, values).rowcount == 1)
        return row.token + 1 if taken else None

    def _begin(self) -> None:
        try:
            self._database.run(lambda tx: tx.execute(_BEGIN) and None)
        except Duplicate:
            LOG.debug("Another sequencer began the sequence.")

    def _number(self, tx: sa.Connection, token: int, most: int) -> int:
        row = tx.execute(_SEQUENCE).one()
        found = tx.execute(_FIND, {"page": most}).scalars().all()
        if not found:
            return 0
        values = {
            "seen_token": token, "me": self._me, "seen_last": row.last, "count": len(found), "lease_micros": self._lease,
        }  # fmt: skip
        # The row of the sequence first: a second sequencer waits there, and finds that its condition fails.
        if tx.execute(_ADVANCE, values).rowcount != 1:
            return 0
        following = row.last + 1
        for run in _runs(found, self._batch):
            given: dict[str, Any] = {"ids": run, "offset": following - run[0]}
            tx.execute(_NUMBER, given)
            following += len(run)
        return len(found)


def _runs(ids: Sequence[int], longest: int) -> Iterator[Sequence[int]]:
    """Yields the parts of rising ids that have no gap, cut into parts of at most ``longest`` ids."""
    start = 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or place - start == longest or ids[place] != ids[place - 1] + 1:
            yield ids[start:place]
            start = place
