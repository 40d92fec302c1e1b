# SPDX-License-Identifier: Apache-2.0
"""Defines the statements on worker rows, each built once.

:class:`moorage.work.operations.SqlOperationStore` and cleanup execute them. The conditions of the writes are the guards of
:mod:`moorage.work.lease`: a write whose condition does not hold changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from moorage.db import now
from moorage.work import lease
from moorage.work.fences import ABOVE_FLOOR
from moorage.work.interface import ANY_SCHEDULER, Phase
from moorage.work.tables import fences, workers

__all__ = [
    "ADVANCE",
    "ANNOUNCE",
    "BEGIN",
    "BEGIN_RETURNING",
    "COLUMNS",
    "FINISH",
    "FINISH_MANY",
    "FORCE",
    "GET",
    "HELD",
    "LOCK_NEW",
    "OF_MANY",
    "PENDING",
    "READDRESS",
    "RELEASE",
    "REMOVE",
    "RENEW",
    "START",
    "TAKE",
    "TAKEN",
    "TAKEN_COLUMNS",
    "TRANSFER",
    "WAITING",
    "Transfer",
    "create",
]

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
ANNOUNCE = (
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
FORCE = lease.FORCE.update(workers, _OF_ONE, {"token": _TOKEN}).values(
    **_ANEW, request=sa.bindparam("to_request"), project_id=sa.bindparam("to_project")
)
#: It stays an operation of the request that asked for it.
READDRESS = (
    lease.FORCE.update(workers, _OF_ONE, {"token": _TOKEN})
    .where(
        workers.c.token == sa.bindparam("seen_token", type_=sa.BigInteger),
        # Its first owner may have begun it without a new token.
        workers.c.attempts == sa.bindparam("seen_attempts", type_=sa.Integer),
    )
    .values(**_ANEW)
)
RENEW = lease.RENEW.update(workers, OF_MANY, {"token": _TOKEN, "lease": _LEASE, "now": now()})
HELD = sa.select(workers.c.resource_id).where(OF_MANY, workers.c.token == _TOKEN)
RELEASE = lease.RELEASE.update(workers, _OF_ONE, {"token": _TOKEN}).values(
    # It has no owner from now on: a service does it again, or cleanup removes it if no service takes it.
    phase=Phase.WAITING.value, worker=None, worker_epoch=0, last_error=sa.bindparam("to_error"), updated_at=now(),
)  # fmt: skip
ADVANCE = lease.RENEW.update(workers, _OF_ONE, {"token": _TOKEN, "lease": _LEASE, "now": now()}).values(
    status=sa.bindparam("to_status")
)
#: By a person's word: whatever is in progress ends.
REMOVE = sa.delete(workers).where(_OF_ONE)
FINISH = lease.FINISH.delete(workers, _OF_ONE, {"token": _TOKEN})
FINISH_MANY = lease.FINISH.delete(workers, OF_MANY, {"token": _TOKEN})

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
def create(only_if: sa.ColumnElement[bool] | None) -> sa.Insert:
    """Inserts an operation if the resource has none, the token is above the floor and the condition holds.

    Returns the same statement for the same condition.
    """
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
GET = sa.select(*COLUMNS).where(_OF_ONE)
TAKEN_COLUMNS = (
    workers.c.resource_id, workers.c.operation, workers.c.status, workers.c.token, workers.c.attempts, workers.c.worker,
    workers.c.worker_epoch, workers.c.updated_at, workers.c.request, workers.c.project_id,
)  # fmt: skip
#: What this transaction has taken: the fence was raised in it, so no row that was taken earlier has the same token.
TAKEN = (
    sa.select(*TAKEN_COLUMNS)
    .join(fences, sa.and_(_SAME_RESOURCE, fences.c.token == workers.c.token))
    .where(OF_MANY, workers.c.owner == _OWNER, workers.c.epoch == _EPOCH)
)
PENDING = (
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
WAITING = (
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
    """A statement that takes the rows of a set, in each of its forms.

    :ivar plain: for databases that do not return the rows that they change.
    :ivar returning: for databases that do.
    :ivar to_one_token: for rows whose fences the transaction has locked, so that it knows the new token, if all get the same one.
        MariaDB reads no fence for it.
    """

    def __init__(self, statement: sa.Update) -> None:
        self.plain = statement.where(_RAISED_SINCE)
        self.returning = self.plain.returning(*TAKEN_COLUMNS)
        self.to_one_token = statement.values(token=_TOKEN).where(workers.c.token < _TOKEN)


#: A late message must not give an agent again what it has handed to the schedulers.
_NOT_OF_SCHEDULERS = workers.c.target_host != ANY_SCHEDULER
TAKE = Transfer(
    lease.TAKE.update(workers, OF_MANY, TRANSFER).where(_NOT_IN_QUARANTINE, _NOT_OF_SCHEDULERS).values(_WORKS)
)
BEGIN = lease.BEGIN.update(
    workers, OF_MANY, {"token": _TOKEN, "owner": _OWNER, "epoch": _EPOCH, "lease": _LEASE, "attempts": 1, "now": now()}
).values(phase=Phase.WORKING.value, worker=_OWNER, worker_epoch=_EPOCH, updated_at=now())
BEGIN_RETURNING = BEGIN.returning(*TAKEN_COLUMNS)
_AFTERWARDS: Mapping[str, sa.ColumnElement[Any]] = {
    "attempts": sa.literal(1), "worker": _OWNER, "worker_epoch": _EPOCH, "updated_at": now(),
}  # fmt: skip
#: The rows of ``BEGIN`` as they are afterwards, for databases that do not return them.
LOCK_NEW = lease.BEGIN.lock(workers, OF_MANY, {"token": _TOKEN}).with_only_columns(
    *(_AFTERWARDS.get(column.name, column).label(column.name) for column in TAKEN_COLUMNS)
)
#: A row that a cleaner has given back is a cleaner's.
START = Transfer(
    lease.START.update(workers, OF_MANY, TRANSFER).where(workers.c.phase == Phase.WAITING.value).values(_WORKS)
)
