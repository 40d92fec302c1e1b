# SPDX-License-Identifier: Apache-2.0
"""Defines consumers with generations, changes of several claims together, expiring consumers, and totals of projects."""

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
    """The state that a change expects of a consumer, if it expects no generation."""

    #: Any state.
    ANYTHING = "anything"
    #: The consumer must hold nothing yet.
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Consumer:
    """A holder of allocations. A consumer without allocations does not exist.

    :param generation: rises with every change of its allocations; 1 at first.
    :param consumer_type: empty: unknown.
    :param updated_at: microseconds since the epoch, by the store's clock. ``expires_at`` likewise; None: it never expires.
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
    """The allocations of a consumer. ``providers``: their providers, without inventories, by uuid."""

    consumer: Consumer
    allocations: tuple[AllocationItem, ...]
    providers: Mapping[str, ResourceProvider]


@dataclass(frozen=True, slots=True)
class ProviderHolding:
    """The allocations of a provider (without inventories). ``consumers``: their consumers, by uuid."""

    provider: ResourceProvider
    allocations: tuple[AllocationItem, ...]
    consumers: Mapping[str, Consumer]


@dataclass(frozen=True, slots=True)
class AllocationChange:
    """Replaces all allocations of a consumer.

    :param resources: units (positive) by provider uuid and resource class; empty: none, and the consumer is removed.
    :param expected: the present generation of the consumer, or an :class:`Expect`.
    :param project: None keeps the stored value; likewise ``user``, ``consumer_type``. They are empty for a new consumer.
    :param request_id: as in :class:`moorage.allocation.interface.ClaimRequest`: a repetition changes nothing.
    :param lifetime: seconds after which the consumer expires; None: never.
    :param residents: as in :class:`moorage.allocation.interface.ClaimRequest`. Unknown nodes without a version are ignored.
    :param counts_with: another consumer that counts together with a new consumer: the larger amount of each class counts against
        the limits of their project. So an instance that moves counts once. It never changes.
    :param enforce_quota: a limit of the project refuses the change if the project would hold more than before. Otherwise the
        change counts and is not refused.
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
    """Replaces all inventories of a provider; see :meth:`ProviderCatalogue.set_inventories`."""

    provider: str
    items: tuple[InventoryItem, ...]
    expected_generation: int | None = None


@dataclass(frozen=True, slots=True)
class UsageTotal:
    """The sum of the allocations of all consumers of one type."""

    consumer_type: str
    consumers: int
    used: Mapping[str, int]


class AllocationLedger(abc.ABC):
    """A power of stores: changes claims."""

    @abc.abstractmethod
    def consumer(self, uuid: str) -> ConsumerHolding | None:
        """Returns the allocations of a consumer; None: it has none, so it does not exist."""

    @abc.abstractmethod
    def consumers(self, *, after: str = "", limit: int = 1000) -> list[Consumer]:
        """Returns consumers, ordered by uuid: at most ``limit`` of them after the uuid ``after``."""

    @abc.abstractmethod
    def provider_holding(self, uuid: str) -> ProviderHolding:
        """Returns the allocations of a provider.

        :raises NotFound: there is no such provider.
        """

    @abc.abstractmethod
    def replace(
        self, changes: Sequence[AllocationChange], companion: Companion | None = None
    ) -> tuple[ClaimOutcome, ...]:
        """Changes the allocations of consumers, all in one transaction or none.

        A migration moves an instance in one step with two changes: the resources of the source go to the migration's own uuid,
        those of the destination to the instance. One change can take what another one releases. The use of a class may exceed the
        capacity only if the changes in sum do not raise what their consumers held of it before, so that consumers can leave a
        provider whose capacity was reduced. min_unit, max_unit and the step rule apply to every amount.

        If each change has the ``request_id`` of its consumer's last change, the call is a repetition: nothing is written, and the
        present allocations are returned.

        :returns: the allocations of each consumer now, in the order of the changes; the generation is 0 if it has none.
        :raises CapacityExceeded, ConstraintViolated: as for a claim; details ``consumer`` too.
        :raises QuotaExceeded: as for a claim, if a change has ``enforce_quota``.
        :raises GenerationConflict: a consumer has another generation than expected; details ``consumer``, ``expected``,
            ``present`` (both None for a consumer without allocations).
        :raises NotFound: a provider (``details['provider']``) or class (``details['resource_class']``) does not exist.
        :raises InvalidInput: a consumer occurs twice, or an amount is no positive whole number.
        """

    @abc.abstractmethod
    def reshape(self, inventories: Sequence[InventoryChange], changes: Sequence[AllocationChange]) -> None:
        """Moves inventories between providers, together with their allocations, in one transaction.

        Capacity is checked against the new inventories. If a provider loses an inventory, the changes must remove all allocations
        of it. The generation of each provider rises as with Placement's reshaper: once for the union of the old and the new
        inventories (if there are new ones), once for its allocations (if they change), and once for the new inventories alone.

        :raises GenerationConflict: a provider or a consumer has another generation than expected.
        :raises InUse: an inventory would be removed that consumers outside of the changes hold.
        """

    @abc.abstractmethod
    def project_usages(
        self, project: str, *, user: str | None = None, consumer_type: str | None = None
    ) -> list[UsageTotal]:
        """Returns the use of a project by consumer type (empty: unknown), ordered by type."""

    @abc.abstractmethod
    def renew(self, consumer: str, lifetime: float | None) -> bool:
        """Sets a consumer's lifetime, in seconds from now by the store's clock; None: it never expires (the claim is confirmed).

        Returns False if the consumer has no allocations: a consumer that renews too late has lost its claim.
        """

    @abc.abstractmethod
    def expire(self, limit: int = 100) -> list[str]:
        """Releases up to ``limit`` consumers that have expired by the store's clock. Returns their uuids.

        The statement that releases checks the condition again, so consumers that were renewed meanwhile stay.
        """

    def has_expired(self) -> bool:
        """Returns whether any consumer may have expired, so that :meth:`expire` must be called. True by default."""
        return True
