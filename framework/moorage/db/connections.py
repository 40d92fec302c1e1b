# SPDX-License-Identifier: Apache-2.0
"""Lends the connections of an engine to transactions, and keeps some checked out of the engine's pool in between.

SQLAlchemy makes several objects to check a connection out of its pool and in again. On SQLite that takes as long as a short
transaction does otherwise.
"""

from __future__ import annotations

from typing import cast

import sqlalchemy as sa
from sqlalchemy import pool

from moorage.db.engines import ENDED
from moorage.db.prepared import PreparedConnection

__all__ = ["Connections"]


class Connections:
    """Lends the connections of one engine. Safe for use by several threads.

    :param keep: keep as many connections checked out between transactions as the pool would keep. Otherwise each of them returns
        to the pool, which can check whether it still lives.
    """

    def __init__(self, engine: sa.Engine, *, keep: bool) -> None:
        self.engine = engine
        self._keep = keep
        self._kept: list[PreparedConnection] = []

    @property
    def lent(self) -> int:
        """The number of connections in use."""
        return self._pool.checkedout() - len(self._kept)

    def take(self) -> PreparedConnection:
        """Returns an idle connection, or opens one.

        :raises sqlalchemy.exc.TimeoutError: all were in use for longer than the pool waits.
        """
        try:
            return self._kept.pop()
        except IndexError:
            return cast(PreparedConnection, self.engine.connect())

    def release(self, connection: PreparedConnection, of: sa.Pool) -> None:
        """Keeps a connection for the next transaction, or returns it to the pool.

        :param of: the engine's pool at the moment of :meth:`take`.
        """
        if not connection.invalidated:
            if self.engine.pool is not of:
                # Disposed of meanwhile: nothing would use, or close, it again.
                connection.invalidate()
            # Threads wait at the pool only while more connections are checked out than it keeps: then they return to it.
            elif self._keep and connection.info.pop(ENDED, False) and self._pool.checkedout() <= self._pool.size():
                self._kept.append(connection)
                return
        connection.close()

    def dispose(self, *, close: bool = True) -> None:
        """Replaces the pool, and forgets idle connections; see :meth:`sqlalchemy.Engine.dispose`.

        :param close: close the connections that are not in use. Those of a parent process must not be closed.
        """
        self.engine.dispose(close=close)
        while self._kept:
            connection = self._kept.pop()
            if close:
                connection.invalidate()
                connection.close()

    @property
    def _pool(self) -> pool.QueuePool:
        return cast(pool.QueuePool, self.engine.pool)
