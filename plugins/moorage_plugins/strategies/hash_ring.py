# SPDX-License-Identifier: Apache-2.0
"""Shards by consistent hashing: a node's shard follows from its uuid and the names of the shards alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.ring import HASH_FUNCTIONS, Ring
from moorage.sharding.interface import NodePlacer, ShardNode, ShardStrategy
from moorage_plugins.strategies import params as reading

__all__ = ["HashRingStrategy"]

PARAMS = ("hash_function", "replicas")


class HashRingStrategy(ShardStrategy, NodePlacer):
    """The ring of :mod:`moorage.ring` with the shards as members.

    Any program that knows the shards can compute the shard of a node, without the store. One shard more or less moves about 1/n of
    the nodes. The shards are as uneven as the ring (1.2 times the mean with 160 replicas), and a level fleet is shuffled once.
    Parameters: ``replicas`` (points of a shard, 160) and ``hash_function`` (``md5``, as Sahara's ring, or ``xxh3``).
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
        uuids = [node.uuid for node in nodes]
        return dict(zip(uuids, _ring(shards, params).owners(uuids), strict=True))

    @override
    def place_one(self, node: ShardNode, loads: Mapping[str, int], params: Mapping[str, Any]) -> str | None:
        return _ring(sorted(loads), params).owner(node.uuid) if loads else None

    @override
    def explain(self, node: ShardNode, shard: str | None, params: Mapping[str, Any]) -> str:
        return f"its uuid lies on the part of the ring that is {shard}'s"


def _ring(shards: Sequence[str], params: Mapping[str, Any]) -> Ring[str]:
    reading.known("hash_ring", params, PARAMS)
    function = reading.text(params, "hash_function", "md5")
    if function not in HASH_FUNCTIONS:
        raise errors.InvalidInput(
            f"hash_function is {function!r}; it must be one of {', '.join(HASH_FUNCTIONS)}.",
            path="params/hash_function",
        )
    return Ring(shards, reading.whole(params, "replicas", 160) or 160, function)
