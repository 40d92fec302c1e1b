# SPDX-License-Identifier: Apache-2.0
"""Cooler nodes first."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from moorage.scheduling.interface import Fleet, HostWeigher, RequestSpec, Rows

__all__ = ["CoolWeigher"]

#: Degrees Celsius of a node that has no sensor.
UNKNOWN = 40.0


class CoolWeigher(HostWeigher):
    """Ranks nodes by their property ``inlet_temperature``, in degrees Celsius: the lower, the better."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    weighs_alone: ClassVar[bool] = True
    ignores_owner: ClassVar[bool] = True

    @property
    def multiplier(self) -> float:
        """``[weigher_cool] multiplier``."""
        return float(self.conf.weigher_cool.multiplier)

    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> npt.NDArray[np.float64]:
        """The raw weights; the scheduler stretches them to 0..1 over the nodes that passed the filters."""
        return -np.nan_to_num(fleet.property_numbers("inlet_temperature")[rows], nan=UNKNOWN)
