# SPDX-License-Identifier: Apache-2.0
"""Numbers of resource classes: the standard ones have theirs for ever, custom ones are counted from 10000."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import os_resource_classes
import sqlalchemy as sa

from moorage import errors
from moorage_plugins.stores.checks import check_class
from moorage_plugins.stores.rows import insert_unless_taken
from moorage_plugins.stores.tables import resource_classes

__all__ = ["FIRST_CUSTOM", "ResourceClasses", "class_name"]

FIRST_CUSTOM = 10_000
_STANDARD_NAMES: dict[int, str] = dict(enumerate(os_resource_classes.STANDARDS))
_STANDARD: dict[str, int] = {name: number for number, name in _STANDARD_NAMES.items()}
_ALL = sa.select(resource_classes.c.id, resource_classes.c.name)
_ADD = sa.insert(resource_classes)
#: How often a class is numbered anew because others took the number.
_TRIES = 20


def class_name(tx: sa.Connection, number: int) -> str:
    """The name of a number that stands in a row, whatever ``tx`` did before; one statement for a custom class."""
    if number in _STANDARD_NAMES:
        return _STANDARD_NAMES[number]
    return str(tx.execute(_ALL.where(resource_classes.c.id == number)).one().name)


class ResourceClasses:
    """Names and numbers of committed classes, remembered: a number once given never means another name."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = dict(_STANDARD)
        self._names: dict[int, str] = dict(_STANDARD_NAMES)
        self._lock = threading.Lock()

    def number(self, tx: sa.Connection, name: str) -> int:
        """The number of a class. ``tx`` must not have created classes: what it read is remembered.

        :raises NotFound: there is no such class.
        """
        found = self._numbers.get(name)
        if found is None:
            self._load(tx)
            found = self._numbers.get(name)
        if found is None:
            raise errors.NotFound(
                f"There is no resource class {name}; it begins to exist with the first inventory of it.",
                resource_class=name,
            )
        return found

    def name(self, tx: sa.Connection, number: int) -> str:
        """The name of a number that stands in a row. ``tx`` must not have created classes."""
        if number not in self._names:
            self._load(tx)
        return self._names[number]

    def ensure(self, tx: sa.Connection, names: Iterable[str]) -> dict[str, int]:
        """The numbers of the classes; custom ones that do not exist are created.

        Nothing of it is remembered here: ``tx`` may yet be rolled back, and its numbers then be given to other names.

        :raises InvalidInput: a name is neither standard nor begins with ``CUSTOM_``.
        """
        wanted = set(names)
        found = {name: self._numbers[name] for name in wanted if name in self._numbers}
        missing = sorted(wanted - found.keys())
        for name in missing:
            check_class(name, known=False)
        for _ in range(_TRIES):
            if not missing:
                return found
            stored = {row.name: row.id for row in tx.execute(_ALL)}
            found |= {name: stored[name] for name in missing if name in stored}
            missing = [name for name in missing if name not in stored]
            first = max(FIRST_CUSTOM, max(stored.values(), default=0) + 1)
            rows = [{"id": first + position, "name": name} for position, name in enumerate(missing)]
            if rows and insert_unless_taken(tx, _ADD, rows):
                return found | {str(row["name"]): int(str(row["id"])) for row in rows}
        raise errors.StoreBusy("Others create resource classes all the time; try again later.")

    def _load(self, tx: sa.Connection) -> None:
        rows = tx.execute(_ALL).all()
        with self._lock:
            for number, name in rows:
                self._numbers[name] = number
                self._names[number] = name
