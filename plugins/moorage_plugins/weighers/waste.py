# SPDX-License-Identifier: Apache-2.0
"""Keep resources that only some nodes have for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from typing_extensions import override

from moorage.scheduling.interface import Fleet, Mask, RequestSpec, Rows
from moorage_plugins.weighers.base import AggregateWeigher, Floats

__all__ = ["LeastWasteWeigher"]


class LeastWasteWeigher(AggregateWeigher):
    """Prefers nodes on which the request leaves no scarce resource unused; ``[weigher_least_waste] multiplier``.

    A resource class is scarce for a request if some nodes of the fleet have it, others do not, and the request does not ask for
    it: a GPU, for a request of processors and memory alone. A node wastes what is free of such classes. Every node that wastes
    something ranks below every node that wastes nothing, and among those that do, less is better. Nodes whose scarce resources are
    all used waste nothing. Metadata: ``least_waste_weight_multiplier``.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    minval = 0.0
    maxval = 2.0
    weighs_alone = True
    ignores_owner = True
    group = "weigher_least_waste"
    aggregate_key = "least_waste_weight_multiplier"
    sign = -1.0

    @property
    @override
    def spreads(self) -> bool:
        return self.multiplier <= 0

    @override
    def preferred(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Mask | None:
        scarce = _scarce(fleet, spec)
        if not scarce or not self.multiplier:
            return None
        wasteful = np.zeros(len(rows), dtype=np.bool_)
        for name in scarce:
            wasteful |= fleet.free(name)[rows] > 0
        return ~wasteful

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Floats:
        scarce, wasted = _scarce(fleet, spec), np.zeros(len(rows))
        for name in scarce:
            free = np.maximum(fleet.free(name)[rows], 0.0)
            # Below 1 for any amount, so that bytes do not outweigh devices. A share of the largest node shown would make the weight
            # of a node depend on the others.
            wasted += free / (free + 1.0)
        # Half of the range separates nodes that waste something from those that waste nothing.
        return np.where(wasted > 0, 1.0 + wasted / max(1, len(scarce)), 0.0)


def _scarce(fleet: Fleet, spec: RequestSpec) -> Sequence[str]:
    """Returns the scarce classes of the fleet that the request does not ask for."""
    return [name for name in fleet.scarce_classes if name not in spec.flavor.resources]
