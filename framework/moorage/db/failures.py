# SPDX-License-Identifier: Apache-2.0
"""Classifies the errors of database drivers: a lost race, a store that cannot be used, or an error of the caller.

Errors are recognized by the numbers that the databases document (SQLSTATE, MariaDB's error numbers, SQLite's result codes),
never by their text, with two exceptions that are marked. oslo.db's filters run first: they know what a lost connection is.
The translation happens where a statement fails, so ``except Duplicate`` works inside of a transaction as well as around it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any

from oslo_db import exception as db_errors
from oslo_db.sqlalchemy import exc_filters
from sqlalchemy import engine, exc

from moorage import errors

__all__ = ["Duplicate", "LostRaceError", "ReadOnlyTransaction", "short", "translate"]


class Duplicate(errors.AlreadyExists, db_errors.DBDuplicateEntry):  # type: ignore[misc]
    """A unique constraint refused a row.

    ``details['constraint']`` is what the database says of it: a name on PostgreSQL and MariaDB, columns on SQLite. It is there
    for logs; never branch on it. The class is oslo.db's too, for code that catches that.
    """

    def __init__(self, message: str, **details: Any) -> None:
        errors.AlreadyExists.__init__(self, message, **details)
        self.args = (message,)  # the other base class put its own there
        self.columns: list[str] = []
        self.value: Any = None
        self.inner_exception: BaseException | None = None
        self.cause: BaseException | None = None


class ReadOnlyTransaction(errors.MoorageError, RuntimeError):
    """A mistake in the code: a statement that writes was run in ``Database.read()``."""

    code = "moorage.db.read_only"


class LostRaceError(Exception):
    """Inside of this package: a concurrent transaction won, this one is undone and may be run again."""


#: Deadlock, serialization failure, lock timeout, busy: by dialect, the codes of a race that was lost.
_LOST: Mapping[str, frozenset[Any]] = {
    "postgresql": frozenset({"40001", "40P01", "55P03"}),
    # 1020: the record changed since it was read (snapshots, Galera); Galera reports conflicts at COMMIT as 1213.
    # 1305: there is no savepoint to go back to, because a deadlock inside of it has undone the whole transaction.
    "mysql": frozenset({1205, 1213, 1020, 1305}),
    "sqlite": frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}),
}
_READ_ONLY: Mapping[str, frozenset[Any]] = {
    "postgresql": frozenset({"25006"}),
    "mysql": frozenset({1792}),
    "sqlite": frozenset({sqlite3.SQLITE_READONLY}),
}
#: The store as a whole cannot be used: full, read-only, starting, stopping, too many connections, no such database, ...
_UNUSABLE: Mapping[str, frozenset[Any]] = {
    "postgresql": frozenset(
        {"53000", "53100", "53200", "53300", "57P01", "57P02", "57P03", "58000", "58030", "25006"}
        | {"28000", "28P01", "3D000", "25P03"}
    ),
    "mysql": frozenset(
        {1021, 1037, 1040, 1041, 1044, 1045, 1047, 1049, 1053, 1114, 1203, 1290, 1836, 1927, 2002, 2003, 2006, 2013}
    ),
    "sqlite": frozenset(
        {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FULL}
        | {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM}
    ),
}
_DUPLICATE: Mapping[str, frozenset[Any]] = {"postgresql": frozenset({"23505"}), "mysql": frozenset({1062, 1586})}
_REFERENCE: Mapping[str, frozenset[Any]] = {"postgresql": frozenset({"23503"}), "mysql": frozenset({1451, 1452})}
_CHECK: Mapping[str, frozenset[Any]] = {"postgresql": frozenset({"23514"}), "mysql": frozenset({4025, 3819})}
#: Too long, out of range, not of the type.
_DATA: Mapping[str, frozenset[Any]] = {
    "postgresql": frozenset({"22001", "22003", "22007", "22008", "22021", "22P02", "22P05"}),
    "mysql": frozenset({1264, 1265, 1292, 1366, 1406}),
    "sqlite": frozenset({sqlite3.SQLITE_TOOBIG}),
}
_NO_TABLE: Mapping[str, frozenset[Any]] = {"postgresql": frozenset({"42P01"}), "mysql": frozenset({1146})}
#: SQLite tells kinds of constraints apart by its extended codes only.
_SQLITE_DUPLICATE = frozenset({sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY})


def translate(context: engine.ExceptionContext, *, url: str, writer: bool) -> BaseException | None:
    """What to raise instead of the driver's error; None keeps the error as it is (SQLAlchemy's own ping asks for that).

    :param url: the database without its password, for the message.
    :param writer: whether the connection may write.
    """
    try:
        error = exc_filters.handler(context)
    except Exception as raised:  # noqa: BLE001  (some of oslo.db's filters raise and some return)
        error = raised
    if error is None:
        return None
    dialect = context.dialect.name
    original = _original(error)
    code = _code(original, dialect)
    if isinstance(error, db_errors.DBDeadlock) or _is(code, _LOST, dialect):
        return LostRaceError(short(error))
    if not writer and _is(code, _READ_ONLY, dialect):
        return ReadOnlyTransaction(
            "A statement that writes was run in a read-only transaction; use Database.run for it."
        )
    if _lost_connection(context, error) or _is(code, _UNUSABLE, dialect):
        return errors.StoreUnavailable(
            f"The database {url} cannot be used: {short(error)}. Check that it runs, that [database] connection is right, "
            "that its disk has room and that this user may write to it."
        )
    if context.execution_context is not None and context.execution_context.execution_options.get(
        "skip_user_error_events"
    ):
        return None  # SQLAlchemy looks whether a table exists, by asking for it and reading the driver's error
    return _mistake(error, original, code, dialect, url)


def _mistake(error: BaseException, original: BaseException, code: Any, dialect: str, url: str) -> BaseException:
    """Errors that would come again with the same statement on the same data."""
    extended = getattr(original, "sqlite_errorcode", None)
    if isinstance(error, db_errors.DBDuplicateEntry) or _is(code, _DUPLICATE, dialect) or extended in _SQLITE_DUPLICATE:
        return _duplicate(error, original)
    if isinstance(error, db_errors.DBReferenceError) or _is(code, _REFERENCE, dialect):
        return errors.Conflict("A row refers to one that does not exist, or is still referred to by another.")
    if _is(code, _CHECK, dialect) or extended == sqlite3.SQLITE_CONSTRAINT_CHECK:
        return errors.InvalidInput(f"The database refuses a value: {short(error)}.")
    # An integer beyond 64 bits never reaches SQLite: its driver raises OverflowError.
    if isinstance(original, OverflowError) or _is(code, _DATA, dialect):
        return errors.InvalidInput(f"A value does not fit into its column: {short(error)}.")
    # SQLite has no code for a missing table: the text is all there is.
    if _is(code, _NO_TABLE, dialect) or (dialect == "sqlite" and str(original).startswith("no such table")):
        return errors.StoreUnavailable(
            f"The database {url} lacks a table ({short(error)}). Run: moorage-manage db upgrade"
        )
    return error


def _duplicate(error: BaseException, original: BaseException) -> Duplicate:
    # psycopg names the constraint; the others say it in their text, which oslo.db has taken apart.
    named = getattr(getattr(original, "diag", None), "constraint_name", None)
    constraint = named or ", ".join(map(str, getattr(error, "columns", None) or ()))
    duplicate = Duplicate("A row with the same unique value exists.", constraint=constraint)
    duplicate.columns = list(getattr(error, "columns", None) or [])
    duplicate.value = getattr(error, "value", None)
    duplicate.inner_exception = getattr(error, "inner_exception", None)
    return duplicate


def _lost_connection(context: engine.ExceptionContext, error: BaseException) -> bool:
    """Returns whether the connection could not be made, or has ended."""
    return (
        isinstance(error, db_errors.DBConnectionError)
        or context.is_disconnect
        # Without a connection there was no statement: it is connecting that failed, for whatever reason.
        or (context.connection is None and isinstance(error, (db_errors.DBError, exc.DBAPIError)))
    )


def _is(code: Any, table: Mapping[str, frozenset[Any]], dialect: str) -> bool:
    return code is not None and code in table.get(dialect, ())


def _original(error: BaseException) -> BaseException:
    """Returns the driver's own error under oslo.db's and SQLAlchemy's."""
    cause = getattr(error, "inner_exception", None) or error
    return getattr(cause, "orig", None) or cause


def _code(original: BaseException, dialect: str) -> Any:
    """SQLSTATE of PostgreSQL (psycopg2, psycopg), SQLite's primary result code, or MariaDB's error number."""
    if dialect == "postgresql":
        return getattr(original, "pgcode", None) or getattr(original, "sqlstate", None)
    if dialect == "sqlite":
        extended = getattr(original, "sqlite_errorcode", None)
        return None if extended is None else extended & 0xFF
    return original.args[0] if original.args else None


def short(error: BaseException) -> str:
    """Returns the first line of the driver's text."""
    original = _original(error)
    text = str(original).strip()
    return text.splitlines()[0].rstrip(".") if text else type(original).__name__
