# SPDX-License-Identifier: Apache-2.0
"""Counts shards in the store for each request of ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oslo_log import log as logging
from prometheus_client.core import GaugeMetricFamily

from moorage import errors
from moorage.db import Database
from moorage.fleet.nodes import NodeStore
from moorage.sharding.checks import agents_of_shards

__all__ = ["ShardCollector"]

LOG = logging.getLogger(__name__)


class ShardCollector:
    """Nodes and working agents of each shard. Two statements each time."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def describe(self) -> list[Any]:
        """Nothing beforehand: no statement runs when it is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Returns the metrics; none when the store is away."""
        members = GaugeMetricFamily("moorage_shard_nodes", "Nodes of a shard; empty: without a shard", labels=["shard"])
        serving = GaugeMetricFamily("moorage_shard_agents", "Working agents that serve a shard", labels=["shard"])
        try:
            with self._database.read() as tx:
                agents = agents_of_shards(tx)
            counts = dict(NodeStore(self._database).shards())
        except errors.MoorageError as error:
            LOG.warning("The metrics of shards cannot be read: %s", error.message)
            return
        for shard in counts.keys() | agents.keys():
            members.add_metric([shard or ""], counts.get(shard, 0))
            if agents:
                serving.add_metric([shard or ""], len(agents.get(shard if shard in agents else None, ())))
        yield from (members, serving)
