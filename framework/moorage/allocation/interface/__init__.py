# SPDX-License-Identifier: Apache-2.0
"""The interface of allocation stores, and the plain data that they exchange with the core.

A provider has inventories, one per resource class; a consumer holds allocations of them; a claim is what a consumer holds.
capacity = (total - reserved) * allocation_ratio. A claim of ``n`` fits when min_unit <= n <= max_unit, the step rule holds and
used + n <= capacity. The store alone decides that, in the statement that takes the room.

The powers of a store are separate classes, so that a small store stays small: every store is an :class:`AllocationStore`
(claim, release, read), which is all that the roles need. :class:`FullStore` has all powers, which the Placement dialect needs;
the reference stores ``sql`` and ``memory`` have them.
"""

from __future__ import annotations

from moorage.allocation.interface.candidates import (
    Candidate,
    CandidateQuery,
    CandidateSet,
    CandidateSource,
    ProviderSummary,
    RequestGroup,
)
from moorage.allocation.interface.catalogue import (
    KEEP,
    GenerationConflict,
    Keep,
    NameCatalogue,
    ProviderCatalogue,
    ProviderFilter,
    ResourceClass,
    Trait,
)
from moorage.allocation.interface.changes import ChangeSource
from moorage.allocation.interface.claims import (
    API_VERSION,
    MOST_LEVELS,
    AllocationItem,
    AllocationStore,
    Auditable,
    BatchCompanion,
    ClaimOutcome,
    ClaimRelease,
    ClaimRequest,
    Companion,
    Drift,
    HasChildren,
    InventoryItem,
    Merge,
    ProviderUsage,
    RefusedTogether,
    ResourceProvider,
    StoreCapability,
    TreeTooDeep,
    context_of,
)
from moorage.allocation.interface.detectors import OrphanDetector
from moorage.allocation.interface.ledger import (
    AllocationChange,
    AllocationLedger,
    Consumer,
    ConsumerHolding,
    Expect,
    InventoryChange,
    ProviderHolding,
    UsageTotal,
)
from moorage.allocation.interface.pools import SHARES, PoolSource
from moorage.allocation.interface.quotas import Quota, QuotaDrift, QuotaSource, QuotaStore
from moorage.allocation.interface.trees import TreeSource
from moorage.extensions import ExtensionPoint

__all__ = [
    "API_VERSION",
    "DETECTORS",
    "KEEP",
    "QUOTA_SOURCES",
    "SHARES",
    "STORES",
    "AllocationChange",
    "AllocationItem",
    "AllocationLedger",
    "AllocationStore",
    "Auditable",
    "BatchCompanion",
    "Candidate",
    "CandidateQuery",
    "CandidateSet",
    "CandidateSource",
    "StoreCapability",
    "ChangeSource",
    "ClaimOutcome",
    "ClaimRelease",
    "ClaimRequest",
    "Companion",
    "Consumer",
    "ConsumerHolding",
    "Drift",
    "Expect",
    "FullStore",
    "GenerationConflict",
    "HasChildren",
    "MOST_LEVELS",
    "TreeTooDeep",
    "InventoryChange",
    "InventoryItem",
    "Keep",
    "Merge",
    "NameCatalogue",
    "OrphanDetector",
    "PoolSource",
    "ProviderCatalogue",
    "ProviderFilter",
    "ProviderHolding",
    "ProviderSummary",
    "ProviderUsage",
    "Quota",
    "QuotaDrift",
    "QuotaSource",
    "QuotaStore",
    "RefusedTogether",
    "RequestGroup",
    "ResourceClass",
    "ResourceProvider",
    "Trait",
    "TreeSource",
    "UsageTotal",
    "context_of",
]


class FullStore(
    AllocationStore, Auditable, ProviderCatalogue, NameCatalogue, AllocationLedger, CandidateSource, PoolSource
):
    """A store with every power."""


#: Chosen by ``[allocation] orphan_detectors``.
DETECTORS: ExtensionPoint[OrphanDetector] = ExtensionPoint(
    "moorage.orphan_detectors", OrphanDetector, API_VERSION, "[allocation] orphan_detectors"
)
#: Chosen by ``[allocation] store``.
STORES: ExtensionPoint[AllocationStore] = ExtensionPoint(
    "moorage.allocation_stores", AllocationStore, API_VERSION, "[allocation] store"
)
#: Chosen by ``[quota] source``.
QUOTA_SOURCES: ExtensionPoint[QuotaSource] = ExtensionPoint(
    "moorage.quota_sources", QuotaSource, API_VERSION, "[quota] source"
)
