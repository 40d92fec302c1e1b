# SPDX-License-Identifier: Apache-2.0
"""The parts of the memory store that edit providers one by one, and keep names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import (
    KEEP,
    InventoryItem,
    Keep,
    NameCatalogue,
    ProviderFilter,
    ProviderUsage,
    ResourceClass,
    ResourceProvider,
    Trait,
)
from moorage_plugins.stores.checks import (
    check_aggregates,
    check_class,
    check_classes,
    check_levels,
    check_provider_name,
    check_providers,
    refusal,
)
from moorage_plugins.stores.classes import STANDARD_CLASSES, no_such_class
from moorage_plugins.stores.edits import Edit, InventoryEdits
from moorage_plugins.stores.trait_names import STANDARD_TRAITS, check_trait, no_such_traits
from tests.memory_store.part import MemoryPart, MemoryProvider, refuse_transaction

__all__ = ["MemoryCatalogue", "MemoryNames"]


class MemoryCatalogue(MemoryPart, InventoryEdits):
    """Providers, inventories, traits of providers, aggregates."""

    @override
    def create_provider(self, provider: ResourceProvider) -> ResourceProvider:
        check_providers([provider])
        with self._lock:
            if provider.parent == provider.uuid:
                raise errors.InvalidInput(f"Provider {provider.uuid} cannot be its own parent.", path="parent")
            self._check_classes(item.resource_class for item in provider.inventories)
            self._check_parent(provider.parent)
            self._check_place(provider, {})
            if provider.uuid in self._providers:
                raise errors.AlreadyExists(
                    f"There is a provider {provider.uuid} already.", field="uuid", provider=provider.uuid
                )
            self._check_name(provider.name, provider.uuid)
            return self._shown(self._insert(provider))

    def _insert(self, provider: ResourceProvider) -> MemoryProvider:
        self._count += 1
        items = {item.resource_class: item for item in provider.inventories}
        row = MemoryProvider(
            provider.uuid,
            provider.name,
            provider.can_host,
            self._count,
            parent=provider.parent,
            items=items,
            used=dict.fromkeys(items, 0),
            updated_at=self._now(),
        )
        self._providers[provider.uuid] = row
        self._names[provider.name] = provider.uuid
        return row

    def _check_parent(self, parent: str | None) -> None:
        if parent is not None and parent not in self._providers:
            raise errors.InvalidInput(f"There is no provider {parent} that could be the parent.", path="parent")

    def _check_place(self, provider: ResourceProvider, beside: Mapping[str, str | None]) -> None:
        """Refuses a new provider that is below too many levels.

        :param beside: parents of providers that are created with it.
        """
        if provider.parent is not None:
            check_levels(provider.uuid, provider.parent, self._level(provider.parent, beside) + 1)

    def _level(self, uuid: str, beside: Mapping[str, str | None] | None = None) -> int:
        level, others = 0, beside or {}
        at: str | None = uuid
        while at is not None:
            level, at = level + 1, others[at] if at in others else self._providers[at].parent
        return level

    def _height(self, uuid: str) -> int:
        """Levels of the tree that a provider would be the root of."""
        below = [each.uuid for each in self._providers.values() if each.parent == uuid]
        return 1 + max(map(self._height, below), default=0)

    def _check_name(self, name: str, uuid: str) -> None:
        if self._names.get(name, uuid) != uuid:
            raise errors.AlreadyExists(f"Another provider has the name {name}.", field="name", name=name)

    @override
    def provider(self, uuid: str) -> ResourceProvider:
        with self._lock:
            return self._shown(self._get(uuid), items=False)

    @override
    def find_providers(
        self, query: ProviderFilter | None = None, *, after: str = "", limit: int | None = None
    ) -> list[ResourceProvider]:
        query = query or ProviderFilter()
        with self._lock:
            check_classes(query.resources)
            self._check_classes(query.resources)
            self._check_traits(query.forbidden.union(*query.required))
            root = self._root(query.in_tree) if query.in_tree in self._providers else None
            found = [
                self._shown(row, items=False)
                for uuid, row in sorted(self._providers.items())
                if uuid > after and self._matches(row, query) and (query.in_tree is None or self._root(uuid) == root)
            ]
        return found[:limit]

    def _matches(self, row: MemoryProvider, query: ProviderFilter) -> bool:
        return (
            query.name in {None, row.name}
            and query.uuid in {None, row.uuid}
            and all(each & row.traits for each in query.required)
            and not query.forbidden & row.traits
            and all(each & row.aggregates for each in query.member_of)
            and not query.not_member_of & row.aggregates
            and all(
                refusal(row.uuid, name, amount, row.items.get(name), row.used.get(name, 0), self._step_rule) is None
                for name, amount in query.resources.items()
            )
        )

    @override
    def update_provider(
        self,
        uuid: str,
        *,
        name: str | Keep = KEEP,
        can_host: bool | Keep = KEEP,
        parent: str | None | Keep = KEEP,
        reparent: bool = True,
    ) -> ResourceProvider:
        if not isinstance(name, Keep):
            check_provider_name(name)
        with self._lock:
            row = self._get(uuid)
            if not isinstance(parent, Keep):
                self._check_move(row, parent, reparent)
            if not isinstance(name, Keep):
                self._check_name(name, uuid)
                del self._names[row.name]
                self._names[name] = uuid
                row.name = name
            if not isinstance(parent, Keep):
                row.parent = parent
            if not isinstance(can_host, Keep):
                row.can_host = can_host
            row.updated_at = self._now()
            return self._shown(row, items=False)

    def _check_move(self, row: MemoryProvider, parent: str | None, reparent: bool) -> None:
        if parent == row.parent:
            return
        if row.parent is not None and not reparent:
            raise errors.InvalidInput(
                f"Provider {row.uuid} has the parent {row.parent}, and may not get another one.", path="parent"
            )
        self._check_parent(parent)
        above = parent
        while above is not None:
            if above == row.uuid:
                raise errors.InvalidInput(
                    f"Provider {parent} is, or lies below, provider {row.uuid}, so it cannot be its parent (that would be a "
                    "loop).",
                    path="parent",
                )
            above = self._providers[above].parent
        if parent is not None:
            height = self._height(row.uuid)
            check_levels(row.uuid, parent, self._level(parent) + height, self._level(row.uuid) - 1 + height)

    # -- inventories ----------------------------------------------------------------------------------------------

    @override
    def inventories(self, uuid: str) -> ProviderUsage:
        with self._lock:
            return self._usage(self._get(uuid))

    @override
    def _edit(self, uuid: str, expected: int | None, edit: Edit) -> ResourceProvider:
        with self._lock:
            row = self._turn(uuid, expected)
            wanted = edit(row.items)
            self._check_classes(item.resource_class for item in wanted)
            self._check_kept(row, {item.resource_class for item in wanted})
            self._give(row, wanted)
            return self._shown(row)

    def _check_kept(self, row: MemoryProvider, kept: Set[str]) -> None:
        for name, used in row.used.items():
            if used and name not in kept:
                raise errors.InUse(
                    f"The inventory of {name} of provider {row.uuid} has allocations; release them first.",
                    provider=row.uuid,
                    resource_class=name,
                    holder=f"{used} {name} of allocations",
                )

    def _give(self, row: MemoryProvider, items: Sequence[InventoryItem]) -> None:
        row.items = {item.resource_class: item for item in items}
        row.used = {name: row.used.get(name, 0) for name in row.items}
        self._written(row)

    # -- traits and aggregates ------------------------------------------------------------------------------------

    @override
    def provider_traits(self, uuid: str) -> tuple[ResourceProvider, tuple[str, ...]]:
        with self._lock:
            row = self._get(uuid)
            return self._shown(row, items=False), tuple(sorted(row.traits))

    @override
    def traits_of(self, providers: Sequence[str]) -> Mapping[str, frozenset[str]]:
        wanted = set(providers)
        with self._lock:
            found = {uuid: row.traits for uuid, row in self._providers.items() if uuid in wanted}
        return {uuid: traits for uuid, traits in found.items() if traits}

    @override
    def set_traits(
        self, uuid: str, traits: Set[str], expected_generation: int | None = None
    ) -> tuple[ResourceProvider, tuple[str, ...]]:
        with self._lock:
            row = self._turn(uuid, expected_generation)
            self._check_traits(traits)
            row.traits = frozenset(traits)
            self._written(row)
            return self._shown(row, items=False), tuple(sorted(traits))

    @override
    def change_traits(
        self, uuid: str, added: Set[str], removed: Set[str] = frozenset(), transaction: Any | None = None
    ) -> bool:
        refuse_transaction(transaction)
        with self._lock:
            row = self._get(uuid)
            if added <= row.traits and row.traits.isdisjoint(removed):
                return False
            custom = sorted(name for name in added - self._traits.keys() if name.startswith("CUSTOM_"))
            for name in custom:
                check_trait(name)
            self._check_traits(added - set(custom))
            self._traits |= dict.fromkeys(custom, self._now())
            row.traits = (row.traits - removed) | added
            self._written(row)
            return True

    @override
    def provider_aggregates(self, uuid: str) -> tuple[ResourceProvider, tuple[str, ...]]:
        with self._lock:
            row = self._get(uuid)
            return self._shown(row, items=False), tuple(sorted(row.aggregates))

    @override
    def set_aggregates(
        self, uuid: str, aggregates: Set[str], expected_generation: int | None = None
    ) -> tuple[ResourceProvider, tuple[str, ...]]:
        check_aggregates(aggregates)
        with self._lock:
            row = self._turn(uuid, expected_generation)
            row.aggregates = frozenset(aggregates)
            row.updated_at = self._now()
            row.generation += expected_generation is not None
            return self._shown(row, items=False), tuple(sorted(aggregates))


class MemoryNames(MemoryPart, NameCatalogue):
    """Names of resource classes and traits."""

    @override
    def resource_classes(self) -> list[ResourceClass]:
        with self._lock:
            return [ResourceClass(name, name in STANDARD_CLASSES, when) for name, when in self._classes.items()]

    @override
    def create_resource_class(self, name: str) -> bool:
        with self._lock:
            if name in self._classes:
                return False
            check_class(name, known=False)
            self._classes[name] = self._now()
            return True

    @override
    def rename_resource_class(self, name: str, new_name: str) -> None:
        with self._lock:
            self._check_custom(name)
            if new_name in self._classes and (new_name != name or name in STANDARD_CLASSES):
                raise errors.AlreadyExists(f"There is a resource class {new_name} already.", resource_class=new_name)
            check_class(new_name, known=False)
            # In the same place: the order is that of their creation.
            self._classes = {
                (new_name if each == name else each): (self._now() if each == name else when)
                for each, when in self._classes.items()
            }
            for row in self._providers.values():
                if name in row.items:
                    row.items[new_name] = replace(row.items.pop(name), resource_class=new_name)
                    row.used[new_name] = row.used.pop(name)
            for uuid, consumer in self._consumers.items():
                held = tuple(
                    replace(item, resource_class=new_name) if item.resource_class == name else item
                    for item in consumer.held
                )
                self._consumers[uuid] = replace(consumer, held=held)

    @override
    def delete_resource_class(self, name: str) -> None:
        with self._lock:
            self._check_custom(name)
            count = sum(name in row.items for row in self._providers.values())
            if count:
                raise errors.InUse(
                    f"{count} providers have an inventory of resource class {name}; remove those first.",
                    resource_class=name,
                    holder=f"{count} inventories",
                )
            del self._classes[name]

    def _check_custom(self, name: str) -> None:
        if name in STANDARD_CLASSES:
            raise errors.InvalidInput(
                f"{name} is a standard resource class and stays as it is; only classes named CUSTOM_... can be changed.",
                path="resource_class",
            )
        if name not in self._classes:
            raise no_such_class(name)

    @override
    def traits(self, *, names: Set[str] | None = None, prefix: str = "", associated: bool | None = None) -> list[Trait]:
        with self._lock:
            used: set[str] = set().union(*(row.traits for row in self._providers.values()))
            return [
                Trait(name, name in STANDARD_TRAITS, when)
                for name, when in sorted(self._traits.items())
                if name.startswith(prefix)
                and (names is None or name in names)
                and (associated is None or (name in used) == associated)
            ]

    @override
    def create_trait(self, name: str) -> bool:
        with self._lock:
            if name in self._traits:
                return False
            check_trait(name)
            self._traits[name] = self._now()
            return True

    @override
    def delete_trait(self, name: str) -> None:
        with self._lock:
            if name in STANDARD_TRAITS:
                raise errors.InvalidInput(
                    f"{name} is a standard trait and stays; only traits named CUSTOM_... can be deleted.", path="trait"
                )
            if name not in self._traits:
                raise no_such_traits({name})
            count = sum(name in row.traits for row in self._providers.values())
            if count:
                raise errors.InUse(
                    f"{count} providers have the trait {name}; take it from them first.",
                    trait=name,
                    holder=f"{count} providers",
                )
            del self._traits[name]
