# SPDX-License-Identifier: Apache-2.0
"""What looks wrong with the shards of a fleet; for the upgrade check and ``moorage shard verify``."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from moorage import errors
from moorage.db import Database
from moorage.fleet.interface import check_shard
from moorage.fleet.tables import nodes

__all__ = ["problems"]

_EXAMPLES = 10


def problems(database: Database) -> list[str]:
    """Sentences for an operator; none when no node or every node has a shard, and all names and the index are in order."""
    with database.read() as tx:
        counts = {
            row[0]: row[1] for row in tx.execute(sa.select(nodes.c.shard, sa.func.count()).group_by(nodes.c.shard))
        }
        lacking = sa.select(nodes.c.uuid).where(nodes.c.shard.is_(None)).order_by(nodes.c.id).limit(_EXAMPLES)
        examples = list(tx.execute(lacking).scalars())
        indexes = sa.inspect(tx).get_indexes("nodes")
    found = _mixed(counts, examples)
    names = [name for name in counts if name is not None]
    found += _unreachable(names) + _twins(names)
    if not any(index["column_names"][:1] == ["shard"] for index in indexes):
        found.append(
            "The table nodes has no index on shard; run moorage-manage db check, and make ix_nodes_shard_id again."
        )
    return found


def _mixed(counts: dict[str | None, int], examples: Sequence[str]) -> list[str]:
    without, total = counts.get(None, 0), sum(counts.values())
    if not without or without == total:
        return []
    return [
        f"{without} of {total} nodes have no shard while shards are in use; consumers that ask for a shard will not see them. "
        f"Give them one (moorage shard plan, moorage node set --shard): {', '.join(examples)}"
        f"{', ... (moorage node list --unsharded)' if without > len(examples) else ''}."
    ]


def _unreachable(names: Sequence[str]) -> list[str]:
    found = []
    for name in sorted(names):
        try:
            check_shard(name)
        except errors.InvalidInput as error:
            found.append(f"No query can ask for a shard that nodes are in: {error.message}")
    return found


def _twins(names: Sequence[str]) -> list[str]:
    by_letters: dict[str, list[str]] = {}
    for name in sorted(names):
        by_letters.setdefault(name.casefold(), []).append(name)
    return [
        f"The shards {' and '.join(twins)} differ in the case of letters alone, and are different shards; is that meant?"
        for twins in by_letters.values()
        if len(twins) > 1
    ]
