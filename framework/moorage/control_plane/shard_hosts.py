# SPDX-License-Identifier: Apache-2.0
"""Gives nodes to agents: the nodes of a shard to the agents that declare it, all others to the agents that declare none.

An agent declares its shard with ``[sharding] my_shard``; its row in ``services`` says which. A shard that any known agent declares
belongs to those agents alone: while none of them works, its nodes wait, and no other agent gets them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from oslo_log import log as logging

from moorage import errors
from moorage.db import Database, now
from moorage.fleet.tables import nodes
from moorage.instances.interface import InstanceStore, Reassignable
from moorage.ring import Ring
from moorage.services.interface import Service
from moorage.services.registry import ServiceRegistry
from moorage.sharding.moving import ShardMover

__all__ = ["AgentRings", "ShardHosts"]

LOG = logging.getLogger(__name__)
_AGENT = "agent"
_PAGE = 1000


class AgentRings:
    """The agents by the shard that they declare. Immutable."""

    def __init__(self, agents: Iterable[Service]) -> None:
        known = list(agents)
        self._shard_of = {row.host: row.shard for row in known}
        self._declared = {row.shard for row in known if row.shard is not None}
        working: dict[str | None, list[str]] = {}
        for row in known:
            if not (row.stopped or row.forced_down):
                working.setdefault(row.shard, []).append(row.host)
        self._rings = {shard: Ring(hosts) for shard, hosts in working.items()}

    def __bool__(self) -> bool:
        return bool(self._rings)

    @property
    def sharded(self) -> bool:
        """Whether any agent declares a shard."""
        return bool(self._declared)

    def owner(self, node_uuid: str, shard: str | None) -> str | None:
        """The agent that a node of this shard belongs to; None: no agent that may have it works."""
        ring = self._rings.get(shard if shard in self._declared else None)
        return None if ring is None else str(ring.owner(node_uuid))

    def serves(self, host: str, shard: str | None) -> bool:
        """Whether an agent may manage nodes of this shard. Hosts without a known agent keep what they have."""
        if host not in self._shard_of:
            return True
        return self._shard_of[host] == (shard if shard in self._declared else None)


@dataclass(frozen=True, slots=True)
class _Misplaced:
    uuid: str
    shard: str | None
    source: str
    target: str | None


@dataclass(frozen=True, slots=True)
class ShardHosts:
    """Moves nodes from agents that do not serve their shard to agents that do.

    A free node moves at once. An occupied node moves after its agent was declared dead, and its instances move with it in the same
    transaction. The conditions are part of the statement that writes the node.
    """

    database: Database
    registry: ServiceRegistry
    instances: InstanceStore
    mover: ShardMover

    def correct(self) -> int:
        """Moves all misplaced nodes that may move; returns how many moved."""
        rings = AgentRings(self.registry.list(binary=_AGENT))
        if not rings.sharded:
            return 0
        return sum(self._move(page) for page in self._misplaced(rings))

    def _misplaced(self, rings: AgentRings) -> Iterator[Sequence[_Misplaced]]:
        columns = (nodes.c.uuid, nodes.c.shard, nodes.c.host)
        after = ""
        while True:
            query = sa.select(*columns).where(nodes.c.uuid > after, nodes.c.host.is_not(None)).order_by(nodes.c.uuid)
            with self.database.read() as tx:
                page = tx.execute(query.limit(_PAGE)).all()
            yield [
                _Misplaced(row.uuid, row.shard, row.host, rings.owner(row.uuid, row.shard))
                for row in page
                if not rings.serves(row.host, row.shard)
            ]
            if len(page) < _PAGE:
                return
            after = page[-1].uuid

    def _move(self, found: Sequence[_Misplaced]) -> int:
        if not found:
            return 0
        free = self.database.run(
            lambda tx: [each for each in found if self._write(tx, each, sa.not_(self.mover.occupied))]
        )
        moved = len(free)
        done = {each.uuid for each in free}
        for each in found:
            if each.uuid not in done and each.target is not None:
                moved += self._move_with_instances(each, each.target)
        return moved

    def _write(self, tx: sa.Connection, each: _Misplaced, condition: sa.ColumnElement[bool]) -> bool:
        statement = (
            sa.update(nodes)
            .where(
                nodes.c.uuid == each.uuid,
                nodes.c.host == each.source,
                nodes.c.shard.is_not_distinct_from(each.shard),
                nodes.c.reservation.is_(None),
                condition,
            )
            .values(host=each.target, generation=nodes.c.generation + 1, updated_at=now())
        )
        return bool(tx.execute(statement).rowcount == 1)

    def _move_with_instances(self, each: _Misplaced, target: str) -> bool:
        """Moves an occupied node of a dead agent; False when the agent is not declared dead, or an operation is in progress."""
        try:
            hosts = self._instances_on(each)
            return self.database.run(lambda tx: self._write_with_instances(tx, each, target, hosts))
        except errors.Conflict as error:
            LOG.info("Node %s stays with agent %s: %s", each.uuid, each.source, error.message)
            return False

    def _write_with_instances(self, tx: sa.Connection, each: _Misplaced, target: str, hosts: Mapping[str, str]) -> bool:
        # The death is made certain first: an agent that still runs can finish nothing after this transaction.
        if not self.registry.evict_forced(tx, _AGENT, each.source):
            return False
        if not self.registry.hold_up(tx, _AGENT, target) or not self._write(tx, each, self.mover.may_leave):
            return False
        if hosts:
            if not isinstance(self.instances, Reassignable):
                raise errors.Conflict("The instance store cannot give instances to another host.")
            if self.instances.reassign(tx, hosts, target) != len(hosts):
                raise errors.Conflict("An instance on it is in an operation, or was changed meanwhile.")
        return True

    def _instances_on(self, each: _Misplaced) -> Mapping[str, str]:
        found: dict[str, str] = {}
        after = ""
        while True:
            page = self.instances.list(after=after, limit=_PAGE, host=each.source)
            found |= {row.uuid: row.host for row in page if row.node_uuid == each.uuid}
            if len(page) < _PAGE:
                return found
            after = page[-1].uuid
