# SPDX-License-Identifier: Apache-2.0
"""Counts fenced hosts in the store for each request of ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oslo_log import log as logging
from prometheus_client.core import GaugeMetricFamily

from moorage import errors
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.services.interface import AGENT
from moorage.services.registry import ServiceRegistry

__all__ = ["FenceCollector"]

LOG = logging.getLogger(__name__)


class FenceCollector:
    """Hosts that are fenced, and hosts that fenced themselves and wait for the store's fence. One statement each time."""

    def __init__(self, database: Database) -> None:
        self._registry = ServiceRegistry(database, SystemClock())

    def describe(self) -> list[Any]:
        """Nothing beforehand: no statement runs when it is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Returns the metrics; none when the store is away."""
        try:
            agents = self._registry.list(binary=AGENT)
        except errors.MoorageError as error:
            LOG.warning("The metrics of fences cannot be read: %s", error.message)
            return
        fenced = GaugeMetricFamily("moorage_fenced_hosts", "Hosts that are fenced")
        fenced.add_metric([], sum(each.fenced for each in agents))
        waiting = GaugeMetricFamily(
            "moorage_self_fenced_hosts", "Hosts that fenced themselves and are not fenced in the store"
        )
        waiting.add_metric([], sum(each.self_fenced and not each.fenced for each in agents))
        yield from (fenced, waiting)
