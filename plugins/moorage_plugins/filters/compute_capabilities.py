# SPDX-License-Identifier: Apache-2.0
"""What a flavor's extra specs ask of a node itself."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.scheduling.interface import SKIP, Fleet, HostFilter, HostState, RequestSpec, Rows, Skip
from moorage_plugins.filters.extra_specs import SpecCondition, condition
from moorage_plugins.filters.sets import COMPUTED, attribute, attribute_column

__all__ = ["ComputeCapabilitiesFilter"]

_BITS = "hw:maxphysaddr_bits"
_BITS_PATH = ("capabilities", "cpu_info", "maxphysaddr", "bits")
#: What every hypervisor is expected to say of itself, so that a condition without a scope always counts.
_FACTS = frozenset(
    {
        "cpu_info", "failed_builds", "host_ip", "hypervisor_type", "hypervisor_version", "metrics", "properties", "stats",
        "supported_instances",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Asked:
    """A condition on what stands at the end of a path. ``strict``: a node that does not have it fails."""

    key: str
    path: tuple[str, ...]
    condition: SpecCondition
    strict: bool

    def satisfied(self, value: Any, rest: Sequence[str]) -> bool:
        """Returns whether a node passes that says this under the path's first word; ``rest`` of the path goes on from there."""
        if value is None and not self.strict:
            return True
        value = _follow(value, rest)
        return value is not None and self.condition.matches(str(value))


class ComputeCapabilitiesFilter(HostFilter):
    """Passes nodes whose attributes and properties satisfy the flavor's extra specs.

    ``capabilities:a:b`` looks up ``a`` among the node's attributes (``free_ram_mb``, ``vcpus_total``, ``num_instances``, ...), then
    among its properties, and ``b`` in what it finds there, also when that is JSON in a text. A name without any scope counts where
    the node has it and is ignored where not. Other scopes are for other filters. ``hw:maxphysaddr_bits`` is
    ``capabilities:cpu_info:maxphysaddr:bits`` and takes its place.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    judges_instances = True
    run_filter_once_per_request = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return all(
            each.satisfied(*attribute(host_state, each.path)) for each in _asked(spec_obj, host_state=host_state)
        )

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        return None if _asked(spec, fleet=fleet) else SKIP

    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows:
        for each in _asked(spec, fleet=fleet):
            column, rest = attribute_column(fleet, each.path)
            rows = column.rows_where(rows, functools.partial(each.satisfied, rest=rest))
        return rows

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        missing = [
            f"{each.key} = {each.condition.text}"
            for each in _asked(spec, host_state=host_state)
            if not each.satisfied(*attribute(host_state, each.path))
        ]
        return "it does not satisfy " + ", ".join(missing)


def _asked(spec: RequestSpec, *, fleet: Fleet | None = None, host_state: HostState | None = None) -> list[_Asked]:
    """Returns the conditions that count; one without a scope only where the node, or any node of the fleet, has what it names."""
    wanted = []
    for key, text in spec.flavor.extra_specs.items():
        path = tuple(key.split(":"))
        if key == _BITS:
            wanted.append(_Asked(key, _BITS_PATH[1:], _bits(text), strict=True))
        elif path == _BITS_PATH and _BITS in spec.flavor.extra_specs:
            continue
        elif len(path) > 1 and path[0] == "capabilities":
            wanted.append(_Asked(key, path[1:], condition(key, text), strict=True))
        elif len(path) == 1 and _is_known(key, fleet, host_state):
            wanted.append(_Asked(key, path, condition(key, text), strict=key in COMPUTED or key in _FACTS))
    return wanted


def _bits(text: str) -> SpecCondition:
    if len(text.split()) != 1:
        raise errors.InvalidInput(
            f"The extra spec {_BITS} = {text!r} of the flavor cannot be understood: it must be a number of bits.",
            path=f"flavor/extra_specs/{_BITS}",
        )
    return condition(_BITS, f">= {text}")


def _is_known(name: str, fleet: Fleet | None, host_state: HostState | None) -> bool:
    if name in COMPUTED or name in _FACTS:
        return True
    if fleet is not None:
        return any(value is not None for value in fleet.property_column(name).values)
    return host_state is not None and host_state.properties.get(name) is not None


def _follow(value: Any, path: Sequence[str]) -> Any:
    """What stands at the end of a path; None when it ends before."""
    for word in path:
        if isinstance(value, str):
            value = _parsed(value)
        if not isinstance(value, dict):
            return None
        value = value.get(word)
    return value


@functools.lru_cache(4096)
def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
