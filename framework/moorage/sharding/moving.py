# SPDX-License-Identifier: Apache-2.0
"""Changes the shard of nodes. The conditions are part of the statement that writes the node's row.

* The node is still in the shard that the caller found it in, and it is not reserved.
* A node without a shard may get one, also with an instance on it: no consumer serves it by shard yet.
* An occupied node stays in its shard while the agent that manages it may live. It is occupied by an external instance
  (``instance_uuid``) or by an instance of the instance store. It may move once its agent is declared dead, or when the caller
  includes nodes with instances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.db import now
from moorage.fleet.events import record_nodes
from moorage.fleet.interface import ShardMove
from moorage.fleet.tables import nodes
from moorage.services.tables import services

__all__ = ["ShardMover"]

_NONE: Mapping[str, str | None] = {}
_AGENT_DEAD = (
    sa.exists()
    .where(services.c.binary == "agent", services.c.host == nodes.c.host, services.c.forced_down.is_(sa.true()))
    .correlate(nodes)
)


class ShardMover:
    """Moves nodes between shards, and tells why a node cannot be moved. Safe for use by several threads.

    :param has_instances: a condition on the columns of ``nodes``: an instance of the instance store is on the node, or moves to it.
    """

    def __init__(self, has_instances: sa.ColumnElement[bool]) -> None:
        #: Conditions on the columns of ``nodes``.
        self.occupied = sa.or_(nodes.c.instance_uuid.is_not(None), has_instances)
        self.may_leave = sa.or_(sa.not_(self.occupied), _AGENT_DEAD)
        self._move = (
            sa.update(nodes)
            .where(
                nodes.c.uuid == sa.bindparam("of_uuid"),
                nodes.c.shard.is_not_distinct_from(sa.bindparam("from_shard", type_=nodes.c.shard.type)),
                nodes.c.reservation.is_(None),
                sa.or_(sa.bindparam("any_node", type_=sa.Integer) == 1, self.may_leave),
            )
            .values(
                shard=sa.bindparam("to_shard", type_=nodes.c.shard.type),
                generation=nodes.c.generation + 1,
                updated_at=now(),
            )
        )
        self._holders = sa.select(
            nodes.c.uuid, nodes.c.name, nodes.c.host, nodes.c.shard, nodes.c.instance_uuid, nodes.c.reservation,
            self.occupied.label("occupied"),
        )  # fmt: skip
        self._bound = self._holders.add_columns(
            sa.case((has_instances, 1), else_=0).label("has_instances"),
            sa.case((self.may_leave, 1), else_=0).label("may_leave"),
        ).where(self.occupied)

    def move(self, tx: sa.Connection, moves: Sequence[ShardMove], *, include_instances: bool = False) -> list[bool]:
        """Changes the shard of the nodes for which the conditions hold; returns, for each move, whether it happened."""
        rows = [
            {
                "of_uuid": move.node,
                "from_shard": move.source,
                "to_shard": move.target,
                "any_node": int(include_instances or move.source is None or move.undoes),
            }
            for move in moves
        ]
        if not rows:
            return []
        # As a rule no other transaction interferes, and one round is enough. Otherwise the nodes are written one by one.
        point = tx.begin_nested()
        if tx.execute(self._move, rows).rowcount == len(rows):
            point.commit()
            moved = [True] * len(rows)
        else:
            point.rollback()
            moved = [tx.execute(self._move, row).rowcount == 1 for row in rows]
        record_nodes(tx, [move.node for move, done in zip(moves, moved, strict=True) if done])
        return moved

    def refuse_leaving(
        self, tx: sa.Connection, shards: Mapping[str, str | None], hosts: Mapping[str, str | None] = _NONE
    ) -> None:
        """Refuses that occupied nodes leave their shard, and that nodes leave the host where their instances are.

        One statement, or none when nothing is given. For changes of nodes that are no moves of :meth:`move`.

        :param shards: uuid of a node -> the shard that it shall have.
        :param hosts: uuid of a node -> the host that it shall have.
        :raises Conflict: names the first such node and says what to do.
        """
        uuids = sorted(shards.keys() | hosts.keys())
        for row in tx.execute(self._bound.where(nodes.c.uuid.in_(uuids))) if uuids else ():
            if row.has_instances and row.host is not None and hosts.get(row.uuid, row.host) != row.host:
                raise errors.Conflict(
                    f"Node {row.name} stays with host {row.host}, whose agent works on the instances there. Move the instances to "
                    "other nodes first, or leave the host out.",
                    node=row.uuid,
                )
            if row.shard is not None and not row.may_leave and shards.get(row.uuid, row.shard) != row.shard:
                raise errors.Conflict(
                    f"Node {row.name} stays in shard {row.shard}: {_occupied(row)}. To move it all the same: moorage node set "
                    f"{row.name} --shard SHARD --include-instances.",
                    node=row.uuid,
                )

    def reasons(self, tx: sa.Connection, moves: Sequence[ShardMove]) -> Mapping[str, str]:
        """Returns, by the node's uuid, why each of these moves did not happen."""
        query = self._holders.where(nodes.c.uuid.in_([move.node for move in moves]))
        rows = {row.uuid: row for row in tx.execute(query)}
        return {move.node: _reason(rows.get(move.node), move) for move in moves}


def _reason(row: Any, move: ShardMove) -> str:
    if row is None:
        return "the node is gone"
    if row.shard != move.source:
        return f"it is in {row.shard or 'no shard'} by now"
    if row.reservation is not None:
        return f"{row.reservation} has reserved it"
    if row.occupied:
        dead = f"declare its agent dead (moorage service set agent:{row.host} --forced-down) or " if row.host else ""
        return f"{_occupied(row)}: {dead}give --include-instances"
    return "it was being changed; it can be planned again"


def _occupied(row: Any) -> str:
    return f"instance {row.instance_uuid} is on it" if row.instance_uuid is not None else "instances are on it"
