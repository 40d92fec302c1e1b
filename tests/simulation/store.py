# SPDX-License-Identifier: Apache-2.0
"""What both engines' databases have in common: production's database objects with points, virtual time and faults.

Objects of :class:`SimDatabase` are kept between schedules, because SQLAlchemy caches compiled statements in them.
"""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from typing_extensions import override

from moorage import randomness, threads
from moorage.clock import Clock
from moorage.db import Database
from moorage.db import database as database_module
from tests.simulation.kernel import Kernel, Process

__all__ = ["EPOCH", "Backing", "Compiled", "Fault", "SimDatabase", "Site"]

#: Seconds since the Unix epoch at true second 0.
EPOCH = 1_800_000_000
#: From the kind of point, and whether the transaction writes, to the name of an error that the driver raises there.
Fault = Callable[[str, bool], str | None]


class Site(abc.ABC):
    """What the databases of one schedule share.

    :ivar ahead: seconds by which the database's clock is ahead.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.fault: Fault = lambda kind, writer: None
        #: Looks at what must hold after each commit.
        self.after_commit: Callable[[], None] = lambda: None
        self.ahead = 0.0

    def time(self) -> float:
        """The database's time: seconds since the Unix epoch."""
        return EPOCH + self.ahead + self.kernel.now

    @abc.abstractmethod
    def rows(self, statement: str, values: Sequence[Any]) -> list[Any]:
        """Read committed rows behind the control plane's back; ``?`` marks parameters."""

    @abc.abstractmethod
    def error(self, what: str, connection: Any) -> Exception:
        """The driver's error for a fault: "busy", "lost", "full", or "unknown" (the connection ended after COMMIT)."""

    @abc.abstractmethod
    def cut(self, connections: Sequence[Any]) -> None:
        """End connections as when the server ends them: open transactions are rolled back."""


class Compiled(dict[Any, Any]):
    """Compiled statements of all database objects of an engine: their dialects, the first part of each key, are alike."""

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key[1:], default)

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key[1:], value)


class SimDatabase(Database, abc.ABC):
    """A database object that one simulated process after another uses."""

    site: Site | None = None

    def __init__(self, url: str, compiled: Compiled) -> None:
        self._compiled = compiled
        # Its numbers come from open_for: whether an object is made in a schedule must not change what the schedule draws.
        super().__init__(url, pool_size=20, random=random.Random(0))
        # Forks are the simulation's own: each child gives every object a new pool.
        database_module._LIVING.discard(self)
        self.connections: list[Any] = []
        # SQLAlchemy holds a real lock during an engine's first connection; no other thread may run then.
        for each in (self._writers, self._readers):
            each.engine.connect().close()
            each.dispose()

    def open_for(self, site: Any, process: Process, clock: Clock) -> None:
        """Belong to a process of a schedule from now on; what the one before left open is its own."""
        self.site = site
        self._clock = clock
        self._random = randomness.generator()
        self._local = threads.local()
        self.recorded = threads.event()
        self.service = process.name
        if not self._keeps(site):
            self.connections = []
            for each in (self._writers, self._readers):
                each.dispose(close=False)
        process.on_kill.append(self.cut)

    def _keeps(self, site: Any) -> bool:
        """Whether the connections of the process before may serve this one."""
        return False

    def let_go(self) -> None:
        """The schedule is over."""
        self.cut()

    def cut(self) -> None:
        """Lose all connections."""
        if self.site is not None:
            self.site.cut(self.connections)
        self.connections.clear()

    @override
    def _engine(self, *, writer: bool) -> sa.Engine:
        engine = super()._engine(writer=writer)
        engine._compiled_cache = self._compiled
        # A thread must never wait for a connection in a lock of SQLAlchemy's.
        engine.pool._max_overflow = 50  # type: ignore[attr-defined]
        self._hook_dialect(engine.dialect, writer)
        event.listen(engine, "do_connect", self._connecting)
        event.listen(engine, "connect", self._connected)
        return engine

    @abc.abstractmethod
    def _hook_dialect(self, dialect: Any, writer: bool) -> None:
        """Put points around statements and commits."""

    def _point(
        self, kind: str, what: str, writer: bool, connection: Any, *, guarded: bool = False, more: object = None
    ) -> None:
        if self.site is None:
            return
        self.site.kernel.point(kind, what, guarded=guarded, more=more)
        fault = self.site.fault(kind, writer)
        if fault is not None:
            raise self.site.error(fault, connection)

    def _connecting(self, dialect: Any, record: Any, cargs: Any, cparams: Any) -> Any:
        """Change the arguments of a connection, or give one."""

    def _connected(self, connection: Any, _record: Any) -> None:
        if self.site is not None:
            self.connections.append(connection)


class Backing(abc.ABC):
    """An engine's database: one that is filled once, and brought back into that state for each schedule.

    :ivar url: where it is while it is filled.
    """

    url: str

    def __init__(self) -> None:
        self._free: list[SimDatabase] = []
        self._used: list[SimDatabase] = []
        self._compiled = Compiled()

    @abc.abstractmethod
    def filled(self) -> None:
        """The tables are there, with what each schedule begins with."""

    @abc.abstractmethod
    def site(self, kernel: Kernel, folder: str) -> Site:
        """The database of one schedule, in its first state."""

    @abc.abstractmethod
    def make(self) -> SimDatabase:
        """One more database object."""

    def database(self) -> SimDatabase:
        """One that no process of this schedule has."""
        found = self._free.pop(0) if self._free else self.make()
        self._used.append(found)
        return found

    def disconnect(self) -> None:  # noqa: B027  (not every engine has to)
        """The schedule is over; its threads are ended next."""

    def release(self) -> None:
        """The threads of the schedule have ended."""
        for each in self._used:
            each.let_go()
            each.site = None
        self._free[:0] = self._used
        self._used.clear()
