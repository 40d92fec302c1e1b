# SPDX-License-Identifier: Apache-2.0
"""The instances of the compute service."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from oslo_context import context as oslo_context
from oslo_context.context import RequestContext
from typing_extensions import override

from moorage import errors
from moorage.clock import Clock
from moorage.context import acting_for
from moorage.db import MICROSECONDS, Database, JournalEvent, execute_set, now, read_now, record
from moorage.db.schema import JsonText, json_text, names_of
from moorage.instances.interface import (
    Instance,
    InstanceStore,
    InstanceWrite,
    Reassignable,
    move_consumer,
)
from moorage.instances.moves import MOVES, RESIZED, kept_source
from moorage.read_only import EMPTY, frozen_mapping, replaced
from moorage.scheduling.instance_fields import NO_FIELDS, declared_fields
from moorage.scheduling.interface import InstanceRecord
from moorage.work import lease
from moorage_plugins.compute.tables import instances

__all__ = ["LONGEST_DETAIL", "MOVING", "Compared", "ComputeInstances", "compared"]

_COLUMNS = (
    instances.c.uuid, instances.c.name, instances.c.status, instances.c.host, instances.c.node, instances.c.node_uuid,
    instances.c.flavorid, instances.c.resources, instances.c.project_id, instances.c.user_id, instances.c.fault,
    instances.c.fence, instances.c.created_at, instances.c.updated_at, instances.c.request, instances.c.server_group,
    instances.c.pending, instances.c.actual_state, instances.c.actual_detail, instances.c.actual_at, instances.c.restarts,
    instances.c.flavor_version,
)  # fmt: skip
_GET = sa.select(*_COLUMNS).where(instances.c.uuid == sa.bindparam("of_uuid"))
_FIND = sa.select(*_COLUMNS).where(instances.c.uuid.in_(sa.bindparam("of_uuids", expanding=True)))
_INSERT = sa.insert(instances)
_INSERT_RETURNING = _INSERT.values(created_at=now(), updated_at=now()).returning(
    instances.c.created_at, instances.c.updated_at
)
_GIVEN = names_of(each for each in _COLUMNS if each.name not in ("created_at", "updated_at"))
_RECORD = (
    instances.c.uuid, instances.c.host, instances.c.node, instances.c.flavorid,
    # Many instances have the same: it is read as text, and parsed once.
    sa.type_coerce(instances.c.resources, sa.Text).label("resources_text"),
    instances.c.project_id, instances.c.status, instances.c.server_group,
)  # fmt: skip
#: What is read too when filters want more of an instance.
_MORE = (instances.c.name, instances.c.user_id, instances.c.created_at, instances.c.request)
#: Statuses in which instances can be given to another host: no operation is in progress, and no other place is kept.
_REASSIGNABLE = frozenset({"active", "error", "stopped", "shelved_offloaded"})
#: No operation is in progress.
_SETTLED = _REASSIGNABLE | {RESIZED}
#: Statuses of an instance that may already run on its destination, or may go back to its source.
MOVING = ("resizing", "migrating", "deleting", RESIZED)
#: An instance in error holds no room any more: its claim is given back when the build fails. One that is shelved has none.
_OCCUPIES = instances.c.status.not_in(("error", "shelved_offloaded"))
#: The node that an instance is on, and the node that it moves to or may go back to.
_PLACES = (instances.c.node_uuid, instances.c.destination_uuid)
_AFTER = instances.c.uuid > sa.bindparam("after", type_=sa.String)
_LIMIT = sa.bindparam("page", type_=sa.Integer)
_OF_UUID = instances.c.uuid == sa.bindparam("of_uuid")
_FENCE = {"token": sa.bindparam("token", type_=sa.BigInteger)}
_SEEN_FENCE = sa.bindparam("seen_fence", type_=sa.BigInteger)
_OF_NODE = sa.bindparam("of_node", type_=sa.String)
#: In the words of the index, which has no other rows: a parameter would hide that.
_MOVES = instances.c.destination_uuid != sa.literal_column("''")
_IN_GROUP = instances.c.server_group != sa.literal_column("''")
_ON_NODE = (
    sa.select(*_RECORD, instances.c.node_uuid, instances.c.destination_uuid, instances.c.pending)
    .where(
        _OCCUPIES,
        sa.or_(instances.c.node_uuid == _OF_NODE, sa.and_(instances.c.destination_uuid == _OF_NODE, _MOVES)),
    )
    .order_by(instances.c.uuid)
)
_ON_NODE_IN_FULL = _ON_NODE.add_columns(*_MORE)
#: The columns that have JSON.
_OF_JSON = frozenset(names_of(each for each in instances.c if isinstance(each.type, JsonText)))
_CHANGED = frozenset(
    {
        *(
            "status",
            "fault",
            "host",
            "node",
            "node_uuid",
            "flavorid",
            "resources",
            "request",
            "server_group",
            "pending",
        ),
        *("actual_state", "actual_detail", "restarts", "flavor_version"),
    }
)
#: By whether filters want more than a record.
_ALL = {
    more: sa.select(*columns).where(_AFTER, _OCCUPIES).order_by(instances.c.uuid).limit(_LIMIT)
    for more, columns in ((False, _RECORD), (True, (*_RECORD, *_MORE)))
}
#: Ordered by primary key, so that the table is read sequentially. In the order of uuids each row is a random access.
_NEXT = {
    more: sa.select(*columns, instances.c.id)
    .where(instances.c.id > sa.bindparam("after", type_=sa.BigInteger), _OCCUPIES)
    .order_by(instances.c.id)
    .limit(_LIMIT)
    for more, columns in ((False, _RECORD), (True, (*_RECORD, *_MORE)))
}
_BY_HOSTS = {
    more: sa.select(*columns)
    .where(instances.c.host.in_(sa.bindparam("of_hosts", expanding=True)), _OCCUPIES)
    .order_by(instances.c.uuid)
    for more, columns in ((False, _RECORD), (True, (*_RECORD, *_MORE)))
}
_FLAVORS = sa.select(instances.c.uuid, instances.c.flavorid).where(
    instances.c.host == sa.bindparam("of_host"), _OCCUPIES
)
_MEMBERS = (
    sa.select(instances.c.uuid, instances.c.node_uuid, instances.c.pending)
    .where(instances.c.server_group == sa.bindparam("of_group", type_=sa.String), _IN_GROUP, _OCCUPIES)
    .order_by(instances.c.uuid)
)
_MEMBERS_OF_PROJECT = _MEMBERS.where(instances.c.project_id == sa.bindparam("of_project", type_=sa.String))
_REMOVE = lease.REMOVE.delete(instances, _OF_UUID, _FENCE)
#: What an event says of an instance: nothing that users wrote.
_STATE = (
    instances.c.uuid, instances.c.status, instances.c.host, instances.c.node, instances.c.node_uuid, instances.c.flavorid,
    instances.c.flavor_version, instances.c.destination_uuid, instances.c.project_id, instances.c.fence,
)  # fmt: skip
_REMOVE_RETURNING = _REMOVE.returning(*_STATE)
_OF_UUIDS = instances.c.uuid.in_(sa.bindparam("of_uuids", expanding=True))
_REMOVE_MANY = lease.REMOVE.delete(instances, _OF_UUIDS, _FENCE)
_REMOVE_MANY_RETURNING = _REMOVE_MANY.returning(*_STATE)
_READ_STATES = sa.select(*_STATE).where(_OF_UUIDS)
_SHOWN = names_of(each for each in _STATE if each.name not in ("uuid", "fence", "destination_uuid"))
_READ_GIVEN, _READ_SHOWN = operator.attrgetter(*_GIVEN), operator.attrgetter(*_SHOWN)
_READ_STATE = sa.select(*_STATE).where(instances.c.uuid == sa.bindparam("of_uuid"))

#: Characters of ``actual_detail``.
LONGEST_DETAIL = 1000
#: Uuids in one statement; SQLite takes 32,766 parameters.
_PART = 1000
_REASSIGNED = sa.and_(
    instances.c.uuid.in_(sa.bindparam("of_uuids", expanding=True)),
    instances.c.host == sa.bindparam("from_host"),
    instances.c.status.in_(sorted(_REASSIGNABLE)),
)
#: The driver of another host has not seen it yet.
_REASSIGN = (
    sa.update(instances)
    .where(_REASSIGNED)
    .values(host=sa.bindparam("to_host"), updated_at=now(), actual_state="unknown", actual_detail="", actual_at=now())
)
#: An instance whose resize is not confirmed has its old node as the one to which it may go.
_GOING_TO = sa.select(instances.c.uuid, instances.c.pending).where(
    instances.c.destination_uuid.in_(sa.bindparam("of_nodes", expanding=True)), _MOVES
)
_REASSIGN_RETURNING = _REASSIGN.returning(*_STATE)
_LOCK_REASSIGNED = sa.select(*_STATE).where(_REASSIGNED).with_for_update()


#: Statuses in which what runs is compared with what should: no operation is in progress, and it has a place on a host.
_COMPARED = ("active", "stopped", RESIZED)
_COMPARE = sa.select(
    instances.c.uuid, instances.c.status, instances.c.fence, now().label("now"),
    instances.c.actual_state, instances.c.actual_detail, instances.c.actual_at, instances.c.restarts,
    # As text, because few rows are parsed.
    sa.type_coerce(instances.c.pending, sa.Text).label("pending_text"),
).where(
    instances.c.host == sa.bindparam("of_host"), instances.c.status.in_(_COMPARED)
)  # fmt: skip
#: An operation that begins writes status and fence into the row, another observer its own ``actual_at``.
_OBSERVE = (
    sa.update(instances)
    .where(
        _OF_UUID,
        instances.c.host == sa.bindparam("of_host"),
        instances.c.status == sa.bindparam("of_status"),
        instances.c.fence == sa.bindparam("of_fence", type_=sa.BigInteger),
        instances.c.actual_state == sa.bindparam("of_actual_state"),
        instances.c.actual_at == sa.bindparam("of_actual_at", type_=instances.c.actual_at.type),
        instances.c.restarts == sa.bindparam("of_restarts", type_=sa.Integer),
    )
    .values(
        status=sa.bindparam("to_status"), fault=sa.bindparam("to_fault"), actual_state=sa.bindparam("to_actual_state"),
        actual_detail=sa.bindparam("to_actual_detail"), actual_at=now(), updated_at=now(),
        restarts=sa.bindparam("to_restarts", type_=sa.Integer),
    )
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """An instance that is on a host and in no operation, as it was read: what was seen of it last, and how old that is.

    :param seconds: since ``actual_state`` was written, by the database's clock.
    :param unconfirmed: seconds since its resize ended that is not confirmed, by the database's clock; None: there is none.
    :param confirm_after: seconds after which that resize is confirmed; negative: never by itself.
    """

    uuid: str
    status: str
    fence: int
    actual_state: str
    actual_detail: str
    actual_at: int
    restarts: int
    seconds: float
    unconfirmed: float | None = None
    confirm_after: float = -1.0


@functools.cache
def _list(names: tuple[str, ...]) -> sa.Select[Any]:
    """Returns a page of the instances whose columns of these names have given values; built once."""
    equal = (instances.c[name] == sa.bindparam(f"of_{name}", type_=sa.String) for name in names)
    return sa.select(*_COLUMNS).where(_AFTER, *equal).order_by(instances.c.uuid).limit(_LIMIT)


@functools.cache
def _change(names: frozenset[str], expected: bool, fence: bool, returning: bool) -> Any:
    """Sets columns of an instance with the fence; built once for each set of columns.

    :param expected: only in one of the statuses ``expected``.
    :param fence: only with the fence ``seen_fence``.
    :param returning: returns what an event says of the instance.
    """
    values: dict[str, Any] = {name: sa.bindparam(f"to_{name}", type_=instances.c[name].type) for name in sorted(names)}
    if "actual_state" in names:
        values["actual_at"] = now()
    statement = lease.WRITE.update(instances, _OF_UUID, _FENCE).values(**values, updated_at=now())
    if expected:
        statement = statement.where(instances.c.status.in_(sa.bindparam("expected", expanding=True)))
    if fence:
        statement = statement.where(instances.c.fence == _SEEN_FENCE)
    return statement.returning(*_STATE) if returning else statement


@functools.cache
def _change_many(names: frozenset[str], fence: bool) -> sa.Update:
    """Sets columns of instances with the fence, for :func:`execute_set`; built once for each set of columns.

    Its values are strings and numbers: JSON is given as text.

    :param fence: only with the fence ``seen_fence``.
    """
    types = {name: instances.c[name].type for name in sorted(names)}
    values: dict[str, Any] = {
        name: sa.bindparam(f"to_{name}", type_=sa.Text() if isinstance(kind, JsonText) else kind)
        for name, kind in types.items()
    }
    if "actual_state" in names:
        values["actual_at"] = now()
    statement = lease.WRITE.update(instances, _OF_UUID, _FENCE).values(**values, updated_at=now())
    return statement.where(instances.c.fence == _SEEN_FENCE) if fence else statement


def _no_fields(row: Any) -> Mapping[str, Any]:
    return EMPTY


@functools.lru_cache(4096)
def _resources(text: str) -> Mapping[str, int]:
    return frozen_mapping(json.loads(text))


class ComputeInstances(InstanceStore, Reassignable):
    """Instances as rows of the table ``instances``."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, *, conf: Any, database: Database, clock: Clock) -> None:
        self._database = database
        #: MySQL has no RETURNING, and MariaDB has none for UPDATE.
        self._returning = database.dialect != "mysql"
        self._fields = NO_FIELDS if conf is None or "scheduling" not in conf else declared_fields(conf)

    @override
    def all(self, *, after: str = "", limit: int = 1000) -> Sequence[InstanceRecord]:
        with self._database.read() as tx:
            return self._records(tx.execute(_ALL[bool(self._fields)], {"after": after, "page": limit}).all())

    @override
    def pages(self, limit: int) -> Iterator[Sequence[InstanceRecord]]:
        after = 0
        while True:
            with self._database.read() as tx:
                rows = tx.execute(_NEXT[bool(self._fields)], {"after": after, "page": limit}).all()
            yield self._records(rows)
            if len(rows) < limit:
                return
            after = rows[-1].id

    @override
    def by_hosts(self, hosts: Sequence[str]) -> Sequence[InstanceRecord]:
        with self._database.read() as tx:
            return self._records(tx.execute(_BY_HOSTS[bool(self._fields)], {"of_hosts": list(hosts)}).all())

    @override
    def flavors_on(self, host: str) -> Sequence[Any]:
        with self._database.read() as tx:
            return list(tx.execute(_FLAVORS, {"of_host": host}))

    def _records(self, rows: Sequence[Any]) -> list[InstanceRecord]:
        """Converts rows whose first columns are :data:`_RECORD`."""
        of, resources = self._fields.of if self._fields else _no_fields, _resources
        return [
            InstanceRecord(uuid, host, node, flavor, resources(text), project, of(row), status not in _SETTLED, group)
            for row in rows
            for uuid, host, node, flavor, text, project, status, group, *_ in (row,)
        ]

    @override
    def insert(self, transaction: Any, instance: Instance) -> Instance:
        if not self._returning:
            return self.insert_many(transaction, [instance], [oslo_context.get_current()])[0]
        times = transaction.execute(_INSERT_RETURNING, _values(instance)).one()
        return _inserted(transaction, instance, *times)

    @override
    def insert_many(
        self, transaction: Any, instances: Sequence[Instance], contexts: Sequence[RequestContext | None]
    ) -> Sequence[Instance]:
        at = read_now(transaction)
        ordered = sorted(instances, key=lambda each: each.uuid)
        transaction.execute(_INSERT, [{**_values(each), "created_at": at, "updated_at": at} for each in ordered])
        found = []
        for each, context in zip(instances, contexts, strict=True):
            with acting_for(context):
                found.append(_inserted(transaction, each, at, at))
        return found

    @override
    def get(self, uuid: str) -> Instance:
        with self._database.read() as tx:
            row = tx.execute(_GET, {"of_uuid": uuid}).first()
        if row is None:
            raise errors.NotFound(f"There is no instance {uuid}.")
        return _instance(row)

    @override
    def find(self, uuids: Sequence[str], transaction: Any = None) -> Sequence[Instance]:
        if transaction is not None:
            return [_instance(row) for row in transaction.execute(_FIND, {"of_uuids": list(uuids)})]
        with self._database.read() as tx:
            return self.find(uuids, tx)

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
        given = {"host": host, "status": status, "project_id": project_id}
        equal = {name: value for name, value in given.items() if value is not None}
        values = {"after": after, "page": limit, **{f"of_{name}": value for name, value in equal.items()}}
        with self._database.read() as tx:
            return [_instance(row) for row in tx.execute(_list(tuple(equal)), values)]

    @override
    def group_members(
        self, group: str, transaction: Any = None, *, project_id: str | None = None
    ) -> Sequence[tuple[str, str]]:
        if transaction is None:
            with self._database.read() as tx:
                return self.group_members(group, tx, project_id=project_id)
        values = {"of_group": group}
        if project_id is None:
            rows = transaction.execute(_MEMBERS, values)
        else:
            rows = transaction.execute(_MEMBERS_OF_PROJECT, {**values, "of_project": project_id})
        return [(row.uuid, node) for row in rows for node in _nodes(row)]

    @override
    def on_node(self, node_uuid: str, transaction: Any) -> Sequence[InstanceRecord]:
        found = []
        query = _ON_NODE_IN_FULL if self._fields else _ON_NODE
        for row in transaction.execute(query, {"of_node": node_uuid}).all():
            (record,) = self._records([row])
            here = row.node_uuid == node_uuid
            if here:
                found.append(record)
            if row.destination_uuid == node_uuid and row.status in MOVING:
                found.append(_moved_in(record, row.pending or {}, beside_itself=here))
        return found

    @override
    def occupies(self, node_uuid: Any) -> Any:
        return sa.or_(*(sa.exists().where(column == node_uuid).correlate(node_uuid.table) for column in _PLACES))

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
        return self.change(transaction, uuid, token, {"status": status, "fault": fault}, expected=expected)

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
        plain = _plain(values)
        given: dict[str, Any] = {f"to_{name}": value for name, value in plain.items()}
        given |= {"of_uuid": uuid, "token": token}
        if expected:
            given["expected"] = list(expected)
        if fence is not None:
            given["seen_fence"] = fence
        statement = _change(frozenset(plain), bool(expected), fence is not None, self._returning)
        return self._write(transaction, statement, given, "change")

    @override
    def remove(self, transaction: Any, uuid: str, token: int) -> bool:
        given = {"of_uuid": uuid, "token": token}
        if self._returning:
            return self._write(transaction, _REMOVE_RETURNING, given, "delete")
        before = transaction.execute(_READ_STATE, given).first()
        if transaction.execute(_REMOVE, given).rowcount != 1:
            return False
        _record_row(transaction, "delete", before, token)
        return True

    @override
    def write_many(self, transaction: Any, writes: Sequence[InstanceWrite]) -> bool:
        if len(writes) < 2:
            return super().write_many(transaction, writes)
        changes: dict[tuple[frozenset[str], bool], list[dict[str, Any]]] = {}
        removals: dict[int, list[str]] = {}
        for each in sorted(writes, key=lambda each: each.uuid):
            if each.values is None:
                removals.setdefault(each.token, []).append(each.uuid)
                continue
            plain = _plain(each.values)
            # A statement for sets takes JSON as :class:`JsonText` writes it.
            given = {
                f"to_{name}": json_text(value) if isinstance(value, dict) else value for name, value in plain.items()
            }
            given["of_uuid"], given["token"] = each.uuid, each.token
            if each.fence is not None:
                given["seen_fence"] = each.fence
            changes.setdefault((frozenset(plain), each.fence is not None), []).append(given)
        by_uuid = {each.uuid: each for each in writes}
        for form, rows in changes.items():
            if execute_set(transaction, _change_many(*form), rows) != len(rows):
                return False
        changed = [row["of_uuid"] for rows in changes.values() for row in rows]
        if changed:
            _record_rows(transaction, "change", transaction.execute(_READ_STATES, {"of_uuids": changed}), by_uuid)
        return all(self._remove_many(transaction, token, uuids, by_uuid) for token, uuids in sorted(removals.items()))

    def _remove_many(
        self, transaction: Any, token: int, uuids: Sequence[str], by_uuid: Mapping[str, InstanceWrite]
    ) -> bool:
        """Remove instances with one token and record the events; False when not all were removed."""
        given = {"of_uuids": uuids, "token": token}
        if self._returning:
            rows = transaction.execute(_REMOVE_MANY_RETURNING, given).all()
            number = len(rows)
        else:
            rows = transaction.execute(_READ_STATES, given).all()
            number = transaction.execute(_REMOVE_MANY, given).rowcount
        if number != len(uuids):
            return False
        _record_rows(transaction, "delete", rows, by_uuid)
        return True

    def _write(self, transaction: Any, statement: Any, given: Mapping[str, Any], what: str) -> bool:
        """Write one instance and record the event; False when the statement found no row."""
        result = transaction.execute(statement, given)
        if self._returning:
            row = result.first()
        else:
            row = transaction.execute(_READ_STATE, given).first() if result.rowcount == 1 else None
        if row is None:
            return False
        _record_row(transaction, what, row, given["token"])
        return True

    def to_compare(self, host: str) -> Sequence[Any]:
        """Reads the instances of a host that should run or have ended there, without those in an operation. One statement.

        Returns rows with ``uuid``, ``status`` and ``actual_state``. :func:`compared` makes a :class:`Compared` of a row.
        """
        with self._database.read() as tx:
            return list(tx.execute(_COMPARE, {"of_host": host}))

    def observe(
        self,
        transaction: Any,
        host: str,
        before: Compared,
        state: str,
        detail: str,
        *,
        status: str,
        fault: str,
        restarts: int,
    ) -> bool:
        """Writes what was seen of an instance; False when an operation has begun, or another agent of the host was faster.

        It does not raise the fence: an operation that begins meanwhile is not hindered.
        """
        given = {
            "of_uuid": before.uuid, "of_host": host, "of_status": before.status, "of_fence": before.fence,
            "of_actual_state": before.actual_state, "of_actual_at": before.actual_at, "of_restarts": before.restarts,
            "to_status": status, "to_fault": fault, "to_actual_state": state, "to_actual_detail": detail[:LONGEST_DETAIL],
            "to_restarts": restarts,
        }  # fmt: skip
        if transaction.execute(_OBSERVE, given).rowcount != 1:
            return False
        row = transaction.execute(_READ_STATE, given).one()
        seen = {"actual_state": state, "actual_detail": detail[:LONGEST_DETAIL], "restarts": restarts}
        _record_row(transaction, "observe", row, row.fence, **seen)
        return True

    @override
    def reassign(self, transaction: Any, hosts: Mapping[str, str], host: str) -> int:
        of_host: dict[str, list[str]] = {}
        for uuid in sorted(hosts):
            of_host.setdefault(hosts[uuid], []).append(uuid)
        return sum(
            self._reassign(transaction, source, uuids[start : start + _PART], host)
            for source, uuids in sorted(of_host.items())
            for start in range(0, len(uuids), _PART)
        )

    @override
    def kept_on(self, transaction: Any, node_uuids: Collection[str]) -> Sequence[str]:
        wanted = sorted(node_uuids)
        found = []
        for start in range(0, len(wanted), _PART):
            rows = transaction.execute(_GOING_TO, {"of_nodes": wanted[start : start + _PART]})
            found += [row.uuid for row in rows if kept_source(row.pending or {}).get("node_uuid") in node_uuids]
        return sorted(found)

    def _reassign(self, transaction: Any, source: str, uuids: Sequence[str], host: str) -> int:
        given = {"of_uuids": uuids, "from_host": source, "to_host": host}
        if self._returning:
            rows = transaction.execute(_REASSIGN_RETURNING, given).all()
        else:
            rows = transaction.execute(_LOCK_REASSIGNED, given).all()
            transaction.execute(_REASSIGN, given)
        for row in rows:
            _record_row(transaction, "change", row, row.fence, host=host)
        return len(rows)


def _record_rows(transaction: Any, what: str, rows: Iterable[Any], by_uuid: Mapping[str, InstanceWrite]) -> None:
    for row in rows:
        write = by_uuid[row.uuid]
        with acting_for(write.context):
            _record_row(transaction, what, row, write.token)


def _record_row(transaction: Any, what: str, row: Any, version: int, **other: Any) -> None:
    _record(transaction, what, row.uuid, version, {**_shown(row), "destination_uuid": row.destination_uuid, **other})


def _shown(row: Any) -> dict[str, Any]:
    """Returns the state of an instance, or of its row, for an event; without the destination of a move."""
    return dict(zip(_SHOWN, _READ_SHOWN(row), strict=True))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that a change of some fields writes; JSON is written as plain mappings."""
    unknown = values.keys() - _CHANGED
    if unknown:
        raise TypeError(f"instances have no {', '.join(sorted(unknown))} that could be changed")
    plain = dict(values)
    for name in _OF_JSON & plain.keys():
        plain[name] = plain[name] if plain[name] is None else dict(plain[name])
    if "pending" in values:
        plain["destination_uuid"] = _destination(values["pending"])
    return plain


def _values(instance: Instance) -> dict[str, Any]:
    """Returns the columns of a new row."""
    values = dict(zip(_GIVEN, _READ_GIVEN(instance), strict=True))
    # JSON is written as plain mappings.
    values |= {"resources": dict(instance.resources), "request": dict(instance.request)}
    return values | {"pending": dict(instance.pending) or None}


def _inserted(transaction: Any, instance: Instance, created_at: int, updated_at: int) -> Instance:
    """Records that an instance was created, and returns it with its timestamps."""
    _record(transaction, "create", instance.uuid, instance.fence, {**_shown(instance), "destination_uuid": ""})
    return replaced(instance, created_at=created_at, updated_at=updated_at)


def _record(transaction: Any, what: str, uuid: str, version: int, state: Mapping[str, Any]) -> None:
    record(transaction, JournalEvent(f"instance.{what}", f"instance/{uuid}", version, state, state["project_id"]))


def compared(row: Any) -> Compared:
    """Makes a :class:`Compared` of a row of :meth:`ComputeInstances.to_compare`."""
    kept = kept_source((json.loads(row.pending_text) if row.pending_text else None) or {})
    return Compared(
        row.uuid, row.status, row.fence, row.actual_state, row.actual_detail, row.actual_at, row.restarts,
        (row.now - row.actual_at) / MICROSECONDS,
        (row.now - kept["since"]) / MICROSECONDS if row.status == RESIZED else None, kept.get("confirm_after", -1.0),
    )  # fmt: skip


def _other_place(pending: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where an operation moves its instance, or where the revert of its resize would."""
    return pending if pending.get("node_uuid") else kept_source(pending)


def _destination(pending: Mapping[str, Any]) -> str:
    """Returns the node to which an operation, or the revert of a resize, moves its instance; empty when the instance stays."""
    return str(_other_place(pending).get("node_uuid") or "") if pending.get("operation") in MOVES else ""


def _moved_in(record: InstanceRecord, pending: Mapping[str, Any], *, beside_itself: bool) -> InstanceRecord:
    """Returns an instance as its destination sees it: with the flavor that it will have there.

    :param beside_itself: it is resized on its own node, where it is a resident under its own uuid already.
    """
    there = _other_place(pending)
    return dataclasses.replace(
        record,
        uuid=move_consumer(record.uuid) if beside_itself else record.uuid,
        host=there.get("host", record.host),
        node=there.get("node", record.node),
        flavorid=there.get("flavorid", record.flavorid),
        resources=there.get("resources", record.resources),
    )


def _nodes(row: Any) -> set[str]:
    """Returns the node on which an instance is, and the one to which it moves or may go back."""
    return {row.node_uuid, _other_place(row.pending or {}).get("node_uuid") or row.node_uuid}


def _instance(row: Any) -> Instance:
    return Instance(*(value if value is not None else {} for value in row))
