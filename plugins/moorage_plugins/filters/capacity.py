# SPDX-License-Identifier: Apache-2.0
"""Only nodes with enough free, as far as the view knows; the claim has the last word."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from typing_extensions import override

from moorage.scheduling.interface import Fleet, HostFilter, HostState, Mask, RequestSpec, Where

__all__ = ["CapacityFilter"]


class CapacityFilter(HostFilter):
    """Passes nodes on which every resource class of the flavor has as much free as is asked for.

    On nodes with several providers (NUMA cells, GPUs, pools) and for requests with request groups, providers of the node must give
    every group what it asks for, its traits included.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        if not host_state.fits(spec_obj):
            return False
        free = host_state.free
        enough = all(free.get(name, 0) >= amount for name, amount in spec_obj.flavor.resources.items())
        return enough or len(host_state.providers) > 1

    @override
    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        enough: Mask | None = None
        for name, amount in spec.flavor.resources.items():
            here = fleet.free(name)[where] >= amount
            enough = here if enough is None else np.logical_and(enough, here, out=enough)
        if enough is None:
            enough = np.ones(fleet.size, dtype=np.bool_)[where]
        fits = fleet.fits(spec)
        if fits is None:
            return enough
        # Of a node with several providers, no sum tells whether one of them has enough.
        answer: Mask = (enough | fleet.nested[where]) & fits[where]
        return answer

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        free = host_state.free
        short = [
            f"{name} ({free.get(name, 0):g} free, {amount} asked)"
            for name, amount in sorted(spec.flavor.resources.items())
            if free.get(name, 0) < amount
        ]
        if short:
            return "too little " + ", ".join(short)
        return host_state.shortage(spec) or "its providers gave what was free to another request"
