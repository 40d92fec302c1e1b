# SPDX-License-Identifier: Apache-2.0
"""Not too many instances, and not too many busy ones, on one node."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from oslo_log import log as logging
from typing_extensions import override

from moorage.scheduling.interface import Fleet, HostFilter, HostState, Mask, RequestSpec, Where

__all__ = ["AggregateIoOpsFilter", "AggregateNumInstancesFilter", "IoOpsFilter", "NumInstancesFilter"]

LOG = logging.getLogger(__name__)


class _LimitFilter(HostFilter):
    """Passes nodes that have fewer of something than the limit."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    needs_instances = True
    #: The option, and the key of aggregates that set a limit of their own; empty where they cannot.
    group: ClassVar[str]
    option: ClassVar[str]
    aggregate_key: ClassVar[str] = ""
    counted: ClassVar[str]
    #: What is promised of a node that passes.
    promised: ClassVar[str]

    def _count(self, host_state: HostState) -> int:
        raise NotImplementedError

    def _counts(self, fleet: Fleet) -> npt.NDArray[np.int64]:
        raise NotImplementedError

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return self._count(host_state) < self._limit_of(host_state)

    @override
    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        general = self._general()
        if not self.aggregate_key:
            below: Mask = self._counts(fleet)[where] < general
            return below
        column = fleet.aggregate_column(self.aggregate_key)
        limits = np.array([limit(self.aggregate_key, texts, general) for texts in column.values], dtype=np.float64)
        passing: Mask = self._counts(fleet)[where] < limits[column.codes[where]]
        return passing

    @override
    def limits(self, host_state: HostState, spec: RequestSpec) -> Mapping[str, int]:
        return {self.promised: self._limit_of(host_state)}

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        return f"it has {self._count(host_state)} {self.counted}, the limit is {self._limit_of(host_state)}"

    def _general(self) -> int:
        return int(self.conf[self.group][self.option])

    def _limit_of(self, host_state: HostState) -> int:
        if not self.aggregate_key:
            return self._general()
        texts = {
            each.metadata[self.aggregate_key] for each in host_state.aggregates if self.aggregate_key in each.metadata
        }
        return limit(self.aggregate_key, texts, self._general())


def limit(key: str, texts: Iterable[str], general: int) -> int:
    """Returns the least of what aggregates say; the general limit when they say nothing, or something that is no whole number."""
    try:
        return min((int(text) for text in texts), default=general)
    except ValueError as error:
        _warn_once(key, str(error))
        return general


@functools.lru_cache(1024)
def _warn_once(key: str, problem: str) -> None:
    LOG.warning(
        "The metadata %s of an aggregate is no whole number (%s); the general limit counts there.", key, problem
    )


class NumInstancesFilter(_LimitFilter):
    """Passes nodes with fewer instances than ``[filter_num_instances] max_instances_per_host``."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    group = "filter_num_instances"
    option = "max_instances_per_host"
    counted = "instances"
    promised = "num_instances"

    @override
    def _count(self, host_state: HostState) -> int:
        return host_state.num_instances

    @override
    def _counts(self, fleet: Fleet) -> npt.NDArray[np.int64]:
        return fleet.num_instances


class AggregateNumInstancesFilter(NumInstancesFilter):
    """The same, where aggregates may set their own ``max_instances_per_host``; the least of several counts."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    aggregate_key = "max_instances_per_host"


class IoOpsFilter(_LimitFilter):
    """Passes nodes with fewer busy instances than ``[filter_io_ops] max_io_ops_per_host``.

    An instance is busy while it is built, moved, resized or otherwise worked on.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    group = "filter_io_ops"
    option = "max_io_ops_per_host"
    counted = "busy instances"
    promised = "num_io_ops"

    @override
    def _count(self, host_state: HostState) -> int:
        return host_state.num_io_ops

    @override
    def _counts(self, fleet: Fleet) -> npt.NDArray[np.int64]:
        return fleet.num_io_ops


class AggregateIoOpsFilter(IoOpsFilter):
    """The same, where aggregates may set their own ``max_io_ops_per_host``; the least of several counts."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    aggregate_key = "max_io_ops_per_host"
