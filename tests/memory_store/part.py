# SPDX-License-Identifier: Apache-2.0
"""What the parts of the memory store have in common: its data, and one lock around everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moorage import errors, threads
from moorage.allocation.interface import (
    AllocationItem,
    GenerationConflict,
    InventoryItem,
    ProviderUsage,
    ResourceProvider,
)
from moorage.clock import Clock, SystemClock
from moorage_plugins.stores.classes import STANDARD_CLASSES, no_such_class
from moorage_plugins.stores.trait_names import STANDARD_TRAITS, no_such_traits

__all__ = ["MemoryConsumer", "MemoryPart", "MemoryProvider", "refuse_transaction"]


@dataclass(slots=True)
class MemoryProvider:
    """A provider as it is now; ``used`` has every class of ``items``."""

    uuid: str
    name: str
    can_host: bool
    number: int
    generation: int = 0
    parent: str | None = None
    items: dict[str, InventoryItem] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()
    aggregates: frozenset[str] = frozenset()
    updated_at: int = 0
    #: Version of the node's instances.
    residents: int = 0


@dataclass(frozen=True, slots=True)
class MemoryConsumer:
    """A consumer and what it holds, which is never nothing."""

    generation: int
    project: str
    user: str
    consumer_type: str
    request_id: str | None
    held: tuple[AllocationItem, ...]
    updated_at: int = 0
    expires_at: int | None = None


class MemoryPart:
    """The state of a memory store, shared by its parts through inheritance."""

    def __init__(self, *, conf: Any, database: Any = None, clock: Clock | None = None) -> None:
        self._step_rule = str(conf.allocation.step_size_rule)
        self._max_candidates = int(conf.allocation.max_candidates)
        self._clock = clock or SystemClock()
        # Reentrant, so that a companion may read.
        self._lock = threads.rlock()
        self._count = 0
        self._providers: dict[str, MemoryProvider] = {}
        self._names: dict[str, str] = {}
        #: Name -> when it was created or renamed.
        self._classes: dict[str, int] = dict.fromkeys(STANDARD_CLASSES, 0)
        self._traits: dict[str, int] = dict.fromkeys(STANDARD_TRAITS, 0)
        self._consumers: dict[str, MemoryConsumer] = {}

    def _now(self) -> int:
        return int(self._clock.wall() * 1_000_000)

    def _get(self, uuid: str) -> MemoryProvider:
        """:raises NotFound: there is none."""
        found = self._providers.get(uuid)
        if found is None:
            raise errors.NotFound(f"There is no resource provider {uuid}.", provider=uuid)
        return found

    def _root(self, uuid: str) -> str:
        present = self._providers[uuid]
        while present.parent is not None:
            present = self._providers[present.parent]
        return present.uuid

    def _turn(self, uuid: str, expected: int | None) -> MemoryProvider:
        """See that the generation is the expected one; the caller raises it with its write (:meth:`_written`)."""
        present = self._get(uuid)
        if expected is not None and present.generation != expected:
            raise GenerationConflict(
                f"Provider {uuid} has generation {present.generation}, and {expected} was expected: another request changed it. "
                "Read it again, then decide again.",
                provider=uuid,
                expected=expected,
                present=present.generation,
            )
        return present

    def _written(self, present: MemoryProvider, steps: int = 1) -> None:
        present.generation += steps
        present.residents += 1
        present.updated_at = self._now()

    def _check_classes(self, names: Any) -> None:
        for name in names:
            if name not in self._classes:
                raise no_such_class(name)

    def _check_traits(self, names: Any) -> None:
        missing = frozenset(names) - self._traits.keys()
        if missing:
            raise no_such_traits(missing)

    def _shown(self, row: MemoryProvider, *, items: bool = True) -> ResourceProvider:
        inventories = tuple(row.items[name] for name in sorted(row.items, key=self._class_order)) if items else ()
        return ResourceProvider(
            row.uuid,
            row.name,
            row.can_host,
            row.generation,
            inventories,
            row.parent,
            self._root(row.uuid),
            row.updated_at,
        )

    def _class_order(self, name: str) -> tuple[int, int, str]:
        number = STANDARD_CLASSES.get(name)
        return (0, number, "") if number is not None else (1, self._classes.get(name, 0), name)

    def _usage(self, row: MemoryProvider) -> ProviderUsage:
        return ProviderUsage(self._shown(row), dict(row.used))


def refuse_transaction(transaction: Any | None) -> None:
    """Refuse to write in a transaction of a database.

    :raises InvalidInput: there is one.
    """
    if transaction is not None:
        raise errors.InvalidInput(
            "The memory store cannot take part in a transaction of a database; use the sql store.", path="transaction"
        )
