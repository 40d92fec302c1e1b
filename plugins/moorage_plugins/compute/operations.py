# SPDX-License-Identifier: Apache-2.0
"""What each operation does on the hypervisor, and what the store, the claims and the schedulers are told afterwards.

An operation that fails leaves the instance as it was, with the fault's text. Where it ended the workload that it should have
replaced, the instance gets the state that the driver sees. A build that fails is tried on other nodes
(:mod:`moorage.instances.build_retries`); the last one leaves an instance in error that occupies nothing. An instance that
cannot be unshelved stays shelved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moorage import errors
from moorage.drivers.interface import ComputeDriver, DriverError, Observed, PowerControl, Workload, WorkloadState
from moorage.instances.interface import Instance, move_consumer
from moorage.observers.interface import (
    InstanceCreated,
    InstanceDeleted,
    InstanceFailed,
    InstanceMoved,
    InstanceRebuilt,
    ObserverEvent,
)
from moorage.work.interface import Lease
from moorage_plugins.compute.actual_state import GONE, restart_policy
from moorage_plugins.compute.instances import LONGEST_DETAIL

__all__ = ["MOVES", "OPERATIONS", "POWER", "Done", "Held", "event_of"]

#: What the destination does, while the instance is somewhere else.
MOVES = frozenset({"resize", "live_migrate"})
#: What changes whether the instance runs, and nothing else.
POWER = ("stop", "start", "reboot")
#: What a driver has just said of a workload. One that has ended since is judged by the next comparison, which may restart it.
_RUNS = {"actual_state": WorkloadState.RUNNING.value, "actual_detail": "", "restarts": 0}
_NOWHERE = {"host": "", "node": "", "node_uuid": "", "actual_state": "unknown", "actual_detail": ""}


@dataclass(frozen=True, slots=True)
class Done:
    """An operation whose effect on the hypervisor is there: what shall be written and told now.

    :param changes: fields of the instance; None: its row shall go (or is gone).
    :param releases: consumers whose claims go.
    :param holds: what the instance holds from now on in place of what it held, provider -> class -> units; None: the same.
    :param tell: method of the reporter, by which schedulers are told; empty: they are not.
    :param left: the host that has to remove what is still there.
    """

    held: Lease
    instance: Instance | None
    changes: Mapping[str, Any] | None
    releases: tuple[str, ...] = ()
    holds: Mapping[str, Mapping[str, int]] | None = None
    tell: str = ""
    left: str = ""
    #: Something of this try is on the hypervisor, which must go when it turns out to have been taken over.
    made: bool = field(default=False)
    #: The build shall be tried on another node.
    elsewhere: bool = False

    def leaves(self, consumer: str) -> tuple[str, ...]:
        """The nodes whose instances change when this consumer's claim goes, uuids in order."""
        if self.instance is None:
            return ()
        destination = self.instance.pending.get("node_uuid", "")
        if consumer != self.instance.uuid:
            nodes = {destination}
        elif self.holds is None:
            nodes = {self.instance.node_uuid}
        else:
            nodes = {self.instance.node_uuid, destination}
        return tuple(sorted(nodes - {""}))


@dataclass(frozen=True, slots=True)
class Held:
    """An operation that this agent holds, on an instance that exists.

    :param holds: what the instance holds of which providers, as :class:`moorage.drivers.interface.Workload` has it.
    """

    lease: Lease
    instance: Instance
    driver: ComputeDriver
    holds: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def extra_specs(self) -> Mapping[str, str]:
        """Of the flavor that the instance shall have."""
        found: Mapping[str, str] = self.instance.pending.get("extra_specs") or self.instance.request.get(
            "extra_specs", {}
        )
        return found

    def done(self, changes: Mapping[str, Any], *, request: Mapping[str, Any] | None = None, **more: Any) -> Done:
        """It has succeeded.

        :param request: what of the instance's request is another from now on.
        """
        if more.get("made"):
            changes = {**changes, **_RUNS}
        return self._ended({"fault": "", **changes}, request or {}, more)

    def failed(self, error: DriverError, changes: Mapping[str, Any], **more: Any) -> Done:
        """It has not."""
        return self._ended({"fault": str(error), **changes}, {}, more)

    def failed_in_place(self, error: DriverError, **more: Any) -> Done:
        """It has not, and may have ended what ran before: the instance is what the driver sees now."""
        try:
            seen = self.driver.inspect().get(self.instance.uuid)
        except DriverError:
            # The next comparison looks again.
            return self.failed(error, {"status": "active"}, **more)
        if seen is None:
            lost = DriverError(f"{str(error).removesuffix('.')}. Nothing is left of what ran before.")
            return self.failed(lost, {"status": "stopped", "actual_state": GONE, "actual_detail": ""}, **more)
        return self.failed(error, _seen(seen), **more)

    def _ended(self, changes: Mapping[str, Any], request: Mapping[str, Any], more: Mapping[str, Any]) -> Done:
        asked = self.instance.pending.get("request_id")
        if asked is not None:
            # So that a repetition of the request is known for one although nothing is pending any more.
            request = {**request, "last_request_id": asked}
        if request:
            changes = {**changes, "request": {**self.instance.request, **request}}
        return Done(self.lease, self.instance, {"pending": {}, **changes}, **more)

    @property
    def workload(self) -> Workload:
        """What the driver gets: the instance as it is to be when the operation has ended."""
        instance, pending = self.instance, self.instance.pending
        return Workload(
            uuid=instance.uuid,
            name=instance.name,
            project_id=instance.project_id,
            resources=dict(pending.get("resources") or instance.resources),
            image=dict(pending.get("image") or instance.request.get("image") or {}),
            extra_specs=dict(self.extra_specs),
            command=tuple(instance.request.get("command") or ()),
            operation=self.lease.operation,
            holds=self.holds,
        )

    def make(self) -> None:
        """Have it run here, as this try's.

        :raises DriverError: the driver cannot run it.
        """
        workload = self.workload
        if workload.command and not self.driver.runs_commands:
            raise DriverError(
                "the instance has a command, and the compute driver of this host runs none; choose one that does, for example "
                "[compute] driver = process"
            )
        restart_policy(workload.extra_specs)
        self.driver.spawn(workload, self.lease.token)


def _build(held: Held) -> Done:
    try:
        held.make()
    except DriverError as error:
        if held.instance.pending.get("retries"):
            return _try_elsewhere(held, error)
        return held.failed(error, {"status": "error"}, releases=(held.instance.uuid,), tell="deleted", made=True)
    return held.done({"status": "active"}, tell="created", made=True)


def _try_elsewhere(held: Held, error: DriverError) -> Done:
    """The build failed, and a scheduler shall place the instance on another node. Its claim stays until then."""
    instance, pending = held.instance, held.instance.pending
    tried = {"host": instance.host, "node": instance.node, "node_uuid": instance.node_uuid, "fault": str(error)}
    left = {**pending, "retries": pending["retries"] - 1, "tried": [*pending.get("tried", ()), tried]}
    changes = {"status": "building", "fault": str(error), "pending": left}
    return Done(held.lease, instance, changes, tell="deleted", made=True, elsewhere=True)


def _delete(held: Held) -> Done:
    uuid = held.instance.uuid
    try:
        held.driver.destroy(uuid, held.lease.token)
    except DriverError as error:
        raise errors.Unavailable(f"Instance {uuid} cannot be destroyed: {error}") from error
    return Done(held.lease, held.instance, None, (uuid, move_consumer(uuid)), tell="deleted")


def _rebuild(held: Held) -> Done:
    try:
        held.make()
    except DriverError as error:
        return held.failed_in_place(error, tell="rebuilt")
    image = held.instance.pending.get("image")
    return held.done({"status": "active"}, request={"image": image} if image else {}, tell="rebuilt", made=True)


def _power(held: Held) -> Done:
    """Stops, starts or reboots the workload that is there, which has the token of an earlier operation."""
    uuid, driver = held.instance.uuid, held.driver
    try:
        if not isinstance(driver, PowerControl):
            raise DriverError("the compute driver of its host does not have the power compute.power")
        before = driver.inspect().get(uuid)
        if before is None:
            raise DriverError("there is nothing of the instance on its host; rebuild it")
        calls = {"stop": driver.stop, "start": driver.start, "reboot": driver.reboot}
        calls[held.lease.operation](uuid, before.token, held.lease.token)
        if held.lease.operation != "stop":
            return held.done({"status": "active", **_RUNS})
        seen = driver.inspect().get(uuid, before)
    except DriverError as error:
        return held.failed_in_place(error)
    return held.done({**_seen(seen), "restarts": 0})


def _seen(seen: Observed) -> dict[str, str]:
    """The fields of an instance that say what a driver saw."""
    status = "active" if seen.state is WorkloadState.RUNNING else "stopped"
    return {"status": status, "actual_state": seen.state.value, "actual_detail": seen.detail[:LONGEST_DETAIL]}


def _shelve_offload(held: Held) -> Done:
    uuid = held.instance.uuid
    try:
        held.driver.check(held.workload)
        held.driver.destroy(uuid, held.lease.token)
    except DriverError as error:
        return held.failed(error, {"status": "active"})
    return held.done({"status": "shelved_offloaded", **_NOWHERE}, releases=(uuid,), tell="shelved_offloaded")


def _unshelve(held: Held) -> Done:
    """Builds an instance that is on this host already. It was shelved, or evacuated from a host that died."""
    try:
        held.make()
    except DriverError as error:
        shelved = {"status": "shelved_offloaded", **_NOWHERE}
        return held.failed(error, shelved, releases=(held.instance.uuid,), tell="deleted", made=True)
    return held.done({"status": "active"}, tell="unshelved", made=True)


def _move(held: Held) -> Done:
    """Resize and live migration, by the agent of the destination."""
    instance, pending = held.instance, held.instance.pending
    if held.lease.operation == "live_migrate" and not held.driver.live_migrates:
        refused = DriverError("the compute driver of its destination does not have the power live_migrate")
        return held.failed(refused, {"status": "active"}, releases=(move_consumer(instance.uuid),), left=instance.host)
    try:
        held.make()
    except DriverError as error:
        more: dict[str, Any] = {"releases": (move_consumer(instance.uuid),), "left": instance.host}
        if instance.host == pending["host"]:
            # The destination's copy may be the one that was there before.
            return held.failed_in_place(error, **more)
        return held.failed(error, {"status": "active"}, made=True, **more)
    to = {name: pending[name] for name in ("host", "node", "node_uuid", "flavorid", "resources")}
    if held.lease.operation == "resize":
        # Begun by a release that did not know versions: its resources were brought along.
        to["flavor_version"] = pending.get("flavor_version", 0)
    return held.done(
        {"status": "active", **to},
        request={"extra_specs": pending.get("extra_specs") or {}},
        releases=(move_consumer(instance.uuid),),
        # Begun by a release that did not say so: all of it is the node's.
        holds=pending.get("holds") or {pending["node_uuid"]: pending["resources"]},
        tell="resized" if held.lease.operation == "resize" else "live_migrated",
        left=instance.host if instance.host != pending["host"] else "",
        made=True,
    )


OPERATIONS: Mapping[str, Callable[[Held], Done]] = {
    "build": _build,
    "delete": _delete,
    **dict.fromkeys(POWER, _power),
    "rebuild": _rebuild,
    "shelve_offload": _shelve_offload,
    "unshelve": _unshelve,
    "resize": _move,
    "live_migrate": _move,
}


def event_of(done: Done, host: str) -> ObserverEvent:
    """What observers are told of an operation that was written."""
    uuid, instance, changes = done.held.resource_id, done.instance, done.changes
    if instance is None or changes is None:
        return InstanceDeleted(uuid, host)
    if changes["fault"]:
        return InstanceFailed(uuid, host, done.held.operation, changes["fault"])
    if left := instance.pending.get("left"):
        # It was evacuated.
        return InstanceMoved(uuid, left, host, instance.node, instance.flavorid)
    if done.tell in ("created", "unshelved"):
        return InstanceCreated(uuid, instance.project_id, instance.flavorid, host, instance.node)
    if done.tell == "shelved_offloaded":
        return InstanceDeleted(uuid, host)
    if done.held.operation in MOVES:
        return InstanceMoved(uuid, instance.host, host, changes["node"], changes["flavorid"])
    return InstanceRebuilt(uuid, host, instance.node)
