# SPDX-License-Identifier: Apache-2.0
"""What ``/metrics`` counts of licences each time it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from prometheus_client.core import GaugeMetricFamily

from acme_moorage.tables import licences
from moorage import errors
from moorage.db import Database

__all__ = ["LicenceCollector"]

_COUNTS = sa.select(licences.c.status, sa.func.count()).group_by(licences.c.status)


class LicenceCollector:
    """Licences by status. One statement each time."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def describe(self) -> list[Any]:
        """Nothing beforehand: no statement runs when it is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metric; none when the store is away."""
        found = GaugeMetricFamily("acme_licences", "Licences, by status", labels=["status"])
        try:
            with self._database.read() as tx:
                for status, count in tx.execute(_COUNTS):
                    found.add_metric([status], count)
        except errors.MoorageError:
            return
        yield found
