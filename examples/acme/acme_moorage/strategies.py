# SPDX-License-Identifier: Apache-2.0
"""Shards by rendezvous hashing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

from moorage import errors
from moorage.sharding.interface import NodePlacer, ShardNode, ShardStrategy

__all__ = ["RendezvousStrategy"]


class RendezvousStrategy(ShardStrategy, NodePlacer):
    """Each node goes to the shard that scores highest for it: a shard that comes or goes moves its own nodes and no others.

    The parameter ``weights`` (shard -> number above 0) makes shards larger or smaller; 1 where a shard is not named. A weight that
    changes moves nodes to or from that shard alone (Schindelhauer and Schomaker, *Weighted distributed hash tables*, 2005).
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def assign(
        self,
        nodes: Sequence[ShardNode],
        shards: Sequence[str],
        current: Mapping[str, str | None],
        locked: Set[str],
        params: Mapping[str, Any],
    ) -> Mapping[str, str | None]:
        """Where nodes should be; the core keeps the locked ones in place."""
        weights = _weights(shards, params)
        return {node.uuid: _winner(node.uuid, weights) for node in nodes if node.uuid not in locked}

    def place_one(self, node: ShardNode, loads: Mapping[str, int], params: Mapping[str, Any]) -> str | None:
        """The shard of a new node, without a look at the others."""
        weights = _weights(list(loads), params)
        return _winner(node.uuid, weights) if weights else None

    def explain(self, node: ShardNode, shard: str | None, params: Mapping[str, Any]) -> str:
        """Why the node belongs there."""
        return f"{shard} scores highest for it"


def _winner(uuid: str, weights: Mapping[str, float]) -> str:
    return max(weights, key=lambda shard: (_score(uuid, shard, weights[shard]), shard))


def _score(uuid: str, shard: str, weight: float) -> float:
    digest = hashlib.blake2b(f"{shard}/{uuid}".encode(), digest_size=8).digest()
    # In the open interval from 0 to 1, so that the logarithm exists and is not 0.
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return -weight / math.log(uniform)


def _weights(shards: Sequence[str], params: Mapping[str, Any]) -> Mapping[str, float]:
    unknown = sorted(params.keys() - {"weights"})
    if unknown:
        raise errors.InvalidInput(
            f"The strategy rendezvous takes weights alone, so not {', '.join(unknown)}.", path="params"
        )
    given = params.get("weights", {})
    if not isinstance(given, Mapping):
        raise errors.InvalidInput("weights must map shards to numbers.", path="params.weights")
    for shard, weight in given.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise errors.InvalidInput(f"The weight of {shard} must be a number above 0.", path="params.weights")
        if shard not in shards:
            raise errors.InvalidInput(f"weights names {shard}, which shall not be there.", path="params.weights")
    return {shard: float(given.get(shard, 1.0)) for shard in shards}
