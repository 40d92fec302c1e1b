# SPDX-License-Identifier: Apache-2.0
"""Spread by what is free: the more, the better. A negative multiplier stacks instead."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from moorage.scheduling.interface import Fleet, HostWeigher, RequestSpec, Rows

__all__ = ["CpuWeigher", "RamWeigher"]


class _FreeWeigher(HostWeigher):
    """The free amount of one resource class."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    resource_class: ClassVar[str]

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> npt.NDArray[np.float64]:
        return fleet.free(self.resource_class)[rows]


class CpuWeigher(_FreeWeigher):
    """More free VCPUs are better; ``[weigher_cpu] multiplier``."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    resource_class = "VCPU"

    @property
    @override
    def multiplier(self) -> float:
        return float(self.conf.weigher_cpu.multiplier)


class RamWeigher(_FreeWeigher):
    """More free memory is better; ``[weigher_ram] multiplier``."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    resource_class = "MEMORY_MB"

    @property
    @override
    def multiplier(self) -> float:
        return float(self.conf.weigher_ram.multiplier)
