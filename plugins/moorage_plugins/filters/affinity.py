# SPDX-License-Identifier: Apache-2.0
"""Filters that place an instance next to, or away from, given instances.

The hints ``same_host`` and ``different_host`` hold instance uuids, one or several. Without them every node passes. Unknown
instances are nowhere: next to them no node passes, away from them every node does. All is per node, not per agent.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from typing_extensions import override

from moorage.scheduling.interface import SKIP, Fleet, HostFilter, HostState, Mask, RequestSpec, Rows, Skip, Where

__all__ = ["DifferentHostFilter", "SameHostFilter"]


class SameHostFilter(HostFilter):
    """Passes nodes that run at least one of the instances of the hint ``same_host``."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    needs_instances = True
    run_filter_once_per_request = True
    prepare_is_final = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        wanted = spec_obj.hints.get("same_host")
        return not wanted or any(uuid in host_state.instances for uuid in wanted)

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        wanted = spec.hints.get("same_host")
        return fleet.rows_of_instances(wanted) if wanted else SKIP

    @override
    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        wanted = spec.hints.get("same_host")
        together = np.full(fleet.size, not wanted, dtype=np.bool_)
        together[fleet.rows_of_instances(wanted or ())] = True
        return together[where]

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        return "it runs none of the instances of the hint same_host"


class DifferentHostFilter(HostFilter):
    """Passes nodes that run none of the instances of the hint ``different_host``."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    needs_instances = True
    run_filter_once_per_request = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return not any(uuid in host_state.instances for uuid in spec_obj.hints.get("different_host") or ())

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        return None if spec.hints.get("different_host") else SKIP

    @override
    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        apart = np.ones(fleet.size, dtype=np.bool_)
        apart[fleet.rows_of_instances(spec.hints.get("different_host") or ())] = False
        return apart[where]

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        there = [uuid for uuid in spec.hints.get("different_host") or () if uuid in host_state.instances]
        return f"it runs {', '.join(there)}, which the hint different_host names"
