# SPDX-License-Identifier: Apache-2.0
"""Reads that see what the other nodes of a Galera cluster have committed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import sqlalchemy as sa

__all__ = ["causal_read"]

_READS = 1


@contextlib.contextmanager
def causal_read(transaction: sa.Connection) -> Iterator[None]:
    """Makes the snapshot of a reading transaction contain all that the cluster had committed before it.

    A node of Galera may lag behind the node that answered the client a moment ago. The first statement of the transaction must be
    in the block: it waits until its node has caught up. Elsewhere the block changes nothing: one server answers all clients.

    The statement loses its race when the node has not caught up within its ``repl.causal_read_timeout`` (30 seconds).
    """
    known = None
    if transaction.dialect.name == "mysql":
        # MySQL without Galera does not know the variable.
        known = transaction.exec_driver_sql("SHOW SESSION VARIABLES LIKE 'wsrep_sync_wait'").first()
    if known is None or int(known[1]) & _READS:
        yield
        return
    transaction.exec_driver_sql(f"SET SESSION wsrep_sync_wait = {int(known[1]) | _READS}")
    try:
        yield
    finally:
        # A connection that is lost takes its setting with it.
        if not transaction.invalidated:
            transaction.exec_driver_sql(f"SET SESSION wsrep_sync_wait = {int(known[1])}")
