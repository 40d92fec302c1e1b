# SPDX-License-Identifier: Apache-2.0
"""The allocation store of one process, all parts together.

The same contract as the sql store's, kept under one lock: a claim is checked in full before anything is written.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import (
    AllocationItem,
    ClaimOutcome,
    ClaimRequest,
    Companion,
    Drift,
    FullStore,
    HasChildren,
    Merge,
    ProviderUsage,
    ResourceProvider,
    StoreCapability,
)
from moorage_plugins.stores.checks import as_change, check_class, check_providers, check_request
from tests.memory_store.candidates import MemoryCandidates
from tests.memory_store.catalogue import MemoryCatalogue, MemoryNames
from tests.memory_store.ledger import MemoryLedger
from tests.memory_store.part import refuse_transaction
from tests.memory_store.pools import MemoryPools
from tests.memory_store.trees import MemoryTrees

__all__ = ["MemoryStore"]


class MemoryStore(MemoryCatalogue, MemoryNames, MemoryLedger, MemoryPools, MemoryTrees, MemoryCandidates, FullStore):
    """Claims in the memory of one process. A companion is called with None, under the lock; its error undoes the claim."""

    api_version: ClassVar[tuple[int, int]] = (2, 0)
    capabilities: ClassVar[frozenset[StoreCapability]] = frozenset()

    # -- providers ------------------------------------------------------------------------------------------------

    @override
    def ensure_providers(self, providers: Sequence[ResourceProvider], transaction: Any | None = None) -> int:
        return self._ensure_all(providers, None, transaction)

    @override
    def merge_providers(
        self, providers: Sequence[ResourceProvider], merge: Merge, transaction: Any | None = None
    ) -> int:
        return self._ensure_all(providers, merge, transaction)

    def _ensure_all(self, providers: Sequence[ResourceProvider], merge: Merge | None, transaction: Any | None) -> int:
        refuse_transaction(transaction)
        check_providers(providers)
        for each in providers:
            for item in each.inventories:
                check_class(item.resource_class, item.resource_class in self._classes)
        with self._lock:
            wanted = [self._merged(each, merge) for each in providers]
            for each in wanted:
                self._check_ensured(each, wanted)
            return sum(self._ensure(each) for each in wanted)

    def _merged(self, given: ResourceProvider, merge: Merge | None) -> ResourceProvider:
        present = self._providers.get(given.uuid)
        if merge is None or present is None:
            return given
        return replace(given, inventories=tuple(merge(given.uuid, dict(present.items))))

    def _check_ensured(self, wanted: ResourceProvider, beside: Sequence[ResourceProvider]) -> None:
        holder = self._names.get(wanted.name, wanted.uuid)
        if holder != wanted.uuid:
            raise errors.AlreadyExists(
                f"The name {wanted.name} belongs to provider {holder}, so {wanted.uuid} cannot have it.",
                name=wanted.name,
                holder=holder,
            )
        present = self._providers.get(wanted.uuid)
        if present is not None:
            self._check_kept(present, {item.resource_class for item in wanted.inventories})
            return
        earlier = {each.uuid: each.parent for each in beside[: beside.index(wanted)]}
        if wanted.parent not in earlier:
            self._check_parent(wanted.parent)
        self._check_place(wanted, {uuid: parent for uuid, parent in earlier.items() if uuid not in self._providers})

    def _ensure(self, wanted: ResourceProvider) -> bool:
        items = {item.resource_class: item for item in wanted.inventories}
        for name in items:
            self._classes.setdefault(name, self._now())
        present = self._providers.get(wanted.uuid)
        if present is None:
            self._insert(wanted)
            return True
        renamed = (present.name, present.can_host) != (wanted.name, wanted.can_host)
        altered = present.items != items
        self._names.pop(present.name, None)
        self._names[wanted.name] = wanted.uuid
        present.name, present.can_host = wanted.name, wanted.can_host
        if altered:
            self._give(present, wanted.inventories)
        return renamed or altered

    @override
    def delete_provider(self, uuid: str, transaction: Any | None = None) -> bool:
        refuse_transaction(transaction)
        with self._lock:
            present = self._providers.get(uuid)
            if present is None:
                return False
            held = sum(item.provider == uuid for each in self._consumers.values() for item in each.held)
            if held:
                raise errors.InUse(
                    f"Provider {uuid} has {held} allocations; release them first.",
                    provider=uuid,
                    holder=f"{held} allocations",
                )
            children = sum(each.parent == uuid for each in self._providers.values())
            if children:
                raise HasChildren(
                    f"Provider {uuid} is the parent of {children} others; remove or move those first.",
                    provider=uuid,
                    holder=f"{children} children",
                )
            del self._providers[uuid], self._names[present.name]
            return True

    # -- claims ---------------------------------------------------------------------------------------------------

    @override
    def claim(self, request: ClaimRequest, companion: Companion | None = None) -> ClaimOutcome:
        check_request(request)
        with self._lock:
            return self._change([as_change(request)], (), companion)[0]

    @override
    def release(self, consumer: str, transaction: Any | None = None, *, residents: Sequence[str] = ()) -> bool:
        refuse_transaction(transaction)
        with self._lock:
            return self._drop(consumer, residents)

    @override
    def residents(self, provider: str, transaction: Any | None = None) -> int:
        refuse_transaction(transaction)
        with self._lock:
            return self._get(provider).residents

    # -- reading --------------------------------------------------------------------------------------------------

    @override
    def allocations(
        self,
        *,
        consumers: Sequence[str] | None = None,
        providers: Sequence[str] | None = None,
        after: tuple[str, str, str] | None = None,
        limit: int = 1000,
    ) -> list[AllocationItem]:
        with self._lock:
            found = sorted((item for uuid in self._consumers for item in self._consumers[uuid].held), key=_key)
        if consumers is not None:
            found = [item for item in found if item.consumer in set(consumers)]
        if providers is not None:
            found = [item for item in found if item.provider in set(providers)]
        start = 0 if after is None else bisect.bisect_right(found, after, key=_key)
        return found[start : start + limit]

    @override
    def usages(
        self, *, after: str = "", limit: int = 1000, providers: Sequence[str] | None = None
    ) -> list[ProviderUsage]:
        with self._lock:
            wanted = self._providers.keys() if providers is None else self._providers.keys() & set(providers)
            uuids = sorted(uuid for uuid in wanted if uuid > after)[:limit]
            return [self._usage(self._providers[uuid]) for uuid in uuids]

    # -- audit ----------------------------------------------------------------------------------------------------

    @override
    def drift(self) -> list[Drift]:
        with self._lock:
            sums = self._sum(item for each in self._consumers.values() for item in each.held)
            counted = {(uuid, name): used for uuid, each in self._providers.items() for name, used in each.used.items()}
        return [
            Drift(*key, counted.get(key), sums.get(key, 0))
            for key in sorted(counted.keys() | sums.keys())
            if counted.get(key) != sums.get(key, 0)
        ]

    @override
    def recount(self, provider: str) -> bool:
        with self._lock:
            present = self._providers.get(provider)
            if present is None:
                return False
            sums = self._sum(item for each in self._consumers.values() for item in each.held)
            present.used = {name: sums.get((provider, name), 0) for name in present.items}
            self._written(present)
            return True


def _key(item: AllocationItem) -> tuple[str, str, str]:
    return (item.consumer, item.provider, item.resource_class)
