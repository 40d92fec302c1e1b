# SPDX-License-Identifier: Apache-2.0
"""Passes nodes that are available."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from moorage.scheduling.interface import Fleet, HostFilter, HostState, Mask, RequestSpec, Where

__all__ = ["ComputeFilter"]


class ComputeFilter(HostFilter):
    """Passes nodes whose agent is up, that are neither disabled nor in maintenance, and that may host instances at all."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    run_filter_once_per_request = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return host_state.service_up and host_state.service_enabled and host_state.can_host

    @override
    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        return fleet.available[where]

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        if not host_state.can_host:
            return "it may not host instances"
        if not host_state.service_up:
            return f"its agent {host_state.host} is down"
        return host_state.disabled_reason or f"it or its agent {host_state.host} is disabled"
