# SPDX-License-Identifier: Apache-2.0
"""The instances of the compute service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors, lease
from moorage.clock import Clock
from moorage.control_plane.interface import Instance, InstanceStore, Reassignable
from moorage.db import Database, now
from moorage.scheduling.interface import NO_FIELDS, InstanceRecord, declared_fields
from moorage_plugins.compute.tables import instances

__all__ = ["ComputeInstances"]

_COLUMNS = (
    instances.c.uuid, instances.c.name, instances.c.status, instances.c.host, instances.c.node, instances.c.node_uuid,
    instances.c.flavorid, instances.c.resources, instances.c.project_id, instances.c.user_id, instances.c.fault,
    instances.c.fence, instances.c.created_at, instances.c.updated_at, instances.c.request, instances.c.server_group,
    instances.c.pending,
)  # fmt: skip
_RECORD = (
    instances.c.uuid, instances.c.host, instances.c.node, instances.c.flavorid, instances.c.resources,
    instances.c.project_id, instances.c.status, instances.c.server_group,
)  # fmt: skip
#: What is read too when filters want more of an instance.
_MORE = (instances.c.name, instances.c.user_id, instances.c.created_at, instances.c.request)
#: No operation is in progress.
_SETTLED = frozenset({"active", "error", "shelved_offloaded"})
#: What is on one node and goes to another.
_MOVING = ("resizing", "migrating")
#: An instance in error holds no room any more: its claim is given back when the build fails. One that is shelved has none.
_OCCUPIES = instances.c.status.not_in(("error", "shelved_offloaded"))
_OF_UUID = instances.c.uuid == sa.bindparam("of_uuid")
_FENCE = {"token": sa.bindparam("token", type_=sa.BigInteger)}
_SET = lease.WRITE.update(instances, _OF_UUID, _FENCE).values(
    status=sa.bindparam("to_status"), fault=sa.bindparam("to_fault"), updated_at=now()
)
_CHANGED = frozenset(
    {"status", "fault", "host", "node", "node_uuid", "flavorid", "resources", "request", "server_group", "pending"}
)
_REMOVE = lease.REMOVE.delete(instances, _OF_UUID, _FENCE)


_REASSIGN = (
    sa.update(instances)
    .where(
        _OF_UUID,
        instances.c.host == sa.bindparam("from_host"),
        instances.c.status.in_(sorted(_SETTLED)),
    )
    .values(host=sa.bindparam("to_host"), updated_at=now())
)


class ComputeInstances(InstanceStore, Reassignable):
    """Instances as rows of the table ``instances``."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, *, conf: Any, database: Database, clock: Clock) -> None:
        self._database = database
        self._fields = NO_FIELDS if conf is None or "scheduling" not in conf else declared_fields(conf)

    @override
    def all(self, *, after: str = "", limit: int = 1000) -> Sequence[InstanceRecord]:
        return self._records(instances.c.uuid > after, limit)

    @override
    def by_hosts(self, hosts: Sequence[str]) -> Sequence[InstanceRecord]:
        return self._records(instances.c.host.in_(hosts), None)

    def _records(self, condition: sa.ColumnElement[bool], limit: int | None) -> list[InstanceRecord]:
        columns = (*_RECORD, *_MORE) if self._fields else _RECORD
        query = sa.select(*columns).where(condition, _OCCUPIES).order_by(instances.c.uuid).limit(limit)
        with self._database.read() as tx:
            rows = tx.execute(query).all()
        return [
            InstanceRecord(
                row.uuid, row.host, row.node, row.flavorid, row.resources, row.project_id,
                fields=self._fields.of(row) if self._fields else {}, busy=row.status not in _SETTLED,
                server_group=row.server_group,
            )
            for row in rows
        ]  # fmt: skip

    @override
    def insert(self, transaction: Any, instance: Instance) -> None:
        values = {column.name: getattr(instance, column.name) for column in _COLUMNS}
        values |= {"resources": dict(instance.resources), "request": dict(instance.request)}
        values |= {"pending": dict(instance.pending) or None}
        values |= {"created_at": now(), "updated_at": now()}
        transaction.execute(sa.insert(instances).values(values))

    @override
    def get(self, uuid: str) -> Instance:
        with self._database.read() as tx:
            row = tx.execute(sa.select(*_COLUMNS).where(instances.c.uuid == uuid)).first()
        if row is None:
            raise errors.NotFound(f"There is no instance {uuid}.")
        return _instance(row)

    @override
    def list(
        self,
        *,
        after: str = "",
        limit: int = 1000,
        host: str | None = None,
        status: str | None = None,
        project_id: str | None = None,
    ) -> Sequence[Instance]:
        query = sa.select(*_COLUMNS).where(instances.c.uuid > after).order_by(instances.c.uuid).limit(limit)
        for column, value in (
            (instances.c.host, host),
            (instances.c.status, status),
            (instances.c.project_id, project_id),
        ):
            if value is not None:
                query = query.where(column == value)
        with self._database.read() as tx:
            return [_instance(row) for row in tx.execute(query)]

    @override
    def group_members(
        self, group: str, transaction: Any = None, *, project_id: str | None = None
    ) -> Sequence[tuple[str, str]]:
        query = sa.select(instances.c.uuid, instances.c.node_uuid, instances.c.pending)
        query = query.where(instances.c.server_group == group, _OCCUPIES).order_by(instances.c.uuid)
        if project_id is not None:
            query = query.where(instances.c.project_id == project_id)
        if transaction is not None:
            return [(row.uuid, node) for row in transaction.execute(query) for node in _nodes(row)]
        with self._database.read() as tx:
            return [(row.uuid, node) for row in tx.execute(query) for node in _nodes(row)]

    @override
    def on_node(self, node_uuid: str, transaction: Any) -> Sequence[tuple[str, bool]]:
        query = sa.select(instances.c.uuid, instances.c.node_uuid, instances.c.status, instances.c.pending)
        query = query.where(_OCCUPIES, sa.or_(instances.c.node_uuid == node_uuid, instances.c.status.in_(_MOVING)))
        rows = transaction.execute(query).all()
        return [(row.uuid, row.status not in _SETTLED) for row in rows if node_uuid in _nodes(row)]

    @override
    def set_status(
        self,
        transaction: Any,
        uuid: str,
        status: str,
        token: int,
        *,
        fault: str = "",
        expected: Sequence[str] = (),
    ) -> bool:
        statement = _SET.where(instances.c.status.in_(expected)) if expected else _SET
        values = {"of_uuid": uuid, "to_status": status, "to_fault": fault, "token": token}
        return bool(transaction.execute(statement, values).rowcount == 1)

    @override
    def change(
        self,
        transaction: Any,
        uuid: str,
        token: int,
        values: Mapping[str, Any],
        *,
        expected: Sequence[str] = (),
        fence: int | None = None,
    ) -> bool:
        unknown = values.keys() - _CHANGED
        if unknown:
            raise TypeError(f"instances have no {', '.join(sorted(unknown))} that could be changed")
        # JSON is written as plain mappings.
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        statement = lease.WRITE.update(instances, _OF_UUID, _FENCE).values(**plain, updated_at=now())
        if expected:
            statement = statement.where(instances.c.status.in_(expected))
        if fence is not None:
            statement = statement.where(instances.c.fence == fence)
        return bool(transaction.execute(statement, {"of_uuid": uuid, "token": token}).rowcount == 1)

    @override
    def remove(self, transaction: Any, uuid: str, token: int) -> bool:
        return bool(transaction.execute(_REMOVE, {"of_uuid": uuid, "token": token}).rowcount == 1)

    @override
    def reassign(self, transaction: Any, hosts: Mapping[str, str], host: str) -> int:
        rows = [{"of_uuid": uuid, "from_host": source, "to_host": host} for uuid, source in sorted(hosts.items())]
        return int(transaction.execute(_REASSIGN, rows).rowcount) if rows else 0


def _nodes(row: Any) -> set[str]:
    """The node on which an instance is, and the one to which it moves."""
    return {row.node_uuid, (row.pending or {}).get("node_uuid") or row.node_uuid}


def _instance(row: Any) -> Instance:
    return Instance(*(value if value is not None else {} for value in row))
