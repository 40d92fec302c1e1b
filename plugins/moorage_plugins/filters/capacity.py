# SPDX-License-Identifier: Apache-2.0
"""Only nodes with enough free, as far as the view knows; the claim has the last word."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from typing_extensions import override

from moorage.scheduling.interface import Fleet, HostFilter, HostState, RequestSpec, Rows

__all__ = ["CapacityFilter"]


class CapacityFilter(HostFilter):
    """Passes nodes on which every resource class of the flavor has as much free as is asked for."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        free = host_state.free
        return all(free.get(name, 0) >= amount for name, amount in spec_obj.flavor.resources.items())

    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows:
        enough = np.ones(len(rows), dtype=np.bool_)
        for name, amount in spec.flavor.resources.items():
            enough &= fleet.free(name)[rows] >= amount
        return rows[enough]

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        free = host_state.free
        short = [
            f"{name} ({free.get(name, 0):g} free, {amount} asked)"
            for name, amount in sorted(spec.flavor.resources.items())
            if free.get(name, 0) < amount
        ]
        return "too little " + ", ".join(short)
