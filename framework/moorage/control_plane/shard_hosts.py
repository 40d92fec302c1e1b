# SPDX-License-Identifier: Apache-2.0
"""Gives nodes to agents: the nodes of a shard to the agents that declare it, all others to the agents that declare none.

An agent declares its shard with ``[sharding] my_shard``; its row in ``services`` says which. A shard that any known agent declares
belongs to those agents alone: while none of them works, its nodes wait, and no other agent gets them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import sqlalchemy as sa
from oslo_log import log as logging

from moorage import errors
from moorage.db import Database, now
from moorage.fleet.events import record_nodes
from moorage.fleet.tables import nodes
from moorage.instances.departures import Departures
from moorage.instances.interface import Instance, InstanceStore, Reassignable
from moorage.instances.moves import RESIZED
from moorage.ring import Ring
from moorage.services.interface import Service
from moorage.services.registry import ServiceRegistry
from moorage.sharding.moving import ShardMover
from moorage.work.interface import Operation

__all__ = ["AgentRings", "ShardHosts"]

LOG = logging.getLogger(__name__)
_AGENT = "agent"
_PAGE = 1000


class AgentRings:
    """The agents by the shard that they declare. Immutable."""

    def __init__(self, agents: Iterable[Service]) -> None:
        known = list(agents)
        self._shard_of = {row.host: row.shard for row in known}
        #: Hosts whose agent is declared dead.
        self.dead = frozenset(row.host for row in known if row.forced_down)
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
        """Returns the agent that a node of this shard belongs to; None: no agent that may have it works."""
        ring = self._rings.get(shard if shard in self._declared else None)
        return None if ring is None else str(ring.owner(node_uuid))

    def serves(self, host: str, shard: str | None) -> bool:
        """Returns whether an agent may manage nodes of this shard. Hosts without a known agent keep what they have."""
        if host not in self._shard_of:
            return True
        return self._shard_of[host] == (shard if shard in self._declared else None)


@dataclass(frozen=True, slots=True)
class _Misplaced:
    uuid: str
    shard: str | None
    source: str
    target: str | None
    occupied: bool


@dataclass(frozen=True, slots=True)
class ShardHosts:
    """Moves nodes from agents that do not serve their shard to agents that do.

    A free node moves at once. An occupied node moves after its agent was declared dead, and its instances move with it in the same
    transaction, with what the dead agent had to let go of there; while a resize keeps a place on it or is not confirmed, it waits.
    The conditions are part of the statement that writes the node.
    """

    database: Database
    registry: ServiceRegistry
    instances: InstanceStore
    mover: ShardMover
    departures: Departures

    def correct(self) -> int:
        """Moves all misplaced nodes that may move; returns how many moved."""
        rings = AgentRings(self.registry.list(binary=_AGENT))
        if not rings.sharded:
            return 0
        instances = _InstancesByNode(self.instances)
        return sum(self._move(page, rings.dead, instances) for page in self._misplaced(rings))

    def _misplaced(self, rings: AgentRings) -> Iterator[Sequence[_Misplaced]]:
        columns = (nodes.c.uuid, nodes.c.shard, nodes.c.host, self.mover.occupied.label("occupied"))
        after = ""
        while True:
            query = sa.select(*columns).where(nodes.c.uuid > after, nodes.c.host.is_not(None)).order_by(nodes.c.uuid)
            with self.database.read() as tx:
                page = tx.execute(query.limit(_PAGE)).all()
            yield [
                _Misplaced(row.uuid, row.shard, row.host, rings.owner(row.uuid, row.shard), bool(row.occupied))
                for row in page
                if not rings.serves(row.host, row.shard)
            ]
            if len(page) < _PAGE:
                return
            after = page[-1].uuid

    def _move(self, found: Sequence[_Misplaced], dead: Set[str], instances: _InstancesByNode) -> int:
        free = [each for each in found if not each.occupied]
        moved = 0
        if free:
            of_free = sa.not_(self.mover.occupied)
            moved = self.database.run(lambda tx: sum(self._write(tx, each, of_free) for each in free))
        for each in found:
            # The others wait for the death of their agent, and cost nothing meanwhile.
            if each.occupied and each.source in dead and each.target is not None:
                moved += self._move_with_instances(each, each.target, instances)
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
        written = tx.execute(statement).rowcount == 1
        if written:
            record_nodes(tx, [each.uuid])
        return bool(written)

    def _move_with_instances(self, each: _Misplaced, target: str, instances: _InstancesByNode) -> bool:
        """Moves an occupied node of a dead agent; False when the agent is not declared dead, or an operation is in progress."""
        try:
            found = instances.on(each.source, each.uuid)
            leaving = self.departures.of_hosts([each.source], [each.uuid])
            return self.database.run(lambda tx: self._write_with_instances(tx, each, target, found, leaving))
        except errors.Conflict as error:
            LOG.info("Node %s stays with agent %s: %s", each.uuid, each.source, error.message)
            return False

    def _write_with_instances(
        self,
        tx: sa.Connection,
        each: _Misplaced,
        target: str,
        found: Sequence[Instance],
        leaving: Mapping[str, Operation | None],
    ) -> bool:
        # The death is made certain first: an agent that still runs can finish nothing after this transaction.
        if not self.registry.evict_forced(tx, _AGENT, each.source):
            return False
        if not self.registry.hold_up(tx, _AGENT, target) or not self._write(tx, each, self.mover.may_leave):
            return False
        kept = self.instances.kept_on(tx, [each.uuid]) if isinstance(self.instances, Reassignable) else ()
        if unconfirmed := sorted({*kept, *(one.uuid for one in found if one.status == RESIZED)}):
            raise errors.Conflict(f"The resize of instance {unconfirmed[0]} is neither confirmed nor reverted.")
        self.departures.readdress(tx, [each.source], leaving, target)
        if found:
            if not isinstance(self.instances, Reassignable):
                raise errors.Conflict("The instance store cannot give instances to another host.")
            if self.instances.reassign(tx, {one.uuid: each.source for one in found}, target) != len(found):
                raise errors.Conflict("An instance on it is in an operation, or was changed meanwhile.")
        return True


class _InstancesByNode:
    """The instances of hosts by their node. Reads each host once: it gets no further instances, since its agent is dead."""

    def __init__(self, instances: InstanceStore) -> None:
        self._instances = instances
        self._read: dict[str, dict[str, list[Instance]]] = {}

    def on(self, host: str, node_uuid: str) -> Sequence[Instance]:
        """Returns the instances of the host on the node."""
        if host not in self._read:
            self._read[host] = self._of(host)
        return self._read[host].get(node_uuid, ())

    def _of(self, host: str) -> dict[str, list[Instance]]:
        found: dict[str, list[Instance]] = {}
        after = ""
        while True:
            page = self._instances.list(after=after, limit=_PAGE, host=host)
            for row in page:
                found.setdefault(row.node_uuid, []).append(row)
            if len(page) < _PAGE:
                return found
            after = page[-1].uuid
