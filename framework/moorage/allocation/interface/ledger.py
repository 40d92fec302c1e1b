# SPDX-License-Identifier: Apache-2.0
"""Consumers with generations, changes of several claims at once, leases on consumers, and totals of projects."""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moorage.allocation.interface.claims import (
    AllocationItem,
    ClaimOutcome,
    Companion,
    InventoryItem,
    ResourceProvider,
)

__all__ = [
    "AllocationChange",
    "AllocationLedger",
    "Consumer",
    "ConsumerHolding",
    "Expect",
    "InventoryChange",
    "ProviderHolding",
    "UsageTotal",
]


class Expect(enum.Enum):
    """What a change expects of a consumer, where that is not a generation."""

    #: Whatever is there is replaced.
    ANYTHING = "anything"
    #: The consumer must hold nothing yet.
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Consumer:
    """Who holds allocations; there is no consumer that holds none.

    :param generation: rises with every change of what it holds; 1 at first.
    :param consumer_type: empty: not known.
    :param updated_at: microseconds since the epoch, by the store's clock; likewise ``expires_at``, None: it never expires.
    """

    uuid: str
    generation: int
    project: str = ""
    user: str = ""
    consumer_type: str = ""
    updated_at: int = field(default=0, compare=False)
    expires_at: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ConsumerHolding:
    """What a consumer holds. ``providers``: those it holds of, without inventories, by uuid."""

    consumer: Consumer
    allocations: tuple[AllocationItem, ...]
    providers: Mapping[str, ResourceProvider]


@dataclass(frozen=True, slots=True)
class ProviderHolding:
    """Who holds what of a provider (without inventories). ``consumers``: by uuid."""

    provider: ResourceProvider
    allocations: tuple[AllocationItem, ...]
    consumers: Mapping[str, Consumer]


@dataclass(frozen=True, slots=True)
class AllocationChange:
    """What a consumer shall hold from now on, in place of all that it holds.

    :param resources: provider uuid -> resource class -> units (positive); empty: nothing, and the consumer is gone.
    :param expected: its present generation, or an :class:`Expect`.
    :param project: None keeps what is stored; likewise ``user``, ``consumer_type``. They are empty for a new consumer.
    :param request_id: as in :class:`moorage.allocation.interface.ClaimRequest`: a repetition changes nothing again.
    :param lifetime: seconds after which it may be reaped; None: it stays.
    :param residents: as in :class:`moorage.allocation.interface.ClaimRequest`. Without a version, unknown nodes are ignored.
    :param counts_with: the consumer that a new consumer counts together with: of both, the larger amount of each class counts
        against the limits of their project. So an instance that moves counts once. It never changes.
    :param enforce_quota: a limit of the project refuses the change if its project would hold more than before. Otherwise the
        limits count the change and do not refuse it.
    """

    consumer: str
    resources: Mapping[str, Mapping[str, int]]
    expected: int | Expect = Expect.ANYTHING
    project: str | None = None
    user: str | None = None
    consumer_type: str | None = None
    request_id: str | None = None
    lifetime: float | None = None
    residents: Mapping[str, int | None] = field(default_factory=dict)
    counts_with: str | None = None
    enforce_quota: bool = False


@dataclass(frozen=True, slots=True)
class InventoryChange:
    """All inventories that a provider shall have; see :meth:`ProviderCatalogue.set_inventories`."""

    provider: str
    items: tuple[InventoryItem, ...]
    expected_generation: int | None = None


@dataclass(frozen=True, slots=True)
class UsageTotal:
    """What the consumers of one type hold in all."""

    consumer_type: str
    consumers: int
    used: Mapping[str, int]


class AllocationLedger(abc.ABC):
    """A power of stores: claims that change."""

    @abc.abstractmethod
    def consumer(self, uuid: str) -> ConsumerHolding | None:
        """What a consumer holds; None: it holds nothing, so it does not exist."""

    @abc.abstractmethod
    def consumers(self, *, after: str = "", limit: int = 1000) -> list[Consumer]:
        """Consumers, ordered by uuid, a page of ``limit`` after the given one."""

    @abc.abstractmethod
    def provider_holding(self, uuid: str) -> ProviderHolding:
        """Who holds what of a provider.

        :raises NotFound: there is no such provider.
        """

    @abc.abstractmethod
    def replace(
        self, changes: Sequence[AllocationChange], companion: Companion | None = None
    ) -> tuple[ClaimOutcome, ...]:
        """Change what consumers hold, all in one transaction or nothing: replace, release, and moves between consumers.

        A migration moves an instance in one step with two changes: the old host's room to the migration's own uuid, the new
        host's to the instance. What one change gives back is there for the other to take. More than there is may be held of a
        class only when the changes as a whole lower or keep what their consumers held of it before (so that a shrunken
        provider can be left step by step); min_unit, max_unit and the step rule hold for every amount.

        When every change has a ``request_id`` that its consumer's last change had, it is a repetition: nothing is written and
        what they hold is answered.

        :returns: what each holds now, in the order of the changes; the generation is 0 where nothing is held.
        :raises CapacityExceeded, ConstraintViolated: as for a claim; details ``consumer`` too.
        :raises QuotaExceeded: as for a claim, where a change has ``enforce_quota``.
        :raises GenerationConflict: a consumer's generation is not the expected one; details ``consumer``, ``expected``,
            ``present`` (both None for a consumer that holds nothing).
        :raises NotFound: a provider (``details['provider']``) or class (``details['resource_class']``) does not exist.
        :raises InvalidInput: a consumer stands twice, or an amount that is no positive whole number.
        """

    @abc.abstractmethod
    def reshape(self, inventories: Sequence[InventoryChange], changes: Sequence[AllocationChange]) -> None:
        """Move inventories between providers together with what is held of them, all in one transaction.

        Capacity is checked against the new inventories; a class that loses its inventory must be left by the changes. The
        generation of each provider rises as with Placement's reshaper: once for joining the old and the new inventories (if
        there are new ones), once for what is held of it (if that changes), once for the new inventories alone.

        :raises GenerationConflict: of a provider or a consumer.
        :raises InUse: an inventory would vanish that consumers outside of the changes hold.
        """

    @abc.abstractmethod
    def project_usages(
        self, project: str, *, user: str | None = None, consumer_type: str | None = None
    ) -> list[UsageTotal]:
        """What the consumers of a project hold, by their type (empty: not known), ordered by it."""

    @abc.abstractmethod
    def renew(self, consumer: str, lifetime: float | None) -> bool:
        """Let a consumer expire so many seconds from now by the store's clock; None: never (the claim is confirmed).

        False when it holds nothing (any more): a consumer that renews too late has lost its claim.
        """

    @abc.abstractmethod
    def expire(self, limit: int = 100) -> list[str]:
        """Release up to ``limit`` consumers whose lifetime is over by the store's clock; their uuids.

        The condition is asked again in the statement that releases: who was renewed meanwhile stays.
        """

    def has_expired(self) -> bool:
        """Whether the lifetime of any consumer may be over, so that :meth:`expire` must be called. By default always True."""
        return True
