# SPDX-License-Identifier: Apache-2.0
"""Writes that a transaction does last, just before its commit: those of rows that many transactions want."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa

__all__ = ["begin", "run", "write_last"]

#: Where a connection keeps the last writes of its transaction.
_KEY = "moorage_last_writes"
W = TypeVar("W", bound=Callable[[sa.Connection], None])


def write_last(transaction: sa.Connection, name: str, make: Callable[[], W]) -> W:
    """Returns the last write of this name in an open writing transaction, and makes it if there is none yet.

    The last write is called once with the transaction, before the commit: it holds the locks of its rows for a short time only,
    and several changes of one transaction lock these rows in one order. It sees what the transaction has written and collects what
    it needs in itself. A savepoint that is rolled back does not undo what it collected. An error of it undoes the transaction.

    :raises RuntimeError: the transaction is none of :class:`moorage.db.Database` that writes.
    """
    writes = transaction.info.get(_KEY)
    if writes is None:
        raise RuntimeError("Last writes are made in transactions of Database.write and Database.run only.")
    if name not in writes:
        writes[name] = make()
    found: W = writes[name]
    return found


def begin(transaction: sa.Connection) -> None:
    """Begin to collect the last writes of a transaction."""
    transaction.info[_KEY] = {}


def run(transaction: sa.Connection) -> None:
    """Do the last writes, in the order of their names."""
    writes = transaction.info.get(_KEY)
    if writes:
        for _, write in sorted(writes.items()):
            write(transaction)
        writes.clear()
