# SPDX-License-Identifier: Apache-2.0
"""What each operation does on the hypervisor, and what the store, the claims and the schedulers are told afterwards.

An operation that fails leaves the instance as it was, with the fault's text. A build that fails is tried on other nodes
(:mod:`moorage.instances.build_retries`); the last one leaves an instance in error that occupies nothing. An instance that
cannot be unshelved stays shelved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moorage import errors
from moorage.instances.interface import Instance, move_consumer
from moorage.observers.interface import (
    Event,
    InstanceCreated,
    InstanceDeleted,
    InstanceFailed,
    InstanceMoved,
    InstanceRebuilt,
)
from moorage.work.interface import Lease
from moorage_plugins.compute.driver import DriverError, SimulatedDriver

__all__ = ["MOVES", "OPERATIONS", "Done", "Held", "event_of"]

#: What the destination does, while the instance is somewhere else.
MOVES = frozenset({"resize", "live_migrate"})
_NOWHERE = {"host": "", "node": "", "node_uuid": ""}


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
    """An operation that this agent holds, on an instance that exists."""

    lease: Lease
    instance: Instance
    driver: SimulatedDriver

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
        return self._ended({"fault": "", **changes}, request or {}, more)

    def failed(self, error: DriverError, changes: Mapping[str, Any], **more: Any) -> Done:
        """It has not."""
        return self._ended({"fault": str(error), **changes}, {}, more)

    def _ended(self, changes: Mapping[str, Any], request: Mapping[str, Any], more: Mapping[str, Any]) -> Done:
        asked = self.instance.pending.get("request_id")
        if asked is not None:
            # So that a repetition of the request is known for one although nothing is pending any more.
            request = {**request, "last_request_id": asked}
        if request:
            changes = {**changes, "request": {**self.instance.request, **request}}
        return Done(self.lease, self.instance, {"pending": {}, **changes}, **more)

    def make(self) -> None:
        """Have it run here, as this try's."""
        self.driver.build(self.instance.uuid, self.lease.token, self.extra_specs, self.lease.operation)


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
        held.driver.destroy(uuid)
    except DriverError as error:
        raise errors.Unavailable(f"Instance {uuid} cannot be destroyed: {error}") from error
    return Done(held.lease, held.instance, None, (uuid, move_consumer(uuid)), tell="deleted")


def _rebuild(held: Held) -> Done:
    try:
        held.make()
    except DriverError as error:
        return held.failed(error, {"status": "active"}, tell="rebuilt")
    image = held.instance.pending.get("image") or {}
    return held.done({"status": "active"}, request={"image": image}, tell="rebuilt", made=True)


def _shelve_offload(held: Held) -> Done:
    uuid = held.instance.uuid
    try:
        held.driver.check(held.lease.operation, held.extra_specs)
        held.driver.destroy(uuid)
    except DriverError as error:
        return held.failed(error, {"status": "active"})
    return held.done({"status": "shelved_offloaded", **_NOWHERE}, releases=(uuid,), tell="shelved_offloaded")


def _unshelve(held: Held) -> Done:
    try:
        held.make()
    except DriverError as error:
        shelved = {"status": "shelved_offloaded", **_NOWHERE}
        return held.failed(error, shelved, releases=(held.instance.uuid,), tell="deleted", made=True)
    return held.done({"status": "active"}, tell="unshelved", made=True)


def _move(held: Held) -> Done:
    """Resize and live migration, by the agent of the destination."""
    instance, pending = held.instance, held.instance.pending
    try:
        held.make()
    except DriverError as error:
        return held.failed(error, {"status": "active"}, releases=(move_consumer(instance.uuid),), left=instance.host)
    to = {name: pending[name] for name in ("host", "node", "node_uuid", "flavorid", "resources")}
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
    "rebuild": _rebuild,
    "shelve_offload": _shelve_offload,
    "unshelve": _unshelve,
    "resize": _move,
    "live_migrate": _move,
}


def event_of(done: Done, host: str) -> Event:
    """What observers are told of an operation that was written."""
    uuid, instance, changes = done.held.resource_id, done.instance, done.changes
    if instance is None or changes is None:
        return InstanceDeleted(uuid, host)
    if changes["fault"]:
        return InstanceFailed(uuid, host, done.held.operation, changes["fault"])
    if done.tell in ("created", "unshelved"):
        return InstanceCreated(uuid, instance.project_id, instance.flavorid, host, instance.node)
    if done.tell == "shelved_offloaded":
        return InstanceDeleted(uuid, host)
    if done.held.operation in MOVES:
        return InstanceMoved(uuid, instance.host, host, changes["node"], changes["flavorid"])
    return InstanceRebuilt(uuid, host, instance.node)
