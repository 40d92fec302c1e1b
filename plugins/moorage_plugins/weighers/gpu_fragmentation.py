# SPDX-License-Identifier: Apache-2.0
"""Keep the GPUs of nodes usable for the requests that are expected."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from moorage.scheduling.interface import Fleet, RequestSpec, Rows
from moorage_plugins.weighers.base import AggregateWeigher, Floats
from moorage_plugins.weighers.fragmentation import Task, increase
from moorage_plugins.weighers.options import expected_request

__all__ = ["GpuFragmentationWeigher"]


class GpuFragmentationWeigher(AggregateWeigher):
    """Prefers nodes on which the request leaves the most GPUs usable for expected requests: fragmentation gradient descent.

    ``[weigher_gpu_fragmentation] expected`` lists requests and how popular they are, ``resource_class`` names the class of the
    devices (PGPU). A free GPU is a fragment for an expected request if that request does not fit on the node: too few GPUs, or too
    few processors, or too little memory for them. The weight is the number of GPUs that the request turns into fragments, on
    average over the expected requests. Requests without GPUs count too, since they take processors that GPUs need.

    By default it counts the whole devices of a node, its own and those of the providers below it. With ``shares = true`` each
    provider of the class is one device, and a request takes a share of one, or of one for each of its request groups. Then also a
    GPU is a fragment that has less free than a request asks of one GPU, and the weight is in units of the class. A request whose
    groups ask for different shares counts as if all asked for the largest. It does not see which devices belong to one NUMA cell.
    Metadata: ``gpu_fragmentation_weight_multiplier``.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    group = "weigher_gpu_fragmentation"
    aggregate_key = "gpu_fragmentation_weight_multiplier"
    sign = -1.0

    def __init__(self, *, conf: Any) -> None:
        super().__init__(conf=conf)
        options = conf[self.group]
        self._device = str(options.resource_class)
        self._shares = bool(options.shares)
        self._expected = [self._task(*expected_request(text)) for text in options.expected]

    def _task(self, popularity: float, resources: dict[str, tuple[int, int]]) -> tuple[Task, float]:
        others = {name: float(number * units) for name, (number, units) in resources.items() if name != self._device}
        number, units = resources.get(self._device, (0, 1))
        return Task(number, units, others) if self._shares else Task(number * units, 1.0, others), popularity

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Floats:
        weights: Floats = np.zeros(len(rows))
        free_devices = self._shares_of(fleet, rows) if self._shares else self._whole(fleet, rows)
        # Where no device is free, none can become a fragment.
        some = np.flatnonzero(free_devices.any(axis=0))
        if not len(some):
            return weights
        wanted = dict(spec.flavor.resources)
        devices, share = wanted.pop(self._device, 0), 1.0
        if self._shares:
            asked = fleet.asked_of_providers(spec, self._device)
            devices, share = len(asked), float(max(asked, default=1))
        names = {*wanted, *(name for task, _ in self._expected for name in task.resources)}
        free = {name: fleet.free(name)[rows[some]] for name in names}
        shares = free_devices[:, some]
        task = Task(devices, share, {name: float(units) for name, units in wanted.items()})
        raised, _ = increase(task, shares, free, self._expected, tightest=self._shares)
        # A node that is asked about although the request does not fit there (no filter for capacity) loses all of its devices.
        weights[some] = np.where(np.isfinite(raised), raised, shares.sum(axis=0))
        return weights

    def _whole(self, fleet: Fleet, rows: Rows) -> Floats:
        """1 for each free device, a column for each of the rows."""
        counts = np.floor(np.maximum(fleet.free(self._device)[rows], 0.0))
        free: Floats = (np.arange(counts.max(initial=0))[:, np.newaxis] < counts).astype(np.float64)
        return free

    def _shares_of(self, fleet: Fleet, rows: Rows) -> Floats:
        """What is free of each device, a column for each of the rows."""
        found = fleet.free_by_provider(self._device)
        column = np.full(fleet.size, -1, dtype=np.intp)
        column[rows] = np.arange(len(rows))
        wanted = (found.free > 0) & (column[found.rows] >= 0)
        at, free = column[found.rows[wanted]], found.free[wanted]
        counts = np.bincount(at, minlength=len(rows))
        # The devices of a node stand together, so that each has a number among them.
        number = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
        shares: Floats = np.zeros((counts.max(initial=0), len(rows)))
        shares[number, at] = free
        return shares
