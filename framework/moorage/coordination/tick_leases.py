# SPDX-License-Identifier: Apache-2.0
"""Leases of ticks: one row for each task and object, claimed by a conditional statement.

The two statements are declared as data, like those of :mod:`moorage.work.lease`, so that the simulation runs the production
statements. A tick of an object is claimed at most once, and never by an owner of an older ring after an owner of a newer one,
whatever members believe about the ring. The transaction that writes a tick's results also updates the claim's row, on the
condition that the claim is still the last one.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from typing_extensions import override

from moorage import errors
from moorage.coordination.tables import claims
from moorage.db import MICROSECONDS, Database, now, read_now
from moorage.work.lease import LeaseGuard, Statement, Verb

__all__ = ["AHEAD", "CLAIM", "END", "TickLease", "TickLeaseStore", "SqlTickLeases"]

T = TypeVar("T")

_LATER_TICK = LeaseGuard(
    "the tick was not claimed; one that is yet to come was named by a clock that has been set back since",
    lambda row, p: (row["tick"] < p["tick"]) | (row["tick"] > p["now"] + p["ahead"]),
)
_BEGUN = LeaseGuard(
    "the clock has not been set back to long before the tick since the claimer looked at it",
    lambda row, p: p["tick"] <= p["now"] + p["ahead"],
)
_NOT_OVERTAKEN = LeaseGuard(
    "no owner of a later ring has claimed the object",
    lambda row, p: row["token"] <= p["token"],
)
_LAST = LeaseGuard(
    "nobody has claimed the object since",
    lambda row, p: row["sweep"] == p["sweep"],
)
_OPEN = LeaseGuard(
    "it was not finished before",
    lambda row, p: row["finished"] == p["unfinished"],
)
#: Take an object for a tick.
CLAIM = Statement(
    "claim a tick",
    Verb.UPDATE,
    (_LATER_TICK, _NOT_OVERTAKEN, _BEGUN),
    {"tick": "tick", "token": "token", "owner": "owner", "sweep": "sweep", "finished": "unfinished"},
)
#: In the transaction of the handling's writes.
END = Statement("end a tick", Verb.UPDATE, (_LAST, _OPEN), {"finished": "done"})


#: Clocks of several database servers, or of one before and after a failover, differ by less; microseconds.
AHEAD = 60 * MICROSECONDS


@dataclass(frozen=True, slots=True)
class TickLease:
    """Names the sweep that claims objects. No other sweep ever has the name ``sweep``.

    :param ahead: how far, in microseconds, a tick may lie in the future of the store's clock. A tick that is further away is from
        a time before that clock was set back: it blocks no other claim, and is not claimed any more.
    """

    task: str
    tick: int
    token: int
    owner: str
    sweep: str
    ahead: int = AHEAD


class TickLeaseStore(abc.ABC):
    """The rows of claims. Safe for use by several threads."""

    @abc.abstractmethod
    def claim(self, claim: TickLease, object_ids: Sequence[str]) -> list[str]:
        """Claim objects for a tick in one transaction; returns the claimed ones in the order given.

        Objects whose rows another transaction has locked are left out: it does not wait for them.
        """

    @abc.abstractmethod
    def end(self, transaction: Any, claim: TickLease, object_id: str) -> None:
        """Say in the transaction of the handling's writes that it is done.

        :raises Fenced: another engine claimed the object; the transaction must be rolled back.
        """

    @abc.abstractmethod
    def write(self) -> Any:
        """Returns a transaction, as :meth:`moorage.db.Database.write`."""

    @abc.abstractmethod
    def run(self, work: Callable[[Any], T]) -> T:
        """As :meth:`moorage.db.Database.run`."""

    @abc.abstractmethod
    def prune(self, task: str, before: int) -> int:
        """Remove rows whose last tick is older (microseconds): of objects that are gone; how many."""


#: Rows that are removed in one transaction, so that none is long.
_PRUNED = 500
_MANY = sa.and_(
    claims.c.task == sa.bindparam("of_task"), claims.c.object_id.in_(sa.bindparam("of_objects", expanding=True))
)
_ONE = sa.and_(claims.c.task == sa.bindparam("of_task"), claims.c.object_id == sa.bindparam("of_object"))
_TICK = sa.bindparam("to_tick", type_=sa.BigInteger)
_TOKEN = sa.bindparam("to_token", type_=sa.BigInteger)
_SWEEP = sa.bindparam("to_sweep", type_=sa.String)
_PARAMETERS = {
    "tick": _TICK,
    "token": _TOKEN,
    "owner": sa.bindparam("to_owner", type_=sa.String),
    "sweep": _SWEEP,
    "unfinished": sa.false(),
    "now": now(),
    "ahead": sa.bindparam("may_be_ahead", type_=sa.BigInteger),
}
_CLAIM = CLAIM.update(claims, _MANY, _PARAMETERS)
_LOCK = CLAIM.lock(claims, _MANY, _PARAMETERS).with_only_columns(claims.c.object_id).order_by(claims.c.object_id)
_END = END.update(claims, _ONE, {"sweep": _SWEEP, "unfinished": sa.false(), "done": sa.true()})
_THERE = sa.select(claims.c.object_id).where(_MANY)
_CLAIMED = _THERE.where(claims.c.sweep == _SWEEP, claims.c.tick == _TICK)
_KEY = [claims.c.task, claims.c.object_id]
#: Insert rows, and leave alone what is there.
_ADD = {
    "sqlite": sqlite.insert(claims).on_conflict_do_nothing(index_elements=_KEY),
    "postgresql": postgresql.insert(claims).on_conflict_do_nothing(index_elements=_KEY),
    "mysql": mysql.insert(claims).on_duplicate_key_update(token=claims.c.token),
}


class SqlTickLeases(TickLeaseStore):
    """The rows in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @override
    def claim(self, claim: TickLease, object_ids: Sequence[str]) -> list[str]:
        if not object_ids:
            return []
        # In one order, so that two who claim do not wait for each other.
        wanted = sorted(set(object_ids))
        mine = self._database.run(lambda tx: self._claim(tx, claim, wanted))
        return [each for each in object_ids if each in mine]

    def _claim(self, tx: sa.Connection, claim: TickLease, wanted: Sequence[str]) -> frozenset[str]:
        key: dict[str, Any] = {"of_task": claim.task, "of_objects": wanted}
        values: dict[str, Any] = {"to_tick": claim.tick, "to_token": claim.token, "may_be_ahead": claim.ahead}
        # An engine that froze within its transaction keeps its rows locked. The others must not wait for them.
        free = tx.execute(_LOCK, {**key, **values}).scalars().all()
        changed = 0
        if free:
            values |= {"to_sweep": claim.sweep, "to_owner": claim.owner}
            changed = tx.execute(_CLAIM, {**key, **values, "of_objects": free}).rowcount
        if changed < len(wanted):
            there = frozenset(tx.execute(_THERE, key).scalars())
            new = [
                {
                    "task": claim.task, "object_id": each, "tick": claim.tick, "token": claim.token,
                    "owner": claim.owner, "sweep": claim.sweep, "finished": False,
                }
                for each in wanted
                if each not in there
            ]  # fmt: skip
            if new and claim.tick <= read_now(tx) + claim.ahead:
                tx.execute(_ADD[self._database.dialect], new)
        return frozenset(tx.execute(_CLAIMED, {**key, "to_tick": claim.tick, "to_sweep": claim.sweep}).scalars())

    @override
    def end(self, transaction: Any, claim: TickLease, object_id: str) -> None:
        values = {"of_task": claim.task, "of_object": object_id, "to_sweep": claim.sweep}
        if transaction.execute(_END, values).rowcount != 1:
            raise errors.Fenced(
                f"{object_id} of {claim.task} has been claimed by another member since, or this handling had ended; nothing of "
                "it was written."
            )

    @override
    def write(self) -> Any:
        return self._database.write()

    @override
    def run(self, work: Callable[[Any], T]) -> T:
        return self._database.run(work)

    @override
    def prune(self, task: str, before: int) -> int:
        old = sa.and_(claims.c.task == task, claims.c.tick < before)
        some = sa.select(claims.c.object_id).where(old).limit(_PRUNED)

        def work(tx: sa.Connection) -> tuple[int, int]:
            found = tx.execute(some).scalars().all()
            return len(found), tx.execute(sa.delete(claims).where(old, claims.c.object_id.in_(found))).rowcount

        removed, found = 0, _PRUNED
        while found == _PRUNED:
            found, gone = self._database.run(work)
            removed += gone
        return removed
