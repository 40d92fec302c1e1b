# SPDX-License-Identifier: Apache-2.0
"""Counts operations and cleanups in the store for each request of ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from oslo_log import log as logging
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from moorage import errors
from moorage.cleanup import totals
from moorage.db import MICROSECONDS, Database, read_now
from moorage.work.tables import workers

__all__ = ["CleanupCollector"]

LOG = logging.getLogger(__name__)
_ROWS = sa.select(
    workers.c.resource_type, workers.c.status, workers.c.phase, sa.func.count(), sa.func.min(workers.c.created_at)
).group_by(workers.c.resource_type, workers.c.status, workers.c.phase)
_EXPIRED = sa.select(workers.c.resource_type, sa.func.count()).where(
    workers.c.owner.is_not(None), workers.c.expires_at < sa.bindparam("moment")
)


class CleanupCollector:
    """Counts operations in progress by type, status and phase, their age, claims of orphans and outcomes of cleanup.

    Four statements each time.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def describe(self) -> list[Any]:
        """Nothing beforehand: no statement runs when it is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Returns the metrics; none when the store is away."""
        rows = GaugeMetricFamily(
            "moorage_workers", "Operations in progress", labels=["resource_type", "status", "phase"]
        )
        oldest = GaugeMetricFamily(
            "moorage_workers_oldest_seconds",
            "Age of the oldest operation in progress",
            labels=["resource_type", "status", "phase"],
        )
        expired = GaugeMetricFamily(
            "moorage_workers_expired", "Operations whose owner's lease has expired", labels=["resource_type"]
        )
        labels = ["resource_type", "outcome"]
        outcomes = CounterMetricFamily("moorage_cleanup_outcomes", "What became of orphans", labels=labels)
        seconds = CounterMetricFamily("moorage_cleanup_seconds", "Time spent on orphans, by outcome", labels=labels)
        claims = CounterMetricFamily(
            "moorage_cleanup_claims", "Claims of orphans, by how they ended", labels=["resource_type", "result"]
        )
        try:
            with self._database.read() as tx:
                moment = read_now(tx)
                for kind, status, phase, count, first in tx.execute(_ROWS):
                    rows.add_metric([kind, status, phase], count)
                    oldest.add_metric([kind, status, phase], max(0, moment - first) / MICROSECONDS)
                for kind, count in tx.execute(_EXPIRED.group_by(workers.c.resource_type), {"moment": moment}):
                    expired.add_metric([kind], count)
                for (kind, outcome), total in totals.outcomes(tx).items():
                    outcomes.add_metric([kind, outcome], total.number)
                    seconds.add_metric([kind, outcome], total.seconds)
                for (kind, result), count in totals.claims(tx).items():
                    claims.add_metric([kind, result], count)
        except errors.MoorageError as error:
            LOG.warning("The metrics of cleanup cannot be read: %s", error.message)
            return
        yield from (rows, oldest, expired, claims, outcomes, seconds)
