# SPDX-License-Identifier: Apache-2.0
"""The store engine: transactions, the one retry rule, database time, schema helpers, migrations.

What it offers is imported when it is first used: commands that need no database import this package for its part alone, and
SQLAlchemy takes 0.3 seconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy import Connection as Transaction

    from moorage.db.database import Database
    from moorage.db.events import JournalEvent, RecordedEvent, record
    from moorage.db.failures import Duplicate, ReadOnlyTransaction
    from moorage.db.last_writes import write_last
    from moorage.db.schema import new_metadata
    from moorage.db.sets import execute_set
    from moorage.db.time import MICROSECONDS, now, read_now

__all__ = [
    "MICROSECONDS",
    "Database",
    "Duplicate",
    "JournalEvent",
    "ReadOnlyTransaction",
    "RecordedEvent",
    "Transaction",
    "execute_set",
    "new_metadata",
    "now",
    "read_now",
    "record",
    "write_last",
]

_HOMES = {
    "MICROSECONDS": "moorage.db.time:MICROSECONDS",
    "Database": "moorage.db.database:Database",
    "Duplicate": "moorage.db.failures:Duplicate",
    "JournalEvent": "moorage.db.events:JournalEvent",
    "ReadOnlyTransaction": "moorage.db.failures:ReadOnlyTransaction",
    "RecordedEvent": "moorage.db.events:RecordedEvent",
    "Transaction": "sqlalchemy:Connection",
    "execute_set": "moorage.db.sets:execute_set",
    "new_metadata": "moorage.db.schema:new_metadata",
    "now": "moorage.db.time:now",
    "read_now": "moorage.db.time:read_now",
    "record": "moorage.db.events:record",
    "write_last": "moorage.db.last_writes:write_last",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=__name__)
    module, _, attribute = _HOMES[name].partition(":")
    found = globals()[name] = getattr(importlib.import_module(module), attribute)
    return found
