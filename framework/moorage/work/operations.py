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
from moorage.db import MICROSECONDS, Database, JournalEvent, execute_set, record
from moorage.services.interface import ServiceIdentity
from moorage.work import operation_statements as statements
from moorage.work import tracking
from moorage.work.fences import (
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
    ExistedBefore,
    Lease,
    OnlyIf,
    Operation,
    OperationStore,
    Renewer,
)
from moorage.work.renewer import ThreadRenewer
from moorage.work.tables import fences

__all__ = [
    "NewOperation",
    "OperationLease",
    "SqlOperationStore",
    "fenced",
    "same_token",
    "operation_of",
]

LOG = logging.getLogger(__name__)
T = TypeVar("T")
LeaseT = TypeVar("LeaseT", bound=Lease)

#: How often the write of an operation is tried whose condition holds again by the time that it is explained.
_TRIES = 3


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
        statement = statements.create(None if only_if is None else only_if.clause)
        for _ in range(_TRIES):
            given = {**key, **values, "to_token": token, **({} if only_if is None else only_if.values)}
            if tx.execute(statement, given).rowcount == 1:
                return token
            row = tx.execute(statements.GET, key).first()
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
        if tx.execute(statements.FORCE, values).rowcount != 1:
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
        done = all(
            execute_set(transaction, statements.create(clause), rows) == len(rows) for clause, rows in sets.items()
        )
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
        if tx.execute(statements.READDRESS, values).rowcount != 1:
            raise errors.Conflict(
                f"The {seen.operation} of {seen.resource_type} {seen.resource_id} has changed since it was read."
            )
        return token

    def withdraw(self, tx: sa.Connection, resource_type: str, resource_id: str, token: int) -> None:
        """Removes the row that :meth:`create` has written in the same transaction: there is nothing left to do."""
        tx.execute(statements.FINISH, {"of_type": resource_type, "of_resource": resource_id, "to_token": token})

    @override
    def get(self, resource_type: str, resource_id: str) -> Operation | None:
        with self._database.read() as tx:
            row = tx.execute(statements.GET, {"of_type": resource_type, "of_resource": resource_id}).first()
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
            taken = self._take(tx, resource_type, wanted, identity, statements.TAKE)
            if stamp_token is not None and taken:
                stamp_token(tx, taken)
            return taken

        return self._database.run(work) if wanted else {}

    @override
    def start_many(
        self, transaction: sa.Connection, resource_type: str, resource_ids: Sequence[str], identity: ServiceIdentity
    ) -> dict[str, OperationLease]:
        return self._take(transaction, resource_type, sorted(set(resource_ids)), identity, statements.START)

    def _take(
        self,
        tx: sa.Connection,
        resource_type: str,
        resource_ids: Sequence[str],
        identity: ServiceIdentity,
        statement: statements.Transfer,
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
                rows = tx.execute(statements.BEGIN_RETURNING, values).all()
            else:
                rows = tx.execute(statements.LOCK_NEW, values).all()
                found = [row.resource_id for row in rows]
                if found:
                    tx.execute(statements.BEGIN, {**values, "of_resources": found})
            leases |= {row.resource_id: OperationLease(self, resource_type, row) for row in rows}
        return leases

    def transfer(
        self,
        tx: sa.Connection,
        statement: statements.Transfer,
        key: Mapping[str, Any],
        identity: ServiceIdentity,
        locked: Sequence[Any] = (),
    ) -> Sequence[Any]:
        """Raises the fences of a set, then takes its rows, and returns the rows that were taken, as they are now.

        :param key: ``of_type``, ``of_resources`` (in order, so that two who take do not wait for each other), and what else the
            statement's conditions ask for.
        :param locked: the rows of the set, if the transaction has locked them and their fences, as they are when all of them are
            taken. MariaDB then needs no read after the update.
        """
        of_many = {"of_type": key["of_type"], "of_resources": key["of_resources"]}
        mine = {"to_owner": identity.uuid, "to_epoch": identity.epoch}
        tx.execute(RAISE_MANY, of_many)
        values = {**key, **mine, "lease_micros": self._lease_micros}
        if self._database.dialect != "mysql":
            return tx.execute(statement.returning, values).all()
        taking, tokens = statement.plain, {row.token for row in locked}
        if len(tokens) == 1:
            taking, values = statement.to_one_token, {**values, "to_token": tokens.pop()}
        count = tx.execute(taking, values).rowcount
        return locked if count == len(locked) else tx.execute(statements.TAKEN, {**of_many, **mine}).all()

    @override
    def renew_many(self, leases: Sequence[Lease]) -> list[Lease]:
        def work(tx: sa.Connection) -> list[Lease]:
            lost: list[Lease] = []
            for key, some in same_token(leases):
                if tx.execute(statements.RENEW, {**key, "lease_micros": self._lease_micros}).rowcount != len(some):
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
            if transaction.execute(statements.FINISH_MANY, key).rowcount != len(some):
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
        """Returns the leases whose operation has another token now, or has ended."""
        lost: list[LeaseT] = []
        for key, some in same_token(leases):
            kept = set(tx.execute(statements.HELD, key).scalars())
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
            return [operation_of(row) for row in tx.execute(statements.PENDING, values)]

    @override
    def waiting(
        self, resource_type: str, names: Sequence[str], *, after: str = "", limit: int = 500, transaction: Any = None
    ) -> list[Operation]:
        values = {"names": list(names), "of_type": resource_type, "after": after, "page": limit}
        if transaction is not None:
            return [operation_of(row) for row in transaction.execute(statements.WAITING, values)]
        with self._database.read() as tx:
            return [operation_of(row) for row in tx.execute(statements.WAITING, values)]

    @override
    def announce(self, resource_type: str, resource_ids: Sequence[str]) -> None:
        if resource_ids:
            values = {
                "of_type": resource_type, "of_resources": sorted(set(resource_ids)), "lease_micros": self._lease_micros,
                "recent_micros": self._lease_micros * 2 // 3,
            }  # fmt: skip
            self._database.run(lambda tx: tx.execute(statements.ANNOUNCE, values) and None)

    @override
    def reset(self, transaction: sa.Connection, resource_type: str, resource_id: str) -> int:
        token = raise_fence(transaction, resource_type, resource_id)
        transaction.execute(statements.REMOVE, {"of_type": resource_type, "of_resource": resource_id})
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
        """Returns whether the row still carries the lease's token; one read."""
        row = self.get(held.resource_type, held.resource_id)
        return row is not None and row.token == held.token

    def end(self, tx: sa.Connection, held: Lease) -> None:
        """Remove the row, in the transaction of the last write.

        :raises Fenced: it is no longer this owner's; the whole transaction must be rolled back.
        """
        if tx.execute(statements.FINISH, _key(held)).rowcount != 1:
            raise fenced(held)
        _ended(tx, held)

    def advance(self, tx: sa.Connection, held: Lease, status: str) -> None:
        """See :meth:`Lease.advance`."""
        values = {**_key(held), "lease_micros": self._lease_micros, "to_status": status}
        if tx.execute(statements.ADVANCE, values).rowcount != 1:
            raise fenced(held)
        held.status = status

    def release(self, held: Lease, reason: str) -> None:
        """See :meth:`Lease.release`."""

        def give(tx: sa.Connection) -> bool:
            if tx.execute(statements.RELEASE, {**_key(held), "to_error": reason[:1000]}).rowcount != 1:
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
        """:param row: of the columns of :class:`moorage.work.operation_statements.Transfer`, as its owner has just taken it."""
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
    """Converts a row of :data:`moorage.work.operation_statements.COLUMNS` to an operation."""
    return Operation(*row)


def same_token(leases: Iterable[LeaseT]) -> Iterator[tuple[dict[str, Any], Sequence[LeaseT]]]:
    """Sets that one statement of :mod:`moorage.work.lease` serves: of one type, with one token; in one order for all.

    Gives the parameters of :data:`moorage.work.operation_statements.OF_MANY` and the token, and the leases.
    """
    found: dict[tuple[str, int], list[LeaseT]] = {}
    for held in sorted(leases, key=lambda each: (each.resource_type, each.resource_id)):
        found.setdefault((held.resource_type, held.token), []).append(held)
    for (kind, token), some in found.items():
        yield {"of_type": kind, "of_resources": [each.resource_id for each in some], "to_token": token}, some


def _key(held: Lease) -> dict[str, object]:
    return {"of_type": held.resource_type, "of_resource": held.resource_id, "to_token": held.token}


def _times(held: Lease) -> dict[str, int]:
    """Returns when the owner got the message, if it did, and when it took the operation: these have no event of their own."""
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
    """Returns the error of who lost a lease."""
    return errors.Fenced(
        f"The {held.operation} of {held.resource_type} {held.resource_id} with token {held.token} has been taken over or "
        "has ended; nothing of it was written."
    )


def _in_use(row: Operation) -> errors.InUse:
    state = f"is carried out by service {row.owner}" if row.owner else f"waits for {row.target_host}"
    return errors.InUse(
        f"{row.resource_type} {row.resource_id} is in use: its operation {row.operation} {state}. Wait until the operation has "
        "ended, or force.",
        holder=row.owner,
        operation=row.operation,
        target_host=row.target_host,
    )
