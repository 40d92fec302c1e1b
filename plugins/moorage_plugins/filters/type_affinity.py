# SPDX-License-Identifier: Apache-2.0
"""One flavor a node."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from moorage.scheduling.interface import Fleet, HostFilter, HostState, Mask, RequestSpec, Where

__all__ = ["TypeAffinityFilter"]


class TypeAffinityFilter(HostFilter):
    """Passes nodes that are empty or run only instances of the requested flavor, compared by its stable flavorid.

    Versions of a flavor count as one flavor.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    needs_instances = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return all(each.flavorid == spec_obj.flavor.flavorid for each in host_state.instances.values())

    @override
    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        passing: Mask = fleet.num_instances[where] == fleet.flavor_counts(spec.flavor.flavorid)[where]
        return passing

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        others = {each.flavorid for each in host_state.instances.values()} - {spec.flavor.flavorid}
        return f"it runs instances of flavor {', '.join(sorted(others))}"
