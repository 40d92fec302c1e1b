# SPDX-License-Identifier: Apache-2.0
"""Shows the nodes of a scheduler's view, page by page."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moorage import errors

if TYPE_CHECKING:
    from moorage.scheduling.interface import HostState, NodeState
    from moorage.scheduling.snapshot import Snapshot

__all__ = ["HOST_FIELDS", "HOST_FILTERS", "host_page", "one_host"]

#: Instances in one page of a host, unless one node alone has more.
_MOST_INSTANCES = 10_000


def _used(node: NodeState, state: HostState) -> dict[str, float]:
    capacity, free = state.capacity, state.free
    return {name: capacity[name] - free[name] for name in capacity}


#: Field -> its value, from the node and from its state in the view.
_VALUES: Mapping[str, Callable[[NodeState, HostState], Any]] = {
    "host": lambda node, state: node.host,
    "node": lambda node, state: node.name,
    "uuid": lambda node, state: node.uuid,
    "up": lambda node, state: node.up,
    "enabled": lambda node, state: node.enabled,
    "disabled_reason": lambda node, state: node.disabled_reason,
    "can_host": lambda node, state: node.can_host,
    "instances": lambda node, state: state.num_instances,
    "capacity": lambda node, state: dict(state.capacity),
    "used": _used,
}
#: The fields of a node, in the order in which they are shown.
HOST_FIELDS = tuple(_VALUES)
#: Filter -> the attribute of a node that it compares.
HOST_FILTERS: Mapping[str, str] = {
    "host": "host",
    "node": "name",
    "up": "up",
    "enabled": "enabled",
    "can_host": "can_host",
}


def host_page(
    fleet: Snapshot, after: str, limit: int | None, filters: Mapping[str, Any], fields: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Returns nodes ordered by uuid: at most ``limit`` after the given uuid.

    :param filters: some of :data:`HOST_FILTERS` -> the value that a node must have.
    :param fields: those of :data:`HOST_FIELDS` that are shown beside the uuid; None: all.
    """
    uuids, rows = fleet.by_uuid
    wanted = {HOST_FILTERS[name]: value for name, value in filters.items()}
    found = (
        row
        for row in itertools.islice(rows, bisect.bisect_right(uuids, after), None)
        if all(getattr(fleet.nodes[row], name) == value for name, value in wanted.items())
    )
    return _hosts_json(fleet, itertools.islice(found, limit), fields)


def one_host(fleet: Snapshot, host: str, after: str, limit: int | None) -> dict[str, Any]:
    """Returns a page of a host's nodes, ordered by uuid, with the instances on these nodes.

    A page ends early where the nodes have many instances. ``next_after`` is None on the last page.

    :raises NotFound: no node has this host.
    """
    rows = fleet.rows_of_host.get(host)
    if rows is None:
        raise errors.NotFound(f"There is no host {host}; moorage host list shows all.")
    left = sorted((uuid, int(row)) for row in rows if (uuid := fleet.nodes[row].uuid) > after)
    page: list[int] = []
    instances: list[str] = []
    for _, row in left[:limit]:
        here = fleet.instances_on(row)
        if page and len(instances) + len(here) > _MOST_INSTANCES:
            break
        page.append(row)
        instances += here
    following = left[len(page) - 1][0] if len(page) < len(left) else None
    return {"host": host, "nodes": _hosts_json(fleet, page), "instances": sorted(instances), "next_after": following}


def _hosts_json(fleet: Snapshot, rows: Iterable[int], fields: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Returns nodes as the API shows them."""
    names = HOST_FIELDS if fields is None else [name for name in HOST_FIELDS if name in fields or name == "uuid"]
    return [{name: _VALUES[name](fleet.nodes[row], fleet.host_state(row)) for name in names} for row in rows]
