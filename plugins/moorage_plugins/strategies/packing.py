# SPDX-License-Identifier: Apache-2.0
"""Level shards with things of different size that must not be cut, moving as little as it can without searching.

That is bin packing, whose best answer is not to be had in time. What has no home goes to the emptiest shard, the largest first;
then the fullest shard gives to the emptiest, always the largest thing that overshoots neither's mean, until no gift makes the two
more alike. Each gift lowers the sum of the squares, so it ends.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Item", "level_items"]


class Item(NamedTuple):
    """Something that is moved as a whole; ``home``: the shard it is in, if that shall be there in the end."""

    key: str
    weight: float
    home: str | None


def level_items(items: Sequence[Item], loads: Mapping[str, float]) -> dict[str, str]:
    """Returns key -> shard of the items that move.

    :param loads: what lies in each shard and cannot be moved; its keys are the shards.
    """
    shards = _Shards(loads)
    homeless = []
    for item in items:
        if item.home in loads:
            shards.put(str(item.home), item)
        else:
            homeless.append(item)
    for item in sorted(homeless, key=lambda each: (-each.weight, each.key)):
        shards.put(shards.emptiest(), item)
    shards.level()
    homes = {item.key: item.home for item in items}
    return {key: shard for key, shard in sorted(shards.places.items()) if homes[key] != shard}


class _Shards:
    def __init__(self, loads: Mapping[str, float]) -> None:
        self.places: dict[str, str] = {}
        self._loads = dict(loads)
        self._items: dict[str, list[tuple[float, str]]] = {shard: [] for shard in loads}
        self._fullest = [(-load, shard) for shard, load in sorted(loads.items())]
        self._emptiest = [(load, shard) for shard, load in sorted(loads.items())]
        heapq.heapify(self._fullest)
        heapq.heapify(self._emptiest)

    def put(self, shard: str, item: Item) -> None:
        self.places[item.key] = shard
        self._items[shard].append((item.weight, item.key))
        self._change(shard, item.weight)

    def emptiest(self) -> str:
        while self._emptiest[0][0] != self._loads[self._emptiest[0][1]]:
            heapq.heappop(self._emptiest)
        return self._emptiest[0][1]

    def level(self) -> None:
        for entries in self._items.values():
            entries.sort()
        mean = sum(self._loads.values()) / len(self._loads)
        while self._fullest:
            load, giver = -self._fullest[0][0], self._fullest[0][1]
            if load != self._loads[giver]:
                heapq.heappop(self._fullest)
                continue
            taker = self.emptiest()
            if not self._give(giver, taker, mean):
                # It gives up for good: it only gets emptier, and the emptiest fuller.
                heapq.heappop(self._fullest)

    def _give(self, giver: str, taker: str, mean: float) -> bool:
        entries = self._items[giver]
        difference = self._loads[giver] - self._loads[taker]
        wanted = min(self._loads[giver] - mean, mean - self._loads[taker])
        place = bisect.bisect_right(entries, (wanted, "\U0010ffff")) - 1
        if place < 0 or entries[place][0] <= 0:
            place = bisect.bisect_right(entries, (0.0, "\U0010ffff"))
            if place >= len(entries) or entries[place][0] >= difference:
                return False
        if self._loads[giver] - entries[place][0] == self._loads[giver]:
            return False  # too light for the precision of the sums: giving it away would never end
        weight, key = entries.pop(place)
        bisect.insort(self._items[taker], (weight, key))
        self.places[key] = taker
        self._change(giver, -weight)
        self._change(taker, weight)
        return True

    def _change(self, shard: str, by: float) -> None:
        load = self._loads[shard] = self._loads[shard] + by
        heapq.heappush(self._fullest, (-load, shard))
        heapq.heappush(self._emptiest, (load, shard))
