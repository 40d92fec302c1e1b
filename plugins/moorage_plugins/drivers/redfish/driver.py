# SPDX-License-Identifier: Apache-2.0
"""The compute driver ``redfish``: each instance has a whole machine, which is turned on and off through its BMC.

The machines are the nodes of the agent whose driver is ``redfish``. No image is written: a machine boots from the network, or from
what the flavor says (``redfish:boot_device``), and what it boots is set up there.

A BMC knows no tokens. So the power of a machine is changed under a lock, by an operation whose token is still the newest of its
instance when it has the lock (:mod:`moorage_plugins.drivers.redfish.records`). A record of what is about to be changed is written
before each change, since the agent can be killed at any line.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, threads
from moorage.bounded_pool import BoundedPool
from moorage.drivers.interface import (
    ComputeDriver,
    DriverError,
    DriverTools,
    Machine,
    NodePower,
    NodeSeen,
    Observed,
    Workload,
    WorkloadState,
)
from moorage_plugins.drivers.redfish.bmc import BOOT_DEVICES, DRIVER, Bmc, BmcError
from moorage_plugins.drivers.redfish.records import Power, Record, Records

__all__ = ["RedfishDriver"]

LOG = logging.getLogger(__name__)
_BOOT_DEVICE = "redfish:boot_device"
#: BMCs that are asked at the same time, and how many times ``[driver_redfish] timeout`` one may take.
_AT_ONCE, _ANSWERS = 16, 4


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a BMC said last.

    :param on: whether the machine is on; None while that was never seen. :param error: why it cannot be seen now; empty: it can.
    :param at: when, on the monotonic clock.
    """

    on: bool | None
    error: str
    at: float


class RedfishDriver(ComputeDriver):
    """Turns whole machines on and off for instances, through BMCs that speak Redfish."""

    api_version: ClassVar[tuple[int, int]] = (1, 2)

    def __init__(self, tools: DriverTools) -> None:
        super().__init__(tools)
        self._section = section = tools.conf.driver_redfish
        self._clock = tools.clock
        folder = Path(tools.conf.control_plane.state_dir) / "redfish" / tools.host
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise errors.ConfigError(
                f"The folder {folder} for the records of the driver redfish cannot be made: {error.strerror}. See [control_plane] "
                "state_dir."
            ) from error
        self._records = Records(folder, tools.clock)
        #: Longer than an operation that works takes.
        self._patience = 3 * section.power_timeout + section.shutdown_timeout
        self._pool = BoundedPool("readings of BMCs", tools.clock, _AT_ONCE)
        self._lock = threads.lock()
        self._readings: dict[str, _Reading] = {}

    # -- the driver -----------------------------------------------------------------------------------------------

    @override
    def check(self, workload: Workload) -> None:
        self._boot_device(workload)

    @override
    def spawn(self, workload: Workload, token: int) -> None:
        uuid, boot_device = workload.uuid, self._boot_device(workload)
        with self._faults():
            if any(record.token > token for record in self._records.of(uuid).values()):
                return
            machine = self._machine(workload.node)
            bmc = self._bmc(machine)
            bmc.check(boot_device)
            if not self._records.announce(uuid, token):
                raise DriverError("a later operation has ended the instance")
            moved = self._end_elsewhere(uuid, token, machine.uuid)
            try:
                self._replace(machine, bmc, boot_device, uuid, token)
            except DriverError as error:
                if not moved:
                    raise
                raise DriverError(f"{error}. {self._restored(moved, machine, uuid, token)}") from error
            for node, before in moved.items():
                with self._records.locked(node, self._patience):
                    found = self._records.read(node)
                    if found is not None and (found.instance, found.token) == (uuid, before.token):
                        self._records.clear(node)

    @override
    def destroy(self, uuid: str, up_to_token: int) -> None:
        with self._faults():
            if up_to_token > 0:
                # The next operation has this token at least; a late call of an earlier one finds it.
                self._records.announce(uuid, up_to_token + 1)
            for node, record in self._records.of(uuid).items():
                if record.token > up_to_token:
                    continue
                bmc = self._bmc(self._machine(node))
                with self._records.locked(node, self._patience):
                    found = self._records.read(node)
                    if found is None or found.instance != uuid or found.token > up_to_token:
                        continue
                    self._vacate(node, bmc)
                    self._records.clear(node)

    @override
    def inspect(self) -> Mapping[str, Observed]:
        """Looks at all machines. It asks a BMC every ``[driver_redfish] poll_interval`` seconds at most.

        A machine whose BMC does not answer is reported as it was seen last.
        """
        found: dict[str, Observed] = {}
        with self._faults():
            before = self._records.all()
            self._look()
            # The newest token last.
            for node, record in sorted(self._records.all().items(), key=lambda item: item[1].token):
                found[record.instance] = self._observed(node, record, changed=before.get(node) != record)
        return found

    def nodes(self) -> Mapping[str, NodeSeen]:
        """See :class:`moorage.drivers.interface.NodeReport`."""
        with self._faults():
            records = self._records.all()
            with self._lock:
                readings = dict(self._readings)
            return {node: self._node_seen(node, reading, records.get(node)) for node, reading in readings.items()}

    # -- further powers -------------------------------------------------------------------------------------------

    def stop(self, uuid: str, token: int, order: int) -> None:
        """See :class:`moorage.drivers.interface.PowerControl`."""
        with self._ordered(uuid, token, order) as held:
            if held is None:
                return
            node, bmc, record = held
            # What has ended before, was stopped before or never ran stays that.
            kept = record.power is Power.BUILDING or (record.power in (Power.ON, Power.OFF) and not bmc.is_on())
            stopping = record if kept else self._records.write(node, dataclasses.replace(record, power=Power.STOPPING))
            bmc.turn_off(shutdown=self._section.shutdown_timeout)
            self._saw(node, on=False)
            if not kept:
                self._records.write(node, dataclasses.replace(stopping, power=Power.OFF))

    def start(self, uuid: str, token: int, order: int) -> None:
        """See :class:`moorage.drivers.interface.PowerControl`."""
        with self._ordered(uuid, token, order) as held:
            if held is None:
                return
            node, bmc, record = held
            if record.power is Power.BUILDING:
                raise DriverError("no build of the instance has succeeded on its machine; rebuild the instance")
            if record.power is Power.STOPPING:
                # The stop was killed, and its machine may be about to go off.
                self._cut(node, bmc)
            elif record.power is Power.ON and bmc.is_on():
                return
            starting = self._records.write(node, dataclasses.replace(record, power=Power.STARTING))
            bmc.turn_on()
            self._saw(node, on=True)
            self._records.write(node, dataclasses.replace(starting, power=Power.ON))

    def reboot(self, uuid: str, token: int, order: int) -> None:
        """See :class:`moorage.drivers.interface.PowerControl`."""
        self.stop(uuid, token, order)
        self.start(uuid, token, order)

    @contextlib.contextmanager
    def _ordered(self, uuid: str, token: int, order: int) -> Iterator[tuple[str, Bmc, Record] | None]:
        """Holds the machine of a workload for a power call, and keeps its order; None where the call comes too late."""
        with self._faults():
            node = next((node for node, each in self._records.of(uuid).items() if each.token == token), None)
            if node is None:
                yield None
                return
            bmc = self._bmc(self._machine(node))
            with self._records.locked(node, self._patience):
                found = self._records.read(node)
                if found is None or (found.instance, found.token) != (uuid, token) or found.order > order:
                    yield None
                    return
                yield node, bmc, self._records.write(node, dataclasses.replace(found, order=order))

    # -- parts ----------------------------------------------------------------------------------------------------

    def _replace(self, machine: Machine, bmc: Bmc, boot_device: str, uuid: str, token: int) -> None:
        """Turns the machine off, and on for this token.

        :raises DriverError: it cannot be. What ran on it under an older token is run again, if that can be.
        """
        node = machine.uuid
        with self._records.locked(node, self._patience):
            before = self._records.read(node)
            if before is not None and before.instance != uuid:
                raise DriverError(
                    f"node {machine.name} has instance {before.instance} still. A machine has one instance: give the node one unit "
                    "of a resource class that each of its instances needs"
                )
            if before is not None and (
                before.token > token or (before.token == token and before.power is not Power.BUILDING)
            ):
                return
            if not self._records.is_newest(uuid, token):
                raise DriverError("a later operation has ended the instance")
            building = self._records.write(node, Record(uuid, token, Power.BUILDING))
            was_cut = False
            try:
                self._cut(node, bmc)
                was_cut = True
                bmc.boot_once_from(boot_device)
                bmc.turn_on()
            except DriverError as error:
                if before is None or before.token == token:
                    raise
                # A request that failed may have been done.
                boots_once = was_cut and BOOT_DEVICES[boot_device] is not None
                said = self._again(node, bmc, before, token, boots_once=boots_once)
                raise DriverError(f"{error}. {said}") from error
            self._saw(node, on=True)
            self._records.write(node, dataclasses.replace(building, power=Power.ON))

    def _end_elsewhere(self, uuid: str, token: int, node: str) -> Mapping[str, Record]:
        """Turns off other machines of the instance with older tokens. Returns node -> record for each one that was on."""
        ended = {}
        for other, record in self._records.of(uuid).items():
            if other == node or record.token >= token:
                continue
            bmc = self._bmc(self._machine(other))
            with self._records.locked(other, self._patience):
                found = self._records.read(other)
                if found is not None and found.instance == uuid and found.token < token:
                    self._vacate(other, bmc)
                    self._records.write(other, dataclasses.replace(found, power=Power.REPLACED))
                    ended[other] = found
        return ended

    def _restored(self, moved: Mapping[str, Record], machine: Machine, uuid: str, token: int) -> str:
        """Runs an older workload again whose replacement on another machine cannot run; returns a sentence with the result."""
        try:
            with self._records.locked(machine.uuid, self._patience):
                found = self._records.read(machine.uuid)
                if found is not None and (found.instance, found.token) == (uuid, token):
                    self._vacate(machine.uuid, self._bmc(machine))
                    self._records.clear(machine.uuid)
        except DriverError as error:
            return f"What ran before was turned off, and stays off, since node {machine.name} may be on: {error}"
        said = []
        for node, before in moved.items():
            with self._records.locked(node, self._patience):
                found = self._records.read(node)
                if found is not None and (found.instance, found.token) == (uuid, before.token):
                    said.append(self._again(node, self._bmc(self._machine(node)), before, token))
        return " ".join(said)

    def _again(self, node: str, bmc: Bmc, before: Record, token: int, *, boots_once: bool = False) -> str:
        """Gives the machine back to the older workload; power calls of operations before this token come too late then.

        :param boots_once: a build set a boot device for one boot, and may have asked for that boot. The machine must not boot from
            it again: an installer would replace the older workload.
        """
        before = dataclasses.replace(before, order=token)
        if boots_once:
            try:
                self._cut(node, bmc)
                bmc.end_boot_once()
            except DriverError as error:
                self._records.write(node, dataclasses.replace(before, power=Power.BUILDING))
                return (
                    "What ran before is not turned on again, since its machine may boot what the rebuild was to boot: "
                    f"{error}. Rebuild the instance"
                )
        ran = before.power in (Power.ON, Power.STARTING, Power.REPLACED)
        stays = Power.BUILDING if before.power is Power.BUILDING else Power.OFF
        again = self._records.write(node, dataclasses.replace(before, power=Power.STARTING if ran else stays))
        if not ran:
            return "The machine did not run before, and is off."
        try:
            bmc.turn_on()
        except DriverError as error:
            return f"What ran before was turned off, and cannot be turned on again: {error}"
        self._saw(node, on=True)
        self._records.write(node, dataclasses.replace(again, power=Power.ON))
        return "What ran before was turned on again."

    def _cut(self, node: str, bmc: Bmc) -> None:
        """Turns a machine off; also one that is about to be on."""
        bmc.turn_off()
        self._saw(node, on=False)

    def _vacate(self, node: str, bmc: Bmc) -> None:
        """Turns a machine off for good: nothing that was set for its next boot stays, as far as its BMC allows that."""
        self._cut(node, bmc)
        try:
            if bmc.is_to_boot_once():
                bmc.end_boot_once()
        except BmcError as error:
            LOG.warning(
                "Node %s is off, and may boot the next time what its last instance was to boot. See its boot device before you "
                "turn it on by hand. %s",
                node,
                error.detail,
            )

    def _boot_device(self, workload: Workload) -> str:
        device = workload.extra_specs.get(_BOOT_DEVICE, self._section.boot_device)
        if device not in BOOT_DEVICES:
            raise DriverError(
                f"{_BOOT_DEVICE} of the flavor is {device!r}; it must be one of {', '.join(sorted(BOOT_DEVICES))}"
            )
        return str(device)

    def _machines(self) -> Sequence[Machine]:
        return [each for each in self.tools.machines() if each.driver == DRIVER]

    def _machine(self, node: str) -> Machine:
        found = next((each for each in self._machines() if each.uuid == node), None)
        if found is None:
            raise DriverError(
                f"node {node or '(none)'} of the instance is no machine of this agent. Give the node to host {self.tools.host}, "
                f"with the driver {DRIVER} and redfish_address in its driver_info"
            )
        return found

    def _bmc(self, machine: Machine) -> Bmc:
        return Bmc(machine, self._section, self._clock)

    # -- what is seen ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Asks the BMCs that have not been asked lately."""
        machines = self._machines()
        now, readings = self._clock.monotonic(), self._readings
        stale = [
            each
            for each in machines
            if each.uuid not in readings or now - readings[each.uuid].at >= self._section.poll_interval
        ]
        late = "its BMC takes too long to answer"
        limit = _ANSWERS * float(self._section.timeout)
        for each in self._pool.for_each(stale, self._read, limit, lambda each: self._missed(each, late)):
            self._missed(each, late)
        with self._lock:
            known = {each.uuid for each in machines}
            self._readings = {node: each for node, each in self._readings.items() if node in known}

    def _read(self, machine: Machine) -> None:
        asked = self._clock.monotonic()
        try:
            on = self._bmc(machine).is_on()
        except DriverError as error:
            self._missed(machine, str(error), error.detail if isinstance(error, BmcError) else "")
            return
        with self._lock:
            before = self._readings.get(machine.uuid)
            # An operation may have changed it meanwhile.
            if before is None or before.at <= asked:
                self._readings[machine.uuid] = _Reading(on, "", asked)
        if before is not None and before.error:
            LOG.info("The power of node %s is seen again.", machine.name)

    def _missed(self, machine: Machine, error: str, detail: str = "") -> None:
        with self._lock:
            before = self._readings.get(machine.uuid)
            self._readings[machine.uuid] = _Reading(before.on if before else None, error, self._clock.monotonic())
        if before is None or not before.error:
            # Once, until it is seen again.
            LOG.warning("The power of node %s cannot be seen: %s. %s", machine.name, error, detail)

    def _saw(self, node: str, *, on: bool) -> None:
        with self._lock:
            self._readings[node] = _Reading(on, "", self._clock.monotonic())

    def _node_seen(self, node: str, reading: _Reading, record: Record | None) -> NodeSeen:
        if reading.error or reading.on is None:
            return NodeSeen(NodePower.ERROR, record is not None, error=reading.error)
        power, target = NodePower.ON if reading.on else NodePower.OFF, None
        if record is not None and self._records.busy(node):
            wanted = {Power.BUILDING: NodePower.ON, Power.STARTING: NodePower.ON, Power.STOPPING: NodePower.OFF}
            target = wanted.get(record.power)
        return NodeSeen(power, record is not None, None if target is power else target)

    def _observed(self, node: str, record: Record, *, changed: bool) -> Observed:
        """What there is of a workload.

        :param changed: the record was written after the machine was looked at.
        """
        power = record.power
        with self._lock:
            reading = self._readings.get(node)
        wanted = power in (Power.ON, Power.STARTING)
        seen = wanted if changed or reading is None or reading.on is None else reading.on
        detail = ""
        if reading is None:
            detail = "Its node is none of this agent's machines now, so its power cannot be seen."
        elif reading.error and not changed:
            detail = f"Its power cannot be seen now; this is what was seen last: {reading.error}."
        state, said = self._state(node, power, seen)
        return Observed(record.token, state, record.since, detail or said)

    def _state(self, node: str, power: Power, on: bool) -> tuple[WorkloadState, str]:
        if power is Power.BUILDING:
            if self._records.busy(node):
                return WorkloadState.RUNNING, "Its machine is being turned on."
            return WorkloadState.FAILED, "No build on its machine has succeeded."
        if on:
            outside = power in (Power.OFF, Power.REPLACED)
            return WorkloadState.RUNNING, "Its machine was turned on outside of Moorage." if outside else ""
        if power is Power.STARTING and self._records.busy(node):
            return WorkloadState.RUNNING, "Its machine is being turned on."
        if power is Power.ON:
            return (
                WorkloadState.ENDED,
                "Its machine is off: it was turned off outside of Moorage, or by its own system.",
            )
        return WorkloadState.STOPPED, ""

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except DriverError as error:
            cause = error if isinstance(error, BmcError) else error.__cause__
            if isinstance(cause, BmcError):
                LOG.warning("%s", cause.detail)
            raise
        except OSError as error:
            LOG.error("The records of the driver redfish failed: %s", error)
            raise DriverError(
                f"the records of the driver redfish failed ({error.strerror}); the log of the agent names the file"
            ) from error
