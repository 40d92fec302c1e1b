# SPDX-License-Identifier: Apache-2.0
"""By what is measured on the nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from moorage import errors
from moorage.scheduling.interface import Fleet, RequestSpec, Rows
from moorage_plugins.weighers.base import AggregateWeigher, Floats
from moorage_plugins.weighers.options import ratio

__all__ = ["MetricsWeigher", "parse_settings"]


class MetricsWeigher(AggregateWeigher):
    """The sum of metrics times their ratios: ``[weigher_metrics] settings = cpu.percent=-1.0, power=0.5``.

    Metrics are the node's property ``metrics``, an object of names and numbers. A node without one of them refuses the request when
    ``required`` is set (the filter ``metrics`` takes such nodes out before); otherwise it weighs ``weight_of_unavailable``.
    Metadata: ``metrics_weight_multiplier``.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    weighs_alone = True
    ignores_owner = True
    group = "weigher_metrics"
    aggregate_key = "metrics_weight_multiplier"

    def __init__(self, *, conf: Any) -> None:
        super().__init__(conf=conf)
        self._ratios = parse_settings(conf.weigher_metrics.settings)

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Floats:
        multipliers = self.row_multipliers(fleet, rows)
        counts = np.full(len(rows), self.multiplier) if multipliers is None else multipliers
        column = fleet.property_column("metrics")
        weights = np.zeros(len(rows))
        decided = np.zeros(len(rows), dtype=np.bool_)
        for name, share in self._ratios.items():
            numbers = np.array([_number(value, name) for value in column.values])[column.codes[rows]]
            known = ~np.isnan(numbers)
            if self.conf.weigher_metrics.required and not known.all():
                node = fleet.host_state(int(rows[int(np.argmin(known))])).nodename
                raise LookupError(
                    f"node {node} has no metric {name}; enable the filter metrics, or set [weigher_metrics] required = false"
                )
            weights[known & ~decided] += numbers[known & ~decided] * share
            unavailable = ~known & ~decided & (share * counts != 0)
            weights[unavailable] = self.conf.weigher_metrics.weight_of_unavailable
            decided |= unavailable
        return weights


def parse_settings(settings: Sequence[str]) -> Mapping[str, float]:
    """Metric -> ratio, from ``name=ratio`` each.

    :raises ConfigError: says which is wrong.
    """
    try:
        return dict(map(ratio, settings))
    except ValueError as error:
        raise errors.ConfigError(f"[weigher_metrics] settings: {error}.") from error


def _number(metrics: Any, name: str) -> float:
    value = metrics.get(name) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan
