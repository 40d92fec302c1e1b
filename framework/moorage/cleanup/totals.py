# SPDX-License-Identifier: Apache-2.0
"""Totals of cleanup since the first start, by type of resource. They outlive the history.

Claims are counted in the process and added by the cleaner at the end of a pass, in one transaction: a claim costs no write of its
own. What a process has counted and not added yet goes with it when it is killed.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import sqlalchemy as sa
from oslo_log import log as logging

from moorage import errors, threads
from moorage.cleanup.tables import cleanup_history, cleanup_totals
from moorage.db import Database, Duplicate

__all__ = ["TakeOutcome", "ClaimCounts", "Sum", "add", "claims", "outcomes"]

LOG = logging.getLogger(__name__)


class TakeOutcome(enum.StrEnum):
    """The outcomes of taking an orphan's lease.

    WON: the cleaner has the orphan. TAKEN_OVER: it has the orphan of another cleaner whose lease had ended. LOST: another service
    was faster.
    """

    WON = "won"
    TAKEN_OVER = "taken_over"
    LOST = "lost"


class Sum(NamedTuple):
    """How many, and how many seconds they took together."""

    number: int
    seconds: float


#: Of what the history has no lines any more, and of what it has.
_OUTCOMES = sa.union_all(
    sa.select(
        cleanup_totals.c.resource_type,
        cleanup_totals.c.event,
        cleanup_totals.c.count.label("count"),
        cleanup_totals.c.seconds.label("seconds"),
    ).where(cleanup_totals.c.event.not_in([each.value for each in TakeOutcome])),
    sa.select(
        cleanup_history.c.resource_type,
        cleanup_history.c.outcome,
        sa.func.count(),
        sa.func.sum(cleanup_history.c.seconds),
    ).group_by(cleanup_history.c.resource_type, cleanup_history.c.outcome),
)
_CLAIMS = sa.select(cleanup_totals.c.resource_type, cleanup_totals.c.event, cleanup_totals.c.count).where(
    cleanup_totals.c.event.in_([each.value for each in TakeOutcome])
)


def add(tx: sa.Connection, sums: Mapping[tuple[str, str], Sum]) -> None:
    """Add to the totals of (type of resource, event); one statement for each, in one order for all.

    :raises Duplicate: another process wrote the first one of a pair at this moment; run the transaction again.
    """
    for (kind, event), (count, seconds) in sorted(sums.items()):
        total = cleanup_totals.c
        of_event = total.resource_type == kind, total.event == event
        more = {"count": total.count + count, "seconds": total.seconds + seconds}
        if not tx.execute(sa.update(cleanup_totals).where(*of_event).values(more)).rowcount:
            first = {"resource_type": kind, "event": event, "count": count, "seconds": seconds}
            tx.execute(sa.insert(cleanup_totals).values(first))


def outcomes(tx: sa.Connection) -> dict[tuple[str, str], Sum]:
    """What became of orphans, by (type of resource, outcome): never less than before; one statement."""
    found: dict[tuple[str, str], Sum] = {}
    for kind, outcome, count, seconds in tx.execute(_OUTCOMES):
        before = found.get((kind, outcome), Sum(0, 0.0))
        found[kind, outcome] = Sum(before.number + int(count), before.seconds + float(seconds))
    return found


def claims(tx: sa.Connection) -> dict[tuple[str, str], int]:
    """Claims of cleaners by (type of resource, :class:`TakeOutcome`); one statement."""
    return {(kind, event): int(count) for kind, event, count in tx.execute(_CLAIMS)}


class ClaimCounts:
    """Claims that one process has counted and not written yet. Safe for use by several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threads.lock()
        self._waiting: Counter[tuple[str, str]] = Counter()

    def count(self, resource_type: str, how: TakeOutcome, number: int) -> None:
        """So many claims ended like that; in memory."""
        if number:
            with self._lock:
                self._waiting[resource_type, how.value] += number

    def flush(self) -> None:
        """Write what waits. When the store cannot be reached, it waits for the next time."""
        with self._lock:
            taken, self._waiting = self._waiting, Counter()
        if not taken:
            return
        sums = {key: Sum(number, 0.0) for key, number in taken.items()}
        try:
            try:
                self._database.run(lambda tx: add(tx, sums))
            except Duplicate:
                self._database.run(lambda tx: add(tx, sums))
        except errors.MoorageError as error:
            LOG.warning("Claims of orphans are counted later: %s", error.message)
            with self._lock:
                self._waiting.update(taken)
