# SPDX-License-Identifier: Apache-2.0
"""The right to do a piece of work: one primitive for worker rows, ticks and shares of the ring.

A lease is a row with ``token``, ``owner``, ``epoch`` and ``expires_at``. Every statement that changes it, and every write of the
work itself, is declared once, as data: named guards (conditions on the row) and effects. The SQL and the step of the model check
are both made from that declaration, so that what is checked is what runs.

The token is a fence. Tokens come from a counter row that survives the lease, plus one, and are never used again: a transfer is
one transaction that raises the counter *first* (which makes transfers of one lease take turns, by a write), then changes the
lease, then writes the new token into the resource, unless the work writes the resource only when it finishes. The first owner may
do without: :data:`BEGIN` gives it the token of the operation's creation, once. The last write of the work and :data:`FINISH` are
one transaction. Time does one thing only: it lets others take over from an owner that has not
renewed, and it is the database's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

__all__ = [
    "BEGIN",
    "FINISH",
    "FORCE",
    "RELEASE",
    "GUARDED",
    "REMOVE",
    "RENEW",
    "START",
    "STATEMENTS",
    "TAKE",
    "TAKE_OVER",
    "WRITE",
    "LeaseGuard",
    "Statement",
    "Verb",
]

Row = Mapping[str, Any]
Parameters = Mapping[str, Any]


class Verb(enum.Enum):
    """What a statement does to the row."""

    UPDATE = "update"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class LeaseGuard:
    """A condition on the row: one expression, which is evaluated as SQL and on a row in memory.

    :param condition: from the table's columns, or a row, and the parameters to the condition. It is written with ``|``, ``&`` and
        ``==``, which mean the same in both; ``or``, ``and`` and ``is`` do not. Parameters are values, or expressions (``now``).
    """

    name: str
    condition: Callable[[Any, Parameters], Any]

    def sql(self, columns: Any, parameters: Parameters) -> sa.ColumnElement[bool]:
        """Returns the condition of a statement on the table with these columns."""
        found: sa.ColumnElement[bool] = self.condition(columns, parameters)
        return found

    def holds(self, row: Row, parameters: Parameters) -> bool:
        """Returns whether it holds for a row in memory."""
        return bool(self.condition(row, parameters))


#: A row that no service has taken yet, or that was released, has ``expires_at`` 0.
_FREE = LeaseGuard(
    "nobody holds it: it has expired, or its owner is an earlier incarnation of the taker",
    lambda row, p: (row["expires_at"] < p["now"]) | ((row["owner"] == p["owner"]) & (row["epoch"] < p["epoch"])),
)
_UNOWNED = LeaseGuard(
    "it has no owner: it was never taken, or was released",
    lambda row, p: row["owner"] == None,  # noqa: E711  (in SQL: IS NULL)
)
_ORPHANED = LeaseGuard(
    "its owner is gone: the lease has expired, or a write has ended the owner's epoch",
    lambda row, p: (row["expires_at"] < p["now"]) | ((row["owner"] == p["dead"]) & (row["epoch"] < p["dead_epoch"])),
)
_MINE = LeaseGuard(
    "the row still carries the token that its owner was given",
    lambda row, p: row["token"] == p["token"],
)
_NEW = LeaseGuard(
    "it never had an owner",
    lambda row, p: row["attempts"] == 0,
)
_NOT_OVERTAKEN = LeaseGuard(
    "nobody with a later token has written the resource",
    lambda row, p: row["fence"] <= p["token"],
)


@dataclass(frozen=True, slots=True)
class Statement:
    """One conditional statement on one row: of the lease, or of the resource that it guards.

    :param effects: column -> name of the parameter that is written, or None for NULL; ``expires_at`` takes ``now`` plus the
        parameter.
    """

    name: str
    verb: Verb
    guards: tuple[LeaseGuard, ...]
    effects: Mapping[str, str | None]

    def update(self, table: sa.Table, key: sa.ColumnElement[bool], parameters: Parameters) -> sa.Update:
        """Returns the UPDATE for the rows of ``table`` that ``key`` names.

        ``parameters`` are values, bound parameters or expressions; ``now`` is the database's time in microseconds. The caller
        may add columns of its own with ``values`` and conditions with ``where``.
        """
        if self.verb is not Verb.UPDATE:
            raise TypeError(f"{self.name} is no UPDATE")
        values = {column: self._value(column, parameters) for column in self.effects}
        return sa.update(table).where(*self._conditions(table, key, parameters)).values(values)

    def lock(self, table: sa.Table, key: sa.ColumnElement[bool], parameters: Parameters) -> sa.Select[Any]:
        """Selects and locks the rows of ``table`` that the statement would change, without those that others have locked.

        The statement keeps its own conditions: on Galera other nodes do not see the locks, and SQLite has none.
        """
        chosen = sa.select(table).where(*self._conditions(table, key, parameters))
        return chosen.with_for_update(skip_locked=True)

    def delete(self, table: sa.Table, key: sa.ColumnElement[bool], parameters: Parameters) -> sa.Delete:
        """Returns the DELETE for the rows of ``table`` that ``key`` names."""
        if self.verb is not Verb.DELETE:
            raise TypeError(f"{self.name} is no DELETE")
        return sa.delete(table).where(*self._conditions(table, key, parameters))

    def applies(self, row: Row | None, parameters: Parameters, without: str | None = None) -> bool:
        """Returns whether the statement would change the row; ``without`` names a guard that is left out."""
        if row is None:
            return False
        return all(guard.holds(row, parameters) for guard in self.guards if guard.name != without)

    def apply(self, row: Row, parameters: Parameters) -> dict[str, Any] | None:
        """Returns the row afterwards; None when it is deleted."""
        if self.verb is Verb.DELETE:
            return None
        return {**row, **{column: self._value(column, parameters) for column in self.effects}}

    def _conditions(
        self, table: sa.Table, key: sa.ColumnElement[bool], parameters: Parameters
    ) -> list[sa.ColumnElement[bool]]:
        return [key, *(guard.sql(table.c, parameters) for guard in self.guards)]

    def _value(self, column: str, parameters: Parameters) -> Any:
        name = self.effects[column]
        if name is None:
            return 0 if column in {"epoch", "expires_at"} else None
        return parameters["now"] + parameters[name] if column == "expires_at" else parameters[name]


_TAKEN = {"token": "token", "owner": "owner", "epoch": "epoch", "expires_at": "lease"}
#: Take it as its first owner, with the token of its creation, which the message had. No counter is raised: each write that ends the
#: operation or makes another one of it raises the counter and writes another token, and no second owner gets the same token. For
#: work whose last write shows in the resource: its creation has not written the token there, or the work removes the resource.
BEGIN = Statement(
    "begin", Verb.UPDATE, (_MINE, _NEW),
    {"owner": "owner", "epoch": "epoch", "expires_at": "lease", "attempts": "attempts"},
)  # fmt: skip
#: Take it for the first time, or after it was released. The same transaction has raised the counter before.
START = Statement("start", Verb.UPDATE, (_UNOWNED,), _TAKEN)
#: Take what another service left: ``dead`` is its uuid, ``dead_epoch`` its present epoch (which was raised when it was evicted;
#: epochs only rise, so one that was read some time ago is a safe one). The counter was raised before.
TAKE_OVER = Statement("take over", Verb.UPDATE, (_ORPHANED,), _TAKEN)
#: Take it, the first time or over from an owner that is gone. In a transaction that has raised the counter before.
TAKE = Statement("take", Verb.UPDATE, (_FREE,), _TAKEN)
#: Take the work away from its owner, for another operation; leaves it unowned. The counter was raised before.
FORCE = Statement("force", Verb.UPDATE, (), {"token": "token", "owner": None, "epoch": None, "expires_at": None})
#: Keep it for another lease.
RENEW = Statement("renew", Verb.UPDATE, (_MINE,), {"expires_at": "lease"})
#: Release it unfinished; any service that may do such work can take it.
RELEASE = Statement("release", Verb.UPDATE, (_MINE,), {"owner": None, "epoch": None, "expires_at": None})
#: End it; in the transaction of the work's last, fenced write.
FINISH = Statement("finish", Verb.DELETE, (_MINE,), {})
#: Write the resource (rule 3: the fence lives in the row being written).
WRITE = Statement("write", Verb.UPDATE, (_NOT_OVERTAKEN,), {"fence": "token"})
#: Remove the resource.
REMOVE = Statement("remove", Verb.DELETE, (_NOT_OVERTAKEN,), {})

STATEMENTS = (BEGIN, START, TAKE, TAKE_OVER, FORCE, RENEW, RELEASE, FINISH, WRITE, REMOVE)
#: Every guard of every statement; the model check leaves out each in turn and must then find a fault.
GUARDED = tuple((statement, guard) for statement in STATEMENTS for guard in statement.guards)
