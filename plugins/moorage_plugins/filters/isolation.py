# SPDX-License-Identifier: Apache-2.0
"""Filters that reserve hosts for images, and the filter that passes every host."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from typing_extensions import override

from moorage.scheduling.interface import SKIP, Fleet, HostFilter, HostState, RequestSpec, Rows, Skip

__all__ = ["AllHostsFilter", "IsolatedHostsFilter"]


class AllHostsFilter(HostFilter):
    """Passes every node."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    run_filter_once_per_request = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return True

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        return SKIP

    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows:
        return rows


class IsolatedHostsFilter(HostFilter):
    """Isolated images go to isolated hosts only and, when that is restricted, nothing else goes there.

    ``[filter_isolated_hosts] isolated_images``, ``isolated_hosts`` and ``restrict_isolated_hosts_to_isolated_images``.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    RUN_ON_REBUILD = True
    run_filter_once_per_request = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        wanted = self._wanted(spec_obj)
        return wanted is None or wanted == (host_state.host in self.conf.filter_isolated_hosts.isolated_hosts)

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        return SKIP if self._wanted(spec) is None else None

    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows:
        wanted = self._wanted(spec)
        if wanted is None:
            return rows
        isolated = fleet.rows_of_hosts(self.conf.filter_isolated_hosts.isolated_hosts)
        passing: Rows = rows[np.isin(rows, isolated) == wanted]
        return passing

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        if self._wanted(spec):
            return "the image is isolated, and this is no isolated host"
        return "it is an isolated host, and the image is not isolated"

    def _wanted(self, spec: RequestSpec) -> bool | None:
        """Returns whether the request must go to an isolated host; None when either will do."""
        section = self.conf.filter_isolated_hosts
        isolated = spec.image.get("id") in section.isolated_images
        if isolated or section.restrict_isolated_hosts_to_isolated_images:
            return isolated
        return None
