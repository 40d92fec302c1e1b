# SPDX-License-Identifier: Apache-2.0
"""Bringing providers and inventories to a given state, set by set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.interface import InventoryItem, ResourceProvider
from moorage_plugins.stores.classes import ResourceClasses, class_name
from moorage_plugins.stores.rows import insert_unless_taken
from moorage_plugins.stores.statements import TURN
from moorage_plugins.stores.tables import inventories, resource_providers

__all__ = ["ensure"]

#: Providers that one set of statements brings to their state; SQLite limits the parameters of a statement.
_BATCH = 400
#: How often the providers are looked at again because others create the same ones.
_TRIES = 5
_FIELDS = ("total", "reserved", "min_unit", "max_unit", "step_size", "allocation_ratio")
_ADD_PROVIDERS = sa.insert(resource_providers)
_ADD_INVENTORIES = sa.insert(inventories)
_OF_PROVIDER = inventories.c.resource_provider_id == sa.bindparam("of_provider")
_OF_CLASS = inventories.c.resource_class_id == sa.bindparam("of_class")
_CHANGE = (
    sa.update(inventories)
    .where(_OF_PROVIDER, _OF_CLASS)
    .values({name: sa.bindparam(f"new_{name}") for name in _FIELDS})
)
#: The condition is here and not in a read before it: a claim may come between.
_DROP = sa.delete(inventories).where(_OF_PROVIDER, _OF_CLASS, inventories.c.used == 0)
_RENAME = (
    sa.update(resource_providers)
    .where(resource_providers.c.id == sa.bindparam("of_provider"))
    .values(name=sa.bindparam("new_name"), can_host=sa.bindparam("new_can_host"))
)


def ensure(tx: sa.Connection, classes: ResourceClasses, providers: Sequence[ResourceProvider]) -> int:
    """Create or change what differs; how many providers that were. See the store's interface for the errors."""
    return sum(_ensure_batch(tx, classes, batch) for batch in _batches(providers))


def _batches(providers: Sequence[ResourceProvider]) -> Iterator[Sequence[ResourceProvider]]:
    for start in range(0, len(providers), _BATCH):
        yield providers[start : start + _BATCH]


def _ensure_batch(tx: sa.Connection, classes: ResourceClasses, batch: Sequence[ResourceProvider]) -> int:
    numbers = classes.ensure(tx, (item.resource_class for each in batch for item in each.inventories))
    known, fresh = _create(tx, batch)
    if fresh:
        created = _known(tx, fresh)
        rows = [_row(numbers, created[each.uuid].id, item) | {"used": 0} for each in fresh for item in each.inventories]
        if rows:
            tx.execute(_ADD_INVENTORIES, rows)
    present = _inventories(tx, [row.id for row in known.values()])
    changed = sum(
        _bring(tx, numbers, known[each.uuid], present.get(known[each.uuid].id, {}), each)
        for each in batch
        if each.uuid in known
    )
    return len(fresh) + changed


def _create(tx: sa.Connection, batch: Sequence[ResourceProvider]) -> tuple[dict[str, Any], Sequence[ResourceProvider]]:
    """The rows that there were by uuid, and the providers that were created."""
    for _ in range(_TRIES):
        known = _known(tx, batch)
        fresh = [each for each in batch if each.uuid not in known]
        rows = [{"uuid": each.uuid, "name": each.name, "can_host": each.can_host, "generation": 0} for each in fresh]
        if not rows or insert_unless_taken(tx, _ADD_PROVIDERS, rows):
            return known, fresh
    raise errors.StoreBusy("Others create and delete the same providers all the time; try again later.")


def _known(tx: sa.Connection, batch: Sequence[ResourceProvider]) -> dict[str, Any]:
    rows = tx.execute(
        sa.select(resource_providers).where(
            sa.or_(
                resource_providers.c.uuid.in_([each.uuid for each in batch]),
                resource_providers.c.name.in_([each.name for each in batch]),
            )
        )
    ).all()
    owners = {row.name: row.uuid for row in rows}
    for each in batch:
        if owners.get(each.name, each.uuid) != each.uuid:
            raise errors.AlreadyExists(
                f"The name {each.name} belongs to provider {owners[each.name]}, so {each.uuid} cannot have it.",
                name=each.name,
                holder=owners[each.name],
            )
    wanted = {each.uuid for each in batch}
    return {row.uuid: row for row in rows if row.uuid in wanted}


def _inventories(tx: sa.Connection, providers: Sequence[int]) -> dict[int, dict[int, Any]]:
    found: dict[int, dict[int, Any]] = {}
    if providers:
        for row in tx.execute(sa.select(inventories).where(inventories.c.resource_provider_id.in_(providers))).all():
            found.setdefault(row.resource_provider_id, {})[row.resource_class_id] = row
    return found


def _row(numbers: Mapping[str, int], provider: int, item: InventoryItem) -> dict[str, Any]:
    return {
        "resource_provider_id": provider,
        "resource_class_id": numbers[item.resource_class],
        **{name: getattr(item, name) for name in _FIELDS},
    }


def _differs(row: Any, item: InventoryItem) -> bool:
    return any(getattr(row, name) != getattr(item, name) for name in _FIELDS)


def _bring(
    tx: sa.Connection,
    numbers: Mapping[str, int],
    row: Any,
    present: Mapping[int, Any],
    provider: ResourceProvider,
) -> bool:
    """Bring one provider that exists to its state; False when it is there already."""
    wanted = {numbers[item.resource_class]: item for item in provider.inventories}
    same = wanted.keys() == present.keys() and not any(_differs(present[key], item) for key, item in wanted.items())
    renamed = row.name != provider.name or bool(row.can_host) != provider.can_host
    if not same:
        # The turn first, then the look that counts: no claim and no other change comes between.
        if tx.execute(TURN, {"of_provider": row.id, "of_uuid": provider.uuid}).rowcount != 1:
            raise errors.StoreBusy(f"Provider {provider.uuid} was deleted while it was changed; try again.")
        _set_inventories(tx, row.id, wanted, _inventories(tx, [row.id]).get(row.id, {}), provider, numbers)
    if renamed:
        tx.execute(_RENAME, {"of_provider": row.id, "new_name": provider.name, "new_can_host": provider.can_host})
    return renamed or not same


def _set_inventories(
    tx: sa.Connection,
    number: int,
    wanted: Mapping[int, InventoryItem],
    present: Mapping[int, Any],
    provider: ResourceProvider,
    numbers: Mapping[str, int],
) -> None:
    for of_class in present.keys() - wanted.keys():
        if tx.execute(_DROP, {"of_provider": number, "of_class": of_class}).rowcount != 1:
            name = class_name(tx, of_class)
            raise errors.InUse(
                f"The inventory of {name} of provider {provider.uuid} has allocations; release them first.",
                provider=provider.uuid,
                resource_class=name,
                holder=f"{present[of_class].used} {name} of allocations",
            )
    added = [_row(numbers, number, wanted[key]) | {"used": 0} for key in wanted.keys() - present.keys()]
    if added:
        tx.execute(_ADD_INVENTORIES, added)
    for key in wanted.keys() & present.keys():
        if _differs(present[key], wanted[key]):
            values = {f"new_{name}": getattr(wanted[key], name) for name in _FIELDS}
            tx.execute(_CHANGE, {"of_provider": number, "of_class": key, **values})
