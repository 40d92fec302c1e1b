# SPDX-License-Identifier: Apache-2.0
"""Resizes that are not confirmed: the old place of an instance is kept until its resize is confirmed or reverted.

Where ``[compute] resize_confirm_after`` is not 0, a resize ends with the status ``resized``. The instance runs with its new flavor.
``pending["kept"]`` has the place and the flavor that it had before, from the commit of the resize on. Whatever fails meanwhile, the
instance is ``resized`` again afterwards, with the fault. In this status it can be confirmed, reverted, deleted and evacuated.

Resized to another host:
    The source keeps its stopped copy, and ``departed_consumer`` the resources there. Nothing of it has to go, so there is no
    operation ``let_go`` yet. The confirmation creates that operation, and the agent of the source ends it as after any move
    (:mod:`moorage.instances.departures`). The revert is a move back (:mod:`moorage.instances.moves`). In the phase ``prepare`` the
    source only looks whether its copy is there: the commit has the other host remove its own. The commit exchanges the claims of
    both places, so that there is room always.

Resized in its place, or to another node of its host:
    The instance holds the larger amount of both flavors, of each resource class of each provider. The confirmation reduces this to
    the new flavor. The revert has the driver replace the workload by one with the old flavor.

In both cases the instance counts against the limits of its project with the larger amount of both flavors.

Confirmation, revert, deletion, evacuation and the confirmation after a time write the row of the instance on the condition that it
is as it was read. One of them wins. A deletion and an evacuation let the source go in their own transaction, as a confirmation
does. The agent of the host where the instance is confirms what is due, so that happens when that agent runs. It confirms only what
its driver sees running, and what has no fault: otherwise the copy that the source keeps may be the only good one, and a person
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from oslo_log import log as logging

from moorage import errors, randomness
from moorage.allocation.interface import AllocationChange, AllocationLedger, AllocationStore
from moorage.db import Database
from moorage.instances.availability import not_forced_down
from moorage.instances.interface import DEPARTURE, Instance, InstanceStore
from moorage.instances.moves import OF_PHASE, PREPARE, RESIZED, REVERT_RESIZE, kept_elsewhere, kept_source
from moorage.work.interface import OperationStore

__all__ = ["KeptSources", "Resizes"]

LOG = logging.getLogger(__name__)
#: What of the kept place becomes the instance's own again.
_RESTORED = ("host", "node", "node_uuid", "flavorid", "flavor_version", "resources", "extra_specs", "holds")


@dataclass(frozen=True, slots=True)
class KeptSources:
    """Lets go of what is kept for the revert of a resize, together with a write of the instance."""

    database: Database
    workers: OperationStore
    store: AllocationStore

    def let_go(self, seen: Instance, write: Callable[[Any], None]) -> str:
        """Runs one transaction that writes the instance and lets its kept place go; without one, it only writes the instance.

        :param seen: the instance as it was read.
        :param write: writes the instance in the transaction, on the condition that it is as it was read. Raises if it is not.
        :returns: the host whose agent has to remove its copy; empty when there is none.
        """
        kept, other = kept_source(seen.pending), kept_elsewhere(seen.host, seen.pending)

        def work(transaction: Any) -> None:
            write(transaction)
            if other:
                self.workers.create(
                    transaction,
                    DEPARTURE,
                    seen.uuid,
                    "let_go",
                    "leaving",
                    target_host=other,
                    project_id=seen.project_id,
                )
                # One instance fewer may come to this node.
                self.store.release(randomness.new_uuid(), transaction, residents=[kept["node_uuid"]])

        if not kept or other:
            self.database.run(work)
            return other
        if not isinstance(self.store, AllocationLedger):
            raise errors.ConfigError("The allocation store cannot change claims. Write [allocation] store = sql.")
        residents = dict.fromkeys((seen.node_uuid, kept["node_uuid"]))
        change = AllocationChange(
            seen.uuid, kept["confirms"], project=seen.project_id, user=seen.user_id, consumer_type="INSTANCE",
            residents=residents,
        )  # fmt: skip
        self.store.replace([change], work)
        return ""


@dataclass(frozen=True, slots=True)
class Resizes:
    """Confirms and reverts resizes. Safe for use by several threads.

    :param cast: tells the agent of a host something of an instance: ``cast(host, method, uuid)``.
    :param down: returns those of some hosts that have no agent that is up.
    """

    database: Database
    instances: InstanceStore
    workers: OperationStore
    store: AllocationStore
    cast: Callable[[str, str, str], None]
    down: Callable[[Collection[str]], Collection[str]] = lambda hosts: ()

    def confirm(self, uuid: str, request_id: str = "", *, known: Instance | None = None) -> None:
        """Ends the possibility to revert a resize, and lets the old place go.

        Does nothing when the same request has done that already.

        :param request_id: what repetitions of the request have in common; empty: there are none.
        :param known: the instance as it was when that was decided on; it must not have changed since.
        :raises NotFound: there is no such instance.
        :raises Conflict: there is no resize to confirm, or the instance has changed.
        """
        seen = known or self.instances.get(uuid)
        if request_id and request_id == seen.request.get("last_request_id"):
            return
        _check(seen, "confirm")
        # What ended since was not started again: it is as after any other operation.
        ends = "active" if seen.actual_state in ("running", "unknown") else "stopped"

        def write(transaction: Any) -> None:
            token = self.workers.reset(transaction, self.instances.resource_type, uuid)
            values: dict[str, Any] = {"status": ends, "pending": {}}
            if request_id:
                values["request"] = {**seen.request, "last_request_id": request_id}
            if not self.instances.change(transaction, uuid, token, values, expected=(RESIZED,), fence=seen.fence):
                raise _changed(uuid)

        source = KeptSources(self.database, self.workers, self.store).let_go(seen, write)
        if source:
            self.cast(source, "let_go_instance", uuid)

    def confirm_seen(self, seen: Instance) -> None:
        """:meth:`confirm` of an instance as it was read."""
        self.confirm(seen.uuid, known=seen)

    def revert(self, uuid: str, request_id: str, *, known: Instance | None = None) -> None:
        """Begins to bring an instance back to the place and the flavor that it had before its resize.

        Does nothing when the same request has begun that already.

        :raises NotFound: there is no such instance.
        :raises Conflict: there is no resize to revert; the agent of the source is down, or that of the instance's host declared
            dead; or the instance has changed. InUse: an operation on it is in progress.
        """
        seen = known or self.instances.get(uuid)
        if request_id in (seen.pending.get("request_id"), seen.request.get("last_request_id")):
            return
        _check(seen, "revert")
        kept, source = kept_source(seen.pending), kept_elsewhere(seen.host, seen.pending)
        if source and source in self.down([source]):
            # Members of projects may revert resizes, and do not see hosts.
            LOG.warning(
                "The resize of instance %s is not reverted, because the agent of host %s is down.", uuid, source
            )
            raise errors.Conflict(
                f"The resize of instance {uuid} is not reverted: the agent of the host where the instance was before is down. "
                "Start it, wait until moorage service list shows it up, and try again; or confirm the resize.",
                instance=uuid,
            )
        pending: dict[str, Any] = {"operation": REVERT_RESIZE, "request_id": request_id, "kept": kept}
        pending |= {name: kept[name] for name in _RESTORED}
        if source:
            pending |= {"phase": OF_PHASE[PREPARE], "live": False}

        def begin(transaction: Any) -> None:
            token = self.workers.create(
                transaction, self.instances.resource_type, uuid, PREPARE if source else REVERT_RESIZE, "resizing",
                target_host=source or seen.host, only_if=not_forced_down(seen.host), project_id=seen.project_id,
            )  # fmt: skip
            values = {"status": "resizing", "fault": "", "pending": pending}
            if not self.instances.change(transaction, uuid, token, values, expected=(RESIZED,), fence=seen.fence):
                raise _changed(uuid)

        self.database.run(begin)
        self.cast(source or seen.host, "operate_instance", uuid)


def _check(instance: Instance, what: str) -> None:
    if instance.status != RESIZED:
        raise errors.Conflict(
            f"There is no resize of instance {instance.uuid} to {what}: the instance is {instance.status}, not {RESIZED}.",
            instance=instance.uuid,
            status=instance.status,
        )


def _changed(uuid: str) -> errors.Conflict:
    return errors.Conflict(f"Instance {uuid} has just become something else; look again.", instance=uuid)
