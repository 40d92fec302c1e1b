# SPDX-License-Identifier: Apache-2.0
"""What a request asks of a fleet by itself, before any filter: its hosts and nodes, and its room."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from moorage import errors
from moorage.scheduling.interface import RequestSpec, Rows
from moorage.scheduling.snapshot import Snapshot

__all__ = ["could_fit_when_empty", "requested_rows", "scarce_resources", "unfiltered"]

#: Nova's hint that asks for the filters although a host is forced.
_CHECK_FORCED = "_nova_check_type"


def requested_rows(
    fleet: Snapshot, spec: RequestSpec, refused: Collection[str] = (), lacking: Collection[str] = ()
) -> Rows:
    """Returns the rows that the request itself allows. Forced and ignored hosts are compared without case, as Nova does.

    :param refused: uuids of nodes that have refused it.
    :param lacking: hosts whose agents lack a power that it needs.
    :raises InvalidInput: it names hosts or nodes that do not exist.
    """
    rows: Rows = fleet.all_rows
    for hosts, found in (
        (spec.force_hosts, fleet.rows_of_folded_hosts),
        ([spec.requested_host], fleet.rows_of_hosts),
    ):
        if any(hosts):
            names = [host for host in hosts if host is not None]
            unknown = [host for host in names if not len(found([host]))]
            if unknown:
                raise errors.InvalidInput(f"There is no host {', '.join(unknown)}; moorage host list shows all.")
            rows = np.intersect1d(rows, found(names))
    nodes = {*spec.force_nodes, *([spec.requested_node] if spec.requested_node else [])}
    if nodes:
        named = [row for row in rows if fleet.nodes[row].name in nodes or fleet.nodes[row].uuid in nodes]
        known = {name for row in named for name in (fleet.nodes[row].name, fleet.nodes[row].uuid)}
        if nodes - known:
            raise errors.InvalidInput(
                f"There is no node {', '.join(sorted(nodes - known))} on the hosts that were asked for."
            )
        rows = np.array(named, dtype=np.intp)
    if refused:
        rows = np.setdiff1d(rows, fleet.rows_of_nodes(refused), assume_unique=True)
    if lacking:
        rows = np.setdiff1d(rows, fleet.rows_of_hosts(lacking), assume_unique=True)
    if spec.ignore_hosts:
        rows = np.setdiff1d(rows, fleet.rows_of_folded_hosts(spec.ignore_hosts), assume_unique=True)
    if spec.ignore_nodes:
        ignored = set(spec.ignore_nodes)
        rows = rows[[fleet.nodes[row].uuid not in ignored and fleet.nodes[row].name not in ignored for row in rows]]
    return rows


def unfiltered(spec: RequestSpec) -> bool:
    """Returns whether the filters are not asked: a host is forced, as in Nova."""
    return bool(spec.force_hosts or spec.force_nodes) and spec.hints.get(_CHECK_FORCED) is None


def could_fit_when_empty(fleet: Snapshot, spec: RequestSpec) -> bool:
    """Returns whether any node would have enough if it were empty."""
    enough = [fleet.capacity(name) >= amount for name, amount in spec.flavor.resources.items()]
    return not enough or bool(np.logical_and.reduce(enough).any())


def scarce_resources(fleet: Snapshot, spec: RequestSpec, refused: Collection[str]) -> str:
    """Names the resource classes that no available node has enough of, alone or together; empty: some node has enough."""
    if not fleet.size:
        return ""
    usable = fleet.available.copy()
    usable[[fleet.row_of_node[uuid] for uuid in refused if uuid in fleet.row_of_node]] = False
    enough = {name: (fleet.free(name) >= amount) & usable for name, amount in spec.flavor.resources.items()}
    lacking = sorted(name for name, rows in enough.items() if not rows.any())
    if lacking:
        return " and ".join(lacking)
    together: Any = np.logical_and.reduce(list(enough.values()))
    return "" if together.any() else " and ".join(sorted(enough)) + " together"
