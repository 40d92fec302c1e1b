# SPDX-License-Identifier: Apache-2.0
"""Reads pages of numbered events from the database; what happens while a request waits: :mod:`moorage.journal.tail`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from oslo_log import log as logging

from moorage import errors
from moorage.db import Database, RecordedEvent
from moorage.db.galera import causal_read
from moorage.db.tables import event_sequence, events

__all__ = ["EventFilter", "JournalReader", "EventPage", "page_statement"]

LOG = logging.getLogger(__name__)
T = TypeVar("T")

_COLUMNS = (
    events.c.number, events.c.kind, events.c.subject, events.c.version, events.c.at, events.c.actor, events.c.service,
    events.c.project_id, events.c.request_id, events.c.global_request_id, events.c.state,
)  # fmt: skip
_KEPT = sa.select(event_sequence.c.purged, event_sequence.c.last)
_AFTER = events.c.number > sa.bindparam("after", type_=sa.BigInteger)
_LIMIT = sa.bindparam("page", type_=sa.Integer)
#: Events of work on a subject: they do not say what the subject is.
_OF_WORK = ("operation.", "cleanup.")
_CHANGED, _BEFORE, _EARLIER = events.alias("changed"), events.alias("before"), events.alias("earlier")
_NEWEST_EARLIER = (
    sa.select(_EARLIER.c.number)
    .where(
        _EARLIER.c.subject == _CHANGED.c.subject,
        _EARLIER.c.number < _CHANGED.c.number,
        *(_EARLIER.c.kind.not_like(f"{prefix}%") for prefix in _OF_WORK),
    )
    .order_by(_EARLIER.c.number.desc())
    .limit(1)
    .correlate(_CHANGED)
    .scalar_subquery()
)
#: For each of the events, the event before it of the same subject.
_PREVIOUS = (
    sa.select(_CHANGED.c.number, _BEFORE.c.kind, _BEFORE.c.state)
    .join_from(_CHANGED, _BEFORE, _BEFORE.c.number == _NEWEST_EARLIER)
    .where(_CHANGED.c.number.in_(sa.bindparam("numbers", expanding=True)))
)
#: Fields that must be equal, by the name of the filter.
_EQUAL = {
    "kind": events.c.kind,
    "subject": events.c.subject,
    "project_id": events.c.project_id,
    "actor": events.c.actor,
    "request_id": events.c.request_id,
    "global_request_id": events.c.global_request_id,
}
#: Filters for which one value selects few events.
_FEW = frozenset({"subject", "request_id", "global_request_id"})


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events are wanted; None: any value.

    :param since: not before this time, in microseconds since the Unix epoch.
    """

    kind: str | None = None
    subject: str | None = None
    project_id: str | None = None
    actor: str | None = None
    request_id: str | None = None
    global_request_id: str | None = None
    since: int | None = None

    def equal(self) -> dict[str, str]:
        """Returns the fields that must have a value."""
        return {name: value for name in _EQUAL if (value := getattr(self, name)) is not None}

    def wants(self, event: RecordedEvent) -> bool:
        """Returns whether the event is one of these."""
        if self.since is not None and event.at < self.since:
            return False
        return all(getattr(event, name) == value for name, value in self.equal().items())


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events in the order of their numbers, and the cursor of the next page: no event up to it is missing."""

    events: Sequence[RecordedEvent]
    cursor: int


@functools.cache
def page_statement(names: tuple[str, ...], since: bool) -> sa.Select[Any]:
    """Returns a page of the events whose fields of these names have given values; built once."""
    few = _FEW.intersection(names)
    conditions = [
        # SQLite has no statistics: it might choose the index of a filter that has many events.
        (_EQUAL[name] if name in few or not few else _EQUAL[name].concat(""))
        == sa.bindparam(f"of_{name}", type_=sa.String)
        for name in names
    ]
    if since:
        conditions.append(events.c.at >= sa.bindparam("since", type_=sa.BigInteger))
    return sa.select(*_COLUMNS).where(_AFTER, *conditions).order_by(events.c.number).limit(_LIMIT)


class JournalReader:
    """Reads pages of the journal from the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def last(self) -> int:
        """Returns the number of the newest event; 0 when there was none."""
        return self._database.read_run(_kept)[1]

    def page(self, after: int | None, wanted: EventFilter, limit: int) -> EventPage:
        """Events with numbers above ``after``; None: from the oldest that is left.

        :raises Gone: events after the cursor were purged, or the journal has never reached the cursor.
        :raises StoreBusy: a node of a Galera cluster did not catch up with the cursor in time.
        """
        equal = wanted.equal()
        values: dict[str, Any] = {f"of_{name}": value for name, value in equal.items()}

        def read(tx: sa.Connection, begin: int, last: int) -> EventPage:
            given = values | {"after": begin, "page": limit, "since": wanted.since}
            found = [
                RecordedEvent(*row) for row in tx.execute(page_statement(tuple(equal), wanted.since is not None), given)
            ]
            return EventPage(found, found[-1].number if len(found) == limit else last)

        return self._from(after, read)

    def before(self, found: Sequence[RecordedEvent]) -> Mapping[int, Mapping[str, Any]]:
        """For each event, by its number: the fields that the change has changed, with their values before it. One read.

        A field that the earlier event does not name is left out: events may name some fields only. An event whose subject had no
        event before, or whose earlier events were purged, is absent, and so are events of work on a subject.
        """
        changes = {each.number: each for each in found if not each.kind.startswith(_OF_WORK)}
        if not changes:
            return {}
        rows = self._database.read_run(lambda tx: tx.execute(_PREVIOUS, {"numbers": list(changes)}).all())
        # A subject that was deleted may be made again under its name.
        return {
            row.number: _differs(row.state, changes[row.number]) for row in rows if not row.kind.endswith(".delete")
        }

    def check(self, cursor: int) -> None:
        """Check that events can be read from a cursor on; raises as :meth:`page` does."""
        self._from(cursor, lambda tx, begin, last: None)

    def _from(self, cursor: int | None, work: Callable[[sa.Connection, int, int], T]) -> T:
        """Runs ``work`` with the cursor and the newest number, on a snapshot that has both."""

        def read(tx: sa.Connection, kept: Callable[[sa.Connection], tuple[int, int]]) -> T:
            purged, last = kept(tx)
            begin = purged if cursor is None else cursor
            _check(begin, purged, last)
            return work(tx, begin, last)

        try:
            return self._database.read_run(lambda tx: read(tx, _kept))
        except errors.Gone as error:
            if cursor is None or cursor <= error.details["newest"]:
                raise
        # Another node of a Galera cluster may have shown this number to the reader, and this node has not got it yet.
        return self._database.read_run(lambda tx: read(tx, _kept_by_cluster))


def _differs(before: Mapping[str, Any], event: RecordedEvent) -> Mapping[str, Any]:
    # Of a subject that stays, an event may say some fields only; of one that is gone, what it does not say is gone too.
    names = before.keys() if event.kind.endswith(".delete") else before.keys() & event.state.keys()
    return {name: before[name] for name in sorted(names) if before[name] != event.state.get(name)}


def _kept(tx: sa.Connection) -> tuple[int, int]:
    row = tx.execute(_KEPT).first()
    return (0, 0) if row is None else (row.purged, row.last)


def _kept_by_cluster(tx: sa.Connection) -> tuple[int, int]:
    with causal_read(tx):
        return _kept(tx)


def _check(cursor: int, purged: int, last: int) -> None:
    """:raises Gone: the cursor is outside of the journal."""
    if purged <= cursor <= last:
        return
    reason = (
        "Older events were purged."
        if cursor < purged
        else "The journal has never had a newer one: the cursor is of another journal, or the database was restored from a backup."
    )
    raise errors.Gone(
        f"The journal has the events {purged + 1} to {last}, and the cursor is {cursor}. {reason} Begin again with "
        f"after={purged}, or with after=latest.",
        oldest=purged + 1,
        newest=last,
    )
