# SPDX-License-Identifier: Apache-2.0
"""The one place for database time: microseconds since the Unix epoch, read from the database's own clock.

Leases expire by this time only, never by a host's clock. It is the time of the statement, not of the transaction's start
(``now()`` of PostgreSQL is the latter). SQLite's clock has a grain of a millisecond.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction

__all__ = ["MICROSECONDS", "now", "read_now"]

#: Microseconds in a second.
MICROSECONDS = 1_000_000


class now(GenericFunction[int]):
    """SQL expression: microseconds since the Unix epoch, now, by the database's clock (BIGINT)."""

    type = sa.BigInteger()
    inherit_cache = True
    name = "moorage_now"


@compiles(now)
def _unsupported(element: now, compiler: Any, **kw: Any) -> str:
    raise NotImplementedError(f"database time is not defined for {compiler.dialect.name}")


@compiles(now, "postgresql")
def _postgresql(element: now, compiler: Any, **kw: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"


@compiles(now, "mysql")
@compiles(now, "mariadb")
def _mysql(element: now, compiler: Any, **kw: Any) -> str:
    # UNIX_TIMESTAMP reads its argument in the session's time zone, which is what SYSDATE answers in: the zone cancels out.
    return "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)"


@compiles(now, "sqlite")
def _sqlite(element: now, compiler: Any, **kw: Any) -> str:
    return "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000"


_READ_NOW = sa.select(now())


def read_now(transaction: sa.Connection) -> int:
    """Returns the database's time in microseconds; one round trip."""
    return int(transaction.execute(_READ_NOW).scalar_one())
