# SPDX-License-Identifier: Apache-2.0
"""Hangs and exits of plugins: kept in the store, counted in memory.

No request reads them from the store. A scheduler refreshes its counts periodically, by one statement for all plugins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from moorage.db import MICROSECONDS, Database, now
from moorage.scheduling.tables import plugin_incidents

__all__ = ["REFRESH_INTERVAL", "StoredPluginFailures"]

#: Seconds between two readings of the counts.
REFRESH_INTERVAL = 5.0
_COUNTS = (
    sa.select(plugin_incidents.c.plugin, sa.func.count())
    .where(plugin_incidents.c.at > now() - sa.bindparam("window_micros", type_=sa.BigInteger))
    .group_by(plugin_incidents.c.plugin)
)


class StoredPluginFailures:
    """See :class:`moorage.scheduling.plugin_runner.PluginFailureLog`.

    :param window: how many seconds back incidents count; called at each refresh.
    """

    def __init__(self, database: Database, window: Callable[[], float]) -> None:
        self._database = database
        self._window = window
        self._counts: dict[str, int] = {}

    def record(self, plugin: str) -> None:
        """Write one incident, and remove those that are older than a day."""
        self._counts[plugin] = self._counts.get(plugin, 0) + 1

        def work(tx: sa.Connection) -> None:
            tx.execute(sa.insert(plugin_incidents).values(plugin=plugin, at=now()))
            tx.execute(sa.delete(plugin_incidents).where(plugin_incidents.c.at < now() - 86_400 * MICROSECONDS))

        self._database.run(work)

    def count(self, plugin: str) -> int:
        """Returns how many incidents the plugin had within the window, as of the last refresh."""
        return self._counts.get(plugin, 0)

    def refresh(self) -> None:
        """Read the counts of all plugins.

        :raises Unavailable: the store is away; the old counts stay.
        """
        with self._database.read() as tx:
            self.refresh_in(tx)

    def refresh_in(self, transaction: Any) -> None:
        """:meth:`refresh` in the caller's transaction."""
        values = {"window_micros": int(self._window() * MICROSECONDS)}
        self._counts = {plugin: int(count) for plugin, count in transaction.execute(_COUNTS, values)}
