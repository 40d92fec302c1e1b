# SPDX-License-Identifier: Apache-2.0
"""Checks the shards of a fleet, for the upgrade check and ``moorage shard verify``. Each problem says which commands mend it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from moorage import errors
from moorage.db import Database
from moorage.fleet.interface import check_shard
from moorage.fleet.tables import nodes
from moorage.services.tables import services

__all__ = ["agents_of_shards", "problems", "upgrade_check"]

_EXAMPLES = 10
_AGENTS = (
    sa.select(services.c.shard, services.c.host, services.c.beat, services.c.forced_down)
    .where(services.c.binary == "agent")
    .order_by(services.c.host)
)


def problems(database: Database) -> list[str]:
    """Returns sentences for an operator. There are none when no node or every node has a shard, and names and index are right."""
    with database.read() as tx:
        counts = {
            row[0]: row[1] for row in tx.execute(sa.select(nodes.c.shard, sa.func.count()).group_by(nodes.c.shard))
        }
        lacking = sa.select(nodes.c.uuid).where(nodes.c.shard.is_(None)).order_by(nodes.c.id).limit(_EXAMPLES)
        examples = list(tx.execute(lacking).scalars())
        indexes = sa.inspect(tx).get_indexes("nodes")
        agents = agents_of_shards(tx)
        misplaced = tx.execute(_misplaced(agents)).all() if agents else []
    found = _mixed(counts, examples)
    found += _unserved(counts, agents) + [_sentence(row) for row in misplaced]
    names = [name for name in counts if name is not None]
    found += _unreachable(names) + _twins(names)
    if not any(index["column_names"][:1] == ["shard"] for index in indexes):
        found.append(
            "The table nodes has no index on shard, so queries by shard read all nodes. Run this statement on the database: "
            "CREATE INDEX ix_nodes_shard_id ON nodes (shard, id)"
        )
    return found


def upgrade_check(conf: cfg.ConfigOpts) -> Sequence[str]:
    """No or every node has a shard, and every shard can be asked for."""
    return problems(Database.from_config(conf))


def agents_of_shards(tx: sa.Connection) -> Mapping[str | None, Sequence[str]]:
    """Returns the working agents of each shard that any known agent declares; None: agents that declare no shard.

    Empty where no agent declares a shard: then agents serve nodes whatever their shard is.
    """
    found: dict[str | None, list[str]] = {}
    for row in tx.execute(_AGENTS):
        working = found.setdefault(row.shard, [])
        if row.beat and not row.forced_down:
            working.append(row.host)
    return found if found.keys() - {None} else {}


def _misplaced(agents: Mapping[str | None, Sequence[str]]) -> sa.Select[Any]:
    of_others = sa.and_(services.c.shard.is_not(None), nodes.c.shard.is_distinct_from(services.c.shard))
    declared = sa.and_(services.c.shard.is_(None), nodes.c.shard.in_([shard for shard in agents if shard is not None]))
    return (
        sa.select(nodes.c.shard, nodes.c.host, sa.func.count().label("number"))
        .join_from(nodes, services, nodes.c.host == services.c.host)
        .where(services.c.binary == "agent", sa.or_(of_others, declared))
        .group_by(nodes.c.shard, nodes.c.host)
        .order_by(nodes.c.host, nodes.c.shard)
    )


def _sentence(row: Any) -> str:
    where = "without a shard" if row.shard is None else f"of shard {row.shard}"
    return (
        f"Agent {row.host} manages {row.number} nodes {where}, which it does not serve. Free nodes go to another agent by "
        "themselves. Nodes with instances go when the agent is stopped and declared dead: moorage service set "
        f"agent:{row.host} --forced-down."
    )


def _unserved(counts: Mapping[str | None, int], agents: Mapping[str | None, Sequence[str]]) -> list[str]:
    """Shards that no working agent serves; none where no agent declares a shard."""
    if not agents:
        return []
    found = []
    for shard, count in sorted(counts.items(), key=lambda item: item[0] or ""):
        if agents.get(shard if shard in agents else None):
            continue
        if shard is None:
            found.append(
                f"{count} nodes have no shard, and no working agent serves such nodes. Give them a shard (moorage shard plan), or "
                "start an agent without [sharding] my_shard."
            )
        else:
            found.append(
                f"No working agent serves shard {shard} with its {count} nodes. Start an agent with [sharding] my_shard = {shard}."
            )
    return found


def _mixed(counts: dict[str | None, int], examples: Sequence[str]) -> list[str]:
    without, total = counts.get(None, 0), sum(counts.values())
    if not without or without == total:
        return []
    return [
        f"{without} of {total} nodes have no shard while shards are in use; consumers that ask for a shard do not see them: "
        f"{', '.join(examples)}{', ... (moorage node list --unsharded)' if without > len(examples) else ''}. "
        "Give them one: run moorage shard plan, and then moorage shard apply with the plan that it prints; or, for one node, "
        "moorage node set NODE --shard SHARD. Nodes with instances may be given a first shard, reserved nodes may not."
    ]


def _unreachable(names: Sequence[str]) -> list[str]:
    found = []
    for name in sorted(names):
        try:
            check_shard(name)
        except errors.InvalidInput as error:
            found.append(
                f"No query can ask for a shard that nodes are in: {error.message} To move its nodes, run moorage shard plan "
                "--shards SHARD,SHARD with good names, and then moorage shard apply with the plan that it prints; add "
                "--include-instances to the plan for nodes with instances."
            )
    return found


def _twins(names: Sequence[str]) -> list[str]:
    by_letters: dict[str, list[str]] = {}
    for name in sorted(names):
        by_letters.setdefault(name.casefold(), []).append(name)
    return [
        f"The shards {' and '.join(twins)} differ in the case of letters alone, and are different shards. If they should be one: "
        f"moorage node list --shard {twins[-1]} lists the nodes of one, and moorage node set NODE --shard {twins[0]} moves a node; "
        "add --include-instances for a node with instances."
        for twins in by_letters.values()
        if len(twins) > 1
    ]
