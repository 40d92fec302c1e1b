# SPDX-License-Identifier: Apache-2.0
"""The store engine: transactions, the one retry rule, database time, schema helpers, migrations."""

from sqlalchemy import Connection as Transaction

from moorage.db.database import Database
from moorage.db.failures import Duplicate, ReadOnlyTransaction
from moorage.db.schema import new_metadata
from moorage.db.time import MICROSECONDS, now, read_now

__all__ = [
    "MICROSECONDS",
    "Database",
    "Duplicate",
    "ReadOnlyTransaction",
    "Transaction",
    "new_metadata",
    "now",
    "read_now",
]
