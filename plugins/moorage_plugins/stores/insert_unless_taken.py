# SPDX-License-Identifier: Apache-2.0
"""Inserts a row unless another transaction has inserted it; several statements of the sql store need this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from oslo_db import exception as db_errors

__all__ = ["insert_unless_taken"]


def insert_unless_taken(tx: sa.Connection, statement: sa.Insert, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Insert all rows, or none and answer False when one of them meets a unique constraint.

    Of two that insert the same at once the second waits for the commit of the first. The savepoint keeps the transaction
    usable afterwards, as PostgreSQL insists; it costs two round trips.
    """
    try:
        with tx.begin_nested():
            tx.execute(statement, rows)
    except db_errors.DBDuplicateEntry:
        return False
    return True
