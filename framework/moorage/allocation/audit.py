# SPDX-License-Identifier: Apache-2.0
"""Checking a store: do its counters count what is held, and is anywhere more held than there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moorage import errors
from moorage.allocation.interface import AllocationStore, Auditable, Drift, ProviderUsage

__all__ = ["AuditReport", "Overuse", "audit"]

_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Overuse:
    """An inventory of which more is used than its capacity, as after a shrinking below what was held."""

    provider: str
    resource_class: str
    used: int
    capacity: float


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found. ``repaired``: the providers whose counters were set to the sums of their allocations."""

    providers: int
    drift: tuple[Drift, ...]
    overuse: tuple[Overuse, ...]
    repaired: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not self.drift and not self.overuse


def audit(store: AllocationStore, *, repair: bool = False) -> AuditReport:
    """Compare the counters with the stored allocations, and use with capacity; with ``repair`` set wrong counters right.

    Overuse is reported as it stands after the repair and never repaired: what is held is held. Reads everything once.

    :raises InvalidInput: the store keeps no counters of its own (it is not :class:`Auditable`).
    """
    if not isinstance(store, Auditable):
        raise errors.InvalidInput(
            f"The allocation store {type(store).__name__} cannot be audited; it offers no comparison of its counters."
        )
    drift = tuple(store.drift())
    repaired: list[str] = []
    if repair:
        # A class without an inventory has no counter to set; it stays in the report for a person to decide.
        wrong = sorted({each.provider for each in drift if each.counted is not None})
        repaired = [provider for provider in wrong if store.recount(provider)]
    providers, overuse = 0, []
    for usage in _usages(store):
        providers += 1
        overuse += [
            Overuse(usage.provider.uuid, item.resource_class, usage.used[item.resource_class], item.capacity)
            for item in usage.provider.inventories
            if usage.used[item.resource_class] > item.capacity
        ]
    return AuditReport(providers, drift, tuple(overuse), tuple(repaired))


def _usages(store: AllocationStore) -> Iterator[ProviderUsage]:
    after = ""
    while page := store.usages(after=after, limit=_PAGE):
        yield from page
        after = page[-1].provider.uuid
