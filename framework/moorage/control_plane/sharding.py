# SPDX-License-Identifier: Apache-2.0
"""Sharding bound to what it needs of others: the configuration, and the instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from moorage import errors
from moorage.db import Database
from moorage.fleet.interface import NodeSpec
from moorage.fleet.nodes import NodeStore
from moorage.scheduling.interface import InstanceSource
from moorage.sharding.interface import STRATEGIES, ShardStrategy
from moorage.sharding.placing import ShardsForNew
from moorage.sharding.plans import Plans

__all__ = ["open_plans", "shards_for_new"]

_PAGE = 1000


def open_plans(database: Database, nodes: NodeStore, instances: InstanceSource, conf: Any) -> Plans:
    """The plans of the store, made by the configured strategy unless a request names another."""

    def strategy(name: str | None) -> tuple[str, ShardStrategy]:
        try:
            loaded = STRATEGIES.load(name or conf.sharding.strategy)
        except errors.PluginLoadError as error:
            if name is None:
                raise
            # Named by the request, and so its mistake; the configuration is in order.
            raise errors.InvalidInput(error.message, path="strategy") from error
        return loaded.name, loaded.build()

    def occupied() -> Set[str]:
        found: set[str] = set()
        after = ""
        while True:
            page = instances.all(after=after, limit=_PAGE)
            found |= {record.node for record in page}
            if len(page) < _PAGE:
                return found
            after = page[-1].uuid

    return Plans(
        database, nodes, strategy, occupied, batch=int(conf.sharding.batch), keep=int(conf.sharding.keep_plans)
    )


def shards_for_new(nodes: NodeStore, conf: Any) -> Callable[[Sequence[NodeSpec]], Sequence[NodeSpec]] | None:
    """What gives new nodes a shard; None when nobody wants that.

    :raises ConfigError: the strategy cannot.
    """
    return ShardsForNew(nodes, conf) if conf.sharding.assign_at_enrolment else None
