# SPDX-License-Identifier: Apache-2.0
"""Fragmentation gradient descent: how much device capacity a placement makes useless for what is asked for most.

The formulas are those of Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient
Descent", USENIX ATC 2023, section 4:

* The fragment of a node for a task: all free shares of its devices when the task does not fit on the node. Otherwise, the free
  shares of the devices that are too small for the task's share.
* The expected fragmentation of a node: the mean of its fragments over the tasks that are expected, by their popularity.
* A task goes where it raises the expected fragmentation least; on the node, to the device where it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Task", "expected_fragmentation", "fits", "increase"]

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Task:
    """What a request takes from a node.

    :param devices: how many devices it needs.
    :param share: how much it needs of each, in the unit of the free shares.
    :param resources: resource class -> units that it needs of the node beside the devices.
    """

    devices: int
    share: float
    resources: Mapping[str, float]


def fits(task: Task, shares: Floats, free: Mapping[str, Floats]) -> Mask:
    """Nodes on which a task fits.

    :param shares: what is free of each device, a column for each node, 0 where a node has fewer devices.
    :param free: resource class -> what is free of it, a number for each node; 0 of classes that are not in it.
    """
    enough: Mask = _large_enough(task, shares).sum(axis=0) >= task.devices
    return enough & _has_resources(task.resources, free, shares.shape[1])


def expected_fragmentation(
    shares: Floats, free: Mapping[str, Floats], expected: Sequence[tuple[Task, float]]
) -> Floats:
    """Returns the expected fragmentation of each node, in the unit of the shares; arguments as for :func:`fits`.

    :param expected: tasks and their popularity, of any sum above 0.
    """
    #: Many tasks want the same of devices, and differ in processors and memory.
    groups: dict[tuple[int, float], list[tuple[Task, float]]] = {}
    for task, popularity in expected:
        groups.setdefault((task.devices, task.share), []).append((task, popularity))
    least = {name: column.min(initial=np.inf) for name, column in free.items()}
    total = shares.sum(axis=0)
    found: Floats = np.zeros(shares.shape[1])
    for tasks in groups.values():
        large = _large_enough(tasks[0][0], shares)
        enough = large.sum(axis=0) >= tasks[0][0].devices
        weight: Floats = np.zeros(shares.shape[1])
        whole = 0.0
        # Both sums add alike, so that a node on which all tasks fit has no remainder of rounding for a fragment.
        for task, popularity in tasks:
            # What all nodes have free need not be compared.
            scarce = {name: units for name, units in task.resources.items() if units > least.get(name, 0.0)}
            weight += popularity * (enough & _has_resources(scarce, free, shares.shape[1]))
            whole += popularity
        found += (whole - weight) * total + weight * np.where(large, 0.0, shares).sum(axis=0)
    return found / sum(popularity for _, popularity in expected)


def increase(
    task: Task,
    shares: Floats,
    free: Mapping[str, Floats],
    expected: Sequence[tuple[Task, float]],
    *,
    tightest: bool = False,
) -> tuple[Floats, npt.NDArray[np.intp]]:
    """By how much a task raises the expected fragmentation of each node, and the device that it takes for that.

    Infinite on nodes on which it does not fit. The device is -1 for a task that needs none or several: of several, it takes the
    first that are large enough.

    :param tightest: it takes those with the least left of the devices that are large enough, as claims do.
    """
    before = expected_fragmentation(shares, free, expected)
    left = {name: column - task.resources.get(name, 0.0) for name, column in free.items()}
    least: Floats = np.full(shares.shape[1], np.inf)
    device = np.full(shares.shape[1], -1, dtype=np.intp)
    possible = _has_resources(task.resources, free, shares.shape[1])
    for chosen, here, after in [_tightest(task, shares)] if tightest else _choices(task, shares):
        rows = np.flatnonzero(here & possible)
        column = {name: values[rows] for name, values in left.items()}
        raised = expected_fragmentation(after[:, rows], column, expected) - before[rows]
        better = raised < least[rows]
        least[rows[better]] = raised[better]
        device[rows[better]] = chosen if isinstance(chosen, int) else chosen[rows[better]]
    return least, device


def _tightest(task: Task, shares: Floats) -> tuple[int | npt.NDArray[np.intp], Mask, Floats]:
    """As :func:`_choices`: the devices that are large enough and have the least left."""
    sizes = np.where(_large_enough(task, shares), shares, np.inf)
    order = np.argsort(sizes, axis=0, kind="stable")[: task.devices]
    after, columns = shares.copy(), np.arange(shares.shape[1])
    after[order, columns] -= task.share
    here: Mask = np.isfinite(sizes).sum(axis=0) >= task.devices
    return order[0] if task.devices == 1 and len(order) else -1, here, after


def _choices(task: Task, shares: Floats) -> Iterator[tuple[int | npt.NDArray[np.intp], Mask, Floats]]:
    """Ways to take devices: the device, on which nodes it can be taken, and what is free then."""
    large = _large_enough(task, shares)
    if task.devices == 1:
        for device in range(len(shares)):
            # Of devices with equally much free, the first stands for all.
            here = large[device] & (shares[:device] != shares[device]).all(axis=0)
            if here.any():
                after = shares.copy()
                after[device] -= task.share
                yield device, here, after
    else:
        taken = large & (np.cumsum(large, axis=0) <= task.devices)
        yield -1, taken.sum(axis=0) == task.devices, shares - np.where(taken, task.share, 0.0)


def _large_enough(task: Task, shares: Floats) -> Mask:
    """Returns the devices that could give the task its share. A share of zero fits none."""
    return (shares >= task.share) & (shares > 0)


def _has_resources(resources: Mapping[str, float], free: Mapping[str, Floats], nodes: int) -> Mask:
    enough: Mask = np.ones(nodes, dtype=np.bool_)
    for name, units in resources.items():
        enough &= (free[name] if name in free else np.zeros(nodes)) >= units
    return enough
