# SPDX-License-Identifier: Apache-2.0
"""The kinds of operations on instances, when each can begin, and the transaction that begins one.

An operation begins with one transaction that records the worker, the status while it is in progress and what is to come of it
(``pending``); the agent of the host that has the work to do ends it with another.

The id of the last request is kept with the instance when its operation has ended (``request["last_request_id"]``), so that a
repetition after a lost reply is known for one however late it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from moorage import errors
from moorage.instances.interface import (
    Instance,
    InstanceStore,
)
from moorage.instances.moves import (
    PREPARE,
    RESIZED,
)
from moorage.services.interface import LIVE_MIGRATES, MIGRATES, POWER_CONTROL
from moorage.work.interface import OnlyIf
from moorage.work.operations import SqlOperationStore

__all__ = [
    "EVACUATE",
    "LIVE_MIGRATE",
    "OPERATE",
    "OPERATIONS",
    "ActionKind",
    "Lacking",
    "begin_action",
    "check_action",
    "has_begun",
    "has_ended",
]

OPERATE = "operate_instance"
#: From powers to the hosts whose agents lack one of them.
Lacking = Callable[[Collection[str]], Collection[str]]
LIVE_MIGRATE = "live_migrate"
EVACUATE = "evacuate"


@dataclass(frozen=True, slots=True)
class ActionKind:
    """One kind of operation.

    :param status: of the instance while it is in progress.
    :param begins: statuses in which it can begin.
    :param asks: a scheduler is asked: where the instance shall go, or whether it may stay where it is.
    :param powers: what the agent of the instance's host must offer, and that of its destination.
    :param does: the operation that the agent is given; empty: the one of this name.
    """

    name: str
    status: str
    begins: tuple[str, ...]
    asks: bool
    powers: tuple[str, ...] = ()
    does: str = ""


OPERATIONS: Mapping[str, ActionKind] = {
    each.name: each
    for each in (
        ActionKind("stop", "stopping", ("active",), False, (POWER_CONTROL,)),
        ActionKind("start", "starting", ("stopped",), False, (POWER_CONTROL,)),
        ActionKind("reboot", "rebooting", ("active", "stopped"), False, (POWER_CONTROL,)),
        ActionKind("rebuild", "rebuilding", ("active", "stopped"), True),
        ActionKind("shelve_offload", "shelving", ("active",), False),
        ActionKind("resize", "resizing", ("active",), True),
        ActionKind("migrate", "migrating", ("active",), True, (MIGRATES,)),
        ActionKind(LIVE_MIGRATE, "migrating", ("active",), True, (MIGRATES, LIVE_MIGRATES)),
        ActionKind("unshelve", "unshelving", ("shelved_offloaded",), True),
        # To its destination it is an instance that comes from nowhere; agents of earlier releases can build it, too.
        ActionKind(
            EVACUATE, "evacuating", ("active", "stopped", "migrating", "resizing", RESIZED), True, does="unshelve"
        ),  # fmt: skip
    )
}


def check_action(instance: Instance, operation: ActionKind, lacking: Lacking) -> None:
    """Refuse an operation that cannot begin now.

    :raises Conflict: the status of the instance does not allow it, or the agent of its host lacks a power.
    """
    if instance.status not in operation.begins:
        advice = " Confirm its resize, or revert it." if instance.status == RESIZED else ""
        raise errors.Conflict(
            f"Instance {instance.uuid} is {instance.status}; {operation.name} needs one that is "
            f"{' or '.join(operation.begins)}.{advice}",
            instance=instance.uuid,
            status=instance.status,
        )
    for power in operation.powers:
        if instance.host in lacking([power]):
            raise errors.Conflict(
                f"The {operation.name} of instance {instance.uuid} is not possible: the compute driver of its host does not have "
                f"the power {power}. moorage service list shows what each agent offers.",
                instance=instance.uuid,
                power=power,
            )


def begin_action(
    transaction: Any,
    stores: tuple[InstanceStore, SqlOperationStore],
    instance: Instance,
    operation: ActionKind,
    host: str,
    values: Mapping[str, Any],
    only_if: OnlyIf | None = None,
) -> int:
    """Write the operation's row and the instance's in one transaction; returns the token."""
    instances, workers = stores
    does = PREPARE if "phase" in values["pending"] else operation.does or operation.name
    # An evacuation takes the place of a move that is in progress, and of nothing else: the status would be another one.
    token = workers.create(
        transaction, instances.resource_type, instance.uuid, does, operation.status, target_host=host,
        force=operation.name == EVACUATE, only_if=only_if, project_id=instance.project_id,
    )  # fmt: skip
    changes = {"status": operation.status, "fault": "", **values}
    if not instances.change(
        transaction, instance.uuid, token, changes, expected=operation.begins, fence=instance.fence
    ):
        raise errors.Conflict(f"Instance {instance.uuid} has just become something else; look again.")
    return token


def has_ended(instance: Instance, request_id: str) -> bool:
    """Returns whether the last operation that ended on the instance is the one that this request asked for."""
    return bool(instance.request.get("last_request_id") == request_id)


def has_begun(instance: Instance, request_id: str) -> bool:
    """Returns whether the operation that the request asked for is in progress, or has ended as the last one."""
    return instance.pending.get("request_id") == request_id or has_ended(instance, request_id)
