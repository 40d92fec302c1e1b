# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (setUp and tearDown do what their names say)
"""What the conformance kits of allocation stores have in common.

What is held is always summed from the stored allocations, never taken from the store's own counters, and after every test the
counters are compared with those sums.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import unittest
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from moorage import errors
from moorage.allocation.interface import (
    AllocationItem,
    AllocationStore,
    Auditable,
    ClaimOutcome,
    ClaimRequest,
    InventoryItem,
    ProviderUsage,
    ResourceProvider,
    StoreCapability,
)

__all__ = [
    "LARGEST",
    "THREADS",
    "StoreKit",
    "all_allocations",
    "all_usages",
    "held",
    "inconsistencies",
    "new_uuid",
    "provider",
]

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object

LARGEST = 2**31 - 1
THREADS = 8


def new_uuid() -> str:
    """Returns a random uuid as text."""
    return str(uuid.uuid4())


def provider(name: str = "", *, can_host: bool = True, **totals: Any) -> ResourceProvider:
    """Returns a provider of random uuid with inventories by class, given as totals or in full."""
    identity = new_uuid()
    items = tuple(
        item if isinstance(item, InventoryItem) else InventoryItem(of_class, item) for of_class, item in totals.items()
    )
    return ResourceProvider(identity, name or f"provider-{identity}", can_host, inventories=items)


def all_allocations(store: AllocationStore, limit: int = 500) -> list[AllocationItem]:
    """Every stored allocation, page by page."""
    found: list[AllocationItem] = []
    after: tuple[str, str, str] | None = None
    while page := store.allocations(after=after, limit=limit):
        found += page
        after = (page[-1].consumer, page[-1].provider, page[-1].resource_class)
    return found


def all_usages(store: AllocationStore, limit: int = 500) -> list[ProviderUsage]:
    """Every provider, page by page."""
    found: list[ProviderUsage] = []
    while page := store.usages(after=found[-1].provider.uuid if found else "", limit=limit):
        found += page
    return found


def held(store: AllocationStore) -> dict[tuple[str, str], int]:
    """What is held of each (provider uuid, class), summed from the stored allocations."""
    sums: collections.Counter[tuple[str, str]] = collections.Counter()
    for item in all_allocations(store):
        sums[item.provider, item.resource_class] += item.used
    return dict(sums)


def inconsistencies(store: AllocationStore) -> list[str]:
    """Where counters differ from the sums of stored allocations, or more is held than there is; for a store at rest."""
    sums = held(store)
    found = []
    for usage in all_usages(store):
        for item in usage.provider.inventories:
            truth = sums.pop((usage.provider.uuid, item.resource_class), 0)
            counted = usage.used.get(item.resource_class)
            if counted != truth:
                found.append(f"{usage.provider.name} {item.resource_class}: counted {counted}, held {truth}")
            if truth > item.capacity:
                found.append(f"{usage.provider.name} {item.resource_class}: held {truth} of {item.capacity}")
    return found + [f"{key}: {amount} held without an inventory" for key, amount in sums.items()]


class StoreKit(_Base):
    """How a store is made for a test, and what every test does with it."""

    #: Set by a test that makes capacity smaller than what is held.
    shrunk = False

    # -- what the author says -------------------------------------------------------------------------------------

    def make_store(self) -> AllocationStore:
        """Returns a store that is empty, with ``step_size_rule = seed``."""
        raise NotImplementedError

    def another(self, store: AllocationStore) -> AllocationStore:
        """Returns a second store object on the data, as another process has; the first one if there can be no second."""
        return store

    def transaction(self, store: AllocationStore) -> contextlib.AbstractContextManager[Any]:
        """Returns a transaction to pass to the store: committed at the end of the block, rolled back when it raises."""
        raise NotImplementedError

    # -- helpers --------------------------------------------------------------------------------------------------

    def setUp(self) -> None:
        super().setUp()
        self.store = self.make_store()

    def tearDown(self) -> None:
        found = inconsistencies(self.store)
        if self.shrunk:
            found = [each for each in found if ": counted" in each]
        self.assertEqual([], found)
        if isinstance(self.store, Auditable):
            self.assertEqual([], self.store.drift())
        super().tearDown()

    def ensured(self, name: str = "", **totals: Any) -> str:
        """Create a provider; its uuid."""
        made = provider(name, **totals)
        self.assertEqual(1, self.store.ensure_providers([made]))
        return made.uuid

    def claim(self, resources: Mapping[str, Mapping[str, int]], consumer: str = "", **more: Any) -> ClaimOutcome:
        """Claim for a new consumer, or for the given one."""
        return self.store.claim(ClaimRequest(consumer or new_uuid(), resources, **more))

    def usage(self, of_provider: str) -> ProviderUsage:
        """Returns the stored provider."""
        (found,) = self.store.usages(providers=[of_provider])
        return found

    def needs(self, capability: StoreCapability) -> None:
        """Skip the test where the store does not have the capability."""
        if capability not in self.store.capabilities:
            self.skipTest(f"{type(self.store).__name__} does not declare {capability.value}")

    def at_once(self, work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
        """Run ``work(0)``, ``work(1)``, ... in threads that begin together; results or errors, by number."""
        together = threading.Barrier(threads)

        def run(number: int) -> Any:
            together.wait(30)
            try:
                return work(number)
            except errors.MoorageError as error:
                return error

        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(run, range(threads)))
