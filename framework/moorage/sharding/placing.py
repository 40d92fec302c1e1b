# SPDX-License-Identifier: Apache-2.0
"""Chooses the shard of new nodes by the configured strategy; off unless an operator wants it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moorage import errors
from moorage.fleet.interface import NodeSpec
from moorage.fleet.nodes import NodeStore
from moorage.sharding.interface import STRATEGIES, NodePlacer, ShardNode

__all__ = ["ShardsForNew"]


class ShardsForNew:
    """Fills in the shard of nodes that are about to be enrolled and have none.

    :raises ConfigError: the strategy cannot place single nodes.
    """

    def __init__(self, nodes: NodeStore, conf: Any) -> None:
        self._nodes = nodes
        self._shards: Sequence[str] = tuple(conf.sharding.shards)
        loaded = STRATEGIES.load(conf.sharding.strategy)
        if not issubclass(loaded.plugin, NodePlacer):
            raise errors.ConfigError(
                f"[sharding] strategy = {loaded.name} cannot place a single node, which assign_at_enrolment needs; balanced, "
                "hash_ring and rules can."
            )
        self._strategy: Any = loaded.plugin

    def __call__(self, specs: Sequence[NodeSpec]) -> list[NodeSpec]:
        """Returns the nodes, each with a shard. Nodes that exist keep their shard."""
        new = [spec for spec in specs if spec.shard is None]
        known = self._nodes.existing([spec.uuid for spec in new]) if new else frozenset()
        if all(spec.uuid in known for spec in new):
            return list(specs)
        counts = {shard: count for shard, count in self._nodes.shards() if shard is not None}
        loads = {shard: counts.get(shard, 0) for shard in self._shards} or counts
        placer: NodePlacer = self._strategy()
        found = []
        for spec in specs:
            if spec.shard is None and spec.uuid not in known:
                shard = placer.place_one(_seen(spec), loads, {})
                spec = replace(spec, shard=shard)
            if spec.shard in loads and spec.uuid not in known:
                loads[spec.shard] += 1
            found.append(spec)
        return found


def _seen(spec: NodeSpec) -> ShardNode:
    details = spec.details
    return ShardNode(
        spec.uuid,
        spec.name,
        spec.host,
        spec.resource_class,
        details.get("conductor_group") or "",
        details.get("owner"),
        json.dumps(dict(spec.properties)),
        json.dumps(details.get("extra") or {}),
    )
