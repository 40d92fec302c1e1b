# SPDX-License-Identifier: Apache-2.0
"""The engine of stepped servers: PostgreSQL and MariaDB, one statement at a time, in an order that the seed decides.

Each statement is a point. A statement that does not end soon is looked up among the server's lock waits, as PostgreSQL's
isolationtester does. If it waits for a lock, its thread gives the baton away. After each further statement the stepper waits
until every such statement has ended or waits for a lock again. So which thread can run depends on locks and not on speed.

What repeats from a seed is the order of steps: which thread ran which statement, and which statements waited. The choice of a
deadlock's victim is the server's.
"""

from __future__ import annotations

import abc
import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import pymysql
import sqlalchemy as sa
from typing_extensions import override

from tests import servers
from tests.simulation.kernel import Kernel, SimThread, Stalled
from tests.simulation.store import Backing, Compiled, SimDatabase, Site

__all__ = ["SERVERS", "Servers"]

#: A search for work: it leaves out what others have locked. Other statements lock rows in one order, and wait for them.
_SEARCH = re.compile(r"SELECT .*\bFROM (workers|periodic_claims)\b", re.DOTALL)
#: Real seconds after which a statement is looked up among the lock waits. PostgreSQL looks for deadlocks after 0.001.
SOON = 0.002
#: Real seconds between two looks.
AGAIN = 0.0004
#: Real seconds after which a ring of lock waits that the server does not break is taken for waits.
RING = 2.0
#: Virtual seconds that a statement waits for a lock, as [database] lock_timeout says.
LOCK_TIMEOUT = 10.0
#: Schedules after which dead rows are removed.
_CLEAN = 25


class _Server(abc.ABC):
    """What differs between PostgreSQL and MariaDB."""

    name: str
    #: Text of a statement that reads the database's clock.
    clock: str
    #: Whether :meth:`stop` works: then only one connection runs at any moment, and the seed decides who is first at a row.
    stops = False
    #: The driver's classes of simulated errors, and their arguments.
    errors: Mapping[str, Callable[[], Exception]]

    def __init__(self, url: str) -> None:
        self.url = sa.make_url(url)

    @abc.abstractmethod
    def control(self) -> Any:
        """A connection of the stepper's own; each statement is a transaction."""

    @abc.abstractmethod
    def literal(self, seconds: float) -> str:
        """What stands in the place of the clock; seconds since the Unix epoch."""

    @abc.abstractmethod
    def hook(self, connection: Any, wait: Callable[[Any, int], None]) -> None:
        """Call ``wait`` with the connection and its file before it waits for the server's answer."""

    @abc.abstractmethod
    def ident(self, connection: Any) -> int:
        """What the server calls the connection."""

    @abc.abstractmethod
    def is_idle(self, connection: Any) -> bool:
        """Whether the connection is open and no transaction is."""

    @abc.abstractmethod
    def waits(self, control: Any, idents: Sequence[int]) -> Mapping[int, frozenset[int]]:
        """Connections of ``idents`` that wait for a lock now, with those they wait for, as far as the server says."""

    @abc.abstractmethod
    def end(self, control: Any, idents: Sequence[int]) -> None:
        """End connections; returns when their transactions are rolled back."""

    @abc.abstractmethod
    def cancel(self, control: Any, ident: int) -> None:
        """End the statement that waits."""

    def stop(self, ident: int) -> None:  # noqa: B027  (only PostgreSQL can)
        """Let a connection that waits for a lock stand still when it gets the lock, if the server can do that."""

    def resume(self, ident: int) -> None:  # noqa: B027
        """Let it go on."""

    def end_stopped(self, control: Any) -> None:  # noqa: B027
        """End the connections that a process had stopped when it was killed: they hold locks."""

    @abc.abstractmethod
    def save(self, control: Any) -> None:
        """Remember all rows."""

    @abc.abstractmethod
    def restore(self, control: Any, clean: bool) -> None:
        """Bring all rows back."""


def _postgresql_error(code: str, text: str) -> Callable[[], Exception]:
    made = type(f"Simulated{code}", (psycopg2.errors.lookup(code),), {"pgcode": code})
    return lambda: made(text)


class _Postgresql(_Server):
    name = "postgresql"
    clock = "clock_timestamp()"
    errors = {
        "busy": _postgresql_error("40001", "could not serialize access (simulated)"),
        "full": _postgresql_error("53100", "could not extend file: No space left on device (simulated)"),
        "unknown": lambda: psycopg2.OperationalError("server closed the connection unexpectedly"),
        "timeout": _postgresql_error("55P03", "canceling statement due to lock timeout (simulated)"),
    }
    stops = True
    _hooks: dict[int, tuple[Any, Callable[[Any, int], None]]] = {}

    @override
    def control(self) -> Any:
        psycopg2.extensions.set_wait_callback(self._wait)
        made = psycopg2.connect(
            host=self.url.host, port=self.url.port, user=self.url.username, password=self.url.password,
            dbname=self.url.database,
        )  # fmt: skip
        made.autocommit = True
        return made

    @staticmethod
    def _wait(connection: Any) -> None:
        """Psycopg calls this in the place of a wait inside of C."""
        _, wait = _Postgresql._hooks.get(id(connection), (None, None))
        while (state := connection.poll()) != psycopg2.extensions.POLL_OK:
            if state == psycopg2.extensions.POLL_WRITE:
                select.select([], [connection.fileno()], [])
            elif wait is None:
                select.select([connection.fileno()], [], [])
            else:
                wait(connection, connection.fileno())

    @override
    def literal(self, seconds: float) -> str:
        return f"to_timestamp({seconds:.6f})"

    @override
    def hook(self, connection: Any, wait: Callable[[Any, int], None]) -> None:
        self._hooks[id(connection)] = connection, wait

    @override
    def ident(self, connection: Any) -> int:
        return int(connection.info.backend_pid)

    @override
    def is_idle(self, connection: Any) -> bool:
        idle = psycopg2.extensions.TRANSACTION_STATUS_IDLE
        return not connection.closed and connection.info.transaction_status == idle

    @override
    def waits(self, control: Any, idents: Sequence[int]) -> Mapping[int, frozenset[int]]:
        with control.cursor() as cursor:
            cursor.execute("SELECT p, pg_blocking_pids(p) FROM unnest(%s) p", (list(idents),))
            return {pid: frozenset(by) for pid, by in cursor.fetchall() if by}

    @override
    def end(self, control: Any, idents: Sequence[int]) -> None:
        with control.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(p, 10000) FROM unnest(%s) p", (list(idents),))

    @override
    def cancel(self, control: Any, ident: int) -> None:
        with control.cursor() as cursor:
            cursor.execute("SELECT pg_cancel_backend(%s)", (ident,))

    @override
    def stop(self, ident: int) -> None:
        # Asleep: it holds no lock of the server's own, such as the one of its search for deadlocks.
        while Path(f"/proc/{ident}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(AGAIN)
        os.kill(ident, signal.SIGSTOP)

    @override
    def resume(self, ident: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ident, signal.SIGCONT)

    @override
    def save(self, control: Any) -> None:
        with control.cursor() as cursor:
            for name, value in (("deadlock_timeout", "1ms"), ("autovacuum", "off")):
                cursor.execute(f"ALTER SYSTEM SET {name} = '{value}'")
            cursor.execute("SELECT pg_reload_conf()")
            cursor.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")
            tables = [row[0] for row in cursor.fetchall()]
            cursor.execute("CREATE SCHEMA saved")
            self._restoring = ["SET session_replication_role = replica"]
            for table in tables:
                self._restoring.append(f"DELETE FROM public.{table}")
                cursor.execute(f"SELECT count(*) FROM public.{table}")
                if cursor.fetchone()[0]:
                    cursor.execute(f"CREATE TABLE saved.{table} AS TABLE public.{table}")
                    self._restoring.append(f"INSERT INTO public.{table} SELECT * FROM saved.{table}")
            self._restoring.append("SET session_replication_role = origin")

    @override
    def end_stopped(self, control: Any) -> None:
        with control.cursor() as cursor:
            cursor.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database()")
            stopped = [pid for (pid,) in cursor.fetchall() if _state(pid) == "T"]
        for pid in stopped:
            self.resume(pid)
        if stopped:
            self.end(control, stopped)

    @override
    def restore(self, control: Any, clean: bool) -> None:
        with control.cursor() as cursor:
            cursor.execute(";".join(self._restoring))
            if clean:
                cursor.execute("VACUUM")


def _state(process: int) -> str:
    """What a process does, by the letter that the kernel has for it; empty: it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def _mariadb_error(number: int, text: str) -> Callable[[], Exception]:
    return lambda: pymysql.err.OperationalError(number, text)


class _Mariadb(_Server):
    name = "mariadb"
    clock = "SYSDATE(6)"
    errors = {
        "busy": _mariadb_error(1213, "Deadlock found when trying to get lock (simulated)"),
        "full": _mariadb_error(1021, "Disk full (simulated)"),
        "unknown": _mariadb_error(2013, "Lost connection to MySQL server during query"),
        "timeout": _mariadb_error(1205, "Lock wait timeout exceeded (simulated)"),
    }
    _TRANSACTION = re.compile(r"^---TRANSACTION ", re.MULTILINE)
    _THREAD = re.compile(r"thread id (\d+)")

    @override
    def control(self) -> Any:
        return pymysql.connect(
            host=self.url.host, port=self.url.port or 0, user=self.url.username, password=str(self.url.password),
            database=self.url.database, autocommit=True, charset="utf8mb4", ssl_disabled=True,
        )  # fmt: skip

    @override
    def literal(self, seconds: float) -> str:
        return f"FROM_UNIXTIME({seconds:.6f})"

    @override
    def hook(self, connection: Any, wait: Callable[[Any, int], None]) -> None:
        read = type(connection)._read_query_result

        def waiting(unbuffered: bool = False) -> Any:
            wait(connection, connection._sock.fileno())
            return read(connection, unbuffered)

        connection._read_query_result = waiting

    @override
    def ident(self, connection: Any) -> int:
        return int(connection.thread_id())

    @override
    def is_idle(self, connection: Any) -> bool:
        return bool(connection.open) and not connection.server_status & 1

    @override
    def waits(self, control: Any, idents: Sequence[int]) -> Mapping[int, frozenset[int]]:
        # The tables of the information schema are a copy that is up to 0.1 s old; this is not.
        with control.cursor() as cursor:
            cursor.execute("SHOW ENGINE INNODB STATUS")
            text = cursor.fetchone()[2]
        found = {}
        for part in self._TRANSACTION.split(text)[1:]:
            number = self._THREAD.search(part)
            if number is not None and int(number[1]) in idents and "\nLOCK WAIT" in part[: number.start()]:
                found[int(number[1])] = frozenset[int]()
        return found

    @override
    def end(self, control: Any, idents: Sequence[int]) -> None:
        with control.cursor() as cursor:
            for ident in idents:
                with contextlib.suppress(pymysql.Error):
                    cursor.execute(f"KILL CONNECTION {ident}")
            numbers = ", ".join(map(str, idents))
            while idents:
                cursor.execute(f"SELECT count(*) FROM information_schema.processlist WHERE id IN ({numbers})")
                if not cursor.fetchone()[0]:
                    break
                time.sleep(AGAIN)

    @override
    def cancel(self, control: Any, ident: int) -> None:
        with control.cursor() as cursor:
            cursor.execute(f"KILL QUERY {ident}")

    @override
    def save(self, control: Any) -> None:
        schema = f"{self.url.database}_saved"
        with control.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {schema}")
            cursor.execute("SHOW TABLES")
            tables = sorted(row[0] for row in cursor.fetchall())
            self._restoring = ["SET foreign_key_checks = 0", "BEGIN"]
            for table in tables:
                self._restoring.append(f"DELETE FROM {table}")
                cursor.execute(f"SELECT count(*) FROM {table}")
                if cursor.fetchone()[0]:
                    cursor.execute(f"CREATE TABLE {schema}.{table} AS SELECT * FROM {table}")
                    self._restoring.append(f"INSERT INTO {table} SELECT * FROM {schema}.{table}")
            # Deleted rows are locked too until they are purged.
            self._restoring += ["COMMIT", "SET GLOBAL innodb_max_purge_lag_wait = 0"]

    @override
    def restore(self, control: Any, clean: bool) -> None:
        with control.cursor() as cursor:
            for statement in self._restoring:
                cursor.execute(statement)


SERVERS: Mapping[str, type[_Server]] = {kind.name: kind for kind in (_Postgresql, _Mariadb)}


class _Waiting:
    """A statement that waits for a lock."""

    def __init__(self, thread: SimThread, file: int) -> None:
        self.thread = thread
        self.file = file


class _SteppedSite(Site):
    """A database on a server."""

    def __init__(self, kernel: Kernel, server: _Server, control: Any) -> None:
        super().__init__(kernel)
        self.server = server
        self._control = control
        self._clock = server.clock
        #: By the server's name for the connection, in the order in which they began to wait.
        self._waiting: dict[int, _Waiting] = {}
        #: By the server's name for the connection: the statement that runs.
        self._running: dict[int, str] = {}
        #: Connections whose statement waited too long.
        self._late: set[int] = set()

    @override
    def rows(self, statement: str, values: Sequence[Any]) -> list[Any]:
        with self._control.cursor() as cursor:
            cursor.execute(statement.replace("?", "%s"), values or None)
            return [tuple(row) for row in cursor.fetchall()]

    @override
    def error(self, what: str, connection: Any) -> Exception:
        if what in ("lost", "unknown"):
            self.cut([connection])
        return self.server.errors["unknown" if what == "lost" else what]()

    @override
    def cut(self, connections: Sequence[Any]) -> None:
        idents = [self.server.ident(each) for each in connections if not self._is_closed(each)]
        if idents:
            for ident in idents:
                # It may have the lock already, and stand still until its thread runs.
                self._waiting.pop(ident, None)
                self.server.resume(ident)
            self.server.end(self._control, idents)
            self.settle()

    @staticmethod
    def _is_closed(connection: Any) -> bool:
        return bool(connection.closed) if hasattr(connection, "closed") else not connection.open

    def step(self, connection: Any, statement: str, execute: Callable[[str], None]) -> None:
        """Run a statement; other threads run while it waits for a lock."""
        self._running[self.server.ident(connection)] = statement
        try:
            execute(statement.replace(self._clock, self.server.literal(self.time())))
        except Exception as error:
            if self.server.ident(connection) in self._late:
                self._late.discard(self.server.ident(connection))
                raise self.server.errors["timeout"]() from error
            raise
        finally:
            self.settle()

    def wait(self, connection: Any, file: int) -> None:
        """Called by the driver: wait until the server answers."""
        if self.kernel.current is None:
            select.select([file], [], [])
            return
        if is_readable(file, SOON):
            return
        ident = self.server.ident(connection)
        seen = 0
        began = time.monotonic()
        while True:
            waits = self.server.waits(self._control, [*self._waiting, ident])
            if is_readable(file, 0.0):
                return
            if ident in waits and (not in_ring(ident, waits) or time.monotonic() > began + RING):
                seen += 1
                if seen == 2:  # MariaDB looks for a deadlock after it has begun to wait
                    break
            else:
                seen = 0
            if is_readable(file, AGAIN):
                return
        self._hold(ident, file)
        self.wait(connection, file)

    def _hold(self, ident: int, file: int) -> None:
        """Let others run until the lock is free, or the wait is too long."""
        me = self.kernel.current
        assert me is not None  # wait() looked
        if _SEARCH.match(self._running.get(ident, "")):
            self.kernel.violated(f"a search waits for a lock: {self._running[ident]}")
        self._waiting[ident] = _Waiting(me, file)
        self.server.stop(ident)
        woken = self.kernel.block(None, LOCK_TIMEOUT, "locked")
        self._waiting.pop(ident, None)
        if not woken:
            self._late.add(ident)
            self.server.cancel(self._control, ident)
        self.server.resume(ident)

    def settle(self) -> None:
        """Wait until each statement that waited has ended or waits again; wake the threads of those that have ended."""
        if not self._waiting or self.kernel.current is None:
            return
        ended = self._granted() if self.server.stops else self._ended()
        for ident in ended:
            self.kernel.wake(self._waiting.pop(ident).thread)

    def _granted(self) -> Sequence[int]:
        waits = self.server.waits(self._control, list(self._waiting))
        return [ident for ident in self._waiting if ident not in waits]

    def _ended(self) -> Sequence[int]:
        began = time.monotonic()
        while True:
            running = [ident for ident, each in self._waiting.items() if not is_readable(each.file, 0.0)]
            waits = self.server.waits(self._control, running) if running else {}
            if all(ident in waits or is_readable(self._waiting[ident].file, 0.0) for ident in running):
                return [ident for ident, each in self._waiting.items() if is_readable(each.file, 0.0)]
            if time.monotonic() > began + RING:
                raise Stalled(f"some of the connections {running} neither answer nor wait for a lock")
            time.sleep(AGAIN)


def is_readable(file: int, seconds: float) -> bool:
    """Whether an answer is there within real seconds."""
    return bool(select.select([file], [], [], seconds)[0])


def in_ring(ident: int, waits: Mapping[int, frozenset[int]]) -> bool:
    """Whether it waits for itself, over others."""
    seen: set[int] = set()
    following = list(waits.get(ident, ()))
    while following:
        each = following.pop()
        if each == ident:
            return True
        if each not in seen:
            seen.add(each)
            following += waits.get(each, ())
    return False


class _SteppedDatabase(SimDatabase):
    """A database object on a server. Connections that have no transaction at the end of a schedule are used again."""

    site: _SteppedSite | None = None

    def __init__(self, url: str, compiled: Compiled, backing: Servers) -> None:
        self._backing = backing
        super().__init__(url, compiled)

    @override
    def _hook_dialect(self, dialect: Any, writer: bool) -> None:
        execute, execute_many = dialect.do_execute, dialect.do_executemany
        commit, roll_back = dialect.do_commit, dialect.do_rollback
        kind = "write" if writer else "read"

        def do_execute(cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
            if self.site is None:
                execute(cursor, statement, parameters, context)
                return
            self._point(kind, statement[:60], writer, cursor.connection, guarded=True, more=parameters)
            self.site.step(cursor.connection, statement, lambda text: execute(cursor, text, parameters, context))

        def do_executemany(cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
            if self.site is None:
                execute_many(cursor, statement, parameters, context)
                return
            self._point(kind, statement[:60], writer, cursor.connection, guarded=True, more=parameters)
            self.site.step(cursor.connection, statement, lambda text: execute_many(cursor, text, parameters, context))

        def do_commit(connection: Any) -> None:
            if self.site is None or self.site.kernel.current is None:
                commit(connection)
                return
            self._point("commit", "", writer, raw(connection))
            commit(connection)
            self.site.settle()
            self.site.after_commit()
            self._point("committed", "", writer, raw(connection), guarded=True)

        def do_rollback(connection: Any) -> None:
            roll_back(connection)
            if self.site is not None:
                self.site.settle()

        dialect.do_execute, dialect.do_executemany = do_execute, do_executemany
        dialect.do_commit, dialect.do_rollback = do_commit, do_rollback

    @override
    def _connecting(self, dialect: Any, record: Any, cargs: Any, cparams: Any) -> Any:
        return self._backing.spare() if self.site is not None else None

    @override
    def _connected(self, connection: Any, record: Any) -> None:
        super()._connected(connection, record)
        if self.site is not None:
            self.site.server.hook(connection, self.site.wait)


def raw(connection: Any) -> Any:
    """The driver's connection."""
    return getattr(connection, "driver_connection", None) or connection


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Processes that are started inside of the block share one processor, not the simulation's, and never preempt each other.

    Several statements may wait for one row: on one processor without preemption they get it in the order of their waits.
    """
    processors, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
    os.sched_setaffinity(0, {(os.cpu_count() or 1) - 1})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, os.sched_param(0))
        os.sched_setaffinity(0, processors)


class Servers(Backing):
    """One database on a server of the simulation's own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        with _apart():
            server = servers.shared(kind)
            # Whatever ends this process, no connection of the server's stays stopped.
            resume = f"read _; kill -CONT $(ps -o pid= --ppid {server.pid})"
            self._guard = subprocess.Popen(["sh", "-c", resume], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.url = servers.fresh_database(server)
        self._server = SERVERS[kind](self.url)
        self._control: Any = None
        self._pid = 0
        self._schedules = 0
        self._spare: list[Any] = []
        self._old: list[Any] = []

    def _controlling(self) -> Any:
        """The control connection of this process."""
        if self._pid != os.getpid():
            # The parent's connections must not be closed here.
            self._inherited = self._control, self._spare, self._old
            self._pid, self._control = os.getpid(), self._server.control()
            self._server.end_stopped(self._control)
            self._spare, self._old = [], []
        return self._control

    @override
    def filled(self) -> None:
        self._server.save(self._controlling())

    @override
    def site(self, kernel: Kernel, folder: str) -> Site:
        control = self._controlling()
        self._spare = [each for each in self._old + self._spare if self._server.is_idle(each)]
        self._old = []
        self._schedules += 1
        self._server.restore(control, self._schedules % _CLEAN == 0)
        return _SteppedSite(kernel, self._server, control)

    def spare(self) -> Any:
        """A connection that an earlier schedule used; None: make one."""
        return self._spare.pop() if self._spare else None

    @override
    def make(self) -> SimDatabase:
        return _SteppedDatabase(self.url, self._compiled, self)

    @override
    def disconnect(self) -> None:
        for each in self._used:
            live = [one for one in each.connections if not _SteppedSite._is_closed(one)]
            idle = [one for one in live if self._server.is_idle(one)]
            self._old += idle
            each.connections[:] = [one for one in live if one not in idle]
            each.cut()
