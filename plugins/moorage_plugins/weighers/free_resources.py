# SPDX-License-Identifier: Apache-2.0
"""Spread by what is free: the more, the better. A negative multiplier stacks instead."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from moorage.scheduling.interface import Fleet, RequestSpec, Rows
from moorage_plugins.weighers.base import AggregateWeigher, Floats

__all__ = ["CpuWeigher", "DiskWeigher", "RamWeigher"]


class _FreeWeigher(AggregateWeigher):
    """The free amount of one resource class; a node that has more in use than it has counts as one with nothing free."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    minval = 0.0
    weighs_alone = True
    ignores_owner = True
    resource_class: ClassVar[str]

    @property
    @override
    def spreads(self) -> bool:
        return self.multiplier >= 0

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Floats:
        return fleet.free(self.resource_class).take(rows)


class CpuWeigher(_FreeWeigher):
    """More free VCPUs are better; ``[weigher_cpu] multiplier``, metadata ``cpu_weight_multiplier``."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    group = "weigher_cpu"
    aggregate_key = "cpu_weight_multiplier"
    resource_class = "VCPU"


class RamWeigher(_FreeWeigher):
    """More free memory is better; ``[weigher_ram] multiplier``, metadata ``ram_weight_multiplier``."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    group = "weigher_ram"
    aggregate_key = "ram_weight_multiplier"
    resource_class = "MEMORY_MB"


class DiskWeigher(_FreeWeigher):
    """More free disk is better; ``[weigher_disk] multiplier``, metadata ``disk_weight_multiplier``."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    group = "weigher_disk"
    aggregate_key = "disk_weight_multiplier"
    resource_class = "DISK_GB"
