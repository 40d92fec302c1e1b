# SPDX-License-Identifier: Apache-2.0
"""The part of the memory store that takes room and gives it back: all is checked before anything is written."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import (
    AllocationChange,
    AllocationItem,
    AllocationLedger,
    ClaimOutcome,
    Companion,
    Consumer,
    ConsumerHolding,
    Expect,
    GenerationConflict,
    InventoryChange,
    InventoryItem,
    ProviderHolding,
    UsageTotal,
)
from moorage_plugins.stores.checks import check_changes, check_reshape, refusals, steps_of_reshape
from tests.memory_store.part import MemoryConsumer, MemoryPart

__all__ = ["MemoryLedger"]

_Amounts = dict[tuple[str, str], int]


class MemoryLedger(MemoryPart, AllocationLedger):
    """Claims, changes of claims, leases on consumers."""

    @override
    def replace(
        self, changes: Sequence[AllocationChange], companion: Companion | None = None
    ) -> tuple[ClaimOutcome, ...]:
        check_changes(changes)
        with self._lock:
            return self._change(changes, (), companion)

    @override
    def reshape(self, inventories: Sequence[InventoryChange], changes: Sequence[AllocationChange]) -> None:
        check_reshape(inventories, changes)
        with self._lock:
            self._change(changes, inventories, None)

    def _change(
        self, changes: Sequence[AllocationChange], inventories: Sequence[InventoryChange], companion: Companion | None
    ) -> tuple[ClaimOutcome, ...]:
        repeated = self._repeated(changes)
        if repeated is not None:
            return repeated
        for each in changes:
            self._expect(each)
        reshaped = {each.provider: {item.resource_class: item for item in each.items} for each in inventories}
        self._check(changes, inventories, reshaped)
        seen = self._check_residents(changes)
        moved = {uuid for each in changes for uuid in each.resources}
        moved |= {item.provider for each in changes for item in self._held(each.consumer)}
        touched = moved | reshaped.keys() | seen
        saved = {uuid: copy.deepcopy(self._providers[uuid]) for uuid in touched}
        consumers = {each.consumer: self._consumers.get(each.consumer) for each in changes}
        self._write(changes, reshaped)
        for uuid in touched:
            steps = steps_of_reshape(tuple(reshaped[uuid].values()), uuid in moved) if uuid in reshaped else 1
            self._written(self._providers[uuid], steps)
        if companion is not None:
            try:
                companion(None)
            except BaseException:
                self._providers.update(saved)
                for uuid, before in consumers.items():
                    self._put(uuid, before)
                raise
        return tuple(self._outcome(each.consumer) for each in changes)

    def _check_residents(self, changes: Sequence[AllocationChange]) -> set[str]:
        """The nodes whose instances change.

        :raises ResidentsChanged: one has another version than was seen.
        """
        found = set()
        for uuid, version in ((uuid, version) for each in changes for uuid, version in each.residents.items()):
            if version is not None and self._get(uuid).residents != version:
                raise errors.ResidentsChanged(
                    f"The instances of node {uuid} changed since the filters judged them. Ask the filters again.",
                    provider=uuid,
                )
            if uuid in self._providers:
                found.add(uuid)
        return found

    def _held(self, consumer: str) -> tuple[AllocationItem, ...]:
        found = self._consumers.get(consumer)
        return () if found is None else found.held

    def _outcome(self, consumer: str, *, repeated: bool = False) -> ClaimOutcome:
        found = self._consumers.get(consumer)
        return ClaimOutcome(consumer, 0 if found is None else found.generation, self._held(consumer), repeated)

    def _repeated(self, changes: Sequence[AllocationChange]) -> tuple[ClaimOutcome, ...] | None:
        done = gone = 0
        for each in changes:
            found = self._consumers.get(each.consumer)
            done += found is not None and each.request_id is not None and found.request_id == each.request_id
            gone += found is None and not each.resources
        if not done:
            return None
        if done + gone < len(changes):
            raise errors.Conflict(
                f"Request {changes[0].request_id} was done, and some of its consumers were changed since; look what they hold.",
                consumer=changes[0].consumer,
            )
        return tuple(self._outcome(each.consumer, repeated=True) for each in changes)

    def _expect(self, change: AllocationChange) -> None:
        found = self._consumers.get(change.consumer)
        present = None if found is None else found.generation
        if change.expected is Expect.ANYTHING or (change.expected is Expect.NOTHING and found is None):
            return
        if isinstance(change.expected, int):
            if present == change.expected:
                return
            state = "holds nothing" if found is None else f"has generation {present}"
            raise GenerationConflict(
                f"Consumer {change.consumer} {state}, and generation {change.expected} was expected: another request changed it. "
                "Read it again, then decide again.",
                consumer=change.consumer,
                expected=change.expected,
                present=present,
            )
        raise GenerationConflict(
            f"Consumer {change.consumer} holds a claim of another request already; release it first.",
            consumer=change.consumer,
            expected=None,
            present=present,
        )

    def _check(
        self,
        changes: Sequence[AllocationChange],
        inventories: Sequence[InventoryChange],
        reshaped: Mapping[str, Mapping[str, InventoryItem]],
    ) -> None:
        for change in inventories:
            self._turn(change.provider, change.expected_generation)
            self._check_classes(item.resource_class for item in change.items)
        present: dict[tuple[str, str], tuple[InventoryItem, int]] = {}
        for uuid in {uuid for each in changes for uuid in each.resources}:
            row = self._get(uuid)
            # What loses its inventory is still there while the changes are made, as in the sql store.
            for name, item in (row.items | dict(reshaped.get(uuid, {}))).items():
                present[uuid, name] = (item, row.used.get(name, 0))
        for each in changes:
            for wanted in each.resources.values():
                self._check_classes(wanted)
        own = self._sum(item for each in changes for item in self._held(each.consumer))
        for reason in refusals(changes, present, own, self._step_rule):
            raise reason
        self._check_left(changes, reshaped, own)

    def _check_left(
        self,
        changes: Sequence[AllocationChange],
        reshaped: Mapping[str, Mapping[str, InventoryItem]],
        own: _Amounts,
    ) -> None:
        """See that nobody holds of an inventory that will be gone."""
        new = self._sum(
            AllocationItem(uuid, each.consumer, name, amount)
            for each in changes
            for uuid, wanted in each.resources.items()
            for name, amount in wanted.items()
        )
        for uuid, items in reshaped.items():
            for name, used in self._providers[uuid].used.items():
                left = used - own.get((uuid, name), 0) + new.get((uuid, name), 0)
                if name not in items and left:
                    raise errors.InUse(
                        f"The inventory of {name} of provider {uuid} has allocations; release them first.",
                        provider=uuid,
                        resource_class=name,
                        holder=f"{left} {name} of allocations",
                    )

    def _write(self, changes: Sequence[AllocationChange], reshaped: Mapping[str, Mapping[str, InventoryItem]]) -> None:
        for uuid, items in reshaped.items():
            row = self._providers[uuid]
            row.used = dict.fromkeys(items, 0) | row.used
            row.items = row.items | dict(items)
        for each in changes:
            self._count_held(self._held(each.consumer), -1)
            before = self._consumers.get(each.consumer)
            held = tuple(
                AllocationItem(uuid, each.consumer, name, amount)
                for uuid, wanted in sorted(each.resources.items())
                for name, amount in sorted(wanted.items())
            )
            self._count_held(held, 1)
            self._put(each.consumer, self._consumer_after(each, before, held) if held else None)
        for uuid, items in reshaped.items():
            row = self._providers[uuid]
            row.items = dict(items)
            row.used = {name: row.used.get(name, 0) for name in items}

    def _consumer_after(
        self, change: AllocationChange, before: MemoryConsumer | None, held: tuple[AllocationItem, ...]
    ) -> MemoryConsumer:
        now = self._now()

        def kept(wanted: str | None, present: str) -> str:
            return present if wanted is None else wanted

        return MemoryConsumer(
            1 if before is None else before.generation + 1,
            kept(change.project, before.project if before else ""),
            kept(change.user, before.user if before else ""),
            kept(change.consumer_type, before.consumer_type if before else ""),
            change.request_id,
            held,
            now,
            None if change.lifetime is None else now + int(change.lifetime * 1_000_000),
        )

    def _put(self, uuid: str, consumer: MemoryConsumer | None) -> None:
        if consumer is None:
            self._consumers.pop(uuid, None)
        else:
            self._consumers[uuid] = consumer

    def _count_held(self, held: Sequence[AllocationItem], sign: int) -> None:
        for item in held:
            used = self._providers[item.provider].used
            if item.resource_class in used:
                used[item.resource_class] += sign * item.used

    def _drop(self, consumer: str, residents: Sequence[str] = ()) -> bool:
        found = self._consumers.pop(consumer, None)
        held = () if found is None else found.held
        self._count_held(held, -1)
        for uuid in {*(item.provider for item in held), *residents} & self._providers.keys():
            self._written(self._providers[uuid], 0)
        return found is not None

    # -- reading --------------------------------------------------------------------------------------------------

    @override
    def consumer(self, uuid: str) -> ConsumerHolding | None:
        with self._lock:
            found = self._consumers.get(uuid)
            if found is None:
                return None
            providers = {item.provider for item in found.held}
            return ConsumerHolding(
                self._consumer(uuid, found),
                found.held,
                {each: self._shown(self._providers[each], items=False) for each in providers},
            )

    def _consumer(self, uuid: str, row: MemoryConsumer) -> Consumer:
        return Consumer(uuid, row.generation, row.project, row.user, row.consumer_type, row.updated_at, row.expires_at)

    @override
    def consumers(self, *, after: str = "", limit: int = 1000) -> list[Consumer]:
        with self._lock:
            found = sorted(uuid for uuid in self._consumers if uuid > after)[:limit]
            return [self._consumer(uuid, self._consumers[uuid]) for uuid in found]

    @override
    def provider_holding(self, uuid: str) -> ProviderHolding:
        with self._lock:
            row = self._get(uuid)
            found = sorted(
                (item for each in self._consumers.values() for item in each.held if item.provider == uuid),
                key=lambda item: (item.consumer, item.resource_class),
            )
            return ProviderHolding(
                self._shown(row, items=False),
                tuple(found),
                {item.consumer: self._consumer(item.consumer, self._consumers[item.consumer]) for item in found},
            )

    @override
    def project_usages(
        self, project: str, *, user: str | None = None, consumer_type: str | None = None
    ) -> list[UsageTotal]:
        counts: dict[str, int] = {}
        totals: dict[str, dict[str, int]] = {}
        with self._lock:
            for each in self._consumers.values():
                if each.project != project or user not in {None, each.user}:
                    continue
                if consumer_type not in {None, each.consumer_type}:
                    continue
                counts[each.consumer_type] = counts.get(each.consumer_type, 0) + 1
                used = totals.setdefault(each.consumer_type, {})
                for item in each.held:
                    used[item.resource_class] = used.get(item.resource_class, 0) + item.used
        return [UsageTotal(name, counts[name], totals[name]) for name in sorted(counts)]

    # -- leases ---------------------------------------------------------------------------------------------------

    @override
    def renew(self, consumer: str, lifetime: float | None) -> bool:
        with self._lock:
            found = self._consumers.get(consumer)
            if found is None:
                return False
            expires = None if lifetime is None else self._now() + int(lifetime * 1_000_000)
            self._consumers[consumer] = replace(found, expires_at=expires)
            return True

    @override
    def expire(self, limit: int = 100) -> list[str]:
        with self._lock:
            now = self._now()
            overdue = sorted(
                (each.expires_at, uuid)
                for uuid, each in self._consumers.items()
                if each.expires_at is not None and each.expires_at <= now
            )
            return [uuid for _, uuid in overdue[:limit] if self._drop(uuid)]

    def _sum(self, items: Iterable[AllocationItem]) -> _Amounts:
        sums: _Amounts = {}
        for item in items:
            key = (item.provider, item.resource_class)
            sums[key] = sums.get(key, 0) + item.used
        return sums
