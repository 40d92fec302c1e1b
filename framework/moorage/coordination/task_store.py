# SPDX-License-Identifier: Apache-2.0
"""Stores operators' requests to periodic tasks, and the results of their runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.coordination.tables import runs, tasks, totals
from moorage.db import MICROSECONDS, Database, Duplicate, JournalEvent, now, read_now, record
from moorage.db.schema import names_of
from moorage.read_only import fields_of

__all__ = ["COUNTS", "Control", "Run", "TaskStore"]

#: Engines look for requests far more often than this; microseconds.
_UNSEEN = 5 * MICROSECONDS
#: How often a request is tried that another one was faster than.
_TRIES = 5
#: What is counted of objects.
COUNTS = ("handled", "acted", "failed", "fenced", "lost", "skipped")


@dataclass(frozen=True, slots=True)
class Control:
    """Holds a row of ``periodic_tasks``. A task without a row has the defaults.

    :param requested_at: microseconds of the database's clock: all engines run once more, with this as the tick.
    :param requested_object: the one object that was asked for; empty: all.
    """

    name: str
    paused: bool = False
    reason: str = ""
    requested_at: int = 0
    requested_object: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Holds the result of one sweep: one member's run of one task.

    :param ended: ``complete``, ``stale`` (the ring changed or the membership ended), ``failed`` (the objects could not be listed).
    :param owned: objects that were the member's. :param fenced: handlings whose writes were refused.
    :param lost: objects whose tick was claimed already. :param skipped: those put off after failures.
    """

    task: str
    member: str
    tick: int
    token: int
    started_at: int
    milliseconds: int
    owned: int = 0
    handled: int = 0
    acted: int = 0
    failed: int = 0
    fenced: int = 0
    ended: str = "complete"
    problem: str = ""
    lost: int = 0
    skipped: int = 0


_CONTROL = (tasks.c.name, tasks.c.paused, tasks.c.reason, tasks.c.requested_at, tasks.c.requested_object)
#: The database's time, with each row if there are any.
_LOOK = sa.select(now(), *_CONTROL).select_from(sa.select(sa.literal(1)).subquery().outerjoin(tasks, sa.true()))
_RUN = (
    runs.c.task, runs.c.member, runs.c.tick, runs.c.token, runs.c.started_at, runs.c.milliseconds, runs.c.owned,
    runs.c.handled, runs.c.acted, runs.c.failed, runs.c.fenced, runs.c.ended, runs.c.problem, runs.c.lost,
    runs.c.skipped,
)  # fmt: skip
#: What a sweep adds to the totals.
_ADDED = names_of(column for column in totals.c if column is not totals.c.task)
_OF_TASK = sa.bindparam("of_task", type_=sa.String)
_ADD_TO_TOTALS = (
    sa.update(totals)
    .where(totals.c.task == _OF_TASK)
    .values({name: totals.c[name] + sa.bindparam(f"more_{name}", type_=sa.BigInteger) for name in _ADDED})
)
_BEGIN_TOTALS = sa.insert(totals)
_ADD_RUN = sa.insert(runs)
#: The newest result of a task that is removed.
_OLDEST = (
    sa.select(runs.c.id)
    .where(runs.c.task == _OF_TASK)
    .order_by(runs.c.id.desc())
    .offset(sa.bindparam("kept", type_=sa.Integer))
    .limit(1)
)
_FORGET = sa.delete(runs).where(runs.c.task == _OF_TASK, runs.c.id <= sa.bindparam("last", type_=sa.BigInteger))


class TaskStore:
    """Reads and writes the requests to periodic tasks, and the results of their sweeps. Safe for use by several threads.

    :param history: how many results of each task are kept.
    """

    def __init__(self, database: Database, *, history: int = 100) -> None:
        self._database = database
        self._history = history

    def look(self, transaction: Any = None) -> tuple[int, Mapping[str, Control]]:
        """Returns the database's time in microseconds, and what operators have requested, by task. One statement.

        :param transaction: to read in, where the caller has one.
        """
        if transaction is None:
            with self._database.read() as transaction:
                return self.look(transaction)
        rows = transaction.execute(_LOOK).all()
        return int(rows[0][0]), {row.name: _control(row[1:]) for row in rows if row.name is not None}

    def pause(self, name: str, reason: str) -> Control:
        """Pauses a task: no engine starts a sweep of it. Sweeps that run go on to their end."""
        return self._set(name, {"paused": True, "reason": reason})

    def resume(self, name: str) -> Control:
        """Resumes a paused task."""
        return self._set(name, {"paused": False, "reason": ""})

    def request(self, name: str, object_id: str = "") -> Control:
        """Requests one more sweep of a task now, even if it is paused: of all objects, or of one.

        A task has one request at a time. A request for all objects that no engine may have seen yet stays a request for all.

        :raises Conflict: another object was asked for so lately that an engine may not have seen it yet.
        """
        for _ in range(_TRIES):
            try:
                found = self._database.run(lambda tx: self._requested(tx, name, object_id))
            except Duplicate:
                continue
            if found is not None:
                return found
        raise errors.Conflict(f"Task {name} is asked for again and again by others at this moment. Ask again later.")

    def _requested(self, tx: sa.Connection, name: str, object_id: str) -> Control | None:
        """Returns the row, or None if another request came meanwhile."""
        before = tx.execute(sa.select(*_CONTROL).where(tasks.c.name == name)).first()
        if before is None:
            tx.execute(sa.insert(tasks).values(name=name, paused=False, reason="", requested_at=now(),
                                               requested_object=object_id))  # fmt: skip
        else:
            wanted = object_id
            if abs(read_now(tx) - before.requested_at) < _UNSEEN:
                if object_id not in {"", before.requested_object} and before.requested_object:
                    raise errors.Conflict(
                        f"Object {before.requested_object} of {name} was asked for within the last {_UNSEEN // MICROSECONDS} "
                        "seconds, and its engine may not have seen that yet. Ask again after that time, or for all objects."
                    )
                wanted = object_id if before.requested_object else ""
            unchanged = sa.and_(tasks.c.name == name, tasks.c.requested_at == before.requested_at)
            asked = sa.update(tasks).where(unchanged).values(requested_at=now(), requested_object=wanted)
            if tx.execute(asked).rowcount != 1:
                return None
        control = _control(tx.execute(sa.select(*_CONTROL).where(tasks.c.name == name)).one())
        _record(tx, "request", control, object=control.requested_object)
        return control

    def _set(self, name: str, values: Mapping[str, object]) -> Control:
        def work(tx: sa.Connection) -> Control:
            if not tx.execute(sa.update(tasks).where(tasks.c.name == name).values(**values)).rowcount:
                first = {"name": name, "paused": False, "reason": "", "requested_at": 0, "requested_object": ""}
                tx.execute(sa.insert(tasks).values({**first, **values}))
            control = _control(tx.execute(sa.select(*_CONTROL).where(tasks.c.name == name)).one())
            _record(tx, "pause" if control.paused else "resume", control)
            return control

        try:
            return self._database.run(work)
        except Duplicate:
            return self._database.run(work)

    def record(self, run: Run) -> None:
        """Stores the result of a sweep, adds it to the totals, and removes the oldest results beyond ``history``."""
        row = fields_of(run) | {"problem": run.problem[:255]}
        ended = {"complete": "complete", "stale": "stale"}.get(run.ended, "broken")
        added = dict.fromkeys(_ADDED, 0) | {ended: 1, "milliseconds": run.milliseconds}
        added |= {name: getattr(run, name) for name in COUNTS}
        of_task = {"of_task": run.task}

        def work(tx: sa.Connection) -> None:
            if not tx.execute(
                _ADD_TO_TOTALS, {**of_task, **{f"more_{name}": value for name, value in added.items()}}
            ).rowcount:
                tx.execute(_BEGIN_TOTALS, {**added, "task": run.task})
            tx.execute(_ADD_RUN, row)
            last = tx.execute(_OLDEST, {**of_task, "kept": self._history}).scalar()
            if last is not None:
                tx.execute(_FORGET, {**of_task, "last": last})

        try:
            self._database.run(work)
        except Duplicate:
            # Another member's sweep was the first one.
            self._database.run(work)

    def totals(self) -> Sequence[Mapping[str, Any]]:
        """Returns the totals of each task: the columns of ``periodic_totals``, and the last ``tick`` that was swept. One query."""
        last = sa.select(runs.c.task, sa.func.max(runs.c.tick).label("tick")).group_by(runs.c.task).subquery()
        query = sa.select(totals, last.c.tick).join(last, last.c.task == totals.c.task, isouter=True)
        with self._database.read() as tx:
            return [dict(row) for row in tx.execute(query.order_by(totals.c.task)).mappings()]

    def runs(self, task: str | None = None, *, limit: int = 100) -> Sequence[Run]:
        """Returns the results of the last sweeps, newest first."""
        query = sa.select(*_RUN).order_by(runs.c.id.desc()).limit(limit)
        if task is not None:
            query = query.where(runs.c.task == task)
        with self._database.read() as tx:
            return [Run(*row) for row in tx.execute(query)]


def _record(tx: sa.Connection, what: str, control: Control, **state: str) -> None:
    state_after = {"paused": control.paused, **state}
    record(tx, JournalEvent(f"task.{what}", f"task/{control.name}", control.requested_at, state_after))


def _control(row: Any) -> Control:
    found = Control(*row)
    return replace(found, paused=bool(found.paused))
