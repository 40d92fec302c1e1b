# SPDX-License-Identifier: Apache-2.0
"""Defines providers, claims, and the interface of every allocation store."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from oslo_context.context import RequestContext, get_current

from moorage import errors
from moorage.context import acting_for
from moorage.inventory import InventoryItem

__all__ = [
    "API_VERSION",
    "AllocationItem",
    "AllocationStore",
    "Auditable",
    "BatchCompanion",
    "StoreCapability",
    "ClaimOutcome",
    "ClaimRelease",
    "ClaimRequest",
    "Companion",
    "Drift",
    "HasChildren",
    "InventoryItem",
    "MOST_LEVELS",
    "Merge",
    "ProviderUsage",
    "RefusedTogether",
    "context_of",
    "ResourceProvider",
    "TreeTooDeep",
]

API_VERSION = (2, 0)

#: The most levels of a tree of providers, its root included. A machine (node, NUMA cell, device, function) has fewer than ten.
MOST_LEVELS = 64

#: Writes rows in the transaction of a claim. It gets the store's transaction (an SQLAlchemy connection for stores with
#: SHARED_TRANSACTION), after the resources are taken and before the commit. It is called again if the transaction is retried. If
#: it raises, the claim is undone, and the caller gets the error.
Companion = Callable[[Any], None]


class BatchCompanion(abc.ABC):
    """A companion for claims that a store makes together in one transaction.

    A claim with another kind of companion has its own transaction.

    :ivar context: the request context of the claim, if another thread than that of the request makes the claim; None: the
        thread's.
    """

    context: RequestContext | None = None

    @abc.abstractmethod
    def __call__(self, transaction: Any) -> None:
        """Writes the rows of this claim alone; see :data:`Companion`."""

    @classmethod
    @abc.abstractmethod
    def together(cls, transaction: Any, companions: Sequence[Any]) -> None:
        """Writes the rows of several claims. The outcome must be that of calling the companions one after the other.

        :param companions: companions of this class, in the order of the claims. It may be called again, with fewer of them.
        :raises RefusedTogether: some companions cannot be written. Any other error counts for all of them.
        """


def context_of(companion: Companion | None) -> RequestContext | None:
    """Returns the request context of a claim: that of its companion, or else that of the thread."""
    own = companion.context if isinstance(companion, BatchCompanion) else None
    return own or get_current()


class RefusedTogether(Exception):
    """Some companions of a combined transaction refuse their claims. The transaction is repeated without them."""

    def __init__(self, companions: Collection[BatchCompanion]) -> None:
        super().__init__(f"{len(companions)} companions refuse their claims")
        self.companions = companions


#: Returns the new inventories of a provider: ``merge(uuid, present)``. ``present`` has its inventories by class; no other
#: transaction can change them meanwhile. It may be called several times, and must change nothing.
Merge = Callable[[str, Mapping[str, InventoryItem]], Sequence[InventoryItem]]


class StoreCapability(enum.Enum):
    """An optional capability of a store."""

    #: Processes on several machines may use it at once.
    SHARED = "shared"
    #: Claims survive a crash of every process.
    DURABLE = "durable"
    #: ``companion`` writes commit together with the claim.
    SHARED_TRANSACTION = "shared-transaction"


class HasChildren(errors.InUse):
    """A provider cannot be deleted because it has children; details: ``provider``, ``holder`` (how many children)."""


class TreeTooDeep(errors.InvalidInput):
    """A tree would get more than :data:`MOST_LEVELS` levels; details: ``path`` (``parent``), ``levels``."""


@dataclass(frozen=True, slots=True)
class ResourceProvider:
    """A resource provider: a node, or a pool that several nodes share (``can_host`` False: no instance is placed on it).

    :param generation: rises with every write of inventories, traits, aggregates and claims after which a request may not fit any
        more. It does not rise when resources are only released.
    :param parent: the uuid of the provider that it is a part of (a NUMA cell of a node, for example); None: it is a root.
    :param root: the uuid of the root of its tree; empty in a provider that a caller makes: the store finds it.
    :param updated_at: when it was last written, in microseconds since the epoch by the store's clock; 0: unknown.
    """

    uuid: str
    name: str
    can_host: bool = True
    generation: int = 0
    inventories: tuple[InventoryItem, ...] = ()
    parent: str | None = None
    root: str = field(default="", compare=False)
    updated_at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ProviderUsage:
    """A provider with its use by resource class."""

    provider: ResourceProvider
    used: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class AllocationItem:
    """One allocation: ``used`` units of a class of a provider, held by a consumer."""

    provider: str
    consumer: str
    resource_class: str
    used: int


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Requests resources for a consumer, all or none.

    :param consumer: the uuid of the consumer (of an instance, for example).
    :param resources: units (positive) by provider uuid and resource class.
    :param request_id: identifies the claim. A repetition with equal consumer and request_id, after a lost reply, gets the
        resources of the first claim, whatever its ``resources`` are.
    :param project: the owner, for usage by project; likewise ``user`` and ``consumer_type``.
    :param lifetime: seconds after which an unconfirmed claim expires (:meth:`AllocationLedger.expire`); None: never.
    :param residents: the nodes whose instances the claim changes, and the version that each must have
        (:meth:`AllocationStore.residents`; None: any). It has the node also if all resources come from pools.
    :param enforce_quota: a limit of the project refuses the claim. Otherwise the claim counts and is not refused.
    """

    consumer: str
    resources: Mapping[str, Mapping[str, int]]
    request_id: str | None = None
    project: str = ""
    user: str = ""
    consumer_type: str = "INSTANCE"
    lifetime: float | None = None
    residents: Mapping[str, int | None] = field(default_factory=dict)
    enforce_quota: bool = True


@dataclass(frozen=True, slots=True)
class ClaimOutcome:
    """A claim that was made.

    :param repeated: an earlier request made it, and the companion did not run this time.
    :param together: how many claims the transaction made.
    """

    consumer: str
    consumer_generation: int
    allocations: tuple[AllocationItem, ...]
    repeated: bool = False
    together: int = field(default=1, compare=False)

    @property
    def providers(self) -> tuple[str, ...]:
        """The uuids of the providers of the allocations, sorted."""
        return tuple(sorted({item.provider for item in self.allocations}))


@dataclass(frozen=True, slots=True)
class ClaimRelease:
    """One release of :meth:`AllocationStore.release_many`.

    :param residents: as for :meth:`AllocationStore.release`.
    :param context: the request context for the event of the release.
    """

    consumer: str
    residents: tuple[str, ...] = ()
    context: RequestContext | None = None


class AllocationStore(abc.ABC):
    """Keeps providers, inventories and claims. Safe for use by several threads.

    All methods may block on the store, and raise :class:`moorage.errors.StoreUnavailable` (it cannot be reached) or
    :class:`moorage.errors.StoreBusy` (every try lost a race).

    Built by the loader as ``plugin(conf=..., database=..., clock=...)``.
    """

    api_version: ClassVar[tuple[int, int]]
    capabilities: ClassVar[frozenset[StoreCapability]] = frozenset()
    #: The most claims of new consumers that :meth:`claim_many` makes in one transaction.
    claims_together: int = 1
    #: How many of these transactions may run at a time. While some wait for a server, another one can compute.
    lanes: int = 1

    @abc.abstractmethod
    def ensure_providers(self, providers: Sequence[ResourceProvider], transaction: Any | None = None) -> int:
        """Creates providers, or updates name, can_host and inventories of existing ones (equal uuid).

        Custom resource classes (``CUSTOM_...``) are created with their first inventory. A repeated call changes nothing.
        ``generation`` is ignored; every change of inventories raises it. ``parent`` is set for new providers only; the parent must
        exist, or come before it in ``providers``. All in one transaction: ``transaction`` if it is given (stores with
        SHARED_TRANSACTION).

        :returns: how many were created or changed.
        :raises InUse: an inventory with allocations would be removed.
        :raises AlreadyExists: another provider has the name.
        :raises InvalidInput: a number, name or class is invalid.
        :raises TreeTooDeep: a new provider would be below :data:`MOST_LEVELS` levels.
        """

    def merge_providers(
        self, providers: Sequence[ResourceProvider], merge: Merge, transaction: Any | None = None
    ) -> int:
        """Does what :meth:`ensure_providers` does, but ``merge`` decides the inventories of each provider that exists.

        A store overrides this method to read the present inventories while no other transaction can change them. The default reads
        them before, so a concurrent change is lost.
        """
        present = {
            usage.provider.uuid: {item.resource_class: item for item in usage.provider.inventories}
            for usage in self.usages(providers=[each.uuid for each in providers], limit=len(providers))
        }
        wanted = [
            replace(each, inventories=tuple(merge(each.uuid, present[each.uuid]))) if each.uuid in present else each
            for each in providers
        ]
        return self.ensure_providers(wanted, transaction)

    @abc.abstractmethod
    def claim(self, request: ClaimRequest, companion: Companion | None = None) -> ClaimOutcome:
        """Takes resources for a new consumer, or recognises a repetition. One transaction: all or nothing.

        :raises CapacityExceeded: it does not fit; details ``provider``, ``resource_class``, ``asked``, ``free``.
        :raises ConstraintViolated: min_unit, max_unit or the step rule refuses it.
        :raises NotFound: a provider or resource class does not exist.
        :raises ResidentsChanged: the residents of a node have another version than ``request.residents``.
        :raises QuotaExceeded: a limit of the project refuses it (stores that are a :class:`QuotaStore`).
        :raises Conflict: the consumer has a claim of another request.
        :raises InvalidInput: an amount is no positive whole number, or there is no provider or class.
        """

    def claim_many(self, claims: Sequence[tuple[ClaimRequest, Companion | None]]) -> list[ClaimOutcome | BaseException]:
        """Takes resources for new consumers. Returns the outcome of each, or the error that :meth:`claim` would have raised.

        A refused claim does not undo others. A store overrides this method to make the claims in few transactions.
        """
        outcomes: list[ClaimOutcome | BaseException] = []
        for request, companion in claims:
            try:
                with acting_for(context_of(companion)):
                    outcomes.append(self.claim(request, companion))
            except Exception as error:  # noqa: BLE001  (given to the caller)
                outcomes.append(error)
        return outcomes

    @abc.abstractmethod
    def release(self, consumer: str, transaction: Any | None = None, *, residents: Sequence[str] = ()) -> bool:
        """Releases all resources of a consumer. Returns whether it had any. It can be repeated.

        Uses ``transaction`` if it is given (stores with SHARED_TRANSACTION).

        :param residents: the nodes that an instance leaves: the version of their residents rises, even if the consumer holds
            nothing of them. Unknown nodes are ignored.
        """

    def release_many(self, releases: Sequence[ClaimRelease], transaction: Any | None = None) -> None:
        """Releases all resources of several consumers, as :meth:`release` does for each."""
        for each in releases:
            with acting_for(each.context):
                self.release(each.consumer, transaction, residents=each.residents)

    @abc.abstractmethod
    def residents(self, provider: str, transaction: Any | None = None) -> int:
        """Returns the version of a node's residents. Every change of the node's consumers raises it.

        Read the version first, and then the instances of the node. A claim with this version (``ClaimRequest.residents``) succeeds
        only if the instances are still those that were read. Read both in one ``transaction``, so that both come from one server
        of a cluster.

        :raises NotFound: there is no such provider.
        """

    @abc.abstractmethod
    def allocations(
        self,
        *,
        consumers: Sequence[str] | None = None,
        providers: Sequence[str] | None = None,
        after: tuple[str, str, str] | None = None,
        limit: int = 1000,
    ) -> list[AllocationItem]:
        """Returns stored allocations: at most ``limit`` of them after the key ``after`` (consumer, provider, resource_class).

        Ordered by consumer, and for each consumer in a fixed order of the store. Allocations that are made or released while pages
        are read may be in them or not. No other allocation is missing or occurs twice.
        """

    @abc.abstractmethod
    def usages(
        self, *, after: str = "", limit: int = 1000, providers: Sequence[str] | None = None
    ) -> list[ProviderUsage]:
        """Returns providers with inventories and use, by uuid: at most ``limit`` after the uuid ``after``; two statements."""

    @abc.abstractmethod
    def delete_provider(self, uuid: str, transaction: Any | None = None) -> bool:
        """Deletes a provider without allocations and children. Returns whether there was one.

        :raises InUse: it has allocations.
        :raises HasChildren: it is the parent of others.
        """


@dataclass(frozen=True, slots=True)
class Drift:
    """A counter that differs from the sum of its allocations.

    :param provider: the uuid of the provider; empty for an inventory or allocations whose provider does not exist.
    :param counted: the counter ``used``, which decides claims; None: there are allocations of a class, and no inventory.
    :param held: the sum of the stored allocations, which is right.
    """

    provider: str
    resource_class: str
    counted: int | None
    held: int


class Auditable(abc.ABC):
    """A power of stores that keep counters beside the allocations: finds and corrects wrong counters."""

    @abc.abstractmethod
    def drift(self) -> list[Drift]:
        """Returns all wrong counters at one moment, ordered by provider and class. Reads all allocations, so call it seldom."""

    @abc.abstractmethod
    def recount(self, provider: str) -> bool:
        """Sets the counters of a provider to the sums of its allocations. Returns False if the provider is unknown.

        The store keeps claims of the provider waiting meanwhile.
        """
