# SPDX-License-Identifier: Apache-2.0
"""Level shards with the fewest moves: by number of nodes, or by a weight that nodes carry."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.sharding.interface import NodePlacer, ShardNode, ShardStrategy
from moorage_plugins.strategies import params as reading
from moorage_plugins.strategies.packing import Item, level_items

__all__ = ["BalancedStrategy", "level_by_count"]

PARAMS = ("max_per_shard", "weight")


class BalancedStrategy(ShardStrategy, NodePlacer):
    """Keeps nodes in their shards: a node moves only if its shard has too many, or is not one of the wanted shards.

    By number of nodes the shards differ by one node at most (as far as locked nodes let them), with the fewest moves there can be.
    Parameters: ``weight``, the path of a number that counts instead of 1 for each node (``properties.ports``; nodes without it
    count 1): the shards are then about level, with few moves, though not provably the fewest, which is bin packing.
    ``max_per_shard``: refuse a plan in which a shard would have more nodes.
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
        reading.known("balanced", params, PARAMS)
        largest = reading.whole(params, "max_per_shard", None)
        weight = reading.text(params, "weight", None)
        order = sorted(shards)
        uuids = [node.uuid for node in nodes]
        if weight is None:
            return level_by_count(uuids, order, current, locked, largest)
        weights = {node.uuid: _weight(node, weight) for node in nodes}
        found = _level_by_weight(weights, order, current, locked)
        _refuse_overfull(uuids, order, {**current, **found}, largest)
        return found

    @override
    def place_one(self, node: ShardNode, loads: Mapping[str, int], params: Mapping[str, Any]) -> str | None:
        reading.known("balanced", params, PARAMS)
        largest = reading.whole(params, "max_per_shard", None)
        if not loads:
            return None
        best = min(loads, key=lambda shard: (loads[shard], shard))
        return None if largest is not None and loads[best] >= largest else best


def level_by_count(
    uuids: Collection[str],
    shards: Sequence[str],
    current: Mapping[str, str | None],
    locked: Set[str],
    largest: int | None = None,
) -> dict[str, str | None]:
    """Returns the fewest moves that level sorted ``shards``.

    Each shard gets a size: all shards are filled like vessels to one level, those with more locked nodes stand out; where one node
    more is left over, the largest shards keep it. What a shard has above its size leaves it. Linear, and a sort of those who leave.

    :raises InvalidInput: a shard would have more than ``largest`` nodes.
    """
    movable: dict[str, list[str]] = {shard: [] for shard in shards}
    fixed = dict.fromkeys(shards, 0)
    leaving: list[str] = []
    for uuid in uuids:
        shard = current.get(uuid)
        if uuid in locked:
            if shard in fixed:
                fixed[shard] += 1
        elif shard in movable:
            movable[shard].append(uuid)
        else:
            leaving.append(uuid)
    sizes = {shard: fixed[shard] + len(movable[shard]) for shard in shards}
    total = sum(sizes.values()) + len(leaving)
    targets = _targets(fixed, sizes, shards, total)
    if largest is not None and max(targets.values()) > largest:
        raise errors.InvalidInput(
            f"{total} nodes in {len(shards)} shards make more than {largest} in one; name at least {-(-total // largest)} "
            "shards, or unlock nodes.",
            path="params/max_per_shard",
        )
    for shard in shards:
        surplus = sizes[shard] - targets[shard]
        if surplus > 0:
            leaving += sorted(movable[shard])[-surplus:]
    leaving.sort()
    found: dict[str, str | None] = {}
    remaining = iter(leaving)
    for shard in shards:
        for _ in range(targets[shard] - sizes[shard]):
            found[next(remaining)] = shard
    return found


def _targets(fixed: Mapping[str, int], sizes: Mapping[str, int], shards: Sequence[str], total: int) -> dict[str, int]:
    floors = sorted(shards, key=lambda shard: (-fixed[shard], shard))
    dry, left = 0, total
    # A shard stands out of the water when its locked nodes are more than its equal part of what is left.
    while dry < len(floors) and fixed[floors[dry]] * (len(floors) - dry) > left:
        left -= fixed[floors[dry]]
        dry += 1
    targets = dict(fixed)
    wet = sorted(floors[dry:], key=lambda shard: (-sizes[shard], shard))
    if wet:
        water, rest = divmod(left, len(wet))
        for number, shard in enumerate(wet):
            targets[shard] = water + (number < rest)
    return targets


def _level_by_weight(
    weights: Mapping[str, float], shards: Sequence[str], current: Mapping[str, str | None], locked: Set[str]
) -> dict[str, str | None]:
    loads = dict.fromkeys(shards, 0.0)
    items = []
    for uuid, weight in weights.items():
        shard = current.get(uuid)
        if uuid in locked:
            if shard in loads:
                loads[shard] += weight
        else:
            items.append(Item(uuid, weight, shard))
    return dict(level_items(items, loads))


def _weight(node: ShardNode, path: str) -> float:
    value = node.attribute(path)
    if value is None:
        return 1.0
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise errors.InvalidInput(
            f"{path} of node {node.name} is {value!r}; to be a weight it must be a number of 0 or more.",
            path="params/weight",
        )
    return number


def _refuse_overfull(
    uuids: Collection[str], shards: Sequence[str], placed: Mapping[str, str | None], largest: int | None
) -> None:
    if largest is None:
        return
    counts = Counter(placed.get(uuid) for uuid in uuids)
    for shard in shards:
        if counts[shard] > largest:
            raise errors.InvalidInput(
                f"Shard {shard} would have {counts[shard]} nodes, more than {largest}; name more shards.",
                path="params/max_per_shard",
            )
