# SPDX-License-Identifier: Apache-2.0
"""Filters out nodes that lack a metric which the metrics weigher needs."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from moorage.scheduling.interface import Fleet, HostFilter, HostState, RequestSpec, Rows
from moorage_plugins.weighers.metrics import parse_settings

__all__ = ["MetricsFilter"]


class MetricsFilter(HostFilter):
    """Passes nodes whose property ``metrics`` has every name that ``[weigher_metrics] settings`` weighs."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True

    def __init__(self, *, conf: Any) -> None:
        super().__init__(conf=conf)
        self._names = frozenset(parse_settings(conf.weigher_metrics.settings))

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return self._passes(host_state.properties.get("metrics"))

    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows:
        return fleet.property_column("metrics").rows_where(rows, self._passes)

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        missing = self._names - set(host_state.properties.get("metrics") or ())
        return f"it has no metrics {', '.join(sorted(missing))}"

    def _passes(self, metrics: Any) -> bool:
        return self._names <= set(metrics or ())
