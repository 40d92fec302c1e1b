# SPDX-License-Identifier: Apache-2.0
"""Numbers of resource classes: the standard ones have theirs for ever, custom ones are counted from 10000.

A number means one class for ever, even after that was deleted; a class may be given another name. So a remembered number can do
no harm (nothing fits into a class that is gone), and names of custom classes are read anew wherever they are shown.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import os_resource_classes
import sqlalchemy as sa

from moorage import errors
from moorage.db import now
from moorage_plugins.stores.checks import check_class
from moorage_plugins.stores.rows import insert_unless_taken
from moorage_plugins.stores.tables import resource_classes

__all__ = ["FIRST_CUSTOM", "STANDARD_CLASSES", "ResourceClasses", "no_such_class"]

FIRST_CUSTOM = 10_000
STANDARD_CLASSES: Mapping[str, int] = {name: number for number, name in enumerate(os_resource_classes.STANDARDS)}
_STANDARD_NAMES: Mapping[int, str] = {number: name for name, number in STANDARD_CLASSES.items()}
_NAMED = sa.select(resource_classes.c.id, resource_classes.c.name).where(resource_classes.c.name.is_not(None))
_HIGHEST = sa.select(sa.func.max(resource_classes.c.id))
_ADD = sa.insert(resource_classes).values(updated_at=now(), generation=0)
#: Whoever gives a provider an inventory of a custom class writes the class's row, so that nobody deletes it meanwhile.
_HOLD = (
    sa.update(resource_classes)
    .where(resource_classes.c.id == sa.bindparam("of_class"), resource_classes.c.name.is_not(None))
    .values(generation=resource_classes.c.generation + 1)
)
#: How often a class is numbered anew because others took the number.
_TRIES = 20


def no_such_class(name: str) -> errors.NotFound:
    """The error for a class that does not exist."""
    return errors.NotFound(
        f"There is no resource class {name}; it begins to exist when it is created, or with the first inventory of it.",
        resource_class=name,
    )


class ResourceClasses:
    """Names and numbers of committed classes; numbers are remembered."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = dict(STANDARD_CLASSES)
        self._lock = threading.Lock()

    def number(self, tx: sa.Connection, name: str) -> int:
        """The number of a class, as it was when this process last looked: right for claims, which meet its inventories.

        ``tx`` must not have created classes: what it read is remembered.

        :raises NotFound: there is no such class.
        """
        found = self._numbers.get(name)
        if found is None:
            self.look(tx)
            found = self._numbers.get(name)
        if found is None:
            raise no_such_class(name)
        return found

    def numbers(self, tx: sa.Connection, names: Iterable[str]) -> dict[str, int]:
        """The numbers of classes as of now; one statement when one of them is custom.

        ``tx`` must not have created classes.

        :raises NotFound: one does not exist.
        """
        wanted = list(names)
        if any(name not in STANDARD_CLASSES for name in wanted):
            self.look(tx)
        for name in wanted:
            if name not in self._numbers:
                raise no_such_class(name)
        return {name: self._numbers[name] for name in wanted}

    def names(self, tx: sa.Connection, numbers: Iterable[int]) -> Mapping[int, str]:
        """Names by number, as of now, whatever ``tx`` did before; one statement when one of them is custom."""
        if all(number in _STANDARD_NAMES for number in numbers):
            return _STANDARD_NAMES
        return dict(_STANDARD_NAMES) | {row.id: str(row.name) for row in tx.execute(_NAMED)}

    def hold(self, tx: sa.Connection, numbers: Iterable[int]) -> None:
        """Keep the classes from being deleted until ``tx`` ends. For who adds inventories; after everything else.

        :raises NotFound: one was deleted.
        """
        for number in sorted({each for each in numbers if each >= FIRST_CUSTOM}):
            if tx.execute(_HOLD, {"of_class": number}).rowcount != 1:
                names = [name for name, known in self._numbers.items() if known == number]
                raise no_such_class(names[0] if names else f"number {number}")

    def look(self, tx: sa.Connection) -> bool:
        """Read the custom classes anew; whether what was remembered of one that is still there, or was, proved wrong."""
        stored = {str(row.name): int(row.id) for row in tx.execute(_NAMED)} | dict(STANDARD_CLASSES)
        with self._lock:
            wrong = any(stored.get(name) != number for name, number in self._numbers.items())
            self._numbers = stored
        return wrong

    def ensure(self, tx: sa.Connection, names: Iterable[str]) -> dict[str, int]:
        """The numbers of the classes; custom ones that do not exist are created.

        Nothing of it is remembered here: ``tx`` may yet be rolled back, and its numbers then be given to other names.

        :raises InvalidInput: a name is neither standard nor begins with ``CUSTOM_``.
        """
        wanted = set(names)
        found = {name: STANDARD_CLASSES[name] for name in wanted if name in STANDARD_CLASSES}
        missing = sorted(wanted - found.keys())
        for name in missing:
            check_class(name, known=False)
        for _ in range(_TRIES):
            if not missing:
                return found
            stored: dict[str, Any] = {row.name: row.id for row in tx.execute(_NAMED)}
            found |= {name: stored[name] for name in missing if name in stored}
            missing = [name for name in missing if name not in stored]
            first = max(FIRST_CUSTOM, (tx.execute(_HIGHEST).scalar_one() or 0) + 1) if missing else 0
            rows = [{"id": first + position, "name": name} for position, name in enumerate(missing)]
            if rows and insert_unless_taken(tx, _ADD, rows):
                return found | {str(row["name"]): int(str(row["id"])) for row in rows}
        raise errors.StoreBusy("Others create resource classes all the time; try again later.")
