# SPDX-License-Identifier: Apache-2.0
"""One flavor a node."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from moorage.scheduling.interface import Fleet, HostFilter, HostState, RequestSpec, Rows

__all__ = ["TypeAffinityFilter"]


class TypeAffinityFilter(HostFilter):
    """Passes nodes that are empty or run only instances of the requested flavor, compared by its stable flavorid."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    needs_instances = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return all(each.flavorid == spec_obj.flavor.flavorid for each in host_state.instances.values())

    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows:
        passing: Rows = rows[fleet.num_instances[rows] == fleet.flavor_counts(spec.flavor.flavorid)[rows]]
        return passing

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        others = {each.flavorid for each in host_state.instances.values()} - {spec.flavor.flavorid}
        return f"it runs instances of flavor {', '.join(sorted(others))}"
