# SPDX-License-Identifier: Apache-2.0
"""What scheduling plugins implement, and the plain data that they exchange with the scheduler.

:mod:`~moorage.scheduling.interface.plugins` has filters, weighers and the fleet that they judge,
:mod:`~moorage.scheduling.interface.requests` what is asked and the instances that are placed,
:mod:`~moorage.scheduling.interface.nodes` what is read of nodes, and :mod:`~moorage.scheduling.interface.claims` what the scheduler
needs of an allocation store.
"""

from __future__ import annotations

from moorage.scheduling.interface.claims import Claimer, ClaimResult, SetClaimer, WantedClaim
from moorage.scheduling.interface.nodes import (
    Aggregate,
    ExcludedTargets,
    FleetChanges,
    FleetSource,
    NodeState,
    ProviderState,
)
from moorage.scheduling.interface.plugins import (
    API_VERSION,
    FILTERS,
    SKIP,
    WEIGHERS,
    Column,
    Fleet,
    FreeByProvider,
    HostFilter,
    HostState,
    HostWeigher,
    Mask,
    Rows,
    Skip,
    Where,
)
from moorage.scheduling.interface.requests import (
    Flavor,
    Holds,
    InstanceRecord,
    InstanceSource,
    Propose,
    RequestSpec,
    Residents,
    ServerGroup,
)

__all__ = [
    "Holds",
    "Propose",
    "Flavor",
    "ServerGroup",
    "RequestSpec",
    "InstanceRecord",
    "Residents",
    "InstanceSource",
    "ClaimResult",
    "Claimer",
    "WantedClaim",
    "SetClaimer",
    "Aggregate",
    "ProviderState",
    "NodeState",
    "ExcludedTargets",
    "FleetChanges",
    "FleetSource",
    "API_VERSION",
    "Rows",
    "Where",
    "Mask",
    "Skip",
    "SKIP",
    "Column",
    "FreeByProvider",
    "HostState",
    "Fleet",
    "HostFilter",
    "HostWeigher",
    "FILTERS",
    "WEIGHERS",
]
