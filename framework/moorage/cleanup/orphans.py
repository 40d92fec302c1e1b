# SPDX-License-Identifier: Apache-2.0
"""Finds and takes the orphans of dead services in sets, releases them, puts them into quarantine, and records their end.

A row is an orphan when the service that worked on it has ended: its ``worker_epoch`` is smaller than the service's epoch, which
only a write can raise. Who cleans holds a lease; should the cleaner die too, the lease expires and the row is taken again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors, plugin_isolation
from moorage.cleanup.conditions import (
    ExpiredLease,
    NeverStarted,
    OrphanSelector,
    OrphansOfService,
    QueuedForDead,
)
from moorage.cleanup.interface import CleanupHandler
from moorage.cleanup.staleness import StalenessTracker
from moorage.cleanup.tables import cleanup_history
from moorage.cleanup.totals import ClaimCounts, TakeOutcome
from moorage.db import MICROSECONDS, Database, JournalEvent, now, record
from moorage.services.interface import ServiceIdentity
from moorage.work import lease
from moorage.work.interface import Phase
from moorage.work.operation_statements import OF_MANY, TAKEN_COLUMNS, TRANSFER, Transfer
from moorage.work.operations import OperationLease, SqlOperationStore, fenced, same_token
from moorage.work.tables import fences, workers

__all__ = ["LAST", "Claimed", "CleanLease", "OrphanStore", "OrphansOfService", "refused"]

_OF_TYPE = workers.c.resource_type == sa.bindparam("of_type")
_BETWEEN = sa.and_(workers.c.resource_id > sa.bindparam("after"), workers.c.resource_id <= sa.bindparam("last"))
#: Behind every id.
LAST = "\U0010ffff"
_PAGE = sa.bindparam("page", type_=sa.Integer)
_DEAD = sa.bindparam("dead", type_=sa.String)
_DEAD_EPOCH = sa.bindparam("dead_epoch", type_=sa.BigInteger)
_TOKEN = sa.bindparam("to_token", type_=sa.BigInteger)

_OF_RESOURCE = sa.or_(sa.bindparam("only", type_=sa.String) == "", workers.c.resource_id == sa.bindparam("only"))
#: Rows that a cleaner had when its lease ended are taken alone: one of them may be what killed it.
_ALONE = sa.case((workers.c.phase == Phase.CLEANING.value, 1), else_=0) == sa.bindparam("alone", type_=sa.Integer)


#: Whatever its owner, or who has it in a queue, does to a row changes one of these.
_AS_IT_IS = (
    workers.c.resource_id, workers.c.phase, workers.c.token, workers.c.expires_at, workers.c.next_try_at,
    workers.c.updated_at,
)  # fmt: skip
#: Kinds whose rows are orphans once nobody has changed them for long enough.
_TOLD_BY_TIME = (ExpiredLease, NeverStarted)
#: No cleaner has taken these from their owners yet.
_BEGINS = frozenset({Phase.WAITING.value, Phase.WORKING.value})


class _Search(NamedTuple):
    """The statements that find and take the orphans of one kind.

    :param types: the types of resources that have such orphans.
    :param look: all orphans of a kind that only a timeout can tell, to compare with later reads; see
        :mod:`moorage.cleanup.staleness`.
    :param find: a page of orphans.
    :param find_and_lock: ``find``, which also locks the fences: for PostgreSQL, which can lock the rows of one table of a join.
    :param lock: locks given orphans with their fences, and returns the rows with the values that ``take`` will write: for MariaDB,
        whose UPDATE returns no rows. It skips rows that another cleaner has locked. (Locks are node-local on Galera; there the
        cleaners' different starting points keep them apart, and the commit decides.)
    :param find_and_return: ``find`` and ``lock`` in one statement, for MariaDB. None for kinds that only a timeout can tell: of
        those, a cleaner takes only some of the rows that it finds.
    :param take: writes the cleaner into the rows.
    """

    types: sa.Select[Any]
    look: sa.Select[Any]
    find: sa.Select[Any]
    find_and_lock: sa.Select[Any]
    lock: sa.Select[Any]
    find_and_return: sa.Select[Any] | None
    take: Transfer


def _search(wanted: type[OrphanSelector]) -> _Search:
    condition = wanted.condition
    types = sa.select(workers.c.resource_type).where(condition).distinct()
    look = sa.select(workers.c.resource_type, *_AS_IT_IS).where(condition)
    columns = _AS_IT_IS if wanted in _TOLD_BY_TIME else _AS_IT_IS[:2]
    found = _OF_TYPE, _BETWEEN, condition, _OF_RESOURCE, _ALONE
    find = sa.select(*columns).where(*found).order_by(workers.c.resource_id).limit(_PAGE)
    same = fences.c.resource_type == workers.c.resource_type, fences.c.resource_id == workers.c.resource_id
    # As an expression, the type of the orphan gives PostgreSQL no constant to search the fences by. With statistics from before the
    # orphans came, it would read all fences of the type for each of them.
    by_key = fences.c.resource_type == workers.c.resource_type.concat(""), same[1]
    locking = find.join(fences, sa.and_(*by_key)).with_for_update(of=fences, skip_locked=True)
    transfer = lease.TAKE_OVER.update(workers, OF_MANY, {**TRANSFER, "dead": _DEAD, "dead_epoch": _DEAD_EPOCH})
    by_cleaners = workers.c.phase.in_([Phase.CLEANING.value, Phase.RETRYING.value])
    # Owners before the first cleaner count as one: operations may be given back, and taken again, any number of times. (MariaDB
    # sets columns one after the other: attempts stands before phase in the table, so this sees the phase as it was.)
    attempts = sa.case((by_cleaners, workers.c.attempts + 1), else_=2)
    taken = {"attempts": attempts, "phase": Phase.CLEANING.value, "updated_at": now(), **wanted.attribution}
    afterwards = {**taken, "token": fences.c.token + 1}
    lock = sa.select(*(sa.label(each.name, afterwards.get(each.name, each)) for each in TAKEN_COLUMNS))
    lock = lock.join_from(workers, fences, sa.and_(*same)).order_by(workers.c.resource_id)
    # In a full table scan of MariaDB, SKIP LOCKED also skips rows that no transaction has locked.
    lock = lock.with_hint(workers, "FORCE INDEX (uq_workers_resource)", "mysql").with_for_update(skip_locked=True)
    find_and_return = None if wanted in _TOLD_BY_TIME else lock.where(*found).limit(_PAGE)
    take = Transfer(transfer.where(condition).values(taken))
    return _Search(types, look, find, locking, lock.where(OF_MANY, condition), find_and_return, take)


_SEARCHES: Mapping[type[OrphanSelector], _Search] = {
    kind: _search(kind) for kind in (OrphansOfService, QueuedForDead, ExpiredLease, NeverStarted)
}
_END = lease.FINISH.delete(workers, OF_MANY, {"token": _TOKEN})
_PUT_BACK = lease.RELEASE.update(workers, OF_MANY, {"token": _TOKEN}).values(
    phase=sa.bindparam("to_phase"),
    last_error=sa.bindparam("to_error"),
    next_try_at=now() + sa.bindparam("delay", type_=sa.BigInteger),
    attempts=workers.c.attempts - sa.bindparam("untried", type_=sa.Integer),
    updated_at=now(),
)
_OF_ROW = (
    "resource_type", "resource_id", "operation", "status", "worker", "worker_epoch", "token", "attempts",
)  # fmt: skip
#: The history of a set, from its rows as they are.
_RECORD = sa.insert(cleanup_history).from_select(
    ["at", "outcome", "reason", "cleaner", "cleaner_epoch", "seconds", *_OF_ROW],
    sa.select(
        now(),
        sa.bindparam("outcome", type_=sa.String),
        sa.bindparam("reason", type_=sa.String),
        workers.c.owner,
        workers.c.epoch,
        sa.cast(sa.bindparam("seconds", type_=sa.Double), sa.Double),
        *(workers.c[name] for name in _OF_ROW),
    ).where(OF_MANY, workers.c.token == _TOKEN),
)


@dataclass(frozen=True, slots=True)
class Claimed:
    """What was taken in one transaction.

    :param last: the last id that was looked at; None when there was none.
    :param lost: how many another service took at that moment. (PostgreSQL passes by unseen what another one has locked.)
    """

    leases: Mapping[str, CleanLease] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)
    last: str | None = None
    lost: int = 0


class CleanLease(OperationLease):
    """Represents a cleaner's lease. It has the owner whose work is cleaned; the history records how it ends."""

    __slots__ = ("_orphans", "began", "worker", "worker_epoch")

    def __init__(self, orphans: OrphanStore, resource_type: str, row: Any, cause: str) -> None:
        super().__init__(orphans.workers, resource_type, row)
        self._orphans = orphans
        self.cause = cause
        self.worker: str | None = row.worker
        self.worker_epoch: int = row.worker_epoch
        self.began = orphans.clock.monotonic()

    @override
    def end(self, transaction: Any) -> None:
        self._orphans.end_many(transaction, [self], "done")


class OrphanStore:
    """Rows whose owner is dead. Safe for use by several threads.

    :param identity: of the cleaner.
    """

    def __init__(
        self, database: Database, workers_store: SqlOperationStore, identity: ServiceIdentity, clock: Any
    ) -> None:
        self.database = database
        self.workers = workers_store
        self.clock = clock
        self.counts = ClaimCounts(database)
        self._looks: Mapping[type[OrphanSelector], StalenessTracker] = {
            kind: StalenessTracker(clock) for kind in _TOLD_BY_TIME
        }
        self._identity = identity

    def types(self, wanted: OrphanSelector) -> frozenset[str]:
        """Returns the types of resources that have orphans to take now; one read."""
        search, looks = _SEARCHES[type(wanted)], self._looks.get(type(wanted))
        if looks is None:
            with self.database.read() as tx:
                return frozenset(tx.execute(search.types, wanted.parameters).scalars())
        found: dict[str, list[Any]] = {}
        with self.database.read() as tx:
            for kind, *row in tx.execute(search.look, wanted.parameters):
                found.setdefault(kind, []).append(row)
        looks.forget_others((kind, row[0]) for kind, rows in found.items() for row in rows)
        return frozenset(kind for kind, rows in found.items() if self._left(kind, rows, wanted))

    def forget_looks(self, *kinds: type[OrphanSelector]) -> None:
        """Restarts the timeouts of orphans of these kinds, because live services could not show that they are alive.

        :param kinds: kinds that only a timeout tells; none: all of them, after the store was away.
        """
        for kind in kinds or self._looks:
            self._looks[kind].forget()

    def _left(self, kind: str, rows: Sequence[Any], wanted: OrphanSelector) -> list[str]:
        """Returns the ids of the rows that were unchanged for long enough."""
        looks = self._looks.get(type(wanted))
        if looks is None or isinstance(wanted, (OrphansOfService, QueuedForDead)):
            return [row[0] for row in rows]
        begins = {(kind, row[0]): tuple(row) for row in rows if row[1] in _BEGINS}
        left = looks.unchanged(begins, wanted.timeout)
        return [row[0] for row in rows if row[1] not in _BEGINS or (kind, row[0]) in left]

    def claim(
        self,
        resource_type: str,
        handler: CleanupHandler | None,
        wanted: OrphanSelector,
        *,
        after: str,
        last: str,
        limit: int,
        alone: bool = False,
    ) -> Claimed:
        """Take up to ``limit`` of those between two ids; one transaction of a few statements, however many there are.

        :param handler: reads the resources; None: they are not read.
        :param alone: those that another cleaner had when its lease ended; else all others.
        """
        key = {"of_type": resource_type, **wanted.parameters}
        search = _SEARCHES[type(wanted)]
        dialect, query = self.database.dialect, search.find
        if dialect == "postgresql":
            query = search.find_and_lock
        elif dialect == "mysql" and search.find_and_return is not None:
            query = search.find_and_return
        page = {"only": wanted.resource_id, "after": after, "last": last, "page": limit, "alone": int(alone)}

        def work(tx: sa.Connection) -> Claimed:
            rows = tx.execute(query, {**key, **page}).all()
            if not rows:
                return Claimed()
            claimed = Claimed(last=rows[-1].resource_id)
            ids = found = self._left(resource_type, rows, wanted)
            locked: Sequence[Any] = ()
            if query is search.find_and_return:
                locked = rows
            elif ids and dialect == "mysql":
                locked = tx.execute(search.lock, {**key, "of_resources": found}).all()
                ids = [row.resource_id for row in locked]
            if ids:
                of_many = {**key, "of_resources": ids}
                claimed = self._take(tx, resource_type, handler, wanted, of_many, rows[-1].resource_id, locked)
            return replace(claimed, lost=len(found) - len(claimed.leases))

        claimed = self.database.run(work)
        self.counts.count(resource_type, TakeOutcome.TAKEN_OVER if alone else TakeOutcome.WON, len(claimed.leases))
        self.counts.count(resource_type, TakeOutcome.LOST, claimed.lost)
        return claimed

    def _take(
        self,
        tx: sa.Connection,
        resource_type: str,
        handler: CleanupHandler | None,
        wanted: OrphanSelector,
        key: Mapping[str, Any],
        last: str,
        locked: Sequence[Any] = (),
    ) -> Claimed:
        taken = self.workers.transfer(tx, _SEARCHES[type(wanted)].take, key, self._identity, locked)
        if not taken:
            return Claimed(last=last)
        leases = {row.resource_id: CleanLease(self, resource_type, row, wanted.cause) for row in taken}
        self._journal(tx, "take", leases.values())
        if handler is None:
            return Claimed(leases, {}, last)
        with plugin_isolation.isolate_plugin_call(resource_type):
            resources = handler.read(tx, list(leases))
            found = {
                uuid: held
                for uuid, held in leases.items()
                if uuid in resources and resources[uuid].status == held.status
            }
            if found:
                handler.stamp_token(tx, found)
        return Claimed(leases, resources, last)

    def end_many(self, tx: sa.Connection, leases: Sequence[CleanLease], outcome: str, reason: str = "") -> None:
        """End the rows of a set, all of one type, with their history.

        :raises Fenced: at least one was lost; the whole transaction must be rolled back.
        """
        for key, some in same_token(leases):
            self._record(tx, key, some, outcome, reason)
            if tx.execute(_END, key).rowcount != len(some):
                raise fenced((self.workers.lost_of(tx, some) or some)[0])

    def lost_of(self, leases: Sequence[CleanLease]) -> list[CleanLease]:
        """Those that are no longer this cleaner's; one read for each token."""
        with self.database.read() as tx:
            return self.workers.lost_of(tx, leases)

    def requeue(self, held: CleanLease, reason: str, *, delay: float, quarantine: bool, untried: bool = False) -> bool:
        """Let it go uncleaned: to be tried again after ``delay`` seconds, or never by itself; False when it was lost already.

        :param untried: this was no try.
        """
        phase = Phase.QUARANTINED if quarantine else Phase.RETRYING
        key = {"of_type": held.resource_type, "of_resources": [held.resource_id], "to_token": held.token}
        values = {**key, "to_phase": phase.value, "to_error": reason[:1000]}
        values |= {"delay": int(delay * MICROSECONDS), "untried": int(untried)}

        def work(tx: sa.Connection) -> None:
            # Of the row as it is, before it is let go.
            self._record(tx, key, [held], "quarantined" if quarantine else "retry", reason)
            if tx.execute(_PUT_BACK, values).rowcount != 1:
                raise fenced(held)

        try:
            self.database.run(work)
        except errors.Fenced:
            return False
        return True

    def tell_lost(self, held: CleanLease, reason: str) -> None:
        """Records in the history that another service took the operation over meanwhile."""
        seconds = self.clock.monotonic() - held.began
        line = {
            "at": now(), "resource_type": held.resource_type, "resource_id": held.resource_id, "operation": held.operation,
            "status": held.status, "outcome": "fenced", "reason": reason[:1000], "worker": held.worker,
            "worker_epoch": held.worker_epoch, "cleaner": self._identity.uuid, "cleaner_epoch": self._identity.epoch,
            "token": held.token, "attempts": held.attempts, "seconds": seconds,
        }  # fmt: skip
        self.database.run(lambda tx: tx.execute(sa.insert(cleanup_history).values(line)))

    def _record(
        self, tx: sa.Connection, key: Mapping[str, Any], leases: Sequence[CleanLease], outcome: str, reason: str
    ) -> None:
        seconds = self.clock.monotonic() - min(held.began for held in leases)
        tx.execute(_RECORD, {**key, "outcome": outcome, "reason": reason[:1000], "seconds": seconds})
        self._journal(tx, outcome, leases)

    def _journal(self, tx: sa.Connection, what: str, leases: Iterable[CleanLease]) -> None:
        for held in leases:
            state = {
                "operation": held.operation,
                "status": held.status,
                "worker": held.worker,
                "attempts": held.attempts,
            }
            subject = f"{held.resource_type}/{held.resource_id}"
            record(tx, JournalEvent(f"cleanup.{what}", subject, held.token, state, held.project_id))


def refused(error: BaseException) -> str:
    """What a handler raised, for operators."""
    return error.message if isinstance(error, errors.MoorageError) else plugin_isolation.format_exception(error)
