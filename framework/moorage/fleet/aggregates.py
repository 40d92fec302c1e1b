# SPDX-License-Identifier: Apache-2.0
"""Aggregates: named sets of nodes with metadata, which filters and weighers read.

A member is a host, with all the nodes that its agent manages now or later, or one node. Every change of an aggregate or its members
counts its generation up by one statement on its row. So changes of one aggregate come one after the other, and a change of one that
another request has just removed fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from moorage import errors, randomness
from moorage.db import Database, Duplicate, now
from moorage.fleet.tables import aggregate_members as members
from moorage.fleet.tables import aggregates, nodes

__all__ = ["HOST", "NODE", "AggregateStore", "AggregateMembership", "StoredAggregate"]

HOST = "host"
NODE = "node"
_COLUMNS = (
    aggregates.c.uuid, aggregates.c.name, aggregates.c.metadata, aggregates.c.generation, aggregates.c.created_at,
    aggregates.c.updated_at,
)  # fmt: skip
_ALL = sa.select(*_COLUMNS)
_ALL_MEMBERS = sa.select(members.c.aggregate, members.c.kind, members.c.member)
#: The generation of an aggregate rises with each change. A node that is removed takes its memberships with it.
_VERSION = sa.select(
    sa.func.count(),
    sa.func.coalesce(sa.func.sum(aggregates.c.generation), 0),
    sa.func.coalesce(sa.func.max(aggregates.c.updated_at), 0),
    sa.select(sa.func.count()).select_from(members).scalar_subquery(),
)
_TOUCH = (
    sa.update(aggregates)
    .where(aggregates.c.uuid == sa.bindparam("of_uuid"))
    .values(generation=aggregates.c.generation + 1, updated_at=now())
)


@dataclass(frozen=True, slots=True)
class StoredAggregate:
    """An aggregate in full. Timestamps are microseconds since the Unix epoch."""

    uuid: str
    name: str
    metadata: Mapping[str, str]
    generation: int
    created_at: int
    updated_at: int
    hosts: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AggregateMembership:
    """All aggregates as a scheduler needs them: name and metadata by the host or the node that is a member."""

    of_host: Mapping[str, Sequence[tuple[str, Mapping[str, str]]]] = field(default_factory=dict)
    of_node: Mapping[str, Sequence[tuple[str, Mapping[str, str]]]] = field(default_factory=dict)

    def of(self, host: str, node_uuid: str) -> list[tuple[str, Mapping[str, str]]]:
        """What a node is in, ordered by name."""
        found = dict([*self.of_host.get(host, ()), *self.of_node.get(node_uuid, ())])
        return sorted(found.items())


class AggregateStore:
    """The aggregates of the store. Safe for use by several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, metadata: Mapping[str, str]) -> StoredAggregate:
        """A new one without members.

        :raises AlreadyExists: the name is taken.
        """
        values: dict[str, Any] = {"uuid": randomness.new_uuid(), "name": name, "metadata": dict(metadata)}

        def work(tx: sa.Connection) -> None:
            tx.execute(sa.insert(aggregates).values(generation=0, created_at=now(), updated_at=now(), **values))

        try:
            self._database.run(work)
        except Duplicate:
            raise errors.AlreadyExists(f"There is an aggregate {name} already.") from None
        return self.get(values["uuid"])

    def get(self, name_or_uuid: str) -> StoredAggregate:
        """One aggregate with its members.

        :raises NotFound: there is none of that uuid or name.
        """
        with self._database.read() as tx:
            return self._get(tx, name_or_uuid)

    def list(self, *, after: str = "", limit: int = 1000) -> Sequence[StoredAggregate]:
        """Aggregates with their members ordered by name, a page of ``limit`` after the given name."""
        with self._database.read() as tx:
            query = sa.select(*_COLUMNS).where(aggregates.c.name > after).order_by(aggregates.c.name).limit(limit)
            return _with_members(tx, tx.execute(query).all())

    def change(
        self, name_or_uuid: str, *, name: str | None = None, metadata: Mapping[str, str | None] | None = None
    ) -> StoredAggregate:
        """Give it another name, or change its metadata; a None takes a key away.

        :raises NotFound: there is none.
        :raises AlreadyExists: the new name is taken.
        """

        def work(tx: sa.Connection) -> str:
            uuid = self._touch(tx, name_or_uuid)
            found = self._get(tx, uuid)
            merged = {**found.metadata, **(metadata or {})}
            tx.execute(
                sa.update(aggregates)
                .where(aggregates.c.uuid == uuid)
                .values(
                    name=name or found.name, metadata={key: text for key, text in merged.items() if text is not None}
                )
            )
            return uuid

        try:
            return self.get(self._database.run(work))
        except Duplicate:
            raise errors.AlreadyExists(f"There is an aggregate {name} already.") from None

    def remove(self, name_or_uuid: str) -> None:
        """Remove it with its members.

        :raises NotFound: there is none.
        """

        def work(tx: sa.Connection) -> None:
            uuid = self._touch(tx, name_or_uuid)
            tx.execute(sa.delete(members).where(members.c.aggregate == uuid))
            tx.execute(sa.delete(aggregates).where(aggregates.c.uuid == uuid))

        self._database.run(work)

    def add(self, name_or_uuid: str, kind: str, member: str) -> StoredAggregate:
        """Make a host, or a node (by name or uuid), a member; nothing happens when it is one.

        :raises NotFound: there is no such aggregate, host or node.
        """

        def work(tx: sa.Connection) -> str:
            uuid = self._touch(tx, name_or_uuid)
            row = {"aggregate": uuid, "kind": kind, "member": _known_member(tx, kind, member)}
            present = sa.select(members.c.id).where(*(members.c[key] == value for key, value in row.items()))
            if tx.execute(present).first() is None:
                tx.execute(sa.insert(members).values(**row))
            return uuid

        try:
            return self.get(self._database.run(work))
        except Duplicate:
            # Another request added the same member at the same time.
            return self.get(name_or_uuid)

    def take_out(self, name_or_uuid: str, kind: str, member: str) -> StoredAggregate:
        """Make a host or a node no member.

        :raises NotFound: there is no such aggregate, or it is no member.
        """

        def work(tx: sa.Connection) -> str:
            uuid = self._touch(tx, name_or_uuid)
            of_node = sa.select(nodes.c.uuid).where(nodes.c.name == member) if kind == NODE else None
            named = members.c.member == member
            named = named if of_node is None else sa.or_(named, members.c.member.in_(of_node))
            gone = tx.execute(sa.delete(members).where(members.c.aggregate == uuid, members.c.kind == kind, named))
            if not gone.rowcount:
                raise errors.NotFound(f"The {kind} {member} is no member of aggregate {name_or_uuid}.")
            return uuid

        return self.get(self._database.run(work))

    def version(self) -> tuple[int, ...]:
        """Numbers that differ when any aggregate or membership has changed; one statement."""
        with self._database.read() as tx:
            return tuple(map(int, tx.execute(_VERSION).one()))

    def membership(self) -> AggregateMembership:
        """Everything, by two statements on one snapshot."""
        with self._database.read() as tx:
            known = {row.uuid: (row.name, row.metadata) for row in tx.execute(_ALL)}
            found: dict[str, dict[str, list[tuple[str, Mapping[str, str]]]]] = {HOST: {}, NODE: {}}
            for row in tx.execute(_ALL_MEMBERS):
                if row.aggregate in known:
                    found[row.kind].setdefault(row.member, []).append(known[row.aggregate])
        return AggregateMembership(found[HOST], found[NODE])

    def forget_node(self, tx: sa.Connection, node_uuid: str) -> None:
        """A node is removed; it is in no aggregate any more."""
        tx.execute(sa.delete(members).where(members.c.kind == NODE, members.c.member == node_uuid))

    def _touch(self, tx: sa.Connection, name_or_uuid: str) -> str:
        """Count the generation up: from here on, no other change of the aggregate happens before this one is committed."""
        uuid = self._get(tx, name_or_uuid).uuid
        if tx.execute(_TOUCH, {"of_uuid": uuid}).rowcount != 1:
            raise errors.NotFound(f"There is no aggregate {name_or_uuid} any more.")
        return uuid

    def _get(self, tx: sa.Connection, name_or_uuid: str) -> StoredAggregate:
        named = sa.or_(aggregates.c.uuid == name_or_uuid, aggregates.c.name == name_or_uuid)
        rows = tx.execute(sa.select(*_COLUMNS).where(named)).all()
        if not rows:
            raise errors.NotFound(f"There is no aggregate {name_or_uuid}; moorage aggregate list shows all.")
        # A name may look like the uuid of another one; the uuid counts.
        row = next((row for row in rows if row.uuid == name_or_uuid), rows[0])
        return _with_members(tx, [row])[0]


def _with_members(tx: sa.Connection, rows: Sequence[Any]) -> list[StoredAggregate]:
    found: dict[tuple[str, str], list[str]] = {}
    query = sa.select(members.c.aggregate, members.c.kind, members.c.member).order_by(members.c.member)
    for row in tx.execute(query.where(members.c.aggregate.in_([row.uuid for row in rows]))):
        found.setdefault((row.aggregate, row.kind), []).append(row.member)
    return [
        StoredAggregate(
            row.uuid,
            row.name,
            row.metadata,
            row.generation,
            row.created_at,
            row.updated_at,
            hosts=tuple(found.get((row.uuid, HOST), ())),
            nodes=tuple(found.get((row.uuid, NODE), ())),
        )
        for row in rows
    ]


def _known_member(tx: sa.Connection, kind: str, member: str) -> str:
    if kind == HOST:
        if tx.execute(sa.select(nodes.c.id).where(nodes.c.host == member).limit(1)).first() is None:
            raise errors.NotFound(f"There is no host {member} that has nodes; moorage host list shows all.")
        return member
    row = tx.execute(sa.select(nodes.c.uuid).where(sa.or_(nodes.c.uuid == member, nodes.c.name == member))).first()
    if row is None:
        raise errors.NotFound(f"There is no node {member}; moorage node list shows all.")
    return str(row.uuid)
