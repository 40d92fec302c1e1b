# SPDX-License-Identifier: Apache-2.0
"""Deciding once for each value that nodes share, instead of once for each node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moorage.scheduling.interface import Column, Fleet, HostState, Rows

__all__ = ["COMPUTED", "attribute", "attribute_column", "rows_where_all"]

#: Attributes that are worked out for a node, by the names that Nova gave them; everything else is a property of the node.
COMPUTED = frozenset(
    {
        "host", "nodename", "uuid", "hypervisor_hostname", "num_instances", "num_io_ops",
        "total_usable_ram_mb", "free_ram_mb", "total_usable_disk_gb", "free_disk_mb", "disk_mb_used",
        "vcpus_total", "vcpus_used", "cpu_allocation_ratio", "ram_allocation_ratio", "disk_allocation_ratio",
    }
)  # fmt: skip
_BAGS = ("stats", "properties")
_MB = 1024
#: Those of them that are whole numbers, or counted in parts, for all nodes at once; as :class:`HostState` says them of one.
_NUMBERS: Mapping[str, Callable[[Fleet], npt.NDArray[np.float64]]] = {
    "num_instances": lambda fleet: fleet.num_instances.astype(np.float64),
    "num_io_ops": lambda fleet: fleet.num_io_ops.astype(np.float64),
    "total_usable_ram_mb": lambda fleet: np.trunc(fleet.capacity("MEMORY_MB")),
    "free_ram_mb": lambda fleet: np.trunc(fleet.free("MEMORY_MB")),
    "total_usable_disk_gb": lambda fleet: np.trunc(fleet.capacity("DISK_GB")),
    "free_disk_mb": lambda fleet: np.trunc(fleet.free("DISK_GB") * _MB),
    "disk_mb_used": lambda fleet: np.trunc((fleet.capacity("DISK_GB") - fleet.free("DISK_GB")) * _MB),
    "vcpus_total": lambda fleet: fleet.capacity("VCPU"),
    "vcpus_used": lambda fleet: fleet.capacity("VCPU") - fleet.free("VCPU"),
}


def attribute(host_state: HostState, path: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """What a node says under the first word of a path, and the rest of the path; None when it says nothing.

    ``stats`` and ``properties`` hold the properties, which need no such word before them.
    """
    if path[0] in COMPUTED:
        return getattr(host_state, path[0]), path[1:]
    if path[0] in _BAGS:
        return host_state.properties, path[1:]
    return host_state.properties.get(path[0]), path[1:]


def attribute_column(fleet: Fleet, path: Sequence[str]) -> tuple[Column, Sequence[str]]:
    """The same for all nodes."""
    name = path[0]
    if name in _BAGS and len(path) > 1:
        return fleet.property_column(path[1]), path[2:]
    if name in _NUMBERS:
        distinct, codes = np.unique(_NUMBERS[name](fleet), return_inverse=True)
        return Column(codes, tuple(int(each) if each.is_integer() else each for each in distinct.tolist())), path[1:]
    if name in COMPUTED or name in _BAGS:
        return _encoded([attribute(fleet.host_state(row), [name])[0] for row in range(fleet.size)]), path[1:]
    return fleet.property_column(name), path[1:]


def _encoded(values: Sequence[Any]) -> Column:
    codes: npt.NDArray[np.intp] = np.empty(len(values), dtype=np.intp)
    known: dict[Any, int] = {}
    distinct: list[Any] = []
    for row, value in enumerate(values):
        key = value if isinstance(value, str | int | float) else id(value)
        code = known.setdefault((type(value), key), len(distinct))
        if code == len(distinct):
            distinct.append(value)
        codes[row] = code
    return Column(codes, tuple(distinct))


def rows_where_all(columns: Sequence[Column], rows: Rows, decide: Callable[..., bool]) -> Rows:
    """Returns the rows whose values, one of each column, ``decide`` accepts.

    It is asked once for each combination of values that occurs.
    """
    if not len(rows) or not columns:
        return rows if len(rows) and decide() else rows[:0]
    combined = columns[0].codes[rows].astype(np.int64)
    for column in columns[1:]:
        # Made small again after each step, so that the product never overflows.
        _, combined = np.unique(combined, return_inverse=True)
        combined = combined * len(column.values) + column.codes[rows]
    _, first, which = np.unique(combined, return_index=True, return_inverse=True)
    answers = np.array(
        [decide(*(column.values[column.codes[rows[position]]] for column in columns)) for position in first],
        dtype=np.bool_,
    )
    return rows[answers[which]]
