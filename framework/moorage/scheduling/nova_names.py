# SPDX-License-Identifier: Apache-2.0
"""The names by which Nova's filters and weighers know a host, worked out from a node's capacity, use and properties.

Capacities are what may be used (reserves taken off, ratios applied), so the allocation ratios are 1: a plugin that multiplies a
total by its ratio and takes off what is used finds what is free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moorage.read_only import FrozenDict, frozen_mapping

__all__ = ["NovaNames"]

_MB = 1024


class NovaNames:
    """A mix-in for what has ``capacity``, ``free``, ``properties`` and ``nodename``."""

    __slots__ = ()

    cpu_allocation_ratio = 1.0
    ram_allocation_ratio = 1.0
    disk_allocation_ratio = 1.0

    @property
    def _capacity(self) -> Mapping[str, float]:
        capacity: Mapping[str, float] = self.capacity  # type: ignore[attr-defined]
        return capacity

    @property
    def _free(self) -> Mapping[str, float]:
        free: Mapping[str, float] = self.free  # type: ignore[attr-defined]
        return free

    @property
    def stats(self) -> Mapping[str, Any]:
        """The node's properties."""
        properties: Mapping[str, Any] = self.properties  # type: ignore[attr-defined]
        return properties

    @property
    def total_usable_ram_mb(self) -> int:
        """Memory in MiB."""
        return int(self._capacity.get("MEMORY_MB", 0))

    @property
    def free_ram_mb(self) -> int:
        """Free memory in MiB."""
        return int(self._free.get("MEMORY_MB", 0))

    @property
    def total_usable_disk_gb(self) -> int:
        """Disk in GiB."""
        return int(self._capacity.get("DISK_GB", 0))

    @property
    def free_disk_mb(self) -> int:
        """Free disk in MiB."""
        return int(self._free.get("DISK_GB", 0) * _MB)

    @property
    def disk_mb_used(self) -> int:
        """Used disk in MiB."""
        return int((self._capacity.get("DISK_GB", 0) - self._free.get("DISK_GB", 0)) * _MB)

    @property
    def vcpus_total(self) -> float:
        """Processors, those that may be overcommitted included."""
        return _whole(self._capacity.get("VCPU", 0))

    @property
    def vcpus_used(self) -> float:
        """Processors in use."""
        return _whole(self._capacity.get("VCPU", 0) - self._free.get("VCPU", 0))

    @property
    def hypervisor_hostname(self) -> str:
        """The property of that name, else the node's name."""
        return str(self.stats.get("hypervisor_hostname") or self.nodename)  # type: ignore[attr-defined]

    @property
    def hypervisor_type(self) -> str | None:
        """The property of that name."""
        return self.stats.get("hypervisor_type")

    @property
    def hypervisor_version(self) -> int | None:
        """The property of that name: 2000000 for 2.0.0."""
        return self.stats.get("hypervisor_version")

    @property
    def host_ip(self) -> str | None:
        """The property of that name."""
        return self.stats.get("host_ip")

    @property
    def supported_instances(self) -> Sequence[Any]:
        """The property of that name: a list of [architecture, hypervisor type, machine mode]."""
        return self.stats.get("supported_instances") or ()

    @property
    def cpu_info(self) -> Mapping[str, Any]:
        """The property of that name, an object or JSON of one."""
        info = self.stats.get("cpu_info")
        if isinstance(info, str):
            try:
                info = json.loads(info)
            except ValueError:
                info = None
        return frozen_mapping(info if isinstance(info, dict) else {})

    @property
    def failed_builds(self) -> int:
        """The property of that name."""
        return self.stats.get("failed_builds") or 0

    @property
    def metrics(self) -> Mapping[str, float]:
        """The property of that name: metric -> number."""
        return self.stats.get("metrics") or FrozenDict()


def _whole(number: float) -> float:
    """As an int where it is one, as Nova's columns are."""
    return int(number) if float(number).is_integer() else number
