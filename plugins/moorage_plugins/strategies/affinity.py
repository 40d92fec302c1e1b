# SPDX-License-Identifier: Apache-2.0
"""Nodes that belong together stay in one shard: a rack, a conductor group, a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

from typing_extensions import override

from moorage.sharding.interface import ShardNode, ShardStrategy
from moorage_plugins.strategies import params as reading
from moorage_plugins.strategies.packing import Item, level_items

__all__ = ["AffinityStrategy"]

PARAMS = ("group_by", "max_per_shard")


class AffinityStrategy(ShardStrategy):
    """Keeps the nodes of a group in one shard, and the shards level as far as whole groups allow.

    A group stays in the shard that has its locked nodes, or most of its nodes; a shard that has too many gives whole groups away.
    Nodes without a value belong to no group, and are moved one by one. Parameters: ``group_by``, the path of what makes a group
    (``conductor_group`` by default; ``properties.rack``, ``extra.row``, ...), and ``max_per_shard``: a group of more nodes is cut
    into parts of that size, which go their own ways.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    @override
    def assign(
        self,
        nodes: Sequence[ShardNode],
        shards: Sequence[str],
        current: Mapping[str, str | None],
        locked: Set[str],
        params: Mapping[str, Any],
    ) -> Mapping[str, str | None]:
        reading.known("affinity", params, PARAMS)
        path = reading.text(params, "group_by", "conductor_group") or ""
        largest = reading.whole(params, "max_per_shard", None)
        groups: dict[str, list[str]] = {}
        for node in sorted(nodes, key=lambda each: each.uuid):
            value = node.attribute(path)
            # A value may be any text, a node's own uuid included: the two kinds of keys cannot meet.
            key = f"alone/{node.uuid}" if value in (None, "") else f"group/{value}"
            groups.setdefault(key, []).append(node.uuid)
        return _whole_groups(_cut(groups, current, largest), shards, current, locked)

    @override
    def explain(self, node: ShardNode, shard: str | None, params: Mapping[str, Any]) -> str:
        path = reading.text(params, "group_by", "conductor_group") or ""
        value = node.attribute(path)
        return "" if value in (None, "") else f"all of {path} {value} goes to {shard}"


def _cut(
    groups: Mapping[str, list[str]], current: Mapping[str, str | None], largest: int | None
) -> dict[str, list[str]]:
    """Groups of more than ``largest`` nodes in parts, each of nodes that are in one shard now as far as that goes.

    The nodes of each shard make full parts; what is over is put together where it fits first, the largest first.
    """
    found: dict[str, list[str]] = {}
    for key, members in groups.items():
        if largest is None or len(members) <= largest:
            found[key] = members
            continue
        by_shard: dict[str, list[str]] = {}
        for uuid in members:
            by_shard.setdefault(current.get(uuid) or "", []).append(uuid)
        pieces = [
            inside[first : first + largest]
            for _, inside in sorted(by_shard.items())
            for first in range(0, len(inside), largest)
        ]
        parts: list[list[str]] = []
        for piece in sorted(pieces, key=lambda each: (-len(each), each[0])):
            part = next((part for part in parts if len(part) + len(piece) <= largest), None)
            if part is None:
                parts.append(list(piece))
            else:
                part += piece
        found |= {f"{key}/part/{number}": part for number, part in enumerate(parts)}
    return found


def _whole_groups(
    groups: Mapping[str, list[str]], shards: Sequence[str], current: Mapping[str, str | None], locked: Set[str]
) -> dict[str, str | None]:
    loads = dict.fromkeys(shards, 0.0)
    items: list[Item] = []
    places: dict[str, str] = {}
    for key, members in groups.items():
        anchors = Counter(current.get(uuid) for uuid in members if uuid in locked and current.get(uuid) in loads)
        if anchors:
            places[key] = _most(anchors)
            movable = len(members) - sum(uuid in locked for uuid in members)
            loads[places[key]] += movable
            for shard, count in anchors.items():
                loads[str(shard)] += count
            continue
        movable = sum(uuid not in locked for uuid in members)
        if movable:
            homes = Counter(current.get(uuid) for uuid in members if uuid not in locked and current.get(uuid) in loads)
            home = _most(homes) if homes else None
            items.append(Item(key, float(movable), home))
            if home is not None:
                places[key] = home
    places.update(level_items(items, loads))
    return {
        uuid: places[key] for key, members in groups.items() if key in places for uuid in members if uuid not in locked
    }


def _most(counts: Mapping[str | None, int]) -> str:
    return str(min(counts, key=lambda shard: (-counts[shard], shard or "")))
