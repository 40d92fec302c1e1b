# SPDX-License-Identifier: Apache-2.0
"""Providers, claims, and what every allocation store does with them."""

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

#: Levels of a tree of providers, its root included. The levels of a machine (node, NUMA cell, device, function) are fewer than ten.
MOST_LEVELS = 64

#: Writes that shall happen in the claim's own transaction: called with the store's transaction (an SQLAlchemy connection for
#: stores with SHARED_TRANSACTION) after the room is taken and before the commit. It may be called again for a retried
#: transaction; raising an error undoes the claim and is passed on to the caller.
Companion = Callable[[Any], None]


class BatchCompanion(abc.ABC):
    """A companion that can be written together with others of its class: a store may make several claims in one transaction.

    A claim with another companion has a transaction of its own.

    :ivar context: of the request of the claim, if another thread than the request's makes it; None: that of the thread.
    """

    context: RequestContext | None = None

    @abc.abstractmethod
    def __call__(self, transaction: Any) -> None:
        """Write what belongs to this claim alone; see :data:`Companion`."""

    @classmethod
    @abc.abstractmethod
    def together(cls, transaction: Any, companions: Sequence[Any]) -> None:
        """Write what belongs to several claims, with the outcome that calling them one after the other would have.

        :param companions: of this class, in the order in which the claims came. It may be called again, with fewer of them.
        :raises RefusedTogether: names the companions that cannot be written. Any other error is taken for one of all.
        """


def context_of(companion: Companion | None) -> RequestContext | None:
    """Returns the request of the claim with this companion: the companion's, else that of the thread."""
    own = companion.context if isinstance(companion, BatchCompanion) else None
    return own or get_current()


class RefusedTogether(Exception):
    """Some of the companions of a combined transaction refuse their claims; the transaction is done again without them."""

    def __init__(self, companions: Collection[BatchCompanion]) -> None:
        super().__init__(f"{len(companions)} companions refuse their claims")
        self.companions = companions


#: Returns the inventories that a provider shall have: ``merge(uuid, present)``. ``present`` are its inventories by class; no other
#: transaction can change them meanwhile. It may be called several times and must change nothing.
Merge = Callable[[str, Mapping[str, InventoryItem]], Sequence[InventoryItem]]


class StoreCapability(enum.Enum):
    """What a store can do beyond the required."""

    #: Processes on several machines may use it at once.
    SHARED = "shared"
    #: Claims survive a crash of every process.
    DURABLE = "durable"
    #: ``companion`` writes commit together with the claim.
    SHARED_TRANSACTION = "shared-transaction"


class HasChildren(errors.InUse):
    """A provider that is the parent of others cannot go; details: ``provider``, ``holder`` (how many children)."""


class TreeTooDeep(errors.InvalidInput):
    """A tree would get more than :data:`MOST_LEVELS` levels; details: ``path`` (``parent``), ``levels``."""


@dataclass(frozen=True, slots=True)
class ResourceProvider:
    """A provider: a node, or a pool that several nodes share (``can_host`` False: nothing ever lands on it).

    :param generation: rises with every write that can make something not fit any more: of inventories, traits, aggregates and
        claims; not when room is only given back (released, expired).
    :param parent: uuid of the provider that this one is a part of (a NUMA cell of a node); None: it is a root.
    :param root: uuid of the root of its tree; empty where a caller makes a provider: the store finds it.
    :param updated_at: when it was last written, in microseconds since the epoch by the store's clock; 0: not known.
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
    """A provider with what is used of it, by resource class."""

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
    """What a consumer wants to hold, all or nothing.

    :param consumer: uuid of the consumer (an instance's uuid).
    :param resources: provider uuid -> resource class -> units (positive).
    :param request_id: names this claim; a repetition with the same consumer and request_id after a lost reply is recognised and
        answered with what the first one took, whatever ``resources`` the repetition names.
    :param project: owner, for usage by project; likewise ``user`` and ``consumer_type``.
    :param lifetime: seconds after which an unconfirmed claim may be reaped (:meth:`AllocationLedger.expire`); None: it stays
        until released.
    :param residents: nodes whose instances this claim changes, and the version that each must have
        (:meth:`AllocationStore.residents`; None: any). A node stands here also when everything is taken from pools.
    :param enforce_quota: a limit of the project refuses the claim. Otherwise the limits count the claim and do not refuse it.
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
    """A claim that holds.

    :param repeated: an earlier request took it, and ``companion`` did not run this time.
    :param together: how many claims the transaction made.
    """

    consumer: str
    consumer_generation: int
    allocations: tuple[AllocationItem, ...]
    repeated: bool = False
    together: int = field(default=1, compare=False)

    @property
    def providers(self) -> tuple[str, ...]:
        """The uuids of the providers that are held, sorted."""
        return tuple(sorted({item.provider for item in self.allocations}))


@dataclass(frozen=True, slots=True)
class ClaimRelease:
    """One of the releases of :meth:`AllocationStore.release_many`.

    :param residents: as for :meth:`AllocationStore.release`.
    :param context: the request that the event of the release names.
    """

    consumer: str
    residents: tuple[str, ...] = ()
    context: RequestContext | None = None


class AllocationStore(abc.ABC):
    """Keeps providers, inventories and claims. Safe for use by several threads.

    All methods may block on the store and raise :class:`moorage.errors.StoreUnavailable` (it cannot be reached) or
    :class:`moorage.errors.StoreBusy` (the bounded number of lost races was used up).

    Built by the loader as ``plugin(conf=..., database=..., clock=...)``.
    """

    api_version: ClassVar[tuple[int, int]]
    capabilities: ClassVar[frozenset[StoreCapability]] = frozenset()
    #: How many claims of new consumers :meth:`claim_many` makes in one transaction at most.
    claims_together: int = 1
    #: How many of its transactions may run at a time: one that computes while others wait for the server.
    lanes: int = 1

    @abc.abstractmethod
    def ensure_providers(self, providers: Sequence[ResourceProvider], transaction: Any | None = None) -> int:
        """Creates providers, or brings name, can_host and inventories of existing ones (same uuid) to the given state.

        Custom resource classes (``CUSTOM_...``) begin to exist with the first inventory of them.
        Repeating the call changes nothing. ``generation`` is ignored; every change of inventories raises it. ``parent`` is given
        to providers that are created (its row must exist, or come before it in ``providers``) and never changed here. One
        transaction for all; inside ``transaction`` when given (stores with SHARED_TRANSACTION).

        :returns: how many were created or changed.
        :raises InUse: an inventory would vanish that has allocations.
        :raises AlreadyExists: another provider has the name.
        :raises InvalidInput: a number, name or class that can never be right.
        :raises TreeTooDeep: a provider that is created would be below :data:`MOST_LEVELS` levels.
        """

    def merge_providers(
        self, providers: Sequence[ResourceProvider], merge: Merge, transaction: Any | None = None
    ) -> int:
        """Does what :meth:`ensure_providers` does, but ``merge`` decides the inventories of each provider that exists.

        A store overrides this method to read the present inventories while no other transaction can change them. This default
        reads them before, so a change that comes between is lost.
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
        """Take the room for a new consumer, or recognise a repetition. One transaction; nothing is half taken.

        :raises CapacityExceeded: it does not fit; details ``provider``, ``resource_class``, ``asked``, ``free``.
        :raises ConstraintViolated: min_unit, max_unit or the step rule refuses it.
        :raises NotFound: a provider or resource class does not exist.
        :raises ResidentsChanged: a node has another version of its residents than ``request.residents`` names.
        :raises QuotaExceeded: a limit of the project refuses it (stores that are a :class:`QuotaStore`).
        :raises Conflict: the consumer holds a claim of another request.
        :raises InvalidInput: an amount that is no positive whole number, no provider, no class.
        """

    def claim_many(self, claims: Sequence[tuple[ClaimRequest, Companion | None]]) -> list[ClaimOutcome | BaseException]:
        """Take the room for several new consumers; of each the outcome, or what :meth:`claim` would have raised.

        A claim that is refused undoes no other one. A store overrides this method to make the claims in few transactions.
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
        """Give back all that the consumer holds; False when it held nothing. Repeating it is harmless.

        Inside ``transaction`` when given (stores with SHARED_TRANSACTION).

        :param residents: nodes that an instance leaves: the version of their residents rises although the consumer may hold
            nothing of them. Unknown nodes are ignored.
        """

    def release_many(self, releases: Sequence[ClaimRelease], transaction: Any | None = None) -> None:
        """Give back all that several consumers hold, as :meth:`release` does for each of them."""
        for each in releases:
            with acting_for(each.context):
                self.release(each.consumer, transaction, residents=each.residents)

    @abc.abstractmethod
    def residents(self, provider: str, transaction: Any | None = None) -> int:
        """The version of a node's residents. Every write that changes who holds resources of the provider raises it.

        A reader of a node's instances reads this version first, then the instances: a claim that names this version
        (``ClaimRequest.residents``) then succeeds only while the instances are as they were read. Read both in one
        ``transaction``, so that both come from one server of a cluster.

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
        """Stored allocations, a page of ``limit`` after the given key (consumer, provider, resource_class).

        Ordered by consumer; those of one consumer in an order of the store's own that stays the same. What is claimed or
        released while pages are read may be in them or not; nothing else is shown twice or left out.
        """

    @abc.abstractmethod
    def usages(
        self, *, after: str = "", limit: int = 1000, providers: Sequence[str] | None = None
    ) -> list[ProviderUsage]:
        """Providers with inventories and use, ordered by uuid, a page of ``limit`` after the given uuid; two statements a page."""

    @abc.abstractmethod
    def delete_provider(self, uuid: str, transaction: Any | None = None) -> bool:
        """Remove a provider without allocations and children; False when there is none.

        :raises InUse: it has allocations.
        :raises HasChildren: it is the parent of others.
        """


@dataclass(frozen=True, slots=True)
class Drift:
    """A counter that disagrees with what it counts.

    :param provider: its uuid; empty for an inventory or allocations of a provider that does not exist.
    :param counted: the ``used`` that claims are decided by; None: allocations of a class of which the provider has no inventory.
    :param held: the sum of the stored allocations, which is the truth.
    """

    provider: str
    resource_class: str
    counted: int | None
    held: int


class Auditable(abc.ABC):
    """A further power of stores that keep a counter beside the allocations: derive from it and from AllocationStore."""

    @abc.abstractmethod
    def drift(self) -> list[Drift]:
        """Every disagreement, as of one moment, ordered by provider and class. Reads all allocations: not for every minute."""

    @abc.abstractmethod
    def recount(self, provider: str) -> bool:
        """Set the counters of a provider to the sums of its allocations, while no claim of it runs; False when it is unknown."""
