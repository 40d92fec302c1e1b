# SPDX-License-Identifier: Apache-2.0
"""How much a node does already, and how well it did it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from typing_extensions import override

from moorage.scheduling.interface import Fleet, RequestSpec, Rows
from moorage_plugins.weighers.base import AggregateWeigher, Floats

__all__ = ["BuildFailureWeigher", "HypervisorVersionWeigher", "IoOpsWeigher", "NumInstancesWeigher"]


class IoOpsWeigher(AggregateWeigher):
    """The number of busy instances; ``[weigher_io_ops] multiplier`` (-1: few are better), metadata ``io_ops_weight_multiplier``."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    minval = 0.0
    weighs_alone = True
    ignores_owner = True
    group = "weigher_io_ops"
    aggregate_key = "io_ops_weight_multiplier"

    @property
    @override
    def spreads(self) -> bool:
        return self.multiplier <= 0

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Floats:
        return fleet.num_io_ops[rows].astype(np.float64)


class NumInstancesWeigher(AggregateWeigher):
    """The number of instances; ``[weigher_num_instances] multiplier`` (0: not at all, negative: few are better).

    Metadata: ``num_instances_weight_multiplier``.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    weighs_alone = True
    ignores_owner = True
    group = "weigher_num_instances"
    aggregate_key = "num_instances_weight_multiplier"

    @property
    @override
    def spreads(self) -> bool:
        return self.multiplier <= 0

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Floats:
        return fleet.num_instances[rows].astype(np.float64)


class BuildFailureWeigher(AggregateWeigher):
    """The node's property ``failed_builds``, avoided by ``[weigher_build_failure] multiplier``.

    Metadata: ``build_failure_weight_multiplier``.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    weighs_alone = True
    ignores_owner = True
    group = "weigher_build_failure"
    aggregate_key = "build_failure_weight_multiplier"
    sign = -1.0

    @property
    @override
    def spreads(self) -> bool:
        return self.multiplier <= 0

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Floats:
        return np.nan_to_num(fleet.property_numbers("failed_builds")[rows], posinf=0.0, neginf=0.0)


class HypervisorVersionWeigher(AggregateWeigher):
    """The node's property ``hypervisor_version``; ``[weigher_hypervisor_version] multiplier``, newer is better.

    Metadata: ``hypervisor_version_weight_multiplier``. A node that does not say its version is the oldest.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    weighs_alone = True
    ignores_owner = True
    group = "weigher_hypervisor_version"
    aggregate_key = "hypervisor_version_weight_multiplier"

    @property
    @override
    def spreads(self) -> bool:
        # The newest nodes may be few.
        return self.multiplier == 0

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Floats:
        return np.nan_to_num(fleet.property_numbers("hypervisor_version")[rows], posinf=0.0, neginf=0.0)
