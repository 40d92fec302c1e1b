# SPDX-License-Identifier: Apache-2.0
"""Instances whose agent is dead and does not come back.

An agent that starts again goes on with its operations by itself. Who cleans after one that does not can reach no hypervisor: an
instance that was being built gets the status ``error``, one that was being deleted goes; both give their claim back. One that was
being unshelved or evacuated is on the dead host from the beginning of that and may run there, so it stays there, stopped with the
actual state ``unknown``: only a fence of the host or its agent's return can tell. So does one whose move the dead host had
stopped or begun to start (:mod:`moorage.instances.moves`). One whose destination died before the move was committed stays active
where it was, and what was done in place counts as not done: all with a fault's text. What a resize keeps for its revert stays kept,
and the instance is ``resized`` again. What really runs on the dead host is
destroyed by its agent, should it ever start. Schedulers read the instances of a silent host again; observers get an event for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors
from moorage.cleanup.interface import SetCleanupHandler
from moorage.instances.interface import DEPARTURE, move_consumer
from moorage.instances.moves import ACTIVATE, REVERT, TRANSFER, acting_host, kept_elsewhere, still_kept
from moorage.observers.interface import InstanceDeleted, InstanceFailed, ObserverEvent
from moorage.work.interface import Lease
from moorage_plugins.compute.tables import instances

__all__ = ["InstanceHandler"]

_FAULT = "Its host died while it was being built."
_UNDONE = "The host that had to do the last operation died; it was not done."
_MAY_RUN = (
    "Its host died while it was being built there, and may run it. It is seen when the host is back; when the host is fenced, it "
    "can be evacuated."
)
_STOPPED = "Its host died while it moved. It is seen what runs there when the host is back; when it is fenced, it can be evacuated."
_SETTLED: Mapping[str, Mapping[str, str]] = {
    "building": {"status": "error", "fault": _FAULT},
    "starting": {"status": "stopped", "fault": _UNDONE},
    **dict.fromkeys(
        ("unshelving", "evacuating"),
        {"status": "stopped", "fault": _MAY_RUN, "actual_state": "unknown", "actual_detail": ""},
    ),
}
_STAYS: Mapping[str, str] = {"status": "active", "fault": _UNDONE}
#: By operation, before the status: what a host was doing of a move of the instance that is on it.
_MOVING: Mapping[str, Mapping[str, str]] = dict.fromkeys(
    (TRANSFER, REVERT, ACTIVATE),
    {"status": "stopped", "fault": _STOPPED, "actual_state": "unknown", "actual_detail": ""},
)


def _settled(held: Lease) -> Mapping[str, str]:
    return _MOVING.get(held.operation) or _SETTLED.get(held.status, _STAYS)


class InstanceHandler(SetCleanupHandler):
    """building -> error, deleting -> deleted, unshelving, evacuating, starting -> stopped, others -> active.

    Claims that end are given back. One that was being unshelved or evacuated keeps its host and its claim.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    cleanable = frozenset(
        {
            *("building", "deleting", "rebuilding", "shelving", "unshelving", "evacuating", "resizing", "migrating"),
            *("stopping", "starting", "rebooting"),
        }
    )
    cleans_own = False

    @override
    def read(self, transaction: Any, resource_ids: Sequence[str]) -> Mapping[str, Any]:
        columns = (
            instances.c.uuid, instances.c.status, instances.c.node_uuid, instances.c.host, instances.c.pending,
        )  # fmt: skip
        found = transaction.execute(sa.select(*columns).where(instances.c.uuid.in_(resource_ids)))
        return {row.uuid: row for row in found}

    @override
    def finish_batch(self, transaction: Any, leases: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
        tools: Any = self.tools
        # Claims are given back in the order of their providers, so that two who do it do not wait for each other.
        for uuid in sorted(leases, key=lambda each: (resources[each].node_uuid, each)):
            held, row = leases[uuid], resources[uuid]
            pending = row.pending or {}
            if held.status == "deleting":
                written = tools.instances.remove(transaction, uuid, held.token)
            else:
                changes = {"pending": {}, **_settled(held), **still_kept(pending)}
                written = tools.instances.change(transaction, uuid, held.token, changes)
            if not written:
                raise errors.Fenced(f"Instance {uuid} was written by a later operation, or removed.")
            if held.status == "deleting" and (kept := kept_elsewhere(row.host, pending)):
                tools.workers.create(
                    transaction, DEPARTURE, uuid, "let_go", "leaving", target_host=kept, project_id=held.project_id
                )
            if held.status in ("building", "deleting"):
                tools.release(uuid, transaction, residents=_nodes(row.node_uuid))
            if held.status in ("deleting", "resizing", "migrating"):
                destination = pending.get("node_uuid", "")
                tools.release(move_consumer(uuid), transaction, residents=_nodes(destination))

    @override
    def after_commit(self, leases: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
        tools: Any = self.tools
        for uuid, held in leases.items():
            tools.tell(_event(held, resources[uuid]))


def _nodes(uuid: str) -> tuple[str, ...]:
    return (uuid,) if uuid else ()


def _event(held: Lease, row: Any) -> ObserverEvent:
    """Returns the event that observers get for an instance that was cleaned."""
    if held.status == "deleting":
        return InstanceDeleted(held.resource_id, row.host)
    host = acting_host(held.operation, row.host, row.pending or {})
    return InstanceFailed(held.resource_id, host, held.operation, _settled(held)["fault"])
