# SPDX-License-Identifier: Apache-2.0
"""Hangs and exits of plugins, remembered in the store; read seldom."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.clock import Clock
from moorage.db import MICROSECONDS, Database, now
from moorage.scheduling.tables import plugin_incidents

__all__ = ["StoredIncidents"]

#: Seconds for which a count is believed; the breaker is asked for every request.
_FRESH = 5.0


class StoredIncidents:
    """See :class:`moorage.scheduling.guard.IncidentLog`."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._counts: dict[str, tuple[float, int]] = {}

    def record(self, plugin: str) -> None:
        """Write it down, and forget what is older than a day."""

        def work(tx: sa.Connection) -> None:
            tx.execute(sa.insert(plugin_incidents).values(plugin=plugin, at=now()))
            tx.execute(sa.delete(plugin_incidents).where(plugin_incidents.c.at < now() - 86_400 * MICROSECONDS))

        self._database.run(work)
        self._counts.pop(plugin, None)

    def count(self, plugin: str, window: float) -> int:
        """How many within ``window`` seconds; up to five seconds old."""
        known = self._counts.get(plugin)
        if known is not None and self._clock.monotonic() - known[0] < _FRESH:
            return known[1]
        query = sa.select(sa.func.count()).where(
            plugin_incidents.c.plugin == plugin, plugin_incidents.c.at > now() - int(window * MICROSECONDS)
        )
        with self._database.read() as tx:
            count = int(tx.execute(query).scalar_one())
        self._counts[plugin] = (self._clock.monotonic(), count)
        return count
