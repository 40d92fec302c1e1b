# SPDX-License-Identifier: Apache-2.0
"""The SQLite database of a simulation: production's engines with points, virtual time and faults around each statement.

One file for each schedule, copied from a template. Objects of :class:`SimDatabase` are kept between schedules, because SQLAlchemy
caches compiled statements in them. SQLite has one writer: writers wait for :class:`Turn`, and never inside of SQLite.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from typing_extensions import override

from moorage import errors, randomness, threads
from moorage.clock import Clock
from moorage.db import Database
from moorage.db import database as database_module
from tests.simulation.kernel import Kernel, Process, SimThread
from tests.simulation.primitives import wake_all

__all__ = ["Fault", "SimDatabase", "Site", "Turn"]

#: Seconds since the Unix epoch at true second 0.
EPOCH = 1_800_000_000
_JULIAN = 2440587.5
#: From the kind of point to an error that the driver raises there; None: none.
Fault = Callable[[str, bool], sqlite3.Error | None]


class Site:
    """What the databases of one schedule share."""

    def __init__(self, kernel: Kernel, path: str) -> None:
        self.kernel = kernel
        self.path = path
        self.turn = Turn(kernel)
        self.fault: Fault = lambda kind, writer: None
        #: Looks at what must hold after each commit.
        self.after_commit: Callable[[], None] = lambda: None
        #: Seconds by which the database's clock is ahead.
        self.ahead = 0.0

    def julian(self, _text: str) -> float:
        """What julianday('now') says."""
        return (EPOCH + self.ahead + self.kernel.now) / 86400.0 + _JULIAN


class Turn:
    """The right to write to the file; who dies loses it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._holder: SimThread | None = None
        self._waiters: list[SimThread] = []

    def take(self, seconds: float) -> None:
        """Wait for it, at most ``seconds``.

        :raises StoreBusy: it did not come in time.
        """
        kernel = self._kernel
        if kernel.current is None:
            return
        deadline = kernel.now + seconds
        kernel.point("writer", guarded=True)
        while self._holder is not None:
            if not kernel.block(self._waiters, max(0.0, deadline - kernel.now), "turn") and self._holder is not None:
                raise errors.StoreBusy(f"Others have been writing to the database for {seconds:g} seconds.")
        self._holder = kernel.current

    def give(self) -> None:
        """Let it go, if the running thread has it."""
        if self._holder is not None and self._holder is self._kernel.current:
            self._free()

    def drop(self, process: Process) -> None:
        """Take it from a process that is dead."""
        if self._holder is not None and self._holder.process is process:
            self._free()

    def _free(self) -> None:
        self._holder = None
        wake_all(self._kernel, self._waiters)


class _Queue:
    """In the place of :class:`moorage.db.queue.WritersQueue`."""

    def __init__(self, database: SimDatabase) -> None:
        self._database = database

    @contextlib.contextmanager
    def turn(self, seconds: float) -> Iterator[None]:
        site = self._database.site
        if site is None:
            yield
            return
        site.turn.take(seconds)
        try:
            yield
        finally:
            site.turn.give()

    def close(self) -> None:
        """Nothing is open."""


class SimDatabase(Database):
    """A database object that one simulated process after another uses."""

    site: Site | None = None

    def __init__(self, url: str) -> None:
        super().__init__(url, pool_size=20)
        # Forks are the simulation's own: each child gives every object a new pool.
        database_module._LIVING.discard(self)
        # SQLAlchemy holds a real lock during an engine's first connection; no other thread may run then.
        for engine in (self._write_engine, self._read_engine):
            engine.connect().close()
            engine.dispose()

    def open_for(self, site: Site, process: Process, clock: Clock) -> None:
        """Belong to a process of a schedule from now on; what the one before left open is its own."""
        self.site = site
        self._clock = clock
        self._random = randomness.generator()
        self._local = threads.local()
        self.connections: list[Any] = []
        for engine in (self._write_engine, self._read_engine):
            engine.dispose(close=False)
        process.on_kill.append(self._killed)
        process.on_kill.append(lambda: site.turn.drop(process))

    def cut(self) -> None:
        """Lose all connections, as when the server ends them: open transactions are rolled back."""
        for connection in self.connections:
            with contextlib.suppress(sqlite3.Error):
                connection.rollback()
                connection.close()
        self.connections.clear()

    def _killed(self) -> None:
        self.cut()

    @override
    def _open(self) -> None:
        super()._open()
        self._queue = _Queue(self)  # type: ignore[assignment]

    @override
    def _engine(self, *, writer: bool) -> sa.Engine:
        engine = super()._engine(writer=writer)
        # The turn ends with COMMIT here: the next writer must not wait for the connection in a lock of SQLAlchemy's.
        engine.pool._max_overflow = 50  # type: ignore[attr-defined]
        self._hook_dialect(engine.dialect, writer)
        event.listen(engine, "do_connect", self._connecting)
        event.listen(engine, "connect", self._connected)
        return engine

    def _hook_dialect(self, dialect: Any, writer: bool) -> None:
        """Put points around statements and commits."""
        execute, execute_many, commit = dialect.do_execute, dialect.do_executemany, dialect.do_commit
        kind = "write" if writer else "read"

        def do_execute(cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
            begins = statement.startswith("BEGIN")
            if not (begins and writer):  # its turn was the point
                self._point(kind, statement[:60], writer, guarded=not writer)
            execute(cursor, statement, parameters, context)

        def do_executemany(cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
            self._point(kind, statement[:60], writer)
            execute_many(cursor, statement, parameters, context)

        def do_commit(connection: Any) -> None:
            self._point("commit", "", writer)
            commit(connection)
            if self.site is not None:
                self.site.after_commit()
                self.site.turn.give()
            self._point("committed", "", writer, guarded=True)

        dialect.do_execute, dialect.do_executemany, dialect.do_commit = do_execute, do_executemany, do_commit

    def _point(self, kind: str, what: str, writer: bool, *, guarded: bool = False) -> None:
        if self.site is None:
            return
        self.site.kernel.point(kind, what, guarded=guarded)
        error = self.site.fault(kind, writer)
        if error is not None:
            raise error

    def _connecting(self, _dialect: Any, _record: Any, cargs: Any, cparams: Any) -> None:
        if self.site is not None:
            cargs[0] = self.site.path
            cparams["timeout"] = 0

    def _connected(self, connection: Any, _record: Any) -> None:
        if self.site is not None:
            connection.create_function("julianday", 1, self.site.julian)
            self.connections.append(connection)
