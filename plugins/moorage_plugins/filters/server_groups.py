# SPDX-License-Identifier: Apache-2.0
"""The members of a server group together on one node, or apart."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from typing_extensions import override

from moorage.scheduling.interface import (
    SKIP,
    Fleet,
    HostFilter,
    HostState,
    Mask,
    RequestSpec,
    Rows,
    ServerGroup,
    Skip,
    Where,
)

__all__ = ["ServerGroupAffinityFilter", "ServerGroupAntiAffinityFilter"]


def group_of(spec: RequestSpec, policy: str) -> ServerGroup | None:
    """Returns the request's group when it has the policy."""
    group = spec.server_group
    return group if group is not None and group.policy == policy else None


class ServerGroupAffinityFilter(HostFilter):
    """Passes, for a group with the policy ``affinity``, the nodes on which members are; all when none is anywhere."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    needs_instances = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        group = group_of(spec_obj, "affinity")
        return group is None or not group.nodes or host_state.uuid in group.nodes

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        group = group_of(spec, "affinity")
        return SKIP if group is None or not group.nodes else fleet.rows_of_nodes(group.nodes)

    @override
    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        group = group_of(spec, "affinity")
        nodes = () if group is None else group.nodes
        together = np.full(fleet.size, not nodes, dtype=np.bool_)
        together[fleet.rows_of_nodes(nodes)] = True
        return together[where]

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        return "no member of the server group is there, and the policy is affinity"


class ServerGroupAntiAffinityFilter(HostFilter):
    """Passes, for a group with the policy ``anti-affinity``, nodes with fewer members than ``max_server_per_host``.

    The node on which the instance itself is passes too, so that it can be resized or rebuilt there.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    needs_instances = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        group = group_of(spec_obj, "anti-affinity")
        if group is None:
            return True
        instances = host_state.instances
        if spec_obj.instance_uuid in instances:
            return True
        return sum(uuid in instances for uuid in set(group.members)) < group.max_server_per_host

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        group = group_of(spec, "anti-affinity")
        return SKIP if group is None or not group.members else None

    @override
    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        apart = np.ones(fleet.size, dtype=np.bool_)
        group = group_of(spec, "anti-affinity")
        if group is None:
            return apart[where]
        placed = fleet.locate(set(group.members))
        there, count = np.unique(np.array(list(placed.values()), dtype=np.intp), return_counts=True)
        apart[there[count >= group.max_server_per_host]] = False
        apart[fleet.rows_of_instances([spec.instance_uuid])] = True
        return apart[where]

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        group = spec.server_group
        there = [] if group is None else sorted(uuid for uuid in set(group.members) if uuid in host_state.instances)
        return f"it runs {', '.join(there)} of the same server group, and the policy is anti-affinity"
