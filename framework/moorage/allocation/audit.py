# SPDX-License-Identifier: Apache-2.0
"""Audits an allocation store: counters against allocations, use against capacity, consumers against what they stand for.

The wiring adds checks that compare the store with other tables (:data:`Check`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from moorage import errors
from moorage.allocation.interface import (
    AllocationChange,
    AllocationLedger,
    AllocationStore,
    Auditable,
    Consumer,
    Drift,
    GenerationConflict,
    OrphanDetector,
    ProviderUsage,
    QuotaStore,
)

__all__ = ["AuditReport", "Check", "Finding", "Overuse", "audit"]

_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Overuse:
    """Reports an inventory whose use exceeds its capacity, for example after it was shrunk below what was held."""

    provider: str
    resource_class: str
    used: int
    capacity: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One contradiction that a check found.

    :param kind: ``provider_without_node``, ``node_without_provider``, ``instance_without_allocation`` or ``quota_drift``.
    :param message: what is wrong, and what an operator can do.
    :param provider: uuid of the provider, or empty; likewise ``consumer``.
    """

    kind: str
    message: str
    provider: str = ""
    consumer: str = ""
    repaired: bool = False


#: Compares the store with another table: ``check(repair)``; with ``repair`` it also repairs what is safe to repair.
Check = Callable[[bool], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found.

    :param repaired: the providers whose counters were set to the sums of their allocations.
    :param orphans: consumers behind which there is nothing, by the detectors that were asked.
    :param released: the uuids of those that were released.
    """

    providers: int
    drift: tuple[Drift, ...]
    overuse: tuple[Overuse, ...]
    repaired: tuple[str, ...] = ()
    orphans: tuple[Consumer, ...] = ()
    released: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not (self.drift or self.overuse or self.orphans or self.findings)


def audit(
    store: AllocationStore,
    *,
    repair: bool = False,
    detectors: Sequence[OrphanDetector] = (),
    release_orphans: bool = False,
    checks: Sequence[Check] = (),
) -> AuditReport:
    """Compares counters with the stored allocations, and use with capacity; ``repair`` corrects wrong counters.

    Overuse is reported as it stands after the repair and never repaired: the audit takes nothing from a consumer. Detectors look
    for orphans; ``release_orphans`` releases them. Checks run last. Reads everything once.

    :raises InvalidInput: the store keeps no counters of its own (it is not :class:`Auditable`).
    """
    if not isinstance(store, Auditable):
        raise errors.InvalidInput(
            f"The allocation store {type(store).__name__} cannot be audited; it offers no comparison of its counters."
        )
    orphans, released = _orphans(store, detectors, release=release_orphans) if detectors else ((), ())
    drift = tuple(store.drift())
    repaired: list[str] = []
    if repair:
        # A class without an inventory has no counter to set, and what belongs to no provider no place to be right in; both stay
        # in the report for a person to decide.
        wrong = sorted({each.provider for each in drift if each.counted is not None and each.provider})
        repaired = [provider for provider in wrong if store.recount(provider)]
    providers, overuse = 0, []
    for usage in _usages(store):
        providers += 1
        overuse += [
            Overuse(usage.provider.uuid, item.resource_class, usage.used[item.resource_class], item.capacity)
            for item in usage.provider.inventories
            if usage.used[item.resource_class] > item.capacity
        ]
    own: tuple[Check, ...] = (functools.partial(_quota_drift, store),) if isinstance(store, QuotaStore) else ()
    findings = tuple(finding for check in (*own, *checks) for finding in check(repair))
    return AuditReport(providers, drift, tuple(overuse), tuple(repaired), orphans, released, findings)


def _quota_drift(store: QuotaStore, repair: bool) -> Iterator[Finding]:
    """Finds counters of limits that differ from what the project holds; with ``repair``, sets them."""
    recounted: set[str] = set()
    for each in store.quota_drift():
        if repair and each.project not in recounted and store.recount_quotas(each.project):
            recounted.add(each.project)
        yield Finding(
            "quota_drift",
            f"Project {each.project} holds {each.held} {each.resource_class}, and its limit counts {each.counted}.",
            repaired=each.project in recounted,
        )


def _orphans(
    store: AllocationStore, detectors: Sequence[OrphanDetector], *, release: bool
) -> tuple[tuple[Consumer, ...], tuple[str, ...]]:
    if not isinstance(store, AllocationLedger):
        raise errors.InvalidInput(
            f"The allocation store {type(store).__name__} cannot list consumers, so orphans cannot be looked for."
        )
    found: list[Consumer] = []
    released: list[str] = []
    after = ""
    while page := store.consumers(after=after, limit=_PAGE):
        after = page[-1].uuid
        gone: set[str] = set()
        for detector in detectors:
            asked = [each.uuid for each in page if each.consumer_type in detector.consumer_types]
            gone |= detector.missing(asked) if asked else frozenset()
        for each in page:
            if each.uuid in gone and _still(store, each):
                found.append(each)
                if release and _release(store, each):
                    released.append(each.uuid)
    return tuple(found), tuple(released)


def _still(store: AllocationLedger, consumer: Consumer) -> bool:
    """It holds what it held before the detectors looked: so its release did not just come between."""
    held = store.consumer(consumer.uuid)
    return held is not None and held.consumer.generation == consumer.generation


def _release(store: AllocationLedger, consumer: Consumer) -> bool:
    try:
        store.replace([AllocationChange(consumer.uuid, {}, expected=consumer.generation)])
    except GenerationConflict:
        return False
    return True


def _usages(store: AllocationStore) -> Iterator[ProviderUsage]:
    after = ""
    while page := store.usages(after=after, limit=_PAGE):
        yield from page
        after = page[-1].provider.uuid
