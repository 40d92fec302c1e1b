# SPDX-License-Identifier: Apache-2.0
"""Transactions on SQLite, PostgreSQL and MariaDB, and the one rule for lost races."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import sqlalchemy as sa
from oslo_log import log as logging
from sqlalchemy import event
from sqlalchemy import exc as sa_errors
from sqlalchemy.engine import ExceptionContext

from moorage import errors, randomness, threads
from moorage.clock import Clock, SystemClock
from moorage.db import engines, events, failures, last_writes, sqlite
from moorage.db.connections import Connections
from moorage.db.prepared import PreparedConnection
from moorage.db.queue import WritersQueue
from moorage.db.settings import DatabaseSettings

__all__ = ["Database", "check"]

LOG = logging.getLogger(__name__)
T = TypeVar("T")

#: A writing transaction may be idle for at most so many times ``lock_timeout``.
_IDLE = 3
#: For how many times ``lock_timeout`` a transaction that loses races is run again: what is held that long is not let go soon.
_PATIENCE = 2
#: Seconds: the longest wait before the first retry (it doubles with each), and the longest of all.
_WAIT = 0.004
_WAIT_LONGEST = 0.5


class Database:
    """One database. Safe for use by several threads; a forked child opens connections of its own.

    :param url: an SQLAlchemy URL; nothing is connected before the first transaction.
    :param pool_size: connections kept open for writing, and as many for reading; twice as many under load.
    :param pool_timeout: seconds to wait for a free connection.
    :param lock_timeout: seconds that a statement (on SQLite: a transaction) waits for others that write.
    :param recycle: seconds after which a connection is replaced.
    :param attempts: how often :meth:`run` runs a transaction that loses races, in all.
    :param idle_timeout: seconds without a statement after which the server ends a writing transaction, because its process was
        paused or its machine is gone, so that others get its locks; at most, and by default, three times ``lock_timeout``.
        MariaDB counts whole seconds, at least one. MySQL and SQLite have no such limit.
    :param wsrep_sync_wait: Galera's causality checks; None leaves them as the server has them.
    :param service: the name of the service under which events are recorded (``scheduler:scheduler-1``). None records nothing.
    :ivar recorded: set after each commit of a transaction that recorded events.
    :raises ConfigError: the URL cannot be used, or its driver is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        random: randomness.Random | None = None,
        pool_size: int = 10,
        pool_timeout: int = 30,
        lock_timeout: int = 10,
        recycle: int = 3600,
        attempts: int = 10,
        wsrep_sync_wait: int | None = None,
        idle_timeout: float | None = None,
        service: str | None = None,
    ) -> None:
        self.service = service
        self._url = engines.parse(url)
        self._clock: Clock = clock or SystemClock()
        self._random = random or randomness.generator()
        longest_idle = float(_IDLE * lock_timeout)
        idle = longest_idle if idle_timeout is None else min(idle_timeout, longest_idle)
        self._settings = DatabaseSettings(pool_size, pool_timeout, recycle, lock_timeout, idle, wsrep_sync_wait)
        self._attempts = attempts
        self._open()
        _LIVING.add(self)

    @classmethod
    def from_config(
        cls, conf: Any, *, clock: Clock | None = None, idle_timeout: float | None = None, service: str | None = None
    ) -> Database:
        """Returns the database of the ``[database]`` section.

        :param idle_timeout: as for the class, and ``service`` too.
        :raises ConfigError: no or an unusable connection is configured.
        """
        section = conf.database
        if not section.connection:
            raise errors.ConfigError(
                "[database] connection is not set; give a URL, or a state directory to keep SQLite in."
            )
        return cls(
            section.connection,
            clock=clock,
            pool_size=section.max_pool_size,
            pool_timeout=section.pool_timeout,
            lock_timeout=section.lock_timeout,
            recycle=section.connection_recycle_time,
            attempts=section.attempts,
            wsrep_sync_wait=section.mysql_wsrep_sync_wait,
            idle_timeout=idle_timeout,
            service=service,
        )

    @property
    def dialect(self) -> str:
        """``sqlite``, ``postgresql`` or ``mysql`` (MariaDB included)."""
        return self._url.get_backend_name()

    @property
    def lock_timeout(self) -> int:
        """Seconds that a statement (on SQLite: a transaction) waits for others that write."""
        return self._settings.lock_timeout

    @property
    def url_safe(self) -> str:
        """The URL without its password and its parameters (which may hold secrets too), for messages."""
        return self._url.set(query={}).render_as_string(hide_password=True)

    @property
    def is_reading(self) -> bool:
        """Whether the thread is in a transaction of :meth:`read`, in which it must not begin another one that writes."""
        return getattr(self._local, "open", None) == "read"

    # -- transactions ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """One read-only transaction on one snapshot of the database: what it reads twice is the same twice.

        It waits for no writer. Keep it short all the same: databases keep what a snapshot can still see. Inside of
        :meth:`shared_read` it is that transaction.

        :raises ReadOnlyTransaction: a statement in it writes.
        :raises StoreUnavailable: the database cannot be reached.
        """
        if self._shared is not None:
            yield self._shared
            return
        try:
            with self._transaction(self._readers, writer=False) as connection:
                yield connection
        except failures.LostRaceError as error:
            raise _lost_once(error) from error

    @contextlib.contextmanager
    def shared_read(self) -> Iterator[sa.Connection]:
        """Opens a read transaction that every :meth:`read` of this thread uses inside of the block; all see one snapshot.

        After a failed statement the transaction is of no use to the others: let the error leave the block.
        """
        outer = self._shared
        with self.read() as connection:
            self._local.shared = connection
            try:
                yield connection
            finally:
                self._local.shared = outer

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """One transaction: committed at the end of the block, rolled back when it raises. Not retried; see :meth:`run`.

        A statement that fails outside of a savepoint undoes the transaction on every database, as it does on PostgreSQL: an
        error that the block swallows is raised again instead of the commit.

        :raises StoreBusy: it lost a race and was undone.
        :raises StoreUnavailable: the database cannot be reached or written; ``details['outcome']`` is ``unknown`` when that
            happened at the commit, which may then have been done or not.
        :raises Duplicate: a unique constraint refused a row.
        """
        try:
            with self._write_once() as connection:
                yield connection
        except failures.LostRaceError as error:
            raise _lost_once(error) from error

    def run(
        self,
        work: Callable[[sa.Connection], T],
        *,
        attempts: int | None = None,
        deadline: float | None = None,
        idempotent: bool = False,
    ) -> T:
        """The retry rule: ``work`` in a transaction, and the whole of it again in a new one when it loses a race.

        The commit is part of what is tried (Galera reports conflicts there). ``work`` may therefore run several times and must
        have no effect outside of the transaction.

        :param attempts: tries in all; None is ``[database] attempts``.
        :param deadline: seconds from now after which no new try begins; None: twice ``lock_timeout`` when races are lost.
        :param idempotent: try again after a lost connection too. The commit may then have happened already: only for work that
            does no harm, and gives the same answer, when it is done twice.
        :raises StoreBusy: every try lost.
        """
        return self._retried(self._write_once, work, attempts, deadline, idempotent)

    def read_run(
        self, work: Callable[[sa.Connection], T], *, attempts: int | None = None, deadline: float | None = None
    ) -> T:
        """``work`` in :meth:`read`, again when the database gives the snapshot up or the connection is lost.

        Inside of :meth:`shared_read` there is no second try.
        """
        if self._shared is not None:
            return work(self._shared)
        return self._retried(lambda: self._transaction(self._readers, writer=False), work, attempts, deadline, True)

    @contextlib.contextmanager
    def schema_change(self) -> Iterator[sa.Connection]:
        """As :meth:`write`, for migrations: foreign keys of SQLite are checked at the end instead of followed.

        Alembic changes a SQLite table by making a new one and dropping the old, which would delete the rows that refer to it.
        Wait for locks is six times as long. MariaDB commits each change of the schema by itself.

        :raises Conflict: rows refer to nothing after it; nothing was changed.
        """
        try:
            with self._write_once(schema=True) as connection:
                yield connection
        except failures.LostRaceError as error:
            raise _lost_once(error) from error

    def current_writer(self) -> tuple[int, int] | None:
        """(number of the transaction, process id) of what writes now; SQLite only, None elsewhere."""
        return None if self._queue is None else self._queue.writer()

    def close(self) -> None:
        """Close all connections; the object may be used again."""
        self._writers.dispose()
        self._readers.dispose()
        if self._queue is not None:
            self._queue.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def _shared(self) -> sa.Connection | None:
        """The connection of the :meth:`shared_read` that the thread is in."""
        return getattr(self._local, "shared", None)

    def _open(self) -> None:
        """Make the engines for this process; connections are opened when first used."""
        self.recorded = threads.event()
        self._local = threads.local()
        self._path = sqlite.file(self._url)
        # A connection to a server may be lost while it rests; the pool checks that.
        keep = self._path is not None
        self._writers = Connections(self._engine(writer=True), keep=keep)
        self._readers = Connections(self._engine(writer=False), keep=keep)
        self._queue = None if self._path is None else WritersQueue(f"{self._path}.lock", self._clock, self._random)

    def _engine(self, *, writer: bool) -> sa.Engine:
        engine = engines.create(self._url, self._settings, self._clock, writer=writer)

        def failed(context: ExceptionContext) -> BaseException | None:
            error = failures.translate(context, url=self.url_safe, writer=writer)
            self._local.failure = error or getattr(self._local, "failure", None)
            return error

        event.listen(engine, "handle_error", failed, retval=True)
        self._watch_savepoints(engine.dialect)
        return engine

    def _watch_savepoints(self, dialect: sa.Dialect) -> None:
        """Let failures and recorded events follow savepoints.

        Not by events of SQLAlchemy: their calls would be prepared at each step of each transaction.
        """
        savepoint, rollback = dialect.do_savepoint, dialect.do_rollback_to_savepoint

        def set_savepoint(connection: sa.Connection, name: str) -> None:
            events.mark(connection, name)
            savepoint(connection, name)

        def back_to_savepoint(connection: sa.Connection, name: str) -> None:
            # A lost race or connection has undone all of the transaction; there is no way back into it.
            if not isinstance(getattr(self._local, "failure", None), (failures.LostRaceError, errors.StoreUnavailable)):
                self._local.failure = None
            events.undo(connection, name)
            rollback(connection, name)

        dialect.do_savepoint, dialect.do_rollback_to_savepoint = set_savepoint, back_to_savepoint  # type: ignore[method-assign]

    def _before_fork(self) -> None:
        """Close idle connections to SQLite; see :mod:`moorage.db.sqlite`."""
        if self._path is not None:
            self._writers.dispose()
            self._readers.dispose()

    def _after_fork(self) -> None:
        """In the child: leave the parent's connections alone.

        Closing them here, or letting them be collected, would end sessions of the parent, so they are kept.
        """
        _INHERITED.extend((self._writers, self._readers))
        if self._queue is not None:
            self._queue.close()
        self._open()

    @contextlib.contextmanager
    def _write_once(self, *, schema: bool = False) -> Iterator[sa.Connection]:
        self._refuse("write")
        with (
            self._turn(schema) as ticket,
            self._transaction(self._writers, writer=True, schema=schema) as connection,
        ):
            if self._queue is not None and ticket is not None:
                self._queue.record_writer(ticket)
            yield connection

    def _turn(self, schema: bool) -> contextlib.AbstractContextManager[int | None]:
        if self._queue is None:
            return contextlib.nullcontext()
        return self._queue.acquire(self._settings.lock_timeout * (6 if schema else 1))

    @contextlib.contextmanager
    def _transaction(self, connections: Connections, *, writer: bool, schema: bool = False) -> Iterator[sa.Connection]:
        self._refuse("write" if writer else "read")
        local, pid = self._local, os.getpid()
        outer = getattr(local, "open", None)
        pool = connections.engine.pool
        connection = self._connect(connections)
        local.open, local.failure = "write" if writer else "read", None
        try:
            with _Foreign(connection, schema):
                transaction = connection.begin()
                recorded = False
                if writer:
                    events.begin(connection, self.service)
                    last_writes.begin(connection)
                try:
                    yield connection
                    if writer and local.failure is not None:
                        raise local.failure
                    if writer:
                        last_writes.run(connection)
                        recorded = events.flush(connection, self.service)
                    if schema:
                        _check_references(connection)
                except BaseException:
                    if os.getpid() == pid:
                        _undo(transaction)
                    raise
                _end(transaction, commit=writer, same_process=os.getpid() == pid)
            if recorded:
                self.recorded.set()
        finally:
            local.open = outer
            if os.getpid() == pid:
                connections.release(connection, pool)
            else:
                _INHERITED.append(connection)

    def _connect(self, connections: Connections) -> PreparedConnection:
        try:
            return connections.take()
        except sa_errors.TimeoutError as error:
            raise errors.StoreBusy(
                f"All connections to {self.url_safe} were in use for {self._settings.pool_timeout} seconds; try again later. "
                "[database] max_pool_size sets how many there are."
            ) from error

    def _refuse(self, kind: str) -> None:
        """Refuse what could only go wrong later: a transaction inside of another, a file inherited open from the parent."""
        outer = getattr(self._local, "open", None)
        if outer == "write" or (outer == "read" and kind == "write"):
            raise RuntimeError(
                f"A {kind} transaction was begun inside a {outer} transaction of the same thread, which would not see what that "
                "did, or would wait for it for ever; pass the open transaction on instead."
            )
        if self._path is not None:
            sqlite.refuse_inherited(self._path)

    def _retried(
        self,
        begin: Callable[[], contextlib.AbstractContextManager[sa.Connection]],
        work: Callable[[sa.Connection], T],
        attempts: int | None,
        deadline: float | None,
        idempotent: bool,
    ) -> T:
        tries = self._attempts if attempts is None else attempts
        begun = self._clock.monotonic()
        patience = _PATIENCE * self._settings.lock_timeout if deadline is None else deadline
        attempt = 1
        while True:
            try:
                with begin() as connection:
                    return work(connection)
            except (failures.LostRaceError, errors.StoreUnavailable) as error:
                lost_race = isinstance(error, failures.LostRaceError)
                if not lost_race and not idempotent:
                    raise
                passed = self._clock.monotonic() - begun
                last = attempt >= tries or ((lost_race or deadline is not None) and passed >= patience)
                if last and not lost_race:
                    raise
                if last:
                    raise errors.StoreBusy(
                        f"The transaction lost {attempt} races in a row, in {passed:.0f} seconds, with other writers of "
                        f"{self.url_safe}; try again later."
                    ) from error
                LOG.debug("Transaction undone (try %d of %d): %s", attempt, tries, error)
            self._clock.sleep(self._random.uniform(0, min(_WAIT_LONGEST, _WAIT * 2**attempt)))
            attempt += 1


class _Foreign:
    """Turn SQLite's foreign keys off around a change of the schema; that has no effect inside of a transaction."""

    def __init__(self, connection: sa.Connection, schema: bool) -> None:
        self._connection = connection if schema and connection.dialect.name == "sqlite" else None

    def __enter__(self) -> None:
        self._set("OFF")

    def __exit__(self, *failure: object) -> None:
        self._set("ON")

    def _set(self, value: str) -> None:
        if self._connection is not None and not self._connection.invalidated:
            driver = self._connection.connection.driver_connection
            assert driver is not None  # noqa: S101  (for the type checker: the connection is open)
            driver.execute(f"PRAGMA foreign_keys={value}")


def _check_references(connection: sa.Connection) -> None:
    if connection.dialect.name != "sqlite":
        return
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
    if broken:
        tables = ", ".join(sorted({f"{row[0]} to {row[2]}" for row in broken}))
        raise errors.Conflict(f"After the change of the schema {len(broken)} rows refer to nothing ({tables}); undone.")


def _lost_once(error: failures.LostRaceError) -> errors.StoreBusy:
    return errors.StoreBusy(f"The transaction lost a race with another one and was undone ({error}); try again.")


def _undo(transaction: sa.RootTransaction) -> None:
    """Roll back; a failure of that is no news: the connection is lost, and with it the transaction."""
    # After a failed commit SQLAlchemy sends no ROLLBACK here. The pool sends it when the connection returns.
    sends = transaction.is_active
    try:
        transaction.rollback()
        if sends and not transaction.connection.invalidated:
            transaction.connection.info[engines.ENDED] = True
    except Exception as error:  # noqa: BLE001  (the error that made us roll back is on its way already)
        LOG.debug("Rollback failed: %s", error)


def _end(transaction: sa.RootTransaction, *, commit: bool, same_process: bool) -> None:
    if not same_process:
        raise RuntimeError(
            "The process forked inside of a transaction, and the child ended it; it belongs to the parent."
        )
    if not commit:
        _undo(transaction)
        return
    try:
        transaction.commit()
        transaction.connection.info[engines.ENDED] = True
    except errors.StoreUnavailable as error:
        error.details["outcome"] = "unknown"
        # The transaction may still be open. SQLAlchemy takes it for ended, so the pool would not roll it back.
        transaction.connection.invalidate()
        raise
    except BaseException:
        _undo(transaction)
        raise


#: All databases of this process, for the moment after a fork, and what a child inherited and must never touch.
_LIVING: weakref.WeakSet[Database] = weakref.WeakSet()
_INHERITED: list[object] = []


def check(conf: Any) -> None:
    """Refuse a ``[database]`` section that cannot be used; connects to nothing.

    :raises ConfigError: see :meth:`Database.from_config`.
    """
    Database.from_config(conf).close()


def _before_fork() -> None:
    for database in list(_LIVING):
        database._before_fork()


def _after_fork_in_child() -> None:
    sqlite.forget_inherited()
    for database in list(_LIVING):
        database._after_fork()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
