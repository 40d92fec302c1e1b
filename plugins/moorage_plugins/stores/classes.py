# SPDX-License-Identifier: Apache-2.0
"""Numbers of resource classes: the standard ones have theirs for ever, custom ones are counted from 10000.

A number means one class for ever, even after that was deleted; a class may be given another name, and its old name to another
class. So names of custom classes are read again wherever they are shown, and their numbers wherever something is done with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import os_resource_classes
import sqlalchemy as sa

from moorage import errors
from moorage.db import now
from moorage_plugins.stores.checks import check_class
from moorage_plugins.stores.insert_unless_taken import insert_unless_taken
from moorage_plugins.stores.tables import resource_classes

__all__ = ["FIRST_CUSTOM", "STANDARD_CLASSES", "ResourceClasses", "no_such_class"]

FIRST_CUSTOM = 10_000
STANDARD_CLASSES: Mapping[str, int] = {name: number for number, name in enumerate(os_resource_classes.STANDARDS)}
_STANDARD_NAMES: Mapping[int, str] = {number: name for name, number in STANDARD_CLASSES.items()}
_NAMED = sa.select(resource_classes.c.id, resource_classes.c.name).where(resource_classes.c.name.is_not(None))
_NAMED_SO = _NAMED.where(resource_classes.c.name.in_(sa.bindparam("names", expanding=True)))
_HIGHEST = sa.select(sa.func.max(resource_classes.c.id))
_ADD = sa.insert(resource_classes).values(updated_at=now(), generation=0)
#: Whoever gives a provider an inventory of a custom class writes the class's row, so that nobody deletes it meanwhile.
_HOLD = (
    sa.update(resource_classes)
    .where(resource_classes.c.id == sa.bindparam("of_class"), resource_classes.c.name.is_not(None))
    .values(generation=resource_classes.c.generation + 1)
)
#: How often a class is numbered again because others took the number.
_TRIES = 20


def no_such_class(name: str) -> errors.NotFound:
    """Returns the error for a class that does not exist."""
    return errors.NotFound(
        f"There is no resource class {name}; it begins to exist when it is created, or with the first inventory of it.",
        resource_class=name,
    )


class ResourceClasses:
    """Names and numbers of committed classes."""

    def __init__(self) -> None:
        #: Names that were seen, for messages only.
        self._seen: dict[int, str] = {}

    def numbers(self, tx: sa.Connection, names: Iterable[str]) -> dict[str, int]:
        """Returns the numbers of classes as of now; one statement when one of them is custom.

        :raises NotFound: one does not exist.
        """
        wanted = set(names)
        found = {name: STANDARD_CLASSES[name] for name in wanted if name in STANDARD_CLASSES}
        custom = sorted(wanted - found.keys())
        if custom:
            found |= {str(row.name): int(row.id) for row in tx.execute(_NAMED_SO, {"names": custom})}
            self._seen |= {found[name]: name for name in custom if name in found}
        for name in custom:
            if name not in found:
                raise no_such_class(name)
        return found

    def names(self, tx: sa.Connection, numbers: Iterable[int]) -> Mapping[int, str]:
        """Returns names by number, as the database has them now. One statement if one of them is custom."""
        if all(number in _STANDARD_NAMES for number in numbers):
            return _STANDARD_NAMES
        return dict(_STANDARD_NAMES) | {row.id: str(row.name) for row in tx.execute(_NAMED)}

    def hold(self, tx: sa.Connection, numbers: Iterable[int]) -> None:
        """Keep the classes from being deleted until ``tx`` ends.

        For who adds inventories, after everything else but last writes; and for who sets a limit, before everything else.

        :raises NotFound: one was deleted.
        """
        for number in sorted({each for each in numbers if each >= FIRST_CUSTOM}):
            if tx.execute(_HOLD, {"of_class": number}).rowcount != 1:
                raise no_such_class(self._seen.get(number, f"number {number}"))

    def ensure(self, tx: sa.Connection, names: Iterable[str]) -> dict[str, int]:
        """Returns the numbers of the classes; custom ones that do not exist are created.

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
