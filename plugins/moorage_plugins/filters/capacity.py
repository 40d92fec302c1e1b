# SPDX-License-Identifier: Apache-2.0
"""Only nodes with enough free, as far as the view knows; the claim has the last word."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from typing_extensions import override

from moorage.scheduling.interface import Fleet, HostFilter, HostState, Mask, RequestSpec, Where

__all__ = ["CapacityFilter"]


class CapacityFilter(HostFilter):
    """Passes nodes on which every resource class of the flavor has as much free as is asked for."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        free = host_state.free
        return all(free.get(name, 0) >= amount for name, amount in spec_obj.flavor.resources.items())

    @override
    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        enough: Mask | None = None
        for name, amount in spec.flavor.resources.items():
            here = fleet.free(name)[where] >= amount
            enough = here if enough is None else np.logical_and(enough, here, out=enough)
        return np.ones(fleet.size, dtype=np.bool_)[where] if enough is None else enough

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        free = host_state.free
        short = [
            f"{name} ({free.get(name, 0):g} free, {amount} asked)"
            for name, amount in sorted(spec.flavor.resources.items())
            if free.get(name, 0) < amount
        ]
        return "too little " + ", ".join(short)
