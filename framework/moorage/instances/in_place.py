# SPDX-License-Identifier: Apache-2.0
"""Begins operations on instances where they are: stop, start, reboot, rebuild, shelve_offload, and the revert of a move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moorage import errors
from moorage.db import Database
from moorage.instances.action_kinds import (
    OPERATE,
    OPERATIONS,
    Lacking,
    begin_action,
    check_action,
    has_begun,
)
from moorage.instances.availability import not_forced_down
from moorage.instances.interface import (
    Instance,
    InstanceStore,
)
from moorage.instances.moves import (
    ACTIVATE,
    OF_PHASE,
    REVERT,
    is_revertible,
)
from moorage.work.operations import SqlOperationStore

__all__ = ["InPlace"]


@dataclass(frozen=True, slots=True)
class InPlace:
    """Begins what happens where the instance is: stop, start, reboot, rebuild and shelve_offload.

    :param lacking: the hosts whose agents lack one of some powers.
    """

    database: Database
    instances: InstanceStore
    workers: SqlOperationStore
    cast: Callable[[str, str, str], None]
    lacking: Lacking = lambda powers: ()

    def begin(self, uuid: str, name: str, pending: Mapping[str, Any], *, known: Instance | None = None) -> None:
        """Record the operation, then send a message to the agent. Does nothing when ``pending["request_id"]`` has begun it already.

        :param known: the instance as it was when the operation was decided on; it must not have changed since.

        :raises NotFound: there is no such instance.
        :raises Conflict: its status does not allow it (InUse: an operation on it is in progress), or the agent of its host is
            declared dead.
        """
        instance, operation = known or self.instances.get(uuid), OPERATIONS[name]
        if "request_id" in pending and has_begun(instance, pending["request_id"]):
            return
        check_action(instance, operation, self.lacking)
        stores = (self.instances, self.workers)
        values = {"pending": {"operation": name, **pending}}
        only_if = not_forced_down(instance.host)
        self.database.run(
            lambda tx: begin_action(tx, stores, instance, operation, instance.host, values, only_if) and None
        )
        self.cast(instance.host, OPERATE, uuid)

    def revert_move(self, uuid: str, reason: str, *, known: Instance | None = None) -> None:
        """Have the source of a move end it, and let the workload go on there. Does nothing when that has begun already.

        It takes turns with the commit of the move: both write the instance on the condition that the other one has not.

        :param reason: becomes the fault of the instance.
        :param known: the instance as it was when that was decided on.
        :raises NotFound: there is no such instance.
        :raises Conflict: no move is in progress, or it has been committed.
        """
        instance = known or self.instances.get(uuid)
        pending = instance.pending
        if pending.get("phase") == OF_PHASE[REVERT]:
            return
        if not is_revertible(pending):
            why = (
                "its move has passed the point of no return, and goes on"
                if pending.get("phase") == OF_PHASE[ACTIVATE]
                else f"it is {instance.status}, and does not move between two hosts"
            )
            raise errors.Conflict(f"No move of instance {uuid} can be reverted: {why}.", instance=uuid)

        def begin(transaction: Any) -> None:
            token = self.workers.create(
                transaction, self.instances.resource_type, uuid, REVERT, instance.status, target_host=instance.host,
                force=True, only_if=not_forced_down(instance.host), project_id=instance.project_id,
            )  # fmt: skip
            values = {"pending": {**pending, "phase": OF_PHASE[REVERT], "reason": reason}}
            if not self.instances.change(
                transaction, uuid, token, values, expected=(instance.status,), fence=instance.fence
            ):
                raise errors.Conflict(f"The move of instance {uuid} has just gone a step further; look again.")

        self.database.run(begin)
        self.cast(instance.host, OPERATE, uuid)
