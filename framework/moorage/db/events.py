# SPDX-License-Identifier: Apache-2.0
"""Writes events of the journal in the transaction of the change that they report.

A writer calls :func:`record` after the write of the subject's row. The transaction inserts all of its events by one statement just
before it commits. So an event exists exactly if its change does. The event has no number yet: a sequencer numbers committed events
(:mod:`moorage.journal.sequencer`), and readers see numbered events only.

The order within a subject is that of ``id``. The second writer of a row waits for the commit of the first, or loses its
transaction, and inserts its events after its write. So its events get greater ids.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from oslo_context import context as oslo_context

from moorage.db.prepared import PreparedConnection
from moorage.db.schema import json_text
from moorage.db.time import now

__all__ = ["JournalEvent", "RecordedEvent", "record"]

_COLUMNS = (
    "kind", "subject", "version", "actor", "service", "project_id", "request_id", "global_request_id", "state",
)  # fmt: skip
#: Rows that one statement inserts at most; SQLite takes 32,766 parameters.
_MOST = 500
#: Where a connection keeps the events that its transaction has recorded so far.
_PENDING = "moorage_events"
_SAVEPOINTS = "moorage_event_savepoints"


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """One change of one subject.

    :param kind: ``instance.create``: the type of the subject and what happened to it.
    :param subject: the type and name of what changed, as ``instance/UUID``.
    :param version: the fence, epoch or generation of the subject's row after the change.
    :param state: the subject after the change: small values only, no secrets and nothing that users wrote.
    :param project_id: the project whose members may see the event; empty: only readers of the system may.
    """

    kind: str
    subject: str
    version: int
    state: Mapping[str, Any] = field(default_factory=dict)
    project_id: str = ""


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event of the journal, as it is read; see :class:`JournalEvent`.

    :param number: its place in the journal; rises, without a gap.
    :param at: microseconds since the Unix epoch, of the database's clock.
    """

    number: int
    kind: str
    subject: str
    version: int
    at: int
    actor: str
    service: str
    project_id: str
    request_id: str
    global_request_id: str
    state: Mapping[str, Any]


def record(transaction: sa.Connection, event: JournalEvent) -> None:
    """Record an event in an open writing transaction. The thread's request context says who asked for the change.

    Nothing is recorded in a database object without a service: stores that work as a library in another program have no journal.

    :raises RuntimeError: the transaction is none of :class:`moorage.db.Database` that writes.
    """
    pending = transaction.info.get(_PENDING)
    if pending is not None:
        pending.append((event, oslo_context.get_current()))
    elif _PENDING not in transaction.info:
        raise RuntimeError("Events are recorded in transactions of Database.write and Database.run only.")


@functools.cache
def _insert(rows: int, dialect: sa.Dialect) -> str:
    """Inserts so many events; text, because SQLAlchemy compiles an INSERT of several rows again for each call."""
    place = "?" if dialect.paramstyle == "qmark" else "%s"
    row = f"({', '.join([place] * len(_COLUMNS))}, {now().compile(dialect=dialect)})"
    return f"INSERT INTO events ({', '.join(_COLUMNS)}, at) VALUES {', '.join([row] * rows)}"  # noqa: S608  (no value is in it)


def _values(pending: Sequence[tuple[JournalEvent, Any]], service: str | None) -> list[Any]:
    """Returns the column values of several events in one list, event by event, for one INSERT."""
    found: list[Any] = []
    # Several events of a transaction have one context.
    known: dict[int, tuple[str, str, str]] = {}
    for event, context in pending:
        asked = known.get(id(context))
        if asked is None:
            asked = known[id(context)] = (
                _text(context, "user_id", 255),
                _text(context, "request_id", 64),
                _text(context, "global_request_id", 64),
            )
        user, request, global_request = asked
        state = json_text(event.state)
        found += (
            event.kind, event.subject, event.version, user, service, event.project_id, request, global_request, state,
        )  # fmt: skip
    return found


def _text(context: Any, name: str, length: int) -> str:
    return (getattr(context, name, None) or "")[:length]


def begin(transaction: sa.Connection, service: str | None) -> None:
    """Begin to collect the events of a transaction."""
    transaction.info[_PENDING] = None if service is None else []
    transaction.info[_SAVEPOINTS] = {}


def flush(transaction: PreparedConnection, service: str | None) -> bool:
    """Insert what was recorded; returns whether there was anything."""
    pending = transaction.info.get(_PENDING)
    if not pending:
        return False
    for start in range(0, len(pending), _MOST):
        part = pending[start : start + _MOST]
        transaction.write_driver_sql(_insert(len(part), transaction.dialect), tuple(_values(part, service)))
    pending.clear()
    return True


def mark(transaction: sa.Connection, savepoint: str) -> None:
    """Note how many events were recorded before a savepoint (``sa_savepoint_1``)."""
    pending = transaction.info.get(_PENDING)
    if pending is not None:
        transaction.info[_SAVEPOINTS][savepoint] = len(pending)


def undo(transaction: sa.Connection, savepoint: str) -> None:
    """Forget what was recorded since a savepoint that was rolled back: it has not happened."""
    if not transaction.invalidated and (pending := transaction.info.get(_PENDING)):
        del pending[transaction.info[_SAVEPOINTS][savepoint] :]
