# SPDX-License-Identifier: Apache-2.0
"""What the aggregates of a node say: zones, tenants, flavors and images that they are for."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar

from typing_extensions import override

from moorage.scheduling.interface import SKIP, Aggregate, Fleet, HostFilter, HostState, RequestSpec, Rows, Skip
from moorage_plugins.filters.extra_specs import SpecCondition, condition

__all__ = [
    "AggregateImagePropertiesIsolationFilter",
    "AggregateInstanceExtraSpecsFilter",
    "AggregateMultiTenancyIsolationFilter",
    "AggregateTypeAffinityFilter",
    "AvailabilityZoneFilter",
]

Aggregates = Sequence[Aggregate]
#: Whether nodes in these aggregates pass.
Decision = Callable[[Aggregates], bool]
_SCOPE = "aggregate_instance_extra_specs"
_TENANT = "filter_tenant_id"


def values(aggregates: Aggregates, key: str) -> set[str]:
    """What the aggregates say under a key, lists at their commas taken apart."""
    return {
        part.strip()
        for each in aggregates
        if (text := each.metadata.get(key)) is not None
        for part in str(text).split(",")
    }


class _AggregateFilter(HostFilter):
    """Decides by nothing but the aggregates that a node is in."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    run_filter_once_per_request = True

    @abc.abstractmethod
    def decision(self, spec: RequestSpec) -> Decision | None:
        """How the request decides; None when it has nothing to say of any node."""

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        decide = self.decision(spec_obj)
        return decide is None or decide(host_state.aggregates)

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        return SKIP if self.decision(spec) is None else None

    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows:
        decide = self.decision(spec)
        return rows if decide is None else fleet.aggregates.rows_where(rows, decide)

    @override
    def host_key(self, host_state: HostState) -> Hashable:
        return tuple(each.name for each in host_state.aggregates)


class AvailabilityZoneFilter(_AggregateFilter):
    """Passes nodes of the zone that is asked for.

    A node's zone is what its aggregates say under ``availability_zone``; without any it is in ``[filter_availability_zone]
    default_zone``. Without a zone in the request every node passes.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    @override
    def decision(self, spec: RequestSpec) -> Decision | None:
        wanted = spec.availability_zone
        if not wanted:
            return None
        default = {self.conf.filter_availability_zone.default_zone}
        return lambda aggregates: wanted in (values(aggregates, "availability_zone") or default)

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        default = {self.conf.filter_availability_zone.default_zone}
        zones = values(host_state.aggregates, "availability_zone") or default
        return f"it is in zone {', '.join(sorted(zones))}, not in {spec.availability_zone}"


class AggregateInstanceExtraSpecsFilter(_AggregateFilter):
    """Passes nodes whose aggregates' metadata satisfy the flavor's extra specs.

    Extra specs with the scope ``aggregate_instance_extra_specs:`` and those without any scope count; each must be satisfied by one
    of the values that the aggregates have under its name, and is not when they have none.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    @override
    def decision(self, spec: RequestSpec) -> Decision | None:
        wanted = _conditions(spec)
        if not wanted:
            return None
        return lambda aggregates: not any(_unsatisfied(aggregates, wanted))

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        missing = _unsatisfied(host_state.aggregates, _conditions(spec))
        return "its aggregates do not satisfy " + ", ".join(missing)


def _conditions(spec: RequestSpec) -> dict[str, SpecCondition]:
    wanted = {}
    for name, text in spec.flavor.extra_specs.items():
        scope, colon, key = name.partition(":")
        if not colon or scope == _SCOPE:
            wanted[name] = condition(name, text)
    return wanted


def _unsatisfied(aggregates: Aggregates, wanted: dict[str, SpecCondition]) -> list[str]:
    return [
        f"{name} = {asked.text}"
        for name, asked in wanted.items()
        if not any(asked.matches(value) for value in values(aggregates, name.removeprefix(_SCOPE + ":")))
    ]


class AggregateMultiTenancyIsolationFilter(_AggregateFilter):
    """Keeps others out of nodes that are set aside for some projects.

    A node whose aggregates have metadata that begin with ``filter_tenant_id`` (a project or several between commas) passes only for
    those; a node without any passes for every project.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    ignores_owner = False

    @override
    def decision(self, spec: RequestSpec) -> Decision | None:
        def decide(aggregates: Aggregates) -> bool:
            tenants = _tenants(aggregates)
            return not tenants or spec.project_id in tenants

        return decide

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        return f"it is set aside for the projects {', '.join(_tenants(host_state.aggregates))}"


def _tenants(aggregates: Aggregates) -> tuple[str, ...]:
    keys = {key for each in aggregates for key in each.metadata if key.startswith(_TENANT)}
    return tuple(sorted({value for key in keys for value in values(aggregates, key)}))


class AggregateTypeAffinityFilter(_AggregateFilter):
    """Passes nodes whose aggregates are for the requested flavor, or for none in particular.

    The metadata ``instance_type`` of an aggregate names a flavor, or several between commas.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    @override
    def decision(self, spec: RequestSpec) -> Decision | None:
        wanted = spec.flavor.flavorid

        def decide(aggregates: Aggregates) -> bool:
            named = values(aggregates, "instance_type")
            return not named or wanted in named

        return decide

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        return f"its aggregates are for the flavors {', '.join(sorted(values(host_state.aggregates, 'instance_type')))}"


class AggregateImagePropertiesIsolationFilter(_AggregateFilter):
    """Keeps images whose properties differ from the aggregates' metadata out of a node.

    For every metadata key that the image has as a property too, the property must be one of the values. With the option
    ``namespace`` only keys that begin with it and the separator count.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    RUN_ON_REBUILD = True

    @override
    def decision(self, spec: RequestSpec) -> Decision | None:
        properties = self._asked(spec)
        if not properties:
            return None
        return lambda aggregates: not _differing(aggregates, properties)

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        return "its aggregates are not for images with " + ", ".join(
            _differing(host_state.aggregates, self._asked(spec))
        )

    def _asked(self, spec: RequestSpec) -> dict[str, str]:
        section = self.conf.filter_aggregate_image_properties_isolation
        prefix = section.namespace + section.separator if section.namespace else ""
        properties = spec.image.get("properties", {})
        return {key: str(value) for key, value in properties.items() if value and key.startswith(prefix)}


def _differing(aggregates: Aggregates, properties: dict[str, str]) -> list[str]:
    return [
        f"{key} = {value}"
        for key, value in sorted(properties.items())
        if (wanted := values(aggregates, key)) and value not in wanted
    ]
