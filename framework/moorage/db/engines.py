# SPDX-License-Identifier: Apache-2.0
"""SQLAlchemy engines for the three databases, set up so that a transaction means the same on each.

A database has two engines: one whose transactions write (READ COMMITTED; BEGIN IMMEDIATE on SQLite) and one whose transactions
read one snapshot and cannot write (REPEATABLE READ, READ ONLY; query_only on SQLite). All of it is set once for each connection,
so that a transaction costs no round trip for it.

oslo.db's filters are used, its enginefacade is not: that opens every SQLite transaction deferred, on a new connection, and pings
PostgreSQL and MariaDB at each checkout (a quarter of the time of a small read, measured).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from oslo_log import log as logging
from sqlalchemy import event, exc
from sqlalchemy.dialects.mysql.base import MySQLExecutionContext
from sqlalchemy.engine.interfaces import ExecuteStyle
from typing_extensions import override

from moorage import errors
from moorage.clock import Clock
from moorage.db import sqlite
from moorage.db.prepared import PreparedConnection
from moorage.db.settings import DatabaseSettings

__all__ = ["ENDED", "create", "parse"]

LOG = logging.getLogger(__name__)

#: The driver that a URL without one means, and the extra that brings a driver. oslo.db knows MariaDB as mysql only.
_DRIVERS: Mapping[str, str] = {
    "postgresql": "postgresql+psycopg2",
    "postgres": "postgresql+psycopg2",
    "mysql": "mysql+pymysql",
    "mariadb": "mysql+pymysql",
    "mariadb+pymysql": "mysql+pymysql",
}
_EXTRAS: Mapping[str, str] = {"postgresql": "moorage[postgresql]", "mysql": "moorage[mysql]"}
#: A server whose machine or network is gone without a word is given up after about a minute, not after a quarter of an hour.
_VANISHED: Mapping[str, str] = {
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
#: The same for MariaDB, whose driver turns keepalive on and leaves its times to the kernel: a quarter of an hour and more than two
#: hours. A limit for each read would end long statements, such as migrations, too.
_SOCKET_OPTIONS: Mapping[int, int] = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 60_000,
}
#: Where a connection is marked whose transaction has ended with an answer of the server.
ENDED = "moorage_ended"
#: Seconds of rest after which a connection is asked whether it lives, before it is used.
_REST = 1.0
#: Rows, and characters of their texts, that one statement inserts into MariaDB at most, unless one row alone has more. They are one
#: packet, of which MariaDB takes 16 MiB.
_PAGE = 256
_PAGE_TEXT = 1_000_000
#: Strict, and 0 in a key that counts up is 0, as it is elsewhere.
_SQL_MODE = "TRADITIONAL,NO_AUTO_VALUE_ON_ZERO"


def parse(text: str) -> sa.URL:
    """Returns the URL of ``[database] connection``, with the driver and the settings that are missing in it.

    :raises ConfigError: it is no URL, or of a database that is not supported.
    """
    try:
        url = sa.make_url(text)
    except (exc.ArgumentError, ValueError) as error:
        raise errors.ConfigError(
            "[database] connection is not a database URL; write for example sqlite:////var/lib/moorage/moorage.sqlite."
        ) from error
    url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
    name = url.get_backend_name()
    if name not in ("sqlite", "postgresql", "mysql"):
        raise errors.ConfigError(
            f"[database] connection names the database {name}; use sqlite, postgresql or mysql (MariaDB too)."
        )
    if name == "sqlite" and sqlite.file(url) is None:
        raise errors.ConfigError(
            "[database] connection names a SQLite database in memory, which no second process could see; name a file."
        )
    missing = {} if name == "sqlite" else {"connect_timeout": "10"}
    if name == "mysql":
        missing["charset"] = "utf8mb4"
    if name == "postgresql":
        missing |= _VANISHED
    return url.update_query_dict({key: value for key, value in missing.items() if key not in url.query})


def create(url: sa.URL, settings: DatabaseSettings, clock: Clock, *, writer: bool) -> sa.Engine:
    """Returns an engine for one kind of transaction; connects when first used.

    :raises ConfigError: the driver is not installed, or SQLite's file lies on a network file system.
    """
    path = sqlite.file(url)
    if path is not None:
        return sqlite.create(url, path, settings, clock, writer=writer)
    name = url.get_backend_name()
    try:
        engine = sa.create_engine(
            url,
            isolation_level="READ COMMITTED" if writer else "REPEATABLE READ",
            pool_size=settings.pool_size,
            max_overflow=settings.pool_size,
            pool_timeout=settings.pool_timeout,
            pool_recycle=settings.recycle,
            pool_use_lifo=True,
            pool_pre_ping=False,  # _check_after_rest does it when there is reason to
            pool_reset_on_return=None,  # _roll_back_once does
        )
    except (ImportError, exc.NoSuchModuleError) as error:
        tested = _DRIVERS[name]
        instead = "" if url.drivername == tested else f"{url.drivername} is not tested; write {tested}:// and "
        raise errors.ConfigError(
            f"[database] connection needs a driver that is not installed ({error}). Try: {instead}pip install '{_EXTRAS[name]}'"
        ) from error
    engine._connection_cls = PreparedConnection
    if name == "mysql":
        # Of rows that are inserted together, PyMySQL makes one statement only if no value is an expression. SQLAlchemy always does.
        engine.dialect.use_insertmanyvalues_wo_returning = True
        engine.dialect.execution_ctx_cls = _MysqlExecution
    event.listen(engine, "connect", _PREPARE[name](settings, writer))
    _check_after_rest(engine, clock)
    _roll_back_once(engine)
    return engine


def _roll_back_once(engine: sa.Engine) -> None:
    """Roll a connection back that returns to the pool, unless its transaction has ended: PyMySQL would ask the server each time."""

    def reset(connection: Any, record: Any, _: object) -> None:
        if not record.info.pop(ENDED, False):
            engine.dialect.do_rollback(connection)

    event.listen(engine, "reset", reset)


def _check_after_rest(engine: sa.Engine, clock: Clock) -> None:
    """Ask a connection that rested whether it lives; one that was used a moment ago is taken as it is."""

    def checkin(connection: Any, record: Any) -> None:
        record.info["moorage_rests_since"] = clock.monotonic()

    def checkout(connection: Any, record: Any, proxy: Any) -> None:
        since = record.info.get("moorage_rests_since")
        if since is None or clock.monotonic() - since < _REST:
            return
        try:
            alive = engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise exc.DisconnectionError("the connection ended while it rested") from error
        if not alive:
            raise exc.DisconnectionError("the connection ended while it rested")

    event.listen(engine, "checkin", checkin)
    event.listen(engine, "checkout", checkout)


class _MysqlExecution(MySQLExecutionContext):
    """Limits the rows that one statement inserts by their size."""

    @override
    def pre_exec(self) -> None:
        super().pre_exec()  # type: ignore[no-untyped-call]
        if self.execute_style is ExecuteStyle.INSERTMANYVALUES:
            rows = [row.values() if isinstance(row, Mapping) else row for row in self.parameters]
            sizes = [sum(len(value) for value in row if isinstance(value, str | bytes)) for row in rows]
            page = _PAGE if sum(sizes) <= _PAGE_TEXT else max(1, min(_PAGE, _PAGE_TEXT // max(sizes)))
            self.execution_options = self.execution_options.union({"insertmanyvalues_page_size": page})


# -- PostgreSQL and MariaDB ---------------------------------------------------------------------------------------


def _prepare_postgresql(settings: DatabaseSettings, writer: bool) -> Callable[[Any, Any], None]:
    def connect(connection: Any, record: Any) -> None:
        with connection.cursor() as cursor:
            mode = "WRITE" if writer else "ONLY"
            # Milliseconds.
            idle = round(settings.idle_timeout * 1000) if writer else 0
            cursor.execute(
                f"SET lock_timeout = '{settings.lock_timeout}s'; SET idle_in_transaction_session_timeout = {idle}; "
                f"SET SESSION CHARACTERISTICS AS TRANSACTION READ {mode}; SET TIME ZONE 'UTC'"
            )
        connection.commit()

    return connect


def _prepare_mysql(settings: DatabaseSettings, writer: bool) -> Callable[[Any, Any], None]:
    warned: list[str] = []

    def connect(connection: Any, record: Any) -> None:
        _give_up_vanished(connection)
        values = {
            "time_zone": "'+00:00'",
            "sql_mode": f"'{_SQL_MODE}'",
            "innodb_lock_wait_timeout": settings.lock_timeout,
        }
        if writer and "MariaDB" in connection.get_server_info():
            # Whole seconds; 0 would be no limit. MySQL has no such setting.
            values["idle_write_transaction_timeout"] = max(1, int(settings.idle_timeout))
        if settings.wsrep_sync_wait is not None:
            values["wsrep_sync_wait"] = settings.wsrep_sync_wait
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION " + ", ".join(f"{name} = {value}" for name, value in values.items()))
            cursor.execute(f"SET SESSION TRANSACTION READ {'WRITE' if writer else 'ONLY'}")
            if writer:
                _assert_mysql(cursor, warned)
        connection.commit()

    return connect


def _give_up_vanished(connection: Any) -> None:
    """Have the kernel end the connection about a minute after the server's machine or network is gone. For PyMySQL."""
    of_driver = getattr(connection, "_sock", None)
    if of_driver is not None and of_driver.family in (socket.AF_INET, socket.AF_INET6):
        for option, value in _SOCKET_OPTIONS.items():
            of_driver.setsockopt(socket.IPPROTO_TCP, option, value)


_WANTED = ("tx_isolation", "transaction_isolation", "sysdate_is_now", "innodb_flush_log_at_trx_commit")


def _assert_mysql(cursor: Any, warned: list[str]) -> None:
    """Look at what the session really has: a proxy or the server may have had its own mind.

    :param warned: what was said already, so that it is said once and not for each connection.
    :raises ConfigError: transactions or the clock would not mean what Moorage relies on.
    """
    names = ", ".join(f"'{name}'" for name in _WANTED)
    cursor.execute(f"SHOW SESSION VARIABLES WHERE Variable_name IN ({names})")
    found = {str(name).lower(): str(value).upper() for name, value in cursor.fetchall()}
    level = found.get("transaction_isolation") or found.get("tx_isolation")
    if level != "READ-COMMITTED":
        raise errors.ConfigError(
            f"The database server gives this session the isolation level {level}, not READ-COMMITTED; check for a proxy or an "
            "init_connect that changes it."
        )
    if found.get("sysdate_is_now") == "ON":
        raise errors.ConfigError(
            "The database server runs with sysdate_is_now, which stops its clock within a statement; turn it off."
        )
    if found.get("innodb_flush_log_at_trx_commit", "1") != "1" and not warned:
        warned.append("innodb_flush_log_at_trx_commit")
        LOG.warning(
            "The database server runs with innodb_flush_log_at_trx_commit=%s: a crash of it loses confirmed transactions. "
            "Set it to 1.",
            found["innodb_flush_log_at_trx_commit"],
        )


_PREPARE: Mapping[str, Callable[[DatabaseSettings, bool], Callable[[Any, Any], None]]] = {
    "postgresql": _prepare_postgresql,
    "mysql": _prepare_mysql,
}
