# SPDX-License-Identifier: Apache-2.0
"""Reads subscriptions to the journal from the store for each request of ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oslo_log import log as logging
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from moorage import errors
from moorage.db import Database
from moorage.journal.subscriptions import SubscriptionStore

__all__ = ["SubscriptionCollector"]

LOG = logging.getLogger(__name__)


class SubscriptionCollector:
    """Says of each webhook, and of each observer that follows the journal, how far it is behind. Two statements each time."""

    def __init__(self, database: Database) -> None:
        self._store = SubscriptionStore(database)

    def describe(self) -> list[Any]:
        """Nothing beforehand: no statement runs when it is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Returns the metrics; none when the store is away."""
        labels = ["subscription"]
        lag = GaugeMetricFamily("moorage_subscription_lag", "Events up to the newest one", labels=labels)
        failures = GaugeMetricFamily(
            "moorage_subscription_failures", "Failed deliveries since the last one that succeeded", labels=labels
        )
        missed = CounterMetricFamily(
            "moorage_subscription_missed", "Events that were purged before they were delivered", labels=labels
        )
        try:
            rows, last, _ = self._store.list()
        except errors.MoorageError as error:
            LOG.warning("The metrics of subscriptions cannot be read: %s", error.message)
            return
        for row in rows:
            lag.add_metric([row.name], max(0, last - row.position))
            failures.add_metric([row.name], row.failures)
            missed.add_metric([row.name], row.missed)
        yield from (lag, failures, missed)
