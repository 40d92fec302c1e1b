# SPDX-License-Identifier: Apache-2.0
"""Reading and writing nodes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.db import Database, now
from moorage.db.changes import ChangeReader, RecentRows
from moorage.fleet.events import record_created, record_deleted, record_nodes
from moorage.fleet.interface import DETAILS, STATES, Node, NodeSpec, merged
from moorage.fleet.states import BEGIN_STATES, begun_by, with_since
from moorage.fleet.tables import nodes

__all__ = ["Change", "NodeStore"]

_COLUMNS = (
    nodes.c.uuid, nodes.c.name, nodes.c.host, nodes.c.shard, nodes.c.resource_class, nodes.c.properties,
    nodes.c.generation, nodes.c.created_at, nodes.c.updated_at, nodes.c.disabled, nodes.c.disabled_reason,
    nodes.c.disabled_since, nodes.c.maintenance, nodes.c.maintenance_reason, nodes.c.maintenance_since,
    nodes.c.disabled_by, nodes.c.maintenance_by, nodes.c.draining, nodes.c.draining_reason, nodes.c.draining_since,
    nodes.c.draining_by,
)  # fmt: skip
_DETAILS = {name: nodes.c[name] for name in sorted(DETAILS)}
_EMPTY: Mapping[str, Any] = {
    **dict.fromkeys(DETAILS),
    **{
        "driver_info": {},
        "instance_info": {},
        "extra": {},
        "conductor_group": "",
        **dict.fromkeys(STATES, False),
    },
    "provision_state": "available",
}
_KNOWN = sa.select(*_COLUMNS, *_DETAILS.values()).where(
    sa.or_(
        nodes.c.uuid.in_(sa.bindparam("of_uuids", expanding=True)),
        nodes.c.name.in_(sa.bindparam("of_names", expanding=True)),
    )
)
_INSERT = sa.insert(nodes).values(generation=0, created_at=now(), updated_at=now())
_CHANGEABLE = DETAILS | {"name", "shard", "resource_class", "properties"}
_PLANNING = (
    nodes.c.uuid, nodes.c.name, nodes.c.host, nodes.c.resource_class, nodes.c.conductor_group, nodes.c.owner,
    sa.type_coerce(nodes.c.properties, sa.Text), sa.type_coerce(nodes.c.extra, sa.Text),
    nodes.c.shard, nodes.c.instance_uuid, nodes.c.reservation, nodes.c.provision_state, nodes.c.maintenance,
)  # fmt: skip
_MACHINE = (
    nodes.c.uuid, nodes.c.name, nodes.c.driver, nodes.c.driver_info, nodes.c.generation, nodes.c.power_state,
    nodes.c.target_power_state, nodes.c.provision_state, nodes.c.fault, nodes.c.last_error,
)  # fmt: skip
_CHANGES = ChangeReader(nodes, nodes.c.generation)
_SCHEDULED = sa.select(nodes.c.uuid, nodes.c.name, nodes.c.host, nodes.c.properties).order_by(nodes.c.uuid)
_SCHEDULED_PAGE = _SCHEDULED.where(nodes.c.uuid > sa.bindparam("after", type_=sa.String)).limit(
    sa.bindparam("page", type_=sa.Integer)
)
_SCHEDULED_OF = _SCHEDULED.where(nodes.c.uuid.in_(sa.bindparam("uuids", expanding=True)))
#: Uuids in one statement.
_PART = 1000
_SHARDS = sa.select(nodes.c.shard, sa.func.count()).group_by(nodes.c.shard)
#: Nodes of one shard that get one host.
_WITHOUT_HOST = sa.and_(
    nodes.c.uuid.in_(sa.bindparam("of_uuids", expanding=True)),
    nodes.c.host.is_(None),
    nodes.c.shard.is_not_distinct_from(sa.bindparam("of_shard", type_=nodes.c.shard.type)),
)
_HOSTLESS = (
    sa.select(nodes.c.uuid, nodes.c.shard)
    .where(nodes.c.host.is_(None), nodes.c.uuid > sa.bindparam("after", type_=sa.String))
    .order_by(nodes.c.uuid)
    .limit(sa.bindparam("page", type_=sa.Integer))
)
_ASSIGNABLE = sa.select(nodes.c.uuid).where(_WITHOUT_HOST).with_for_update()
_ASSIGN = (
    sa.update(nodes)
    .where(_WITHOUT_HOST)
    .values(host=sa.bindparam("to_host"), generation=nodes.c.generation + 1, updated_at=now())
)
_CHANGE = (
    sa.update(nodes)
    .where(nodes.c.uuid == sa.bindparam("of_uuid"))
    .values(
        name=sa.bindparam("new_name"),
        # A value that is not given stays as it is in the row now; it may have changed since it was read.
        host=sa.func.coalesce(sa.bindparam("new_host", type_=nodes.c.host.type), nodes.c.host),
        shard=sa.func.coalesce(sa.bindparam("new_shard", type_=nodes.c.shard.type), nodes.c.shard),
        resource_class=sa.func.coalesce(
            sa.bindparam("new_class", type_=nodes.c.resource_class.type), nodes.c.resource_class
        ),
        generation=nodes.c.generation + 1,
        updated_at=now(),
    )
)


class Change(enum.Enum):
    """What became of a node that was ensured."""

    CREATED = "created"
    CHANGED = "changed"
    SAME = "same"
    #: Changed, and in another shard now.
    RESHARDED = "resharded"


class NodeStore:
    """The nodes of the store. Safe for use by several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def ensure(
        self, tx: sa.Connection, specs: Sequence[NodeSpec], hosts: Callable[[NodeSpec], str | None] = lambda spec: None
    ) -> list[Change]:
        """Creates nodes, or merges what is given into existing nodes of the same uuid.

        One query, one insert for all new nodes, one update for each node that differs.

        :param hosts: returns the host of a new node whose specification names none.
        :raises AlreadyExists: a name belongs to a node of another uuid; nothing is written then.
        :raises Conflict: a node that shall keep its host has another one; nothing is written then.
        :raises Duplicate: another transaction created or changed one of the nodes at the same time; a new transaction sees it.
        """
        uuids = [spec.uuid for spec in specs]
        names = [spec.name for spec in specs]
        known = {row.uuid: row for row in tx.execute(_KNOWN, {"of_uuids": uuids, "of_names": names})}
        owner_of = {row.name: row.uuid for row in known.values()}
        for spec in specs:
            if owner_of.get(spec.name, spec.uuid) != spec.uuid:
                raise errors.AlreadyExists(
                    f"The name {spec.name} belongs to node {owner_of[spec.name]}, so node {spec.uuid} cannot have it. "
                    "Give the same uuid, or another name."
                )
            _refuse_other_host(spec, known.get(spec.uuid))
        changes: list[Change] = []
        fresh: list[dict[str, Any]] = []
        for spec in specs:
            row = known.get(spec.uuid)
            if row is not None and not _differs(spec, row):
                changes.append(Change.SAME)
            # No row is changed when the node was removed since it was read: then it is inserted. Merged objects, and nodes that
            # keep their host, are written only over the generation that was read; the insert below then fails with Duplicate.
            elif row is not None and tx.execute(*_change(spec, row)).rowcount == 1:
                changes.append(Change.RESHARDED if spec.shard not in (None, row.shard) else Change.CHANGED)
            else:
                values = _values(spec)
                if spec.host is None:
                    values["host"] = hosts(spec)
                fresh.append(values)
                changes.append(Change.CREATED)
        if fresh:
            self._insert(tx, fresh)
        written = (Change.CHANGED, Change.RESHARDED)
        record_nodes(tx, [spec.uuid for spec, change in zip(specs, changes, strict=True) if change in written])
        return changes

    def insert(self, tx: sa.Connection, spec: NodeSpec) -> None:
        """Create one node; Duplicate when uuid, name or instance are taken."""
        self._insert(tx, [_values(spec)])

    def _insert(self, tx: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        tx.execute(_INSERT, rows)
        marked = [row["uuid"] for row in rows if any(row[flag] for flag in STATES)]
        if marked:
            tx.execute(BEGIN_STATES.where(nodes.c.uuid.in_(marked)), {"begun_by": begun_by()})
        record_created(tx, rows)

    def change(self, tx: sa.Connection, uuid: str, generation: int, changes: Mapping[str, Any]) -> bool:
        """Write some columns of a node that has this generation; False when it has another one, or is gone."""
        strange = changes.keys() - _CHANGEABLE
        if strange:
            raise ValueError(f"not to be changed this way: {', '.join(sorted(strange))}")
        statement = (
            sa.update(nodes)
            .where(nodes.c.uuid == uuid, nodes.c.generation == generation)
            .ordered_values(*with_since(changes).items(), ("generation", nodes.c.generation + 1), ("updated_at", now()))
        )
        written = tx.execute(statement).rowcount == 1
        if written:
            record_nodes(tx, [uuid])
        return bool(written)

    def touch(self, tx: sa.Connection, uuids: Sequence[str]) -> Mapping[str, str]:
        """Raises the generation of nodes, so that no other transaction writes or removes them before ``tx`` ends.

        Returns uuid -> name of those that exist.
        """
        if not uuids:
            return {}
        found = nodes.c.uuid.in_(uuids)
        tx.execute(sa.update(nodes).where(found).values(generation=nodes.c.generation + 1, updated_at=now()))
        return {row.uuid: row.name for row in tx.execute(sa.select(nodes.c.uuid, nodes.c.name).where(found))}

    def recent(self, since: int) -> RecentRows:
        """Reads the versions of the nodes that were written since a moment of the database's time; 0: of all nodes."""
        with self._database.read() as tx:
            return _CHANGES.read(tx, since)

    def uuids(self) -> frozenset[str]:
        """Reads the uuids of all nodes."""
        with self._database.read() as tx:
            return _CHANGES.uuids(tx)

    def for_scheduling(
        self, *, after: str = "", limit: int = 1000, uuids: Sequence[str] | None = None
    ) -> Sequence[Any]:
        """Reads uuid, name, host and properties: a page by uuid, or of the given nodes those that exist."""
        with self._database.read() as tx:
            if uuids is not None:
                return tx.execute(_SCHEDULED_OF, {"uuids": list(uuids)}).all()
            return tx.execute(_SCHEDULED_PAGE, {"after": after, "page": limit}).all()

    def shards(self) -> list[tuple[str | None, int]]:
        """(shard, how many nodes) of every shard that has any, None for nodes without one; the largest first, then by name.

        One statement, which the index on the column answers alone.
        """
        with self._database.read() as tx:
            found = [(row[0], int(row[1])) for row in tx.execute(_SHARDS)]
        return sorted(found, key=lambda pair: (-pair[1], pair[0] is None, pair[0] or ""))

    def for_planning(self, *more: sa.ColumnElement[Any]) -> Sequence[Any]:
        """Reads all nodes in one statement, by id: the fields of ``ShardNode``, then the shard and what may lock a node.

        :param more: further columns, as expressions over the columns of ``nodes``.
        """
        with self._database.read() as tx:
            return tx.execute(sa.select(*_PLANNING, *more).order_by(nodes.c.id)).all()

    def find_many(self, idents: Sequence[str]) -> Mapping[str, Any]:
        """Maps names and uuids of existing nodes to rows with uuid and shard. One statement."""
        columns = (nodes.c.uuid, nodes.c.name, nodes.c.shard)
        wanted = list(dict.fromkeys(idents))
        query = sa.select(*columns).where(sa.or_(nodes.c.uuid.in_(wanted), nodes.c.name.in_(wanted)))
        with self._database.read() as tx:
            rows = tx.execute(query).all()
        # A uuid wins over a node that is called by it.
        return {row.name: row for row in rows} | {row.uuid: row for row in rows}

    def existing(self, uuids: Sequence[str]) -> frozenset[str]:
        """Returns the uuids that belong to nodes."""
        with self._database.read() as tx:
            return frozenset(tx.execute(sa.select(nodes.c.uuid).where(nodes.c.uuid.in_(uuids))).scalars())

    def reassign(self, tx: sa.Connection, shard: str, sources: Sequence[str | None], host: str) -> int:
        """Give the nodes of a shard that are of some hosts (None: of none) to another one; how many."""
        named = [source for source in sources if source is not None]
        of_sources: sa.ColumnElement[bool] = nodes.c.host.in_(named)
        if None in sources:
            of_sources = sa.or_(of_sources, nodes.c.host.is_(None))
        condition = sa.and_(nodes.c.shard == shard, of_sources)
        found = tx.execute(sa.select(nodes.c.uuid).where(condition).with_for_update()).scalars().all()
        statement = sa.update(nodes).values(host=host, generation=nodes.c.generation + 1, updated_at=now())
        for start in range(0, len(found), _PART):
            tx.execute(statement.where(nodes.c.uuid.in_(found[start : start + _PART])))
        record_nodes(tx, found)
        return len(found)

    def without_host(self, after: str, limit: int) -> Sequence[Any]:
        """Reads uuid and shard of nodes that have no host: a page of ``limit`` after the given uuid."""
        with self._database.read() as tx:
            return tx.execute(_HOSTLESS, {"after": after, "page": limit}).all()

    def assign_hosts(self, hosts: Mapping[str, tuple[str | None, str]]) -> int:
        """Gives nodes a host (uuid -> shard, host) that have none and still are in the shard; returns how many got one.

        One statement for each shard and host.
        """
        if not hosts:
            return 0
        sets: dict[tuple[str | None, str], list[str]] = {}
        for uuid, of in sorted(hosts.items(), key=lambda item: item[0]):
            sets.setdefault(of, []).append(uuid)

        def work(tx: sa.Connection) -> int:
            return sum(self._assign(tx, uuids, shard, host) for (shard, host), uuids in sets.items())

        return self._database.run(work)

    def _assign(self, tx: sa.Connection, uuids: Sequence[str], shard: str | None, host: str) -> int:
        key = {"of_uuids": uuids, "of_shard": shard}
        free = tx.execute(_ASSIGNABLE, key).scalars().all()
        if free:
            tx.execute(_ASSIGN, {**key, "of_uuids": free, "to_host": host})
            record_nodes(tx, free)
        return len(free)

    def get(self, name_or_uuid: str) -> Node:
        """One node.

        :raises NotFound: there is none of that uuid or name.
        """
        with self._database.read() as tx:
            row = tx.execute(
                sa.select(*_COLUMNS).where(sa.or_(nodes.c.uuid == name_or_uuid, nodes.c.name == name_or_uuid))
            ).first()
        if row is None:
            raise errors.NotFound(f"There is no node {name_or_uuid}; moorage node list shows all.")
        return Node(*row)

    def free_members(self, uuid: str) -> Mapping[str, Any]:
        """Reads ``extra`` of a node; empty when there is no such node."""
        with self._database.read() as tx:
            return tx.execute(sa.select(nodes.c.extra).where(nodes.c.uuid == uuid)).scalar() or {}

    def list(
        self,
        *,
        after: str = "",
        limit: int = 1000,
        host: str | None = None,
        shard: str | None = None,
        sharded: bool | None = None,
        **equal: Any,
    ) -> Sequence[Node]:
        """Returns nodes ordered by uuid: a page of ``limit`` after the given uuid.

        :param equal: further columns -> the value that they must have.
        """
        query = sa.select(*_COLUMNS).where(nodes.c.uuid > after).order_by(nodes.c.uuid).limit(limit)
        for name, value in {"host": host, "shard": shard, **equal}.items():
            if value is not None:
                query = query.where(nodes.c[name] == value)
        if sharded is not None:
            query = query.where(nodes.c.shard.is_not(None) if sharded else nodes.c.shard.is_(None))
        with self._database.read() as tx:
            return [Node(*row) for row in tx.execute(query)]

    def machines(self, **chosen: str) -> Sequence[Any]:
        """Reads the nodes that name a driver: what the driver needs, what was seen of their power, and the generation.

        :param chosen: columns -> the value that they must have: ``host`` or ``shard``.
        """
        query = sa.select(*_MACHINE).where(nodes.c.driver.is_not(None))
        for name, value in chosen.items():
            query = query.where(nodes.c[name] == value)
        with self._database.read() as tx:
            return tx.execute(query.order_by(nodes.c.uuid)).all()

    def delete(self, tx: sa.Connection, uuid: str, *conditions: sa.ColumnElement[bool]) -> bool:
        """Remove a node for which the conditions hold; False when there is none."""
        deleted = tx.execute(sa.delete(nodes).where(nodes.c.uuid == uuid, *conditions)).rowcount == 1
        if deleted:
            record_deleted(tx, uuid)
        return bool(deleted)


def _values(spec: NodeSpec) -> dict[str, Any]:
    return {
        "uuid": spec.uuid,
        "name": spec.name,
        "host": spec.host,
        "shard": spec.shard,
        "resource_class": spec.resource_class,
        "properties": merged({}, spec.properties),
        **_EMPTY,
        **_merged_details(spec, _EMPTY["extra"]),
    }


def _merged_details(spec: NodeSpec, extra: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(spec.details)
    if given.get("extra") is not None:
        given["extra"] = merged(extra, given["extra"])
    return given


def _refuse_other_host(spec: NodeSpec, row: Any) -> None:
    if row is not None and spec.keep_host and row.host not in (None, spec.host):
        raise errors.Conflict(
            f"Node {row.name} belongs to agent {row.host}, so agent {spec.host} cannot enrol it. If the machine has got another "
            f"name, remove the node (moorage node remove {row.name}); otherwise give this agent another --name.",
            node=row.uuid,
        )


def _differs(spec: NodeSpec, row: Any) -> bool:
    return bool(
        spec.name != row.name
        or (spec.host is not None and spec.host != row.host)
        or (spec.shard is not None and spec.shard != row.shard)
        or (spec.resource_class is not None and spec.resource_class != row.resource_class)
        or merged(row.properties, spec.properties) != row.properties
        or any(getattr(row, name) != value for name, value in _merged_details(spec, row.extra).items())
    )


def _change(spec: NodeSpec, row: Any) -> tuple[sa.Update, dict[str, Any]]:
    """Returns the statement, and its parameters, that merges a specification into the row."""
    statement, details = _CHANGE, _merged_details(spec, row.extra)
    if spec.properties:
        details["properties"] = merged(row.properties, spec.properties)
    if details:
        statement = statement.values(**details)
    if "properties" in details or "extra" in details or spec.keep_host:
        statement = statement.where(nodes.c.generation == row.generation)
    return statement, {
        "of_uuid": spec.uuid,
        "new_name": spec.name,
        "new_host": spec.host,
        "new_shard": spec.shard,
        "new_class": spec.resource_class,
    }
