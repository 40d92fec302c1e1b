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

    It counts the whole devices of a node, its own and those of the providers below it. It does not see which device or NUMA cell
    they belong to, nor shares of a device. Metadata: ``gpu_fragmentation_weight_multiplier``.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    group = "weigher_gpu_fragmentation"
    aggregate_key = "gpu_fragmentation_weight_multiplier"
    sign = -1.0

    def __init__(self, *, conf: Any) -> None:
        super().__init__(conf=conf)
        options = conf[self.group]
        self._device = str(options.resource_class)
        self._expected = [self._task(*expected_request(text)) for text in options.expected]

    def _task(self, popularity: float, resources: dict[str, int]) -> tuple[Task, float]:
        others = {name: float(units) for name, units in resources.items() if name != self._device}
        return Task(resources.get(self._device, 0), 1.0, others), popularity

    @override
    def weigh_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Floats:
        weights: Floats = np.zeros(len(rows))
        free_devices = np.floor(np.maximum(fleet.free(self._device)[rows], 0.0))
        # Where no device is free, none can become a fragment.
        some = np.flatnonzero(free_devices)
        if not len(some):
            return weights
        wanted = dict(spec.flavor.resources)
        devices = wanted.pop(self._device, 0)
        names = {*wanted, *(name for task, _ in self._expected for name in task.resources)}
        free = {name: fleet.free(name)[rows[some]] for name in names}
        counts = free_devices[some]
        shares = (np.arange(counts.max())[:, np.newaxis] < counts).astype(np.float64)
        task = Task(devices, 1.0, {name: float(units) for name, units in wanted.items()})
        raised, _ = increase(task, shares, free, self._expected)
        # A node that is asked about although the request does not fit there (no filter for capacity) loses all of its devices.
        weights[some] = np.where(np.isfinite(raised), raised, counts)
        return weights
