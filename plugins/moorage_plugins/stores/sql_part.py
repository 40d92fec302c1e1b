# SPDX-License-Identifier: Apache-2.0
"""What the parts of the sql store have in common: the database, names and numbers, rows turned into data."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from moorage import errors, threads
from moorage.allocation.interface import GenerationConflict, InventoryItem, ProviderUsage, ResourceProvider
from moorage.clock import Clock
from moorage.db import Database
from moorage_plugins.stores import statements
from moorage_plugins.stores.classes import ResourceClasses
from moorage_plugins.stores.quota_enforcement import QuotaCounter
from moorage_plugins.stores.tables import resource_providers

__all__ = ["SqlPart", "no_such_provider", "shown"]

_TURN_ANY = (
    sa.update(resource_providers)
    .where(resource_providers.c.uuid == sa.bindparam("of_uuid"))
    .values(statements.NEXT_GENERATION)
)
_TURN_AT = _TURN_ANY.where(resource_providers.c.generation == sa.bindparam("of_generation"))


#: Most providers of a fleet have the same inventories, which are made once for all readings.
_item = functools.lru_cache(16_384)(InventoryItem)


def no_such_provider(uuid: str) -> errors.NotFound:
    """Returns the error for a provider that does not exist."""
    return errors.NotFound(f"There is no resource provider {uuid}.", provider=uuid)


def shown(row: Any, inventories: Sequence[tuple[InventoryItem, int]] = ()) -> ResourceProvider:
    """Returns a row of :data:`moorage_plugins.stores.statements.provider_columns` as data."""
    return ResourceProvider(
        row.uuid,
        row.name,
        bool(row.can_host),
        row.generation,
        tuple(item for item, _ in inventories),
        row.parent_uuid,
        row.root_uuid,
        row.updated_at,
    )


class SqlPart:
    """The state of a sql store, shared by its parts through inheritance."""

    def __init__(self, *, conf: Any, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._step_rule = str(conf.allocation.step_size_rule)
        self._max_candidates = int(conf.allocation.max_candidates)
        self._attempts = int(conf.allocation_sql.claim_attempts)
        self._classes = ResourceClasses()
        self._quotas = QuotaCounter(self._classes)
        # uuid -> id of providers, as seen in committed rows; a use of it asks for the uuid again, so it may be outdated.
        self._ids: dict[str, int] = {}
        self._lock = threads.lock()

    def _provider_row(self, tx: sa.Connection, uuid: str) -> Any:
        """:raises NotFound: there is none."""
        row = tx.execute(statements.PROVIDER_ROW, {"of_uuid": uuid}).first()
        if row is None:
            raise no_such_provider(uuid)
        return row

    def _turn(self, tx: sa.Connection, uuid: str, expected: int | None) -> Any:
        """Raise the generation of a provider, if it is the expected one; its row afterwards.

        :raises NotFound: there is none.
        :raises GenerationConflict: nothing was written.
        """
        if expected is None:
            written = tx.execute(_TURN_ANY, {"of_uuid": uuid}).rowcount
        else:
            written = tx.execute(_TURN_AT, {"of_uuid": uuid, "of_generation": expected}).rowcount
        row = self._provider_row(tx, uuid)
        if written != 1:
            raise GenerationConflict(
                f"Provider {uuid} has generation {row.generation}, and {expected} was expected: another request changed it. "
                "Read it again, then decide again.",
                provider=uuid,
                expected=expected,
                present=row.generation,
            )
        return row

    def _inventory_rows(self, tx: sa.Connection, numbers: Iterable[int]) -> dict[int, list[tuple[InventoryItem, int]]]:
        """Inventories with what is used of them, by the provider's id."""
        rows = tx.execute(statements.INVENTORIES_OF, {"numbers": list(numbers)}).all()
        # Most providers have equal inventories, so there are few different ones.
        kinds = {row[1:-1] for row in rows}
        names = self._classes.names(tx, {of_class for of_class, *_ in kinds})
        items = {kind: _item(names[kind[0]], *kind[1:]) for kind in kinds}
        found: dict[int, list[tuple[InventoryItem, int]]] = {}
        for row in rows:
            found.setdefault(row[0], []).append((items[row[1:-1]], row[-1]))
        return found

    def _usage(self, tx: sa.Connection, row: Any) -> ProviderUsage:
        items = self._inventory_rows(tx, [row.id]).get(row.id, [])
        return ProviderUsage(shown(row, items), {item.resource_class: used for item, used in items})
