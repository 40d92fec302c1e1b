# SPDX-License-Identifier: Apache-2.0
"""Bringing providers and inventories to a given state, set by set; and the places of providers in trees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.interface import InventoryItem, Merge, ResourceProvider
from moorage.db import now
from moorage_plugins.stores.checks import check_levels
from moorage_plugins.stores.classes import ResourceClasses
from moorage_plugins.stores.insert_unless_taken import insert_unless_taken
from moorage_plugins.stores.statements import BUMP_GENERATION, PROVIDER_ROW, TOUCH
from moorage_plugins.stores.tables import inventories, resource_providers

__all__ = ["DeletedMeanwhile", "add_provider", "ensure", "join_tree", "move", "present_inventories", "set_inventories"]

#: Providers that one set of statements brings to their state; SQLite limits the parameters of a statement.
_BATCH = 400
#: How often the providers are looked at again because others create the same ones.
_TRIES = 5
_FIELDS = ("total", "reserved", "min_unit", "max_unit", "step_size", "allocation_ratio")


class DeletedMeanwhile(errors.StoreBusy):
    """A provider that was there is gone; looking again would help."""


_KNOWN = sa.select(resource_providers).where(
    sa.or_(
        resource_providers.c.uuid.in_(sa.bindparam("of_uuids", expanding=True)),
        resource_providers.c.name.in_(sa.bindparam("of_names", expanding=True)),
    )
)
_ADD_PROVIDERS = sa.insert(resource_providers).values(generation=0, updated_at=now())
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
    .values(name=sa.bindparam("new_name"), can_host=sa.bindparam("new_can_host"), updated_at=now())
)
_TREE = sa.select(resource_providers.c.uuid, resource_providers.c.parent_uuid).where(
    resource_providers.c.root_uuid == sa.bindparam("of_root")
)
_SET_PARENT = (
    sa.update(resource_providers)
    .where(resource_providers.c.uuid == sa.bindparam("of_uuid"))
    .values(parent_uuid=sa.bindparam("new_parent"), updated_at=now())
)
_SET_ROOT = (
    sa.update(resource_providers)
    .where(resource_providers.c.uuid.in_(sa.bindparam("uuids", expanding=True)))
    .values(root_uuid=sa.bindparam("new_root"))
)


def ensure(
    tx: sa.Connection, classes: ResourceClasses, providers: Sequence[ResourceProvider], merge: Merge | None = None
) -> int:
    """Creates or changes providers; returns how many were written. See the store's interface for parameters and errors."""
    return sum(_ensure_batch(tx, classes, batch, merge) for batch in _batches(providers))


def _batches(providers: Sequence[ResourceProvider]) -> Iterator[Sequence[ResourceProvider]]:
    for start in range(0, len(providers), _BATCH):
        yield providers[start : start + _BATCH]


def _ensure_batch(
    tx: sa.Connection, classes: ResourceClasses, batch: Sequence[ResourceProvider], merge: Merge | None
) -> int:
    numbers = classes.ensure(tx, (item.resource_class for each in batch for item in each.inventories))
    known, fresh = _create(tx, batch)
    added: set[int] = set()
    if fresh:
        created = _known(tx, fresh)
        rows = [_row(numbers, created[each.uuid].id, item) | {"used": 0} for each in fresh for item in each.inventories]
        if rows:
            tx.execute(_ADD_INVENTORIES, rows)
        added |= {row["resource_class_id"] for row in rows}
    present = present_inventories(tx, [row.id for row in known.values()])
    changed = sum(
        _bring(tx, classes, numbers, known[each.uuid], present.get(known[each.uuid].id, {}), each, added, merge)
        for each in batch
        if each.uuid in known
    )
    classes.hold(tx, added)
    return len(fresh) + changed


def _create(tx: sa.Connection, batch: Sequence[ResourceProvider]) -> tuple[dict[str, Any], Sequence[ResourceProvider]]:
    """Returns the rows that there were by uuid, and the providers that were created."""
    for _ in range(_TRIES):
        known = _known(tx, batch)
        fresh = [each for each in batch if each.uuid not in known]
        places: dict[str, _Place] = {}
        rows = []
        for each in fresh:
            places[each.uuid] = place = _place(tx, each, places)
            rows.append(_provider_row(each, place.root))
        if not rows or insert_unless_taken(tx, _ADD_PROVIDERS, rows):
            return known, fresh
    raise errors.StoreBusy("Others create and delete the same providers all the time; try again later.")


class _Place(NamedTuple):
    """The root of a provider's tree, and the level of the provider there; that of the root is 1."""

    root: str
    level: int


def _place(tx: sa.Connection, provider: ResourceProvider, places: dict[str, _Place]) -> _Place:
    """Returns the place of a new provider in its tree, and locks the tree until ``tx`` ends.

    :param places: of providers that were looked at before, those that the same statement creates among them; the parent is added.
    :raises TreeTooDeep: it is below too many levels.
    """
    parent = provider.parent
    if parent is None:
        return _Place(provider.uuid, 1)
    if parent not in places:
        root = join_tree(tx, parent)
        places[parent] = _Place(root, _level(tx, parent))
    above = places[parent]
    check_levels(provider.uuid, parent, above.level + 1)
    return _Place(above.root, above.level + 1)


def _level(tx: sa.Connection, uuid: str) -> int:
    """Returns the level of a provider. The caller has locked its tree."""
    level, at = 1, _existing(tx, uuid).parent_uuid
    while at is not None:
        level, at = level + 1, _existing(tx, at).parent_uuid
    return level


def _provider_row(provider: ResourceProvider, root: str) -> dict[str, Any]:
    return {
        "uuid": provider.uuid,
        "name": provider.name,
        "can_host": provider.can_host,
        "parent_uuid": provider.parent,
        "root_uuid": root,
    }


def add_provider(tx: sa.Connection, classes: ResourceClasses, provider: ResourceProvider) -> None:
    """Create one provider.

    :raises Duplicate: its uuid or name is taken; the transaction is undone.
    """
    if provider.parent == provider.uuid:
        raise errors.InvalidInput(f"Provider {provider.uuid} cannot be its own parent.", path="parent")
    numbers = classes.numbers(tx, (item.resource_class for item in provider.inventories))
    tx.execute(_ADD_PROVIDERS, _provider_row(provider, _place(tx, provider, {}).root))
    if provider.inventories:
        number = tx.execute(PROVIDER_ROW, {"of_uuid": provider.uuid}).one().id
        tx.execute(_ADD_INVENTORIES, [_row(numbers, number, item) | {"used": 0} for item in provider.inventories])
        classes.hold(tx, numbers.values())


def join_tree(tx: sa.Connection, parent: str) -> str:
    """Locks a tree for a new child: the rows of its root and of the parent, until ``tx`` ends. Returns the root's uuid.

    :raises InvalidInput: there is no such parent.
    """
    for _ in range(_TRIES):
        row = tx.execute(PROVIDER_ROW, {"of_uuid": parent}).first()
        if row is None:
            raise errors.InvalidInput(f"There is no provider {parent} that could be the parent.", path="parent")
        for uuid in dict.fromkeys((row.root_uuid, parent)):
            tx.execute(TOUCH, {"of_uuid": uuid})
        now_there = tx.execute(PROVIDER_ROW, {"of_uuid": parent}).first()
        if now_there is not None and now_there.root_uuid == row.root_uuid:
            return str(row.root_uuid)
    raise errors.StoreBusy(f"Others move the tree of provider {parent} all the time; try again later.")


def move(tx: sa.Connection, uuid: str, parent: str | None, *, reparent: bool) -> None:
    """Put a provider that exists, with all below it, below another parent; None: make it a root.

    :raises InvalidInput: no such parent, it lies below the provider, or ``reparent`` forbids it.
    """
    for _ in range(_TRIES):
        row = _existing(tx, uuid)
        if row.parent_uuid == parent:
            return
        if row.parent_uuid is not None and not reparent:
            raise errors.InvalidInput(
                f"Provider {uuid} has the parent {row.parent_uuid}, and may not get another one.", path="parent"
            )
        for each in dict.fromkeys((row.root_uuid, uuid)):
            tx.execute(TOUCH, {"of_uuid": each})
        root = uuid if parent is None else join_tree(tx, parent)
        held = _existing(tx, uuid)
        if (held.root_uuid, held.parent_uuid) == (row.root_uuid, row.parent_uuid):
            _move(tx, uuid, parent, row.root_uuid, root)
            return
    raise errors.StoreBusy(f"Others move provider {uuid} all the time; try again later.")


def _move(tx: sa.Connection, uuid: str, parent: str | None, old_root: str, root: str) -> None:
    """For who holds both trees as they are."""
    levels = _subtree(uuid, tx.execute(_TREE, {"of_root": old_root}).all())
    below = [each for level in levels for each in level]
    if parent in below:
        raise errors.InvalidInput(
            f"Provider {parent} is, or lies below, provider {uuid}, so it cannot be its parent (that would be a loop).",
            path="parent",
        )
    if parent is not None:
        check_levels(uuid, parent, _level(tx, parent) + len(levels), _level(tx, uuid) - 1 + len(levels))
    tx.execute(_SET_PARENT, {"of_uuid": uuid, "new_parent": parent})
    for start in range(0, len(below), _BATCH):
        tx.execute(_SET_ROOT, {"uuids": below[start : start + _BATCH], "new_root": root})


def _existing(tx: sa.Connection, uuid: str) -> Any:
    row = tx.execute(PROVIDER_ROW, {"of_uuid": uuid}).first()
    if row is None:
        raise errors.NotFound(f"There is no resource provider {uuid}.", provider=uuid)
    return row


def _subtree(uuid: str, tree: Sequence[Any]) -> list[list[str]]:
    """Returns a provider and all below it, level by level."""
    children: dict[str, list[str]] = {}
    for each in tree:
        children.setdefault(each.parent_uuid, []).append(each.uuid)
    found, level = [], [uuid]
    while level:
        found.append(level)
        level = [child for each in level for child in children.get(each, ())]
    return found


def _known(tx: sa.Connection, batch: Sequence[ResourceProvider]) -> dict[str, Any]:
    given = {"of_uuids": [each.uuid for each in batch], "of_names": [each.name for each in batch]}
    rows = tx.execute(_KNOWN, given).all()
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


def present_inventories(tx: sa.Connection, providers: Sequence[int]) -> dict[int, dict[int, Any]]:
    """Rows of inventories by the provider's id and the class's number."""
    found: dict[int, dict[int, Any]] = {}
    if providers:
        for row in tx.execute(sa.select(inventories).where(inventories.c.resource_provider_id.in_(providers))).all():
            found.setdefault(row.resource_provider_id, {})[row.resource_class_id] = row
    return found


def _row(numbers: Mapping[str, int], provider: int, item: InventoryItem) -> dict[str, Any]:
    return {
        "resource_provider_id": provider,
        "resource_class_id": numbers[item.resource_class],
        **_fields(item),
    }


def _fields(item: InventoryItem) -> dict[str, Any]:
    return {name: getattr(item, name) for name in _FIELDS}


def _differs(row: Any, item: InventoryItem) -> bool:
    return any(getattr(row, name) != getattr(item, name) for name in _FIELDS)


def _bring(
    tx: sa.Connection,
    classes: ResourceClasses,
    numbers: Mapping[str, int],
    row: Any,
    present: Mapping[int, Any],
    provider: ResourceProvider,
    added: set[int],
    merge: Merge | None,
) -> bool:
    """Brings a provider that exists to its state; False when nothing differs. Adds new classes to ``added``."""
    wanted = _wanted(tx, classes, numbers, provider, present, merge)
    same = wanted.keys() == present.keys() and not any(_differs(present[key], item) for key, item in wanted.items())
    renamed = row.name != provider.name or bool(row.can_host) != provider.can_host
    if not same:
        # The provider's row is written before its inventories are read again: no claim and no other change comes between.
        if tx.execute(BUMP_GENERATION, {"of_provider": row.id, "of_uuid": provider.uuid}).rowcount != 1:
            raise DeletedMeanwhile(f"Provider {provider.uuid} was deleted while it was changed; try again.")
        present = present_inventories(tx, [row.id]).get(row.id, {})
        wanted = _wanted(tx, classes, numbers, provider, present, merge)
        added |= set_inventories(tx, classes, row.id, provider.uuid, wanted, present)
    if renamed:
        tx.execute(_RENAME, {"of_provider": row.id, "new_name": provider.name, "new_can_host": provider.can_host})
    return renamed or not same


def _wanted(
    tx: sa.Connection,
    classes: ResourceClasses,
    numbers: Mapping[str, int],
    provider: ResourceProvider,
    present: Mapping[int, Any],
    merge: Merge | None,
) -> dict[int, InventoryItem]:
    """Returns the inventories that a provider which exists shall have, by the class's number."""
    if merge is None:
        return {numbers[item.resource_class]: item for item in provider.inventories}
    names = classes.names(tx, present)
    items = {
        names[key]: InventoryItem(names[key], **{name: getattr(row, name) for name in _FIELDS})
        for key, row in present.items()
    }
    known = {**numbers, **{name: key for key, name in names.items()}}
    return {known[item.resource_class]: item for item in merge(provider.uuid, items)}


def set_inventories(
    tx: sa.Connection,
    classes: ResourceClasses,
    number: int,
    uuid: str,
    wanted: Mapping[int, InventoryItem],
    present: Mapping[int, Any],
) -> set[int]:
    """Bring the inventories of a provider to the given state, for who has the turn; the classes that were added.

    :raises InUse: one would vanish that has allocations.
    """
    for of_class in present.keys() - wanted.keys():
        if tx.execute(_DROP, {"of_provider": number, "of_class": of_class}).rowcount != 1:
            name = classes.names(tx, [of_class])[of_class]
            raise errors.InUse(
                f"The inventory of {name} of provider {uuid} has allocations; release them first.",
                provider=uuid,
                resource_class=name,
                holder=f"{present[of_class].used} {name} of allocations",
            )
    fresh = wanted.keys() - present.keys()
    if fresh:
        tx.execute(
            _ADD_INVENTORIES,
            [
                {"resource_provider_id": number, "resource_class_id": key, "used": 0, **_fields(wanted[key])}
                for key in sorted(fresh)
            ],
        )
    for key in wanted.keys() & present.keys():
        if _differs(present[key], wanted[key]):
            values = {f"new_{name}": value for name, value in _fields(wanted[key]).items()}
            tx.execute(_CHANGE, {"of_provider": number, "of_class": key, **values})
    return set(fresh)
