# SPDX-License-Identifier: Apache-2.0
"""Manages pools for operators: a name, inventories, and the nodes that take resources from the pool.

A pool is a provider on which nothing lands (``can_host`` False) with the trait of sharing, and its members are the providers in
the aggregate that has the pool's uuid. It is counted once, however many nodes share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

from moorage import errors
from moorage.allocation.interface import (
    SHARES,
    AllocationStore,
    GenerationConflict,
    InventoryItem,
    PoolSource,
    ProviderCatalogue,
    ProviderFilter,
    ProviderUsage,
    ResourceProvider,
)

__all__ = ["Pool", "PoolKeeper"]

T = TypeVar("T")
#: How often a provider is read and written again because others write it at the same time.
_TRIES = 10


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool with what is used of it, and the uuids of its members, sorted."""

    usage: ProviderUsage
    members: tuple[str, ...]


class PoolKeeper:
    """Makes, changes and lists pools.

    :raises InvalidInput: the store has not the powers for it.
    """

    def __init__(self, store: AllocationStore) -> None:
        if not isinstance(store, ProviderCatalogue) or not isinstance(store, PoolSource):
            raise errors.InvalidInput(
                f"The allocation store {type(store).__name__} knows no aggregates, so it can have no pools; use sql."
            )
        self._store = store
        self._catalogue: ProviderCatalogue = store

    def list(self) -> Sequence[Pool]:
        """Returns all pools, ordered by uuid; two statements and one for each pool."""
        found = self._catalogue.find_providers(ProviderFilter(required=(frozenset({SHARES}),)))
        return [self._shown(each.uuid) for each in found if not each.can_host]

    def get(self, uuid: str) -> Pool:
        """One pool.

        :raises NotFound: there is none of this uuid.
        """
        self._must_be_pool(uuid)
        return self._shown(uuid)

    def set(self, uuid: str, name: str, items: Sequence[InventoryItem], members: Set[str]) -> Pool:
        """Make a pool, or bring it to this state. Repeating it is harmless, and finishes what was interrupted.

        Each provider is written in a transaction of its own, the pool first and what leaves it last. What a member that leaves
        holds of the pool it keeps.

        :raises NotFound: a member does not exist; nothing was written.
        :raises Conflict: the uuid is a node's.
        :raises InUse: an inventory would vanish that has allocations.
        """
        missing = sorted(each for each in members if not self._catalogue.find_providers(ProviderFilter(uuid=each)))
        if missing:
            raise errors.NotFound(
                f"There is no provider {missing[0]} that could take of the pool.", provider=missing[0]
            )
        present = self._catalogue.find_providers(ProviderFilter(uuid=uuid))
        if uuid in members or any(each.can_host for each in present):
            raise errors.Conflict(f"{uuid} is the uuid of a node, so it cannot be a pool.", provider=uuid)
        self._store.ensure_providers([ResourceProvider(uuid, name, can_host=False, inventories=tuple(items))])
        self._add_trait(uuid)
        self._join(uuid, uuid, wanted=True)
        before = set(self._members(uuid))
        for each in sorted(members - before):
            self._join(each, uuid, wanted=True)
        for each in sorted(before - members):
            self._join(each, uuid, wanted=False)
        return self._shown(uuid)

    def delete(self, uuid: str) -> None:
        """Remove a pool; its members forget it.

        :raises NotFound: there is none of this uuid.
        :raises InUse: it has allocations.
        """
        self._must_be_pool(uuid)
        members = self._members(uuid)
        self._store.delete_provider(uuid)
        for each in members:
            self._join(each, uuid, wanted=False)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _must_be_pool(self, uuid: str) -> None:
        query = ProviderFilter(uuid=uuid, required=(frozenset({SHARES}),))
        if not any(not each.can_host for each in self._catalogue.find_providers(query)):
            raise errors.NotFound(f"There is no pool {uuid}.", provider=uuid)

    def _shown(self, uuid: str) -> Pool:
        return Pool(self._catalogue.inventories(uuid), self._members(uuid))

    def _members(self, uuid: str) -> tuple[str, ...]:
        found = self._catalogue.find_providers(ProviderFilter(member_of=(frozenset({uuid}),)))
        return tuple(each.uuid for each in found if each.uuid != uuid)

    def _add_trait(self, uuid: str) -> None:
        def work() -> None:
            row, traits = self._catalogue.provider_traits(uuid)
            if SHARES not in traits:
                self._catalogue.set_traits(uuid, {*traits, SHARES}, row.generation)

        _persistently(work)

    def _join(self, uuid: str, aggregate: str, *, wanted: bool) -> None:
        def work() -> None:
            row, present = self._catalogue.provider_aggregates(uuid)
            if (aggregate in present) != wanted:
                changed = {*present, aggregate} if wanted else set(present) - {aggregate}
                self._catalogue.set_aggregates(uuid, changed, row.generation)

        _persistently(work)


def _persistently(work: Callable[[], T]) -> T:
    """Repeats the read and the write if another write came in between."""
    for _ in range(_TRIES - 1):
        try:
            return work()
        except GenerationConflict:
            continue
    return work()
