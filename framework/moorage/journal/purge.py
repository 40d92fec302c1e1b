# SPDX-License-Identifier: Apache-2.0
"""Removes events that are older than an age, in bounded pieces."""

from __future__ import annotations

import itertools

import sqlalchemy as sa

from moorage.db import MICROSECONDS, Database, now
from moorage.db.tables import event_sequence, events

__all__ = ["purge"]

#: Events that one transaction removes at most.
_BATCH = 1000
_PURGED = sa.select(event_sequence.c.purged)
_OLDEST = (
    sa.select(events.c.number, (events.c.at < now() - sa.bindparam("age", type_=sa.BigInteger)).label("old"))
    .where(events.c.number > sa.bindparam("seen", type_=sa.BigInteger))
    .order_by(events.c.number)
    .limit(sa.bindparam("page", type_=sa.Integer))
)
_RAISE = (
    sa.update(event_sequence)
    .where(event_sequence.c.purged == sa.bindparam("seen", type_=sa.BigInteger))
    .values(purged=sa.bindparam("upto", type_=sa.BigInteger))
)
_DELETE = sa.delete(events).where(events.c.number <= sa.bindparam("upto", type_=sa.BigInteger))


def purge(database: Database, seconds: float, *, batch: int = _BATCH) -> int:
    """Remove the oldest events that are older than so many seconds, at most 1,000; returns how many.

    The beginning of the journal is removed, so that it never has a gap: an event stays while an older number is younger. Readers
    whose cursor is before the oldest event get an error.
    """

    def work(tx: sa.Connection) -> int:
        seen = tx.execute(_PURGED).scalar_one_or_none()
        if seen is None:
            return 0
        given = {"seen": seen, "age": int(seconds * MICROSECONDS), "page": batch}
        old = [row.number for row in itertools.takewhile(lambda row: row.old, tx.execute(_OLDEST, given))]
        # Of two that purge at once, the condition lets one go on.
        if not old or tx.execute(_RAISE, {"seen": seen, "upto": old[-1]}).rowcount != 1:
            return 0
        return int(tx.execute(_DELETE, {"upto": old[-1]}).rowcount)

    return database.run(work)
