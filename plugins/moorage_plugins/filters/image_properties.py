# SPDX-License-Identifier: Apache-2.0
"""Only nodes that can run the image."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from oslo_utils import versionutils
from typing_extensions import override

from moorage import errors
from moorage.scheduling.interface import SKIP, Fleet, HostFilter, HostState, RequestSpec, Rows, Skip
from moorage_plugins.filters.sets import rows_where_all

__all__ = ["ImagePropertiesFilter"]

#: Other names of the same things, as images have them.
_ARCHITECTURES = {
    "i386": "i686", "i486": "i686", "i586": "i686", "x86_32": "i686", "x86_32p": "i686", "amd64": "x86_64",
}  # fmt: skip
_HYPERVISORS = {"xapi": "xen"}
_MODES = {"pv": "xen", "hv": "hvm", "baremetal": "hvm"}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What an image asks for."""

    words: tuple[str, ...]
    versions: versionutils.VersionPredicate | None
    version_text: str
    bits: int

    @property
    def reads(self) -> list[str]:
        """Returns the properties of a node to look at. The others are left out, because they have many values."""
        optional = (("hypervisor_version", self.versions), ("cpu_info", self.bits))
        return ["supported_instances", *(name for name, asked in optional if asked)]

    def runs_on(self, properties: Mapping[str, Any]) -> bool:
        """Returns whether a node with these properties can run it."""
        kinds = properties.get("supported_instances") or ()
        if not any(all(word in kind for word in self.words) for kind in kinds):
            return False
        version = properties.get("hypervisor_version")
        if self.versions is not None and version:
            try:
                if not self.versions.satisfied_by(versionutils.convert_version_to_str(int(version))):
                    return False
            except (ValueError, TypeError):
                return False
        has = _bits_of(properties.get("cpu_info")) if self.bits else 0
        return not has or has >= self.bits


class ImagePropertiesFilter(HostFilter):
    """Passes nodes whose ``supported_instances`` have the image's architecture, hypervisor type and machine mode.

    Of the image's properties count ``hw_architecture`` (without it ``[filter_image_properties] default_architecture``),
    ``img_hv_type``, ``hw_vm_mode``, ``img_hv_requested_version`` (``>=2.0,<3.0``, against the node's ``hypervisor_version``, a
    number such as 2000000 for 2.0.0) and ``hw_maxphysaddr_bits`` (against ``cpu_info``). An image that asks for none of the first
    three passes everywhere.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    RUN_ON_REBUILD = True
    run_filter_once_per_request = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        wanted = self._wanted(spec_obj)
        return wanted is None or wanted.runs_on(host_state.properties)

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        return SKIP if self._wanted(spec) is None else None

    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows:
        wanted = self._wanted(spec)
        if wanted is None:
            return rows
        names = wanted.reads

        def decide(*values: Any) -> bool:
            return wanted.runs_on(dict(zip(names, values, strict=True)))

        return rows_where_all([fleet.property_column(name) for name in names], rows, decide)

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        wanted = self._wanted(spec)
        if wanted is None:
            return "nothing is asked of it"
        parts = [*wanted.words, *([wanted.version_text] if wanted.version_text else [])]
        if wanted.bits:
            parts.append(f"{wanted.bits} address bits")
        return f"it does not offer what the image needs ({', '.join(parts)})"

    def _wanted(self, spec: RequestSpec) -> _Wanted | None:
        properties: Mapping[str, Any] = spec.image.get("properties", {})
        named: Sequence[tuple[Any, Mapping[str, str]]] = (
            (properties.get("hw_architecture", self.conf.filter_image_properties.default_architecture), _ARCHITECTURES),
            (properties.get("img_hv_type"), _HYPERVISORS),
            (properties.get("hw_vm_mode"), _MODES),
        )
        words = tuple(same.get(str(name).lower(), str(name).lower()) for name, same in named if name)
        if not words:
            return None
        text = str(properties.get("img_hv_requested_version") or "")
        return _Wanted(words, _versions(text), text, _whole("hw_maxphysaddr_bits", properties))


def _versions(text: str) -> versionutils.VersionPredicate | None:
    try:
        return versionutils.VersionPredicate(text) if text else None
    except ValueError:
        raise errors.InvalidInput(
            f"The image's property img_hv_requested_version = {text!r} cannot be understood; write for example '>=2.0,<3.0'.",
            path="image/properties/img_hv_requested_version",
        ) from None


def _whole(name: str, properties: Mapping[str, Any]) -> int:
    value = properties.get(name) or 0
    try:
        return int(value)
    except (TypeError, ValueError):
        raise errors.InvalidInput(
            f"The image's property {name} = {value!r} must be a whole number.", path=f"image/properties/{name}"
        ) from None


def _bits_of(cpu_info: Any) -> int:
    """Returns the address bits of a processor; 0 where they are not known."""
    if isinstance(cpu_info, str):
        try:
            cpu_info = json.loads(cpu_info)
        except ValueError:
            return 0
    space = cpu_info.get("maxphysaddr") if isinstance(cpu_info, dict) else None
    bits = space.get("bits") if isinstance(space, dict) else None
    return int(bits) if isinstance(bits, int | float) else 0
