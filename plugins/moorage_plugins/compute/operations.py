# SPDX-License-Identifier: Apache-2.0
"""Does operations on the hypervisor, and says what is to be written and reported to schedulers afterwards.

An operation that fails leaves the instance as it was, with the fault's text. Where it ended the workload that it should have
replaced, the instance gets the state that the driver sees. A build that fails is tried on other nodes
(:mod:`moorage.instances.build_retries`); the last one leaves an instance in error that occupies nothing. An instance that
cannot be unshelved stays shelved. The steps of a move are those of :mod:`moorage.instances.moves`. What an unconfirmed resize keeps
stays kept, whatever fails (:mod:`moorage.instances.resizes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moorage import errors
from moorage.drivers.interface import (
    ComputeDriver,
    DriverError,
    LiveMigration,
    Migration,
    Observed,
    PowerControl,
    Workload,
    WorkloadState,
)
from moorage.instances.interface import Instance, move_consumer
from moorage.instances.moves import (
    ACTIVATE,
    MOVES,
    OF_PHASE,
    PREPARE,
    REVERT,
    REVERT_RESIZE,
    TRANSFER,
    kept_elsewhere,
    kept_source,
    still_kept,
)
from moorage.observers.interface import (
    InstanceCreated,
    InstanceDeleted,
    InstanceFailed,
    InstanceMoved,
    InstanceRebuilt,
    ObserverEvent,
)
from moorage.work.interface import ANY_SCHEDULER, Lease
from moorage_plugins.compute.actual_state import GONE, restart_policy
from moorage_plugins.compute.instances import LONGEST_DETAIL

__all__ = ["OPERATIONS", "POWER", "Done", "Held", "event_of", "reverting"]

#: What changes whether the instance runs, and nothing else.
POWER = ("stop", "start", "reboot")
#: What a driver has just said of a workload. One that has ended since is judged by the next comparison, which may restart it.
_RUNS = {"actual_state": WorkloadState.RUNNING.value, "actual_detail": "", "restarts": 0}
_NOWHERE = {"host": "", "node": "", "node_uuid": "", "actual_state": "unknown", "actual_detail": ""}


@dataclass(frozen=True, slots=True)
class Done:
    """Holds what is to be written and reported of an operation that is done on the hypervisor.

    :param changes: fields of the instance; None: its row shall go (or is gone).
    :param releases: consumers whose claims go.
    :param holds: what the instance holds from now on in place of what it held, provider -> class -> units; None: the same.
    :param tell: method of the reporter that sends the message to schedulers; empty: they get none.
    :param left: the host that has to let go of the instance. What the instance held there stays held until then; without ``holds``,
        what a move held on its destination.
    :param keeps: ``left`` has to let go only when the resize is confirmed.
    :param drops: the host that has to remove the copy that it kept for the revert of a resize. Its claim stays until then.
    :param looks: the host that has to compare what is there with the instance, and to tell schedulers.
    :param goes_on: the operation that takes the place of this one, and the host that has to do it.
    """

    held: Lease
    instance: Instance | None
    changes: Mapping[str, Any] | None
    releases: tuple[str, ...] = ()
    holds: Mapping[str, Mapping[str, int]] | None = None
    tell: str = ""
    left: str = ""
    keeps: bool = False
    drops: str = ""
    looks: str = ""
    goes_on: tuple[str, str] | None = None
    #: Something of this try is on the hypervisor, which must go when it turns out to have been taken over.
    made: bool = field(default=False)

    def leaves(self, consumer: str) -> tuple[str, ...]:
        """Returns the uuids of the nodes whose instances change when the claim of a consumer is released, sorted."""
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
    :param claimed: reads what the instance holds now: provider -> class -> units.
    :param confirm_after: ``[compute] resize_confirm_after``.
    """

    lease: Lease
    instance: Instance
    driver: ComputeDriver
    holds: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    claimed: Callable[[], Mapping[str, Mapping[str, int]]] = dict
    confirm_after: float = 0.0

    @property
    def extra_specs(self) -> Mapping[str, str]:
        """Of the flavor that the instance shall have."""
        of = self.instance.pending if "extra_specs" in self.instance.pending else self.instance.request
        found: Mapping[str, str] = of.get("extra_specs") or {}
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
        if "pending" not in changes:
            changes = {"pending": {}, **changes, **still_kept(self.instance.pending)}
        return Done(self.lease, self.instance, changes, **more)

    def source(self, **more: Any) -> dict[str, Any]:
        """Where the instance is, with its flavor and what it holds, so that its resize can be reverted."""
        instance = self.instance
        names = ("host", "node", "node_uuid", "flavorid", "flavor_version")
        return {
            **{name: getattr(instance, name) for name in names},
            "resources": dict(instance.resources),
            "extra_specs": dict(instance.request.get("extra_specs") or {}),
            "holds": {provider: dict(amounts) for provider, amounts in self.claimed().items()},
            **more,
        }

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
            operation=pending["operation"] if self.lease.operation in OF_PHASE else self.lease.operation,
            holds=self.holds,
            node=pending.get("node_uuid") or instance.node_uuid,
        )

    def make(self) -> None:
        """Have it run here, as this try's.

        :raises DriverError: the driver cannot run it.
        """
        self.driver.spawn(self.checked_workload(), self.lease.token)

    def checked_workload(self) -> Workload:
        """What the driver gets.

        :raises DriverError: no driver of this host could run it as its flavor says.
        """
        workload = self.workload
        if workload.command and not self.driver.runs_commands:
            raise DriverError(
                "the instance has a command, and the compute driver of this host runs none; choose one that does, for example "
                "[compute] driver = process"
            )
        restart_policy(workload.extra_specs)
        return workload


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
    goes_on = held.lease.operation, ANY_SCHEDULER
    return Done(held.lease, instance, changes, tell="deleted", made=True, goes_on=goes_on)


def _delete(held: Held) -> Done:
    uuid = held.instance.uuid
    try:
        held.driver.destroy(uuid, held.lease.token)
    except DriverError as error:
        raise errors.Unavailable(f"Instance {uuid} cannot be destroyed: {error}") from error
    # The destination of a move removes what it has prepared.
    host, pending = held.instance.host, held.instance.pending
    to = pending.get("host", "")
    looks, drops = to if to != host else "", kept_elsewhere(host, pending)
    # What a move holds is claimed, and changes hands, in the transactions that write what is pending.
    releases = (uuid, move_consumer(uuid)) if pending else (uuid,)
    return Done(held.lease, held.instance, None, releases, tell="deleted", looks=looks, drops=drops)


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
        power = _power_of(driver)
        before = driver.inspect().get(uuid)
        if before is None:
            raise DriverError("there is nothing of the instance on its host; rebuild it")
        calls = {"stop": power.stop, "start": power.start, "reboot": power.reboot}
        calls[held.lease.operation](uuid, before.token, held.lease.token)
        if held.lease.operation != "stop":
            return held.done({"status": "active", **_RUNS})
        seen = driver.inspect().get(uuid, before)
    except DriverError as error:
        return held.failed_in_place(error)
    return held.done({**_seen(seen), "restarts": 0})


def _power_of(driver: ComputeDriver) -> PowerControl:
    """:raises DriverError: it has none."""
    if not isinstance(driver, PowerControl):
        raise DriverError("the compute driver of its host does not have the power compute.power")
    return driver


def _seen(seen: Observed) -> dict[str, str]:
    """Returns the fields of an instance that say what a driver saw."""
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


def _replace(held: Held) -> Done:
    """Resizes an instance, migrates it and reverts its resize on its own host, whose driver replaces the workload."""
    instance, pending = held.instance, held.instance.pending
    ends: dict[str, Any] = {"releases": (move_consumer(instance.uuid),)}
    if instance.host != pending["host"]:
        old = DriverError(
            f"the {held.lease.operation} to another host was begun by a scheduler of an earlier release, which does not know the "
            "steps of a move; ask for it again"
        )
        return held.failed(old, {"status": "active"}, looks=instance.host, **ends)
    if held.lease.operation == "live_migrate" and not isinstance(held.driver, LiveMigration):
        refused = DriverError("the compute driver of its destination does not have the power compute.live_migrate")
        return held.failed(refused, {"status": "active"}, looks=instance.host, **ends)
    try:
        held.make()
    except DriverError as error:
        # What is there may be the workload that was there before.
        return held.failed_in_place(error, looks=instance.host, **ends)
    # Begun by a release that did not say so: all of it is the node's.
    holds = pending.get("holds") or {pending["node_uuid"]: pending["resources"]}
    changes = {"status": "active", "pending": {}, **_destination(pending)}
    if held.lease.operation == "resize" and held.confirm_after:
        kept = held.source(confirms=holds, confirm_after=held.confirm_after)
        changes |= still_kept({"kept": kept})
        holds = _larger(kept["holds"], holds)
    return held.done(
        changes,
        request={"extra_specs": pending.get("extra_specs") or {}},
        holds=holds,
        tell=_TELLS.get(held.lease.operation, "live_migrated"),
        made=True,
        **ends,
    )


#: Method of the reporter that tells of the end of a move, where it is no migration.
_TELLS = dict.fromkeys(("resize", REVERT_RESIZE), "resized")


def _larger(one: Mapping[str, Mapping[str, int]], other: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Returns the larger amount of each resource class of each provider."""
    found: dict[str, dict[str, int]] = {}
    for holds in (one, other):
        for provider, amounts in holds.items():
            there = found.setdefault(provider, {})
            there.update({name: max(amount, there.get(name, 0)) for name, amount in amounts.items()})
    return found


def _destination(pending: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an instance that its move changes."""
    fields = {name: pending[name] for name in ("host", "node", "node_uuid", "flavorid", "resources")}
    # Begun by a release that did not know versions: its resources were brought along.
    return {**fields, "flavor_version": pending.get("flavor_version", 0)}


def _prepare(held: Held) -> Done:
    """The first step of a move, on its destination."""
    instance, pending, driver = held.instance, held.instance.pending, held.driver
    if kept_source(pending):
        return _find_kept(held)
    try:
        if not isinstance(driver, LiveMigration if pending["live"] else Migration):
            raise DriverError(
                f"the compute driver of its destination does not have the power compute.{'live_' * pending['live']}migrate"
            )
        to = driver.prepare(held.checked_workload(), held.lease.token)
    except DriverError as error:
        consumer = move_consumer(instance.uuid)
        return held.failed(error, {"status": "active"}, releases=(consumer,), looks=instance.host, made=True)
    changed = {**pending, "phase": OF_PHASE[TRANSFER], "prepared": held.lease.token, "to": to}
    if pending["operation"] == "resize" and held.confirm_after:
        # Agents of earlier releases write none, so their resizes keep nothing.
        changed["confirm_after"] = held.confirm_after
    return Done(held.lease, instance, {"pending": changed}, goes_on=(TRANSFER, instance.host), made=True)


def _find_kept(held: Held) -> Done:
    """The first step of the revert of a resize, on the host that keeps the copy.

    It makes nothing, so nothing is destroyed when it fails.
    """
    instance, pending = held.instance, held.instance.pending
    token = kept_source(pending)["token"]
    try:
        _power_of(held.driver)
        seen = held.driver.inspect().get(instance.uuid)
        if seen is None or seen.token != token:
            raise DriverError(
                "the resize is not reverted, because the copy that the old host of the instance kept is gone; confirm the resize"
            )
    except DriverError as error:
        return held.failed(error, {"status": "active"}, looks=instance.host)
    changed = {**pending, "phase": OF_PHASE[TRANSFER], "prepared": token}
    return Done(held.lease, instance, {"pending": changed}, goes_on=(TRANSFER, instance.host))


def _transfer(held: Held) -> Done:
    """The second step, on the source. Its end is the commit of the move."""
    instance, pending, driver, order = held.instance, held.instance.pending, held.driver, held.lease.token
    try:
        before = driver.inspect().get(instance.uuid)
        if before is None:
            # The revert of a resize has a copy elsewhere.
            if not kept_source(pending):
                raise DriverError("there is nothing of the instance on its host; rebuild it")
        elif not pending["live"]:
            _power_of(driver).stop(instance.uuid, before.token, order)
        elif isinstance(driver, LiveMigration):
            driver.transfer(instance.uuid, before.token, order, pending["to"])
        else:
            raise DriverError("the compute driver of its host does not have the power compute.live_migrate")
    except DriverError as error:
        return _let_go_on(held, error)
    names = ("operation", "request_id", "host", "node", "live", "prepared")
    goes_on = {**{name: pending[name] for name in names}, "phase": OF_PHASE[ACTIVATE], "left": instance.host}
    keeps = before is not None and "confirm_after" in pending
    if before is not None and keeps:
        goes_on["kept"] = held.source(token=before.token, confirm_after=pending["confirm_after"])
    changes = {
        **_destination(pending),
        "pending": goes_on,
        "request": {**instance.request, "extra_specs": pending["extra_specs"]},
        "actual_state": "unknown",
        "actual_detail": "",
    }
    return Done(
        held.lease, instance, changes, (move_consumer(instance.uuid),), pending["holds"], left=instance.host, keeps=keeps,
        goes_on=(ACTIVATE, pending["host"]),
    )  # fmt: skip


def _activate(held: Held) -> Done:
    """The third step, on the destination, where the instance is by now."""
    uuid, pending, driver = held.instance.uuid, held.instance.pending, held.driver
    tell = _TELLS.get(pending["operation"], "live_migrated")
    try:
        _power_of(driver).start(uuid, pending["prepared"], held.lease.token)
        seen = driver.inspect().get(uuid)
        if seen is None or seen.token != pending["prepared"]:
            raise DriverError("what its destination had prepared is gone; rebuild it")
    except DriverError as error:
        return held.failed_in_place(error, tell=tell)
    return held.done({**_seen(seen), "restarts": 0}, tell=tell)


def reverting(held: Lease, instance: Instance, reason: str) -> Done:
    """The source's answer to a commit that is refused: it ends the move."""
    changed = {**instance.pending, "phase": OF_PHASE[REVERT], "reason": reason}
    return Done(held, instance, {"pending": changed}, goes_on=(REVERT, instance.host))


def _revert(held: Held) -> Done:
    """Ends a move that has not been committed, on its source."""
    return _let_go_on(held, DriverError(held.instance.pending["reason"]))


def _let_go_on(held: Held, why: DriverError) -> Done:
    """Lets the workload go on that a move has stopped or paused, or perhaps not yet."""
    uuid, pending, driver = held.instance.uuid, held.instance.pending, held.driver
    try:
        before = driver.inspect().get(uuid)
    except DriverError as error:
        raise errors.Unavailable(
            f"The move of instance {uuid} failed ({why}), and it cannot be seen what runs: {error}"
        ) from error
    try:
        if before is not None:
            _power_of(driver).start(uuid, before.token, held.lease.token)
    except DriverError as error:
        why = DriverError(f"{str(why).removesuffix('.')}. It cannot go on on its host: {error}")
    consumer = move_consumer(uuid)
    if pending["live"]:
        # What arrived there has memory. The room is free when the destination has removed it.
        return held.failed_in_place(why, releases=(consumer,), left=pending["host"], tell="rebuilt")
    return held.failed_in_place(why, releases=(consumer,), looks=pending["host"], tell="rebuilt")


OPERATIONS: Mapping[str, Callable[[Held], Done]] = {
    "build": _build,
    "delete": _delete,
    **dict.fromkeys(POWER, _power),
    "rebuild": _rebuild,
    "shelve_offload": _shelve_offload,
    "unshelve": _unshelve,
    **dict.fromkeys(sorted(MOVES), _replace),
    PREPARE: _prepare,
    TRANSFER: _transfer,
    ACTIVATE: _activate,
    REVERT: _revert,
}


def event_of(done: Done, host: str) -> ObserverEvent:
    """Returns the event that observers get for an operation that was written."""
    uuid, instance, changes = done.held.resource_id, done.instance, done.changes
    if instance is None or changes is None:
        return InstanceDeleted(uuid, host)
    if changes["fault"]:
        return InstanceFailed(uuid, host, done.held.operation, changes["fault"])
    if left := instance.pending.get("left"):
        # It was evacuated, or its move was committed before.
        return InstanceMoved(uuid, left, host, instance.node, instance.flavorid)
    if done.tell in ("created", "unshelved"):
        return InstanceCreated(uuid, instance.project_id, instance.flavorid, host, instance.node)
    if done.tell == "shelved_offloaded":
        return InstanceDeleted(uuid, host)
    if done.held.operation in MOVES:
        return InstanceMoved(uuid, instance.host, host, changes["node"], changes["flavorid"])
    return InstanceRebuilt(uuid, host, instance.node)
