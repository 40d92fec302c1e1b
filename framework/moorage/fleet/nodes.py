# SPDX-License-Identifier: Apache-2.0
"""Reading and writing nodes."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.db import Database, now
from moorage.fleet.interface import DETAILS, Node, NodeSpec, ShardMove
from moorage.fleet.tables import nodes

__all__ = ["Change", "NodeStore"]

_COLUMNS = (
    nodes.c.uuid, nodes.c.name, nodes.c.host, nodes.c.shard, nodes.c.resource_class, nodes.c.properties,
    nodes.c.generation, nodes.c.created_at, nodes.c.updated_at,
)  # fmt: skip
_DETAILS = {name: nodes.c[name] for name in sorted(DETAILS)}
_EMPTY: Mapping[str, Any] = {
    **dict.fromkeys(DETAILS),
    **{"driver_info": {}, "instance_info": {}, "extra": {}, "conductor_group": "", "maintenance": False},
    "provision_state": "available",
}
_CHANGEABLE = DETAILS | {"name", "shard", "resource_class", "properties"}
_PLANNING = (
    nodes.c.uuid, nodes.c.name, nodes.c.host, nodes.c.resource_class, nodes.c.conductor_group, nodes.c.owner,
    sa.type_coerce(nodes.c.properties, sa.Text), sa.type_coerce(nodes.c.extra, sa.Text),
    nodes.c.shard, nodes.c.instance_uuid, nodes.c.reservation, nodes.c.provision_state, nodes.c.maintenance,
)  # fmt: skip
_SHARDS = sa.select(nodes.c.shard, sa.func.count()).group_by(nodes.c.shard)
#: The condition of a move is in the row that is written; nobody needs to have looked before.
_MOVE = (
    sa.update(nodes)
    .where(
        nodes.c.uuid == sa.bindparam("of_uuid"),
        nodes.c.shard.is_not_distinct_from(sa.bindparam("from_shard", type_=nodes.c.shard.type)),
        nodes.c.instance_uuid.is_(None),
        nodes.c.reservation.is_(None),
    )
    .values(
        shard=sa.bindparam("to_shard", type_=nodes.c.shard.type),
        generation=nodes.c.generation + 1,
        updated_at=now(),
    )
)
_ASSIGN = (
    sa.update(nodes)
    .where(nodes.c.uuid == sa.bindparam("of_uuid"), nodes.c.host.is_(None))
    .values(host=sa.bindparam("to_host"), generation=nodes.c.generation + 1, updated_at=now())
)
_CHANGE = (
    sa.update(nodes)
    .where(nodes.c.uuid == sa.bindparam("of_uuid"))
    .values(
        name=sa.bindparam("new_name"),
        # What is not given stays as it is in the row, not as it was when it was read: somebody may be moving the node.
        host=sa.func.coalesce(sa.bindparam("new_host", type_=nodes.c.host.type), nodes.c.host),
        shard=sa.func.coalesce(sa.bindparam("new_shard", type_=nodes.c.shard.type), nodes.c.shard),
        resource_class=sa.func.coalesce(
            sa.bindparam("new_class", type_=nodes.c.resource_class.type), nodes.c.resource_class
        ),
        properties=sa.bindparam("new_properties", type_=nodes.c.properties.type),
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

    def ensure(self, tx: sa.Connection, specs: Sequence[NodeSpec]) -> list[Change]:
        """Create nodes, or bring existing ones (same uuid) to what is given; a None leaves host and shard as they are.

        One query, one insert for all that are new, one update for each that differs.

        :raises AlreadyExists: a name belongs to a node of another uuid; nothing is written then.
        :raises Duplicate: somebody else created one of them at the same time; a new transaction sees it.
        """
        uuids = [spec.uuid for spec in specs]
        names = [spec.name for spec in specs]
        known = {
            row.uuid: row
            for row in tx.execute(
                sa.select(*_COLUMNS, *_DETAILS.values()).where(sa.or_(nodes.c.uuid.in_(uuids), nodes.c.name.in_(names)))
            )
        }
        owner_of = {row.name: row.uuid for row in known.values()}
        for spec in specs:
            if owner_of.get(spec.name, spec.uuid) != spec.uuid:
                raise errors.AlreadyExists(
                    f"The name {spec.name} belongs to node {owner_of[spec.name]}, so node {spec.uuid} cannot have it. "
                    "Give the same uuid, or another name."
                )
        changes: list[Change] = []
        fresh: list[dict[str, Any]] = []
        for spec in specs:
            row = known.get(spec.uuid)
            if row is not None and not _differs(spec, row):
                changes.append(Change.SAME)
            # No row is changed when somebody else has removed the node since it was read; it is new then.
            elif row is not None and tx.execute(_CHANGE, _new_values(spec)).rowcount == 1:
                if spec.details:
                    tx.execute(sa.update(nodes).where(nodes.c.uuid == spec.uuid).values(**spec.details))
                changes.append(Change.RESHARDED if spec.shard not in (None, row.shard) else Change.CHANGED)
            else:
                fresh.append(_values(spec))
                changes.append(Change.CREATED)
        if fresh:
            tx.execute(sa.insert(nodes).values(generation=0, created_at=now(), updated_at=now()), fresh)
        return changes

    def insert(self, tx: sa.Connection, spec: NodeSpec) -> None:
        """Create one node; Duplicate when uuid, name or instance are taken."""
        tx.execute(sa.insert(nodes).values(generation=0, created_at=now(), updated_at=now()), [_values(spec)])

    def change(self, tx: sa.Connection, uuid: str, generation: int, changes: Mapping[str, Any]) -> bool:
        """Write some columns of a node that has this generation; False when it has another one, or is gone."""
        strange = changes.keys() - _CHANGEABLE
        if strange:
            raise ValueError(f"not to be changed this way: {', '.join(sorted(strange))}")
        statement = (
            sa.update(nodes)
            .where(nodes.c.uuid == uuid, nodes.c.generation == generation)
            .values(**changes, generation=nodes.c.generation + 1, updated_at=now())
        )
        return bool(tx.execute(statement).rowcount == 1)

    def shards(self) -> list[tuple[str | None, int]]:
        """(shard, how many nodes) of every shard that has any, None for nodes without one; the largest first, then by name.

        One statement, which the index on the column answers alone.
        """
        with self._database.read() as tx:
            found = [(row[0], int(row[1])) for row in tx.execute(_SHARDS)]
        return sorted(found, key=lambda pair: (-pair[1], pair[0] is None, pair[0] or ""))

    def for_planning(self) -> Sequence[Any]:
        """All nodes as of one moment, as rows of ``ShardNode``'s fields and then shard and what may lock it; by number."""
        with self._database.read() as tx:
            return tx.execute(sa.select(*_PLANNING).order_by(nodes.c.id)).all()

    def move(self, tx: sa.Connection, moves: Sequence[ShardMove]) -> list[bool]:
        """Change the shard of nodes that are still in the first one, have no instance and are not reserved; which were."""
        rows = [{"of_uuid": move.node, "from_shard": move.source, "to_shard": move.target} for move in moves]
        if not rows:
            return []
        # As a rule nobody interfered, and one round is enough; who did is found one by one.
        point = tx.begin_nested()
        if tx.execute(_MOVE, rows).rowcount == len(rows):
            point.commit()
            return [True] * len(rows)
        point.rollback()
        return [tx.execute(_MOVE, row).rowcount == 1 for row in rows]

    def find_many(self, idents: Sequence[str]) -> Mapping[str, Any]:
        """Names and uuids -> rows with uuid and shard, of those that there are; one statement."""
        columns = (nodes.c.uuid, nodes.c.name, nodes.c.shard)
        wanted = list(dict.fromkeys(idents))
        query = sa.select(*columns).where(sa.or_(nodes.c.uuid.in_(wanted), nodes.c.name.in_(wanted)))
        with self._database.read() as tx:
            rows = tx.execute(query).all()
        # A uuid wins over a node that is called by it.
        return {row.name: row for row in rows} | {row.uuid: row for row in rows}

    def existing(self, uuids: Sequence[str]) -> frozenset[str]:
        """Those of the uuids that nodes have."""
        with self._database.read() as tx:
            return frozenset(tx.execute(sa.select(nodes.c.uuid).where(nodes.c.uuid.in_(uuids))).scalars())

    def reassign(self, tx: sa.Connection, shard: str, sources: Sequence[str | None], host: str) -> int:
        """Give the nodes of a shard that are of some hosts (None: of none) to another one; how many."""
        named = [source for source in sources if source is not None]
        of_sources = nodes.c.host.in_(named)
        statement = (
            sa.update(nodes)
            .where(
                nodes.c.shard == shard, sa.or_(of_sources, nodes.c.host.is_(None)) if None in sources else of_sources
            )
            .values(host=host, generation=nodes.c.generation + 1, updated_at=now())
        )
        return int(tx.execute(statement).rowcount)

    def what_holds(self, tx: sa.Connection, uuids: Sequence[str]) -> Mapping[str, Any]:
        """Uuid -> row with shard, instance_uuid and reservation, of the nodes that are there."""
        columns = (nodes.c.uuid, nodes.c.shard, nodes.c.instance_uuid, nodes.c.reservation)
        return {row.uuid: row for row in tx.execute(sa.select(*columns).where(nodes.c.uuid.in_(uuids)))}

    def assign_hosts(self, hosts: Mapping[str, str]) -> int:
        """Give nodes without a host one (node uuid -> host); how many were still without."""
        if not hosts:
            return 0

        def work(tx: sa.Connection) -> int:
            return sum(
                tx.execute(_ASSIGN, {"of_uuid": uuid, "to_host": host}).rowcount for uuid, host in sorted(hosts.items())
            )

        return self._database.run(work)

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

    def list(
        self,
        *,
        after: str = "",
        limit: int = 1000,
        host: str | None = None,
        shard: str | None = None,
        sharded: bool | None = None,
        without_host: bool = False,
    ) -> Sequence[Node]:
        """Nodes ordered by uuid, a page of ``limit`` after the given uuid."""
        query = sa.select(*_COLUMNS).where(nodes.c.uuid > after).order_by(nodes.c.uuid).limit(limit)
        if host is not None:
            query = query.where(nodes.c.host == host)
        if shard is not None:
            query = query.where(nodes.c.shard == shard)
        if sharded is not None:
            query = query.where(nodes.c.shard.is_not(None) if sharded else nodes.c.shard.is_(None))
        if without_host:
            query = query.where(nodes.c.host.is_(None))
        with self._database.read() as tx:
            return [Node(*row) for row in tx.execute(query)]

    def delete(self, tx: sa.Connection, uuid: str) -> bool:
        """Remove a node; False when there is none."""
        return bool(tx.execute(sa.delete(nodes).where(nodes.c.uuid == uuid)).rowcount == 1)


def _values(spec: NodeSpec) -> dict[str, Any]:
    return {
        "uuid": spec.uuid,
        "name": spec.name,
        "host": spec.host,
        "shard": spec.shard,
        "resource_class": spec.resource_class,
        "properties": dict(spec.properties),
        **_EMPTY,
        **spec.details,
    }


def _differs(spec: NodeSpec, row: Any) -> bool:
    return bool(
        spec.name != row.name
        or (spec.host is not None and spec.host != row.host)
        or (spec.shard is not None and spec.shard != row.shard)
        or (spec.resource_class is not None and spec.resource_class != row.resource_class)
        or dict(spec.properties) != row.properties
        or any(getattr(row, name) != value for name, value in spec.details.items())
    )


def _new_values(spec: NodeSpec) -> dict[str, Any]:
    return {
        "of_uuid": spec.uuid,
        "new_name": spec.name,
        "new_host": spec.host,
        "new_shard": spec.shard,
        "new_class": spec.resource_class,
        "new_properties": dict(spec.properties),
    }
