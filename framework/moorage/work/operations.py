# SPDX-License-Identifier: Apache-2.0
"""Stores operations and their leases: who does what to which resource, fenced.

:mod:`moorage.work.work_loop` does them; :mod:`moorage.cleanup.cleaner` takes over those of dead services.

A row is written in the transaction that records what is wanted; the service that does it takes the row, and ends it in the
transaction of its last write. Each owner gets a new token; an earlier owner's writes are refused from then on. The first owner
may keep the token of the row's creation.

Every transfer raises the resource's row of ``fences`` before it looks at the row of ``workers``: transfers of one resource take
turns by that write, on Galera too (where the second one fails at its commit and is run again). What a transfer then reads of
the worker row stays so until it commits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from oslo_context import context as oslo_context
from oslo_log import log as logging
from typing_extensions import override

from moorage import context as request_context
from moorage import errors
from moorage.clock import Clock, SystemClock
from moorage.db import MICROSECONDS, Database, JournalEvent, execute_set, now, record
from moorage.services.interface import ServiceIdentity
from moorage.work import lease, tracking
from moorage.work.fences import (
    ABOVE_FLOOR,
    RAISE_MANY,
    first_fence,
    first_fences,
    last_tokens,
    lift_above_floor,
    raise_fence,
    raise_fences,
    raise_unchecked,
)
from moorage.work.interface import (
    ANY_SCHEDULER,
    ExistedBefore,
    Lease,
    OnlyIf,
    Operation,
    OperationStore,
    Phase,
    Renewer,
)
from moorage.work.renewer import ThreadRenewer
from moorage.work.tables import fences, workers

__all__ = [
    "COLUMNS",
    "NewOperation",
    "OF_MANY",
    "TAKEN_COLUMNS",
    "TRANSFER",
    "Transfer",
    "OperationLease",
    "SqlOperationStore",
    "fenced",
    "same_token",
    "operation_of",
]

LOG = logging.getLogger(__name__)
T = TypeVar("T")
LeaseT = TypeVar("LeaseT", bound=Lease)

_OF_ONE = sa.and_(
    workers.c.resource_type == sa.bindparam("of_type"), workers.c.resource_id == sa.bindparam("of_resource")
)
OF_MANY = sa.and_(
    workers.c.resource_type == sa.bindparam("of_type"),
    workers.c.resource_id.in_(sa.bindparam("of_resources", expanding=True)),
)
_SAME_RESOURCE = sa.and_(
    fences.c.resource_type == workers.c.resource_type, fences.c.resource_id == workers.c.resource_id
)
_TOKEN = sa.bindparam("to_token", type_=sa.BigInteger)
_LEASE = sa.bindparam("lease_micros", type_=sa.BigInteger)
_OWNER = sa.bindparam("to_owner", type_=sa.String)
_EPOCH = sa.bindparam("to_epoch", type_=sa.BigInteger)

#: The token of a transfer, in the transaction that has raised the fence.
_RAISED = sa.select(fences.c.token).where(_SAME_RESOURCE).correlate(workers).scalar_subquery()
TRANSFER = {"token": _RAISED, "owner": _OWNER, "epoch": _EPOCH, "lease": _LEASE, "now": now()}
#: An operation that was created after this transaction raised the fences has a fence that this transaction did not raise. It is
#: left for the next take: its token is the request's own (or MariaDB does not see it yet, and reads NULL).
_RAISED_SINCE = workers.c.token < _RAISED
_WORKS = {
    "attempts": workers.c.attempts + 1, "phase": Phase.WORKING.value, "worker": _OWNER, "worker_epoch": _EPOCH,
    "updated_at": now(),
}  # fmt: skip
_NOT_IN_QUARANTINE = workers.c.phase != Phase.QUARANTINED.value
#: Several services may have it in their queues, and look more often than a lease lasts: one write of one of them does for a while.
_ANNOUNCE = (
    sa.update(workers)
    .where(
        OF_MANY,
        workers.c.owner.is_(None),
        workers.c.phase == Phase.WAITING.value,
        workers.c.next_try_at < now() + sa.bindparam("recent_micros", type_=sa.BigInteger),
    )
    .values(next_try_at=now() + _LEASE)
)
_ANEW: Mapping[str, Any] = {
    "operation": sa.bindparam("to_operation"), "status": sa.bindparam("to_status"), "target_host": sa.bindparam("to_host"),
    "attempts": 0, "phase": Phase.WAITING.value, "worker": None, "worker_epoch": 0, "next_try_at": 0, "last_error": "",
    "created_at": now(), "updated_at": now(),
}  # fmt: skip
_FORCE = lease.FORCE.update(workers, _OF_ONE, {"token": _TOKEN}).values(
    **_ANEW, request=sa.bindparam("to_request"), project_id=sa.bindparam("to_project")
)
#: It stays an operation of the request that asked for it.
_READDRESS = (
    lease.FORCE.update(workers, _OF_ONE, {"token": _TOKEN})
    .where(
        workers.c.token == sa.bindparam("seen_token", type_=sa.BigInteger),
        # Its first owner may have begun it without a new token.
        workers.c.attempts == sa.bindparam("seen_attempts", type_=sa.Integer),
    )
    .values(**_ANEW)
)
_RENEW = lease.RENEW.update(workers, OF_MANY, {"token": _TOKEN, "lease": _LEASE, "now": now()})
_HELD = sa.select(workers.c.resource_id).where(OF_MANY, workers.c.token == _TOKEN)
_RELEASE = lease.RELEASE.update(workers, _OF_ONE, {"token": _TOKEN}).values(
    # Nobody has begun it any more: it is done again, or cleaned when nobody comes for it.
    phase=Phase.WAITING.value, worker=None, worker_epoch=0, last_error=sa.bindparam("to_error"), updated_at=now(),
)  # fmt: skip
_ADVANCE = lease.RENEW.update(workers, _OF_ONE, {"token": _TOKEN, "lease": _LEASE, "now": now()}).values(
    status=sa.bindparam("to_status")
)
#: By a person's word: whatever is in progress ends.
_REMOVE = sa.delete(workers).where(_OF_ONE)
_FINISH = lease.FINISH.delete(workers, _OF_ONE, {"token": _TOKEN})
_FINISH_MANY = lease.FINISH.delete(workers, OF_MANY, {"token": _TOKEN})

#: How often the write of an operation is tried whose condition holds again by the time that it is explained.
_TRIES = 3
_CREATED: Mapping[str, Any] = {
    "resource_type": sa.bindparam("of_type", type_=workers.c.resource_type.type),
    "resource_id": sa.bindparam("of_resource", type_=workers.c.resource_id.type),
    "operation": sa.bindparam("to_operation", type_=workers.c.operation.type),
    "status": sa.bindparam("to_status", type_=workers.c.status.type),
    "target_host": sa.bindparam("to_host", type_=workers.c.target_host.type),
    "request": sa.bindparam("to_request", type_=workers.c.request.type),
    "project_id": sa.bindparam("to_project", type_=workers.c.project_id.type),
    "token": _TOKEN,
    "phase": sa.literal(Phase.WAITING.value, workers.c.phase.type),
    "last_error": sa.literal("", workers.c.last_error.type),
    **{name: sa.literal(0) for name in ("epoch", "expires_at", "attempts", "worker_epoch", "next_try_at")},
    "created_at": now(),
    "updated_at": now(),
}


@functools.cache
def _create(only_if: sa.ColumnElement[bool] | None) -> sa.Insert:
    """Insert an operation, where the resource has none, the token is above the floor and the condition holds; built once."""
    present = workers.alias("present")
    same = sa.and_(
        present.c.resource_type == sa.bindparam("of_type"), present.c.resource_id == sa.bindparam("of_resource")
    )
    conditions = [sa.not_(sa.exists().where(same)), ABOVE_FLOOR]
    if only_if is not None:
        conditions.append(only_if)
    row = sa.select(*_CREATED.values()).where(*conditions)
    insert = sa.insert(workers).from_select(list(_CREATED), row, include_defaults=False)
    return insert.execution_options(preserve_rowcount=True)


COLUMNS = (
    workers.c.resource_type, workers.c.resource_id, workers.c.operation, workers.c.status, workers.c.target_host,
    workers.c.owner, workers.c.epoch, workers.c.token, workers.c.attempts, workers.c.phase, workers.c.worker,
    workers.c.worker_epoch, workers.c.expires_at, workers.c.next_try_at, workers.c.last_error, workers.c.created_at,
    workers.c.updated_at, workers.c.request, workers.c.project_id,
)  # fmt: skip
_GET = sa.select(*COLUMNS).where(_OF_ONE)
TAKEN_COLUMNS = (
    workers.c.resource_id, workers.c.operation, workers.c.status, workers.c.token, workers.c.attempts, workers.c.worker,
    workers.c.worker_epoch, workers.c.updated_at, workers.c.request, workers.c.project_id,
)  # fmt: skip
#: What this transaction has taken: the fence was raised in it, so no row that was taken earlier has the same token.
_TAKEN = (
    sa.select(*TAKEN_COLUMNS)
    .join(fences, sa.and_(_SAME_RESOURCE, fences.c.token == workers.c.token))
    .where(OF_MANY, workers.c.owner == _OWNER, workers.c.epoch == _EPOCH)
)
_PENDING = (
    sa.select(*COLUMNS)
    .where(
        workers.c.target_host == sa.bindparam("host"),
        workers.c.resource_type == sa.bindparam("of_type"),
        workers.c.resource_id > sa.bindparam("after"),
        _NOT_IN_QUARANTINE,
        lease.TAKE.guards[0].sql(workers.c, {"now": now(), "owner": _OWNER, "epoch": _EPOCH}),
    )
    .order_by(workers.c.resource_id)
    .limit(sa.bindparam("page", type_=sa.Integer))
)
_WAITING = (
    sa.select(*COLUMNS)
    .where(
        workers.c.target_host.in_(sa.bindparam("names", expanding=True)),
        workers.c.resource_type == sa.bindparam("of_type"),
        workers.c.resource_id > sa.bindparam("after"),
        workers.c.owner.is_(None),
        workers.c.phase == Phase.WAITING.value,
    )
    .order_by(workers.c.resource_id)
    .limit(sa.bindparam("page", type_=sa.Integer))
)


class Transfer:
    """A statement that takes rows of a set, in both forms: not every database tells which rows it has changed."""

    def __init__(self, statement: sa.Update) -> None:
        self.plain = statement.where(_RAISED_SINCE)
        self.returning = self.plain.returning(*TAKEN_COLUMNS)


#: A late message must not give an agent again what it has handed to the schedulers.
_NOT_OF_SCHEDULERS = workers.c.target_host != ANY_SCHEDULER
_TAKE = Transfer(
    lease.TAKE.update(workers, OF_MANY, TRANSFER).where(_NOT_IN_QUARANTINE, _NOT_OF_SCHEDULERS).values(_WORKS)
)
_BEGIN = lease.BEGIN.update(
    workers, OF_MANY, {"token": _TOKEN, "owner": _OWNER, "epoch": _EPOCH, "lease": _LEASE, "attempts": 1, "now": now()}
).values(phase=Phase.WORKING.value, worker=_OWNER, worker_epoch=_EPOCH, updated_at=now())
_BEGIN_RETURNING = _BEGIN.returning(*TAKEN_COLUMNS)
_AFTERWARDS: Mapping[str, sa.ColumnElement[Any]] = {
    "attempts": sa.literal(1), "worker": _OWNER, "worker_epoch": _EPOCH, "updated_at": now(),
}  # fmt: skip
#: The rows of ``_BEGIN`` as they are afterwards, for databases that do not return them.
_LOCK_NEW = lease.BEGIN.lock(workers, OF_MANY, {"token": _TOKEN}).with_only_columns(
    *(_AFTERWARDS.get(column.name, column).label(column.name) for column in TAKEN_COLUMNS)
)
#: A row that a cleaner has given back is a cleaner's.
_START = Transfer(
    lease.START.update(workers, OF_MANY, TRANSFER).where(workers.c.phase == Phase.WAITING.value).values(_WORKS)
)


@dataclass(frozen=True, slots=True)
class NewOperation:
    """Describes an operation that :meth:`SqlOperationStore.create_many` records.

    :param context: the request that asks for the operation.
    """

    resource_id: str
    target_host: str
    project_id: str
    context: oslo_context.RequestContext | None
    only_if: OnlyIf | None = None


class SqlOperationStore(OperationStore):
    """Worker rows. Safe for use by several threads.

    :param lease_seconds: how long an owner keeps a row without renewing.
    :param clock: what who renews waits by; the machine's unless said.
    """

    def __init__(self, database: Database, *, lease_seconds: float, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self.lease_seconds = lease_seconds
        self._lease_micros = int(lease_seconds * MICROSECONDS)
        self._tracked = self.renewer("tracked-renew")

    @override
    def create(
        self,
        transaction: sa.Connection,
        resource_type: str,
        resource_id: str,
        operation: str,
        status: str,
        *,
        target_host: str,
        force: bool = False,
        first: bool = False,
        only_if: OnlyIf | None = None,
        project_id: str = "",
    ) -> int:
        # Two statements; three on MariaDB, unless it is the first operation.
        tx = transaction
        if first:
            begun = first_fence(tx, resource_type, resource_id)
            if begun is None:
                raise ExistedBefore(
                    f"{resource_type.capitalize()} {resource_id} existed before and was deleted. Use a new uuid.",
                    **{resource_type: resource_id},
                )
            token = begun
        else:
            token = raise_unchecked(tx, resource_type, resource_id)
        key = {"of_type": resource_type, "of_resource": resource_id}
        values = {
            "to_operation": operation, "to_status": status, "to_host": target_host,
            "to_request": request_context.to_text(oslo_context.get_current()), "to_project": project_id or None,
        }  # fmt: skip
        statement = _create(None if only_if is None else only_if.clause)
        for _ in range(_TRIES):
            given = {**key, **values, "to_token": token, **({} if only_if is None else only_if.values)}
            if tx.execute(statement, given).rowcount == 1:
                return token
            row = tx.execute(_GET, key).first()
            if row is not None:
                if only_if is not None:
                    only_if.refuse(tx)
                return self._replace(tx, row, force, {**key, **values, "to_token": token})
            token = lift_above_floor(tx, resource_type, resource_id, token)
            if only_if is not None:
                only_if.refuse(tx)
        raise errors.Conflict(f"What the {operation} of {resource_type} {resource_id} requires changes all the time.")

    def _replace(self, tx: sa.Connection, row: Any, force: bool, values: Mapping[str, Any]) -> int:
        """Begin an operation in place of another one, which loses its owner.

        :raises InUse: ``force`` is not given.
        """
        if not force:
            raise _in_use(operation_of(row))
        if tx.execute(_FORCE, values).rowcount != 1:
            # It finished in this moment. Its owner's write decided what the resource is now; the caller must look again.
            raise errors.Conflict(f"The operation on {row.resource_type} {row.resource_id} has just ended; try again.")
        token: int = values["to_token"]
        return token

    def create_many(
        self,
        transaction: sa.Connection,
        resource_type: str,
        operation: str,
        status: str,
        wanted: Sequence[NewOperation],
        *,
        first: bool = False,
    ) -> Mapping[str, int] | None:
        """Record operations on different resources, as :meth:`create` does without ``force``; at least three statements.

        :param first: all of the resources are new.
        :returns: the token of each. None: an operation is in progress on one of them, or not all of their conditions hold, and the
            transaction must be undone.
        :raises ExistedBefore: ``first``, and some of the resources existed before; ``details['resources']`` names them.
        :raises Duplicate: another transaction has just inserted the fence of one of the resources.
        """
        resources = [each.resource_id for each in wanted]
        tokens = (first_fences if first else raise_fences)(transaction, resource_type, resources)
        sets: dict[Any, list[dict[str, Any]]] = {}
        for each in sorted(wanted, key=lambda each: each.resource_id):
            clause, values = (None, {}) if each.only_if is None else (each.only_if.clause, each.only_if.values)
            sets.setdefault(clause, []).append(
                {
                    "of_type": resource_type, "of_resource": each.resource_id, "to_operation": operation,
                    "to_status": status, "to_host": each.target_host, "to_request": request_context.to_text(each.context),
                    "to_project": each.project_id or None, "to_token": tokens[each.resource_id], **values,
                }
            )  # fmt: skip
        done = all(execute_set(transaction, _create(clause), rows) == len(rows) for clause, rows in sets.items())
        return tokens if done else None

    def readdress(self, tx: sa.Connection, seen: Operation, target_host: str) -> int:
        """Address an operation to another host; its new token.

        :param seen: the operation as it was read.
        :raises Conflict: a service has taken, ended or changed it since.
        """
        token = raise_fence(tx, seen.resource_type, seen.resource_id)
        values = {
            "of_type": seen.resource_type, "of_resource": seen.resource_id, "seen_token": seen.token,
            "seen_attempts": seen.attempts, "to_token": token, "to_operation": seen.operation,
            "to_status": seen.status, "to_host": target_host,
        }  # fmt: skip
        if tx.execute(_READDRESS, values).rowcount != 1:
            raise errors.Conflict(
                f"The {seen.operation} of {seen.resource_type} {seen.resource_id} has changed since it was read."
            )
        return token

    def withdraw(self, tx: sa.Connection, resource_type: str, resource_id: str, token: int) -> None:
        """Take back what :meth:`create` recorded, in the same transaction: there is nothing left for anybody to do."""
        tx.execute(_FINISH, {"of_type": resource_type, "of_resource": resource_id, "to_token": token})

    @override
    def get(self, resource_type: str, resource_id: str) -> Operation | None:
        with self._database.read() as tx:
            row = tx.execute(_GET, {"of_type": resource_type, "of_resource": resource_id}).first()
        return None if row is None else operation_of(row)

    def take(self, resource_type: str, resource_id: str, identity: ServiceIdentity) -> OperationLease | None:
        """Become the owner; None when there is nothing to take: no row, or a live owner has it."""
        return self.take_many(resource_type, [resource_id], identity).get(resource_id)

    @override
    def take_many(
        self,
        resource_type: str,
        resource_ids: Sequence[str],
        identity: ServiceIdentity,
        stamp_token: Callable[[Any, Mapping[str, Lease]], None] | None = None,
    ) -> dict[str, OperationLease]:
        wanted = sorted(set(resource_ids))

        def work(tx: sa.Connection) -> dict[str, OperationLease]:
            taken = self._take(tx, resource_type, wanted, identity, _TAKE)
            if stamp_token is not None and taken:
                stamp_token(tx, taken)
            return taken

        return self._database.run(work) if wanted else {}

    @override
    def start_many(
        self, transaction: sa.Connection, resource_type: str, resource_ids: Sequence[str], identity: ServiceIdentity
    ) -> dict[str, OperationLease]:
        return self._take(transaction, resource_type, sorted(set(resource_ids)), identity, _START)

    def _take(
        self,
        tx: sa.Connection,
        resource_type: str,
        resource_ids: Sequence[str],
        identity: ServiceIdentity,
        statement: Transfer,
    ) -> dict[str, OperationLease]:
        if not resource_ids:
            return {}
        taken = self.transfer(tx, statement, {"of_type": resource_type, "of_resources": resource_ids}, identity)
        leases = {row.resource_id: OperationLease(self, resource_type, row) for row in taken}
        for held in leases.values():
            if held.attempts > 1:
                # The first owner's end says when it began; that a later one took it over is an event of its own.
                _record(tx, "take", held, {})
        return leases

    @override
    def begin_many(
        self, transaction: sa.Connection, resource_type: str, tokens: Mapping[str, int], identity: ServiceIdentity
    ) -> dict[str, OperationLease]:
        # One statement for each token, two on MariaDB.
        tx = transaction
        leases: dict[str, OperationLease] = {}
        by_token: dict[int, list[str]] = {}
        for resource_id, token in sorted(tokens.items()):
            by_token.setdefault(token, []).append(resource_id)
        for token, resource_ids in sorted(by_token.items()):
            values = {
                "of_type": resource_type, "of_resources": resource_ids, "to_token": token, "to_owner": identity.uuid,
                "to_epoch": identity.epoch, "lease_micros": self._lease_micros,
            }  # fmt: skip
            if self._database.dialect != "mysql":
                rows = tx.execute(_BEGIN_RETURNING, values).all()
            else:
                rows = tx.execute(_LOCK_NEW, values).all()
                found = [row.resource_id for row in rows]
                if found:
                    tx.execute(_BEGIN, {**values, "of_resources": found})
            leases |= {row.resource_id: OperationLease(self, resource_type, row) for row in rows}
        return leases

    def transfer(
        self,
        tx: sa.Connection,
        statement: Transfer,
        key: Mapping[str, Any],
        identity: ServiceIdentity,
        locked: Sequence[Any] = (),
    ) -> Sequence[Any]:
        """Raise the fences of a set, and then take its rows; those that were taken, as they are now.

        :param key: ``of_type``, ``of_resources`` (in order, so that two who take do not wait for each other), and what else the
            statement's conditions ask for.
        :param locked: the rows of the set, if the transaction has locked them, as they are when all of them are taken. MariaDB
            then needs no read after the update.
        """
        of_many = {"of_type": key["of_type"], "of_resources": key["of_resources"]}
        mine = {"to_owner": identity.uuid, "to_epoch": identity.epoch}
        tx.execute(RAISE_MANY, of_many)
        values = {**key, **mine, "lease_micros": self._lease_micros}
        if self._database.dialect != "mysql":
            return tx.execute(statement.returning, values).all()
        count = tx.execute(statement.plain, values).rowcount
        return locked if count == len(locked) else tx.execute(_TAKEN, {**of_many, **mine}).all()

    @override
    def renew_many(self, leases: Sequence[Lease]) -> list[Lease]:
        def work(tx: sa.Connection) -> list[Lease]:
            lost: list[Lease] = []
            for key, some in same_token(leases):
                if tx.execute(_RENEW, {**key, "lease_micros": self._lease_micros}).rowcount != len(some):
                    lost += self.lost_of(tx, some)
            return lost

        return self._database.run(work) if leases else []

    @override
    def end_many(self, transaction: sa.Connection, leases: Sequence[Lease]) -> None:
        # Subclasses end in a way of their own.
        plain = [each for each in leases if type(each) is OperationLease]
        if len(plain) < 2:
            super().end_many(transaction, leases)
            return
        super().end_many(transaction, [each for each in leases if type(each) is not OperationLease])
        for key, some in same_token(plain):
            if transaction.execute(_FINISH_MANY, key).rowcount != len(some):
                raise errors.Fenced(
                    f"At least one of {len(some)} operations that end together has been taken over or has ended; nothing of "
                    "them was written."
                )
        for each in plain:
            _ended(transaction, each)

    @override
    def renewer(self, name: str) -> Renewer:
        return ThreadRenewer(self, self._clock, name)

    def lost_of(self, tx: sa.Connection, leases: Sequence[LeaseT]) -> list[LeaseT]:
        """Those whose row carries another token by now, or has ended."""
        lost: list[LeaseT] = []
        for key, some in same_token(leases):
            kept = set(tx.execute(_HELD, key).scalars())
            lost += [each for each in some if each.resource_id not in kept]
        return lost

    @override
    def pending(
        self, resource_type: str, identity: ServiceIdentity, *, after: str = "", limit: int = 500
    ) -> list[Operation]:
        values = {
            "host": identity.host, "of_type": resource_type, "after": after, "page": limit,
            "to_owner": identity.uuid, "to_epoch": identity.epoch,
        }  # fmt: skip
        with self._database.read() as tx:
            return [operation_of(row) for row in tx.execute(_PENDING, values)]

    @override
    def waiting(
        self, resource_type: str, names: Sequence[str], *, after: str = "", limit: int = 500, transaction: Any = None
    ) -> list[Operation]:
        values = {"names": list(names), "of_type": resource_type, "after": after, "page": limit}
        if transaction is not None:
            return [operation_of(row) for row in transaction.execute(_WAITING, values)]
        with self._database.read() as tx:
            return [operation_of(row) for row in tx.execute(_WAITING, values)]

    @override
    def announce(self, resource_type: str, resource_ids: Sequence[str]) -> None:
        if resource_ids:
            values = {
                "of_type": resource_type, "of_resources": sorted(set(resource_ids)), "lease_micros": self._lease_micros,
                "recent_micros": self._lease_micros * 2 // 3,
            }  # fmt: skip
            self._database.run(lambda tx: tx.execute(_ANNOUNCE, values) and None)

    @override
    def reset(self, transaction: sa.Connection, resource_type: str, resource_id: str) -> int:
        token = raise_fence(transaction, resource_type, resource_id)
        transaction.execute(_REMOVE, {"of_type": resource_type, "of_resource": resource_id})
        return token

    @override
    def tracked(
        self,
        resource_type: str,
        resource_id: str,
        operation: str,
        status: str,
        identity: ServiceIdentity,
        begin: Callable[[Any, int], None] | None = None,
        *,
        project_id: str = "",
    ) -> contextlib.AbstractContextManager[Lease]:
        return tracking.tracked(
            self,
            self._database,
            self._tracked,
            resource_type,
            resource_id,
            operation,
            status,
            identity,
            begin,
            project_id,
        )

    @override
    def token_of(self, resource_type: str, resource_id: Any) -> sa.ScalarSelect[int]:
        return (
            sa.select(fences.c.token)
            .where(fences.c.resource_type == resource_type, fences.c.resource_id == resource_id)
            .scalar_subquery()
        )

    @override
    def tokens(self, transaction: sa.Connection, resource_type: str, resource_ids: Sequence[str]) -> dict[str, int]:
        return last_tokens(transaction, resource_type, resource_ids)

    # -- for the leases -------------------------------------------------------------------------------------------

    def holds(self, held: Lease) -> bool:
        """Whether the row still carries the lease's token; one read."""
        row = self.get(held.resource_type, held.resource_id)
        return row is not None and row.token == held.token

    def end(self, tx: sa.Connection, held: Lease) -> None:
        """Remove the row, in the transaction of the last write.

        :raises Fenced: it is no longer this owner's; the whole transaction must be rolled back.
        """
        if tx.execute(_FINISH, _key(held)).rowcount != 1:
            raise fenced(held)
        _ended(tx, held)

    def advance(self, tx: sa.Connection, held: Lease, status: str) -> None:
        """See :meth:`Lease.advance`."""
        values = {**_key(held), "lease_micros": self._lease_micros, "to_status": status}
        if tx.execute(_ADVANCE, values).rowcount != 1:
            raise fenced(held)
        held.status = status

    def release(self, held: Lease, reason: str) -> None:
        """See :meth:`Lease.release`."""

        def give(tx: sa.Connection) -> bool:
            if tx.execute(_RELEASE, {**_key(held), "to_error": reason[:1000]}).rowcount != 1:
                return False
            _record(tx, "release", held, _times(held))
            return True

        if self._database.run(give):
            LOG.warning(
                "The %s of %s %s was given back after try %d: %s",
                held.operation, held.resource_type, held.resource_id, held.attempts, reason,
            )  # fmt: skip


class OperationLease(Lease):
    """The lease of a worker row."""

    __slots__ = ("_store",)

    def __init__(self, store: SqlOperationStore, resource_type: str, row: Any) -> None:
        """:param row: of the columns of :class:`Transfer`, as its owner has just taken it."""
        super().__init__(
            store._database, resource_type, row.resource_id, row.operation, row.status, row.token, row.attempts,
            row.request, row.updated_at, row.project_id or "",
        )  # fmt: skip
        self._store = store

    @override
    def renew(self) -> None:
        if self._store.renew_many([self]):
            raise fenced(self)

    @override
    def check(self) -> None:
        if not self._store.holds(self):
            raise fenced(self)

    @override
    def end(self, transaction: Any) -> None:
        self._store.end(transaction, self)

    @override
    def advance(self, transaction: Any, status: str) -> None:
        self._store.advance(transaction, self, status)

    @override
    def release(self, reason: str) -> None:
        self._store.release(self, reason)


def operation_of(row: Any) -> Operation:
    """A row of :data:`COLUMNS` as plain data."""
    return Operation(*row)


def same_token(leases: Iterable[LeaseT]) -> Iterator[tuple[dict[str, Any], Sequence[LeaseT]]]:
    """Sets that one statement of :mod:`moorage.work.lease` serves: of one type, with one token; in one order for all.

    Gives the parameters of :data:`OF_MANY` and the token, and the leases.
    """
    found: dict[tuple[str, int], list[LeaseT]] = {}
    for held in sorted(leases, key=lambda each: (each.resource_type, each.resource_id)):
        found.setdefault((held.resource_type, held.token), []).append(held)
    for (kind, token), some in found.items():
        yield {"of_type": kind, "of_resources": [each.resource_id for each in some], "to_token": token}, some


def _key(held: Lease) -> dict[str, object]:
    return {"of_type": held.resource_type, "of_resource": held.resource_id, "to_token": held.token}


def _times(held: Lease) -> dict[str, int]:
    """When the owner was told, if it was, and when it took the operation: these have no event of their own."""
    return {"began_at": held.taken_at, **({"told_at": held.told_at} if held.told_at else {})}


def _ended(tx: sa.Connection, held: Lease) -> None:
    _record(tx, "end", held, _times(held))
    held.ended = True


def _record(tx: sa.Connection, what: str, held: Lease, state: Mapping[str, Any]) -> None:
    """Record what became of an operation, in the name of the request that asked for it, for the project of the resource."""
    asked = held.context
    project = held.project_id or ("" if asked is None else asked.project_id or "")
    state = {"operation": held.operation, "attempts": held.attempts, **state}
    event = JournalEvent(f"operation.{what}", f"{held.resource_type}/{held.resource_id}", held.token, state, project)
    # Some threads that release operations work for no request.
    with request_context.acting_for(asked or oslo_context.get_current()):
        record(tx, event)


def fenced(held: Lease) -> errors.Fenced:
    """The error of who lost a lease."""
    return errors.Fenced(
        f"The {held.operation} of {held.resource_type} {held.resource_id} with token {held.token} has been taken over or "
        "has ended; nothing of it was written."
    )


def _in_use(row: Operation) -> errors.InUse:
    holder = f"service {row.owner}" if row.owner else f"nobody yet (it waits for {row.target_host})"
    return errors.InUse(
        f"{row.resource_type} {row.resource_id} is being worked on: {row.operation}, by {holder}. Wait until that has "
        "ended, or force.",
        holder=row.owner,
        operation=row.operation,
        target_host=row.target_host,
    )
