# SPDX-License-Identifier: Apache-2.0
"""Filters and weighers in order: which nodes can take a request, and which is best.

The filters that answer for sets are asked first, the smallest set first; those that look at one node at a time see only what is
left, in the configured order. The answer is that of the naive loop over all nodes and filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moorage import errors
from moorage.extensions import Loaded
from moorage.scheduling.fleet_view import Snapshot
from moorage.scheduling.guard import Guard, SkipPluginError
from moorage.scheduling.interface import (
    FILTERS,
    SKIP,
    WEIGHERS,
    HostFilter,
    HostWeigher,
    RequestSpec,
    Rows,
)

__all__ = ["Pipeline", "Ranking", "load"]


@dataclass(frozen=True, slots=True)
class _Filter:
    name: str
    group: str
    distribution: str
    advisory: bool
    plugin: HostFilter


@dataclass(frozen=True, slots=True)
class _Weigher:
    name: str
    group: str
    distribution: str
    plugin: HostWeigher
    advisory: bool = False


@dataclass(frozen=True, slots=True)
class Ranking:
    """What a pipeline found.

    :param rows: rows that passed, best first; equal ones in the order of the fleet.
    :param removed: filter -> how many nodes it removed, in the order in which they were asked.
    """

    rows: Rows
    weights: npt.NDArray[np.float64]
    considered: int
    removed: dict[str, int] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


class Pipeline:
    """An immutable set of filters and weighers; a request uses one from beginning to end."""

    def __init__(self, filters: Sequence[_Filter], weighers: Sequence[_Weigher]) -> None:
        self._filters = tuple(filters)
        self._weighers = tuple(weighers)

    @property
    def filter_names(self) -> tuple[str, ...]:
        """The filters in the configured order."""
        return tuple(each.name for each in self._filters)

    def run(self, guard: Guard, fleet: Snapshot, rows: Rows, spec: RequestSpec) -> Ranking:
        """Filter and rank the given rows of the fleet.

        :raises InvalidInput: a plugin cannot make sense of what the request says.
        :raises PluginFailed: a plugin raised or answered nonsense; the request must be refused.
        :raises PluginTimeout: a plugin is not run any more because it hung too often.
        """
        spec = fleet.resolved(spec)
        considered = len(rows)
        removed: dict[str, int] = {}
        rows, asked, skipped = self._prepare(guard, fleet, rows, spec, removed)
        plain: list[_Filter] = []
        for each in asked:
            try:
                with guard.plugin(each):
                    passed = each.plugin.filter_rows(fleet, rows, spec)
                    if passed is not None:
                        passed = _checked(passed, fleet.size)
            except SkipPluginError:
                skipped.append(each.name)
                continue
            if passed is None:
                plain.append(each)
            else:
                removed[each.name] = removed.get(each.name, 0) + len(rows) - len(passed)
                rows = passed
        for each in plain:
            rows = self._one_by_one(guard, each, fleet, rows, spec, removed, skipped)
        return self._rank(guard, fleet, rows, spec, considered, removed, tuple(skipped))

    def explain(self, guard: Guard, fleet: Snapshot, row: int, spec: RequestSpec) -> dict[str, str]:
        """Why a node does not pass: filter -> reason, for every filter that refuses it."""
        spec = fleet.resolved(spec)
        host = fleet.host_state(row)
        reasons = {}
        for each in self._filters:
            try:
                with guard.plugin(each):
                    if each.plugin.prepare(spec, fleet) is SKIP or each.plugin.host_passes(host, spec):
                        continue
                    reasons[each.name] = each.plugin.explain(host, spec)
            except SkipPluginError:
                continue
        return reasons

    def _prepare(
        self, guard: Guard, fleet: Snapshot, rows: Rows, spec: RequestSpec, removed: dict[str, int]
    ) -> tuple[Rows, list[_Filter], list[str]]:
        asked: list[_Filter] = []
        skipped: list[str] = []
        sets: list[tuple[int, str, Rows]] = []
        for each in self._filters:
            guard.check_breaker(each)
            try:
                with guard.plugin(each):
                    answer = each.plugin.prepare(spec, fleet)
                    if answer is not None and answer is not SKIP:
                        answer = _checked(answer, fleet.size)
            except SkipPluginError:
                skipped.append(each.name)
                continue
            if answer is SKIP:
                continue
            if answer is not None:
                sets.append((len(answer), each.name, answer))
            asked.append(each)
        for _, name, allowed in sorted(sets, key=lambda entry: entry[0]):
            left = rows[np.isin(rows, allowed, assume_unique=True)]
            removed[name] = len(rows) - len(left)
            rows = left
        return rows, asked, skipped

    def _one_by_one(
        self,
        guard: Guard,
        each: _Filter,
        fleet: Snapshot,
        rows: Rows,
        spec: RequestSpec,
        removed: dict[str, int],
        skipped: list[str],
    ) -> Rows:
        try:
            with guard.plugin(each):
                passing = [bool(each.plugin.host_passes(fleet.host_state(int(row)), spec)) for row in rows]
        except SkipPluginError:
            skipped.append(each.name)
            return rows
        left = rows[np.array(passing, dtype=np.bool_)]
        removed[each.name] = removed.get(each.name, 0) + len(rows) - len(left)
        return left

    def _rank(
        self,
        guard: Guard,
        fleet: Snapshot,
        rows: Rows,
        spec: RequestSpec,
        considered: int,
        removed: dict[str, int],
        skipped: tuple[str, ...],
    ) -> Ranking:
        total = np.zeros(len(rows))
        if len(rows) > 1:
            for each in self._weighers:
                guard.check_breaker(each)
                with guard.plugin(each):
                    own = each.plugin.row_multipliers(fleet, rows)
                    multiplier = each.plugin.multiplier if own is None else _of_shape(own, rows)
                    if not np.any(multiplier):
                        continue
                    raw = _of_shape(each.plugin.weigh_rows(fleet, rows, spec), rows)
                total += multiplier * _normalised(raw, each.plugin.minval, each.plugin.maxval)
        order = np.argsort(-total, kind="stable")
        return Ranking(rows[order], total[order], considered, removed, skipped)


def _checked(rows: Any, size: int) -> Rows:
    """Rows as a plugin answered them; a plugin that answers nonsense has failed."""
    found: Rows = np.asarray(rows)
    if found.ndim != 1 or (len(found) and not np.issubdtype(found.dtype, np.integer)):
        raise TypeError("rows must be a one-dimensional array of whole numbers")
    if len(found) and not (int(found.min()) >= 0 and int(found.max()) < size):
        raise ValueError(f"rows must be between 0 and {size - 1}")
    return found.astype(np.intp, copy=False)


def _of_shape(numbers: Any, rows: Rows) -> npt.NDArray[np.float64]:
    """Numbers of a weigher; one that does not answer a finite one for each row has failed."""
    found: npt.NDArray[np.float64] = np.asarray(numbers, dtype=np.float64)
    if found.shape != rows.shape or not np.isfinite(found).all():
        raise ValueError("a weigher must answer one finite number for each row")
    return found


def _normalised(raw: npt.NDArray[np.float64], minval: float | None, maxval: float | None) -> npt.NDArray[np.float64]:
    """Nova's rule: stretch to 0..1 between the bounds, given or found; all equal is 0."""
    low = float(raw.min()) if minval is None else minval
    high = float(raw.max()) if maxval is None else maxval
    if high <= low:
        return np.zeros(len(raw))
    stretched: npt.NDArray[np.float64] = (np.clip(raw, low, high) - low) / (high - low)
    return stretched


def load(conf: Any) -> Pipeline:
    """The pipeline that the configuration names.

    :raises PluginLoadError: a plugin is missing or cannot be used.
    :raises ConfigError: a filter needs instances, which are not tracked.
    """
    filters = FILTERS.load_all(conf.scheduling.enabled_filters)
    weighers = WEIGHERS.load_all(conf.scheduling.enabled_weighers)
    needing = [each.name for each in filters if each.plugin.needs_instances]
    if needing and not conf.scheduling.track_instance_changes:
        raise errors.ConfigError(
            f"The filters {', '.join(needing)} need to know instances: set [scheduling] track_instance_changes = true, or take "
            "them out of [scheduling] enabled_filters."
        )
    return Pipeline(
        [
            _Filter(each.name, each.group, each.distribution, each.plugin.advisory, _built(each, conf))
            for each in filters
        ],
        [_Weigher(each.name, each.group, each.distribution, _built(each, conf)) for each in weighers],
    )


def _built(loaded: Loaded[Any], conf: Any) -> Any:
    try:
        return loaded.plugin(conf=conf)
    except Exception as error:
        raise errors.PluginLoadError(
            f"The plugin '{loaded.name}' ({loaded.group}, of {loaded.distribution} {loaded.version}) cannot be built: "
            f"{type(error).__name__}: {error}. Repair it, its options, or take it out of the configuration.",
            group=loaded.group,
            plugin=loaded.name,
        ) from error
