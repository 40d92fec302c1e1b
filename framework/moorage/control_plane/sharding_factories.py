# SPDX-License-Identifier: Apache-2.0
"""Builds the parts of sharding from the configuration, and binds them to the instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.db import Database
from moorage.fleet import tables as fleet_tables
from moorage.fleet.interface import NodeSpec, check_shard
from moorage.fleet.nodes import NodeStore
from moorage.instances.interface import InstanceStore
from moorage.sharding.interface import STRATEGIES, ShardStrategy
from moorage.sharding.moving import ShardMover
from moorage.sharding.placing import ShardsForNew
from moorage.sharding.plans import Plans

__all__ = ["declared_shard", "open_mover", "open_plans", "shards_for_new"]


def open_mover(instances: InstanceStore) -> ShardMover:
    """Returns what writes the shard of nodes. Where the instance store cannot tell, every node counts as occupied."""
    has_instances = instances.occupies(fleet_tables.nodes.c.uuid)
    return ShardMover(sa.true() if has_instances is None else has_instances)


def declared_shard(conf: Any) -> str | None:
    """Returns the shard that an agent serves (``[sharding] my_shard``); None: it serves the nodes that are given to its host.

    :raises ConfigError: it is no name of a shard; it is not taken for "everything".
    """
    if conf.sharding.my_shard is None:
        return None
    try:
        return check_shard(conf.sharding.my_shard, "[sharding] my_shard")
    except errors.InvalidInput as error:
        raise errors.ConfigError(error.message) from error


def open_plans(database: Database, nodes: NodeStore, mover: ShardMover, conf: Any) -> Plans:
    """Returns the plans of the store; the configured strategy makes them unless a request names another one."""

    def strategy(name: str | None) -> tuple[str, ShardStrategy]:
        try:
            loaded = STRATEGIES.load(name or conf.sharding.strategy)
        except errors.PluginLoadError as error:
            if name is None:
                raise
            # Named by the request, and so its mistake; the configuration is in order.
            raise errors.InvalidInput(error.message, path="strategy") from error
        return loaded.name, loaded.build()

    return Plans(database, nodes, strategy, mover, batch=int(conf.sharding.batch), keep=int(conf.sharding.keep_plans))


def shards_for_new(nodes: NodeStore, conf: Any) -> Callable[[Sequence[NodeSpec]], Sequence[NodeSpec]] | None:
    """Returns what gives new nodes a shard; None if the configuration does not ask for that.

    :raises ConfigError: the strategy cannot.
    """
    return ShardsForNew(nodes, conf) if conf.sharding.assign_at_enrolment else None
