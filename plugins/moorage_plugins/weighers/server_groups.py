# SPDX-License-Identifier: Apache-2.0
"""The members of a server group preferably together on one node, or apart."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from typing_extensions import override

from moorage.scheduling.interface import Fleet, RequestSpec, Rows
from moorage_plugins.weighers.base import AggregateWeigher, Floats

__all__ = ["SoftAffinityWeigher", "SoftAntiAffinityWeigher"]


class _MembersWeigher(AggregateWeigher):
    """How many members of the group are there, for groups with the policy."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    weighs_alone = True
    ignores_owner = True
    policy: ClassVar[str]
    each: ClassVar[float]

    @property
    @override
    def spreads(self) -> bool:
        # Requests with server groups are decided by all nodes.
        return True

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Floats:
        counts = np.zeros(fleet.size)
        if spec.server_group is not None and spec.server_group.policy == self.policy:
            placed = fleet.locate(set(spec.server_group.members))
            np.add.at(counts, np.array(list(placed.values()), dtype=np.intp), self.each)
        weights: Floats = counts[rows]
        return weights


class SoftAffinityWeigher(_MembersWeigher):
    """More members are better for ``soft-affinity``; ``[weigher_soft_affinity] multiplier``.

    Metadata: ``soft_affinity_weight_multiplier``.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    group = "weigher_soft_affinity"
    aggregate_key = "soft_affinity_weight_multiplier"
    policy = "soft-affinity"
    each = 1.0


class SoftAntiAffinityWeigher(_MembersWeigher):
    """Fewer members are better for ``soft-anti-affinity``; ``[weigher_soft_anti_affinity] multiplier``.

    Metadata: ``soft_anti_affinity_weight_multiplier``.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    group = "weigher_soft_anti_affinity"
    aggregate_key = "soft_anti_affinity_weight_multiplier"
    policy = "soft-anti-affinity"
    each = -1.0
