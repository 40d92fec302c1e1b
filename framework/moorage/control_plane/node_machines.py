# SPDX-License-Identifier: Apache-2.0
"""The machines of an agent's nodes: what its driver needs to reach them, and what it saw of their power.

The states are Ironic's. A node is ``available`` when its power is seen and no instance has it, and ``active`` when one has it. A
power that cannot be seen is ``error`` with the fault ``power failure``. States that others wrote (``manageable``, ``rescue``) stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moorage.db import Database
from moorage.drivers.interface import Machine, NodePower, NodeSeen
from moorage.fleet.nodes import NodeStore

__all__ = ["machines_of", "observe_nodes"]

_ENROLLED, _AVAILABLE, _ACTIVE = "enroll", "available", "active"
#: The provision states that an observation changes.
_OURS = (_ENROLLED, _AVAILABLE, _ACTIVE)
_FAULT = "power failure"
#: Characters of ``last_error``.
_LONGEST = 1000


def machines_of(nodes: NodeStore, chosen: Mapping[str, str]) -> Sequence[Machine]:
    """Returns the nodes that name a driver.

    :param chosen: columns -> values that these nodes have: their host or their shard.
    """
    return [
        Machine(uuid=row.uuid, name=row.name, driver=row.driver, driver_info=row.driver_info)
        for row in nodes.machines(**chosen)
    ]


def observe_nodes(
    database: Database, nodes: NodeStore, chosen: Mapping[str, str]
) -> Callable[[Mapping[str, NodeSeen]], None]:
    """Reads the nodes now; the result writes what was seen of them since, each node unless it was written meanwhile.

    Only nodes whose states change are written. An observation of an agent that stood still fails at the generation, or is corrected
    by the next observation of its successor.
    """
    rows = nodes.machines(**chosen)

    def write(seen: Mapping[str, NodeSeen]) -> None:
        for row in rows:
            changes = _changes(row, seen[row.uuid]) if row.uuid in seen else {}
            if changes:
                database.run(functools.partial(nodes.change, uuid=row.uuid, generation=row.generation, changes=changes))

    return write


def _changes(row: Any, seen: NodeSeen) -> dict[str, Any]:
    """Returns the columns that differ from what was seen."""
    failed = seen.power is NodePower.ERROR
    wanted: dict[str, Any] = {
        "power_state": seen.power.value,
        "target_power_state": seen.target.value if seen.target is not None else None,
    }
    if failed or row.fault == _FAULT:
        wanted |= {"fault": _FAULT if failed else None, "last_error": seen.error[:_LONGEST] if failed else None}
    if row.provision_state in _OURS and (seen.occupied or not failed):
        wanted["provision_state"] = _ACTIVE if seen.occupied else _AVAILABLE
    return {name: value for name, value in wanted.items() if getattr(row, name) != value}
