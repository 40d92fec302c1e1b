# SPDX-License-Identifier: Apache-2.0
"""The memory engine: SQLite in a file on a RAM disk, one for each process that runs schedules.

SQLite has one writer: writers wait for :class:`Turn`, and never inside of SQLite. Each schedule finds the rows of the template.
The connections that are idle at its end serve the next schedule: an open connection knows the tables and its statements already.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from moorage import errors
from moorage.clock import Clock
from tests.simulation.kernel import Kernel, Process, SimThread
from tests.simulation.primitives import wake_all
from tests.simulation.store import Backing, SimDatabase, Site

__all__ = ["Memory"]

_JULIAN = 2440587.5
#: Result codes of SQLite for what a driver reports: a lost race, a lost connection or disk, a full disk.
_CODES = {
    "busy": sqlite3.SQLITE_BUSY,
    "lost": sqlite3.SQLITE_IOERR,
    "unknown": sqlite3.SQLITE_IOERR,
    "full": sqlite3.SQLITE_FULL,
}


class _MemorySite(Site):
    """A file."""

    def __init__(self, kernel: Kernel, path: str, eyes: sqlite3.Connection) -> None:
        super().__init__(kernel)
        self.path = path
        self.turn = Turn(kernel)
        self._eyes = eyes

    @override
    def rows(self, statement: str, values: Sequence[Any]) -> list[Any]:
        return self._eyes.execute(statement, values).fetchall()

    @override
    def error(self, what: str, connection: Any) -> Exception:
        error = sqlite3.OperationalError(f"simulated: {what}")
        error.sqlite_errorcode = _CODES[what]
        return error

    @override
    def cut(self, connections: Sequence[Any]) -> None:
        for connection in connections:
            with contextlib.suppress(sqlite3.Error):
                connection.rollback()
                connection.close()


class Turn:
    """The right to write to the file; a process that dies loses it."""

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

    def __init__(self, database: _MemoryDatabase) -> None:
        self._database = database

    @contextlib.contextmanager
    def acquire(self, seconds: float) -> Iterator[None]:
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


class _MemoryDatabase(SimDatabase):
    """A database object on SQLite."""

    site: _MemorySite | None = None

    #: The file whose connections are all idle, so that they may serve another process.
    _idle_on = ""

    @override
    def let_go(self) -> None:
        """Keep the connections of a process that lives and uses none of them."""
        if self.site is not None and not self._is_busy() and self.connections and all(map(_is_idle, self.connections)):
            self._idle_on = self.site.path
        else:
            self.cut()

    @override
    def _keeps(self, site: Any) -> bool:
        found, self._idle_on = self._idle_on, ""
        return found == site.path and not self._is_busy()

    def _is_busy(self) -> bool:
        return any(each.lent for each in (self._writers, self._readers))

    @override
    def open_for(self, site: Any, process: Process, clock: Clock) -> None:
        super().open_for(site, process, clock)
        process.on_kill.append(lambda: site.turn.drop(process))

    @override
    def _open(self) -> None:
        super()._open()
        self._queue = _Queue(self)  # type: ignore[assignment]

    @override
    def _hook_dialect(self, dialect: Any, writer: bool) -> None:
        execute, execute_many, commit = dialect.do_execute, dialect.do_executemany, dialect.do_commit
        kind = "write" if writer else "read"

        def do_execute(cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
            begins = statement.startswith("BEGIN")
            if not (begins and writer):  # its turn was the point
                self._point(kind, statement[:60], writer, None, guarded=not writer, more=parameters)
            execute(cursor, statement, parameters, context)

        def do_executemany(cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
            self._point(kind, statement[:60], writer, None, more=parameters)
            execute_many(cursor, statement, parameters, context)

        def do_commit(connection: Any) -> None:
            self._point("commit", "", writer, None)
            commit(connection)
            if self.site is not None:
                self.site.after_commit()
                # The turn ends with COMMIT here: the next writer must not wait for the connection in a lock of SQLAlchemy's.
                self.site.turn.give()
            self._point("committed", "", writer, None, guarded=True)

        dialect.do_execute, dialect.do_executemany, dialect.do_commit = do_execute, do_executemany, do_commit

    @override
    def _connecting(self, dialect: Any, record: Any, cargs: Any, cparams: Any) -> Any:
        if self.site is not None:
            cargs[0] = self.site.path
            cparams |= {"timeout": 0, "cached_statements": 1000}

    @override
    def _connected(self, connection: Any, _record: Any) -> None:
        super()._connected(connection, _record)
        if self.site is not None:
            connection.create_function("julianday", 1, self._julian)

    def _julian(self, _text: str) -> float:
        """What julianday('now') says; of no schedule while the threads of one are being ended."""
        return 0.0 if self.site is None else self.site.time() / 86400.0 + _JULIAN


def _is_idle(connection: Any) -> bool:
    try:
        return not connection.in_transaction
    except sqlite3.Error:
        return False  # it is closed


class Memory(Backing):
    """One file for each process, which gets the rows of a template before each schedule."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self._template = Path(folder, "template.sqlite")
        self.url = f"sqlite:///{self._template}"
        self._content = b""
        self._restoring: list[str] = []
        self._pid = 0
        self._path = ""
        self._eyes: Any = None
        self._inherited: list[Any] = []

    @override
    def filled(self) -> None:
        self._content = self._template.read_bytes()
        with contextlib.closing(sqlite3.connect(self._template)) as filled:
            names = [name for (name,) in filled.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for name in names:
                self._restoring.append(f'DELETE FROM main."{name}"')
                if filled.execute(f'SELECT 1 FROM "{name}" LIMIT 1').fetchone():
                    self._restoring.append(f'INSERT INTO main."{name}" SELECT * FROM template."{name}"')

    @override
    def site(self, kernel: Kernel, folder: str) -> Site:
        if self._pid != os.getpid():
            self._begin()
        eyes = self._eyes
        eyes.execute("BEGIN IMMEDIATE")
        for statement in self._restoring:
            eyes.execute(statement)
        eyes.execute("COMMIT")
        return _MemorySite(kernel, self._path, eyes)

    def _begin(self) -> None:
        """Make the file of this process. Its parent's connections must not be closed here."""
        self._inherited.append(self._eyes)
        self._pid = os.getpid()
        self._path = str(Path(self._folder, f"store-{self._pid}.sqlite"))
        Path(self._path).write_bytes(self._content)
        self._eyes = sqlite3.connect(
            self._path, check_same_thread=False, isolation_level=None, uri=True, cached_statements=500
        )
        self._eyes.execute("PRAGMA synchronous=OFF")
        self._eyes.execute("ATTACH ? AS template", (f"file:{self._template}?immutable=1",))

    @override
    def make(self) -> SimDatabase:
        return _MemoryDatabase(self.url, self._compiled)
