# SPDX-License-Identifier: Apache-2.0
"""Sets the status of an instance as an operator says, and ends the operation that is in progress on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moorage import errors
from moorage.allocation.interface import AllocationStore
from moorage.db import Database
from moorage.instances.interface import Instance, InstanceStore, move_consumer
from moorage.instances.moves import ACTIVATE, OF_PHASE
from moorage.instances.resizes import KeptSources
from moorage.work.interface import OperationStore

__all__ = ["RESETTABLE", "Resetter"]

#: Statuses that an operator may set.
RESETTABLE = ("active", "error")
#: Attempts while others change the instance.
_LOOKS = 10
_FAULT = "An operator has set the status to error."


class _ChangedError(Exception):
    """The instance is no longer as it was read."""


@dataclass(frozen=True, slots=True)
class Resetter:
    """Resets instances. The owner of an operation that was in progress can write nothing more of it.

    The instance keeps its claim, since it may run. What a move held on its destination is released. What is kept for the revert
    of a resize goes, as by a confirmation.

    :param changed: called with the host after the reset, so that schedulers hear of it soon.
    """

    database: Database
    instances: InstanceStore
    workers: OperationStore
    store: AllocationStore
    changed: Callable[[str], None] = lambda host: None

    def reset(self, uuid: str, status: str) -> Instance:
        """Sets the status and returns the instance.

        :raises NotFound: there is no such instance.
        :raises Conflict: it cannot be active, because it has no host or no claim, or is being evacuated; or others keep changing
            it.
        """
        kept = KeptSources(self.database, self.workers, self.store)
        for _ in range(_LOOKS):
            seen = self.instances.get(uuid)
            if status == "active":
                self._check_active(seen)
            try:
                kept.let_go(seen, lambda tx, seen=seen: self._write(tx, seen, status))  # type: ignore[misc]
            except _ChangedError:
                continue
            if seen.host:
                self.changed(seen.host)
            return self.instances.get(uuid)
        raise errors.Conflict(f"Other requests keep changing instance {uuid}; try again.")

    def _check_active(self, seen: Instance) -> None:
        if not seen.host:
            raise errors.Conflict(f"Instance {seen.uuid} is on no host ({seen.status}), so it cannot be active.")
        if seen.status == "evacuating" or seen.pending.get("phase") == OF_PHASE[ACTIVATE]:
            raise errors.Conflict(
                f"Instance {seen.uuid} is being built or started on its new host, so it cannot be active yet. Wait for the end; "
                "if the new host has died, have a cleaner settle the operation (moorage cleanup)."
            )
        if not self.store.allocations(consumers=[seen.uuid]):
            raise errors.Conflict(
                f"Instance {seen.uuid} is {seen.status} and holds no claim on its node, so it cannot be active. Delete it and "
                "create another one."
            )

    def _write(self, transaction: Any, seen: Instance, status: str) -> None:
        """Writes only if the instance is as it was seen: a claim is released only together with a write of the instance."""
        token = self.workers.reset(transaction, self.instances.resource_type, seen.uuid)
        values = {"status": status, "pending": {}, "fault": "" if status == "active" else _FAULT}
        if not self.instances.change(transaction, seen.uuid, token, values, expected=(seen.status,), fence=seen.fence):
            raise _ChangedError
        # Filters judge an instance in error as absent, and a moving one as present on both nodes.
        nodes = {seen.node_uuid, seen.pending.get("node_uuid", "")} - {""}
        self.store.release(move_consumer(seen.uuid), transaction, residents=sorted(nodes))
