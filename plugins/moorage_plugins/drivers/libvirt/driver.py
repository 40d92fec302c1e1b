# SPDX-License-Identifier: Apache-2.0
"""The compute driver ``libvirt``: each instance is a virtual machine of qemu, which libvirt runs.

Machines and libvirt go on without the agent. A driver that is built again finds them by the names of their domains
(:mod:`moorage_plugins.drivers.libvirt.definition`), which have the token.

A machine is changed only under the lock of its instance (:mod:`moorage_plugins.drivers.libvirt.records`), and the last request of
an agent that was killed is done before the next call has that lock. So a call compares tokens and orders first and acts afterwards.
What became of a request is read from the domains and not from its error: a machine can end at any moment.

Two powers are absent. libvirt has nothing that ends machines when an agent is silent (SelfFencing), and the driver carries no
memory from host to host (LiveMigration).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.drivers.ended_tokens import EndedTokens
from moorage.drivers.interface import (
    ComputeDriver,
    DriverError,
    DriverTools,
    HostResources,
    Observed,
    Usage,
    Workload,
    WorkloadState,
)
from moorage_plugins.drivers.libvirt.definition import (
    find_image,
    host_resources,
    machine_xml,
    name_of,
    prefix_of,
    split_name,
)
from moorage_plugins.drivers.libvirt.records import Power, Record, Records
from moorage_plugins.drivers.libvirt.virsh import Domain, Virsh, VirshError

__all__ = ["LibvirtDriver"]

LOG = logging.getLogger(__name__)
_PAUSE = 0.2
#: Bytes of the logs that are read for a console.
_CONSOLE = 2**20
#: Options of ``virsh undefine``: what libvirt removes with a domain, if an operator has made it.
_WITH_IT = ("--managed-save", "--snapshots-metadata", "--checkpoints-metadata", "--nvram")


class LibvirtDriver(ComputeDriver):
    """Runs virtual machines of qemu through libvirt. A machine has no network, and a disk that it can only read."""

    api_version: ClassVar[tuple[int, int]] = (1, 2)

    def __init__(self, tools: DriverTools) -> None:
        super().__init__(tools)
        self._section = section = tools.conf.driver_libvirt
        self._clock = tools.clock
        program = shutil.which(section.virsh)
        if program is None:
            raise errors.ConfigError(
                f"[compute] driver = libvirt needs the program {section.virsh}, which is not on this machine. Install the package "
                "libvirt-clients, write its path to [driver_libvirt] virsh, or choose another driver."
            )
        self._virsh = Virsh(program, section.uri, section.timeout)
        self._images = Path(section.images)
        if not self._images.is_dir():
            raise errors.ConfigError(
                f"[driver_libvirt] images is {self._images}, which is no folder. Make it, and put images into it (see the guide of "
                "the driver libvirt), or write the path of another folder."
            )
        state_dir = Path(tools.conf.control_plane.state_dir).absolute()
        folder = state_dir / "libvirt" / tools.host
        self._consoles = Path(section.consoles).absolute() if section.consoles else state_dir / "consoles"
        for each in (folder, self._consoles):
            try:
                each.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise errors.ConfigError(
                    f"The folder {each} of the driver libvirt cannot be made: {error.strerror}. See [control_plane] state_dir and "
                    "[driver_libvirt] consoles."
                ) from error
        self._prefix = prefix_of(tools.host)
        self._records = Records(folder, tools.clock)
        self._ended = EndedTokens("libvirt", tools)
        #: Longer than an operation that works takes.
        self._patience = 4 * section.timeout + section.shutdown_timeout

    # -- the driver -----------------------------------------------------------------------------------------------

    @override
    def check(self, workload: Workload) -> None:
        self._definition(workload, 0)

    @override
    def spawn(self, workload: Workload, token: int) -> None:
        uuid, definition = workload.uuid, self._definition(workload, token)
        with self._faults(), self._records.held(uuid, self._patience) as lock:
            domains = self._domains(uuid)
            if (
                max(domains, default=0) > token
                or self._ended(uuid) >= token
                or self._records.read(uuid, token) is not None
            ):
                return
            before = self._take_place(uuid, token, definition, domains, lock)
            try:
                self._execute(uuid, token, domains.get(token), lock)
            except DriverError as error:
                if not before:
                    raise
                self._remove(uuid, token, lock)
                raise DriverError(f"{error}. {self._restored(uuid, before, token, lock)}") from error
            self._records.write(uuid, token, Record(Power.ON))
            for older in domains:
                if older < token:
                    self._remove(uuid, older, lock)

    @override
    def destroy(self, uuid: str, up_to_token: int) -> None:
        with self._faults(), self._records.held(uuid, self._patience) as lock:
            self._ended.note(uuid, up_to_token)
            for token in self._domains(uuid):
                if token <= up_to_token:
                    self._remove(uuid, token, lock)

    @override
    def inspect(self) -> Mapping[str, Observed]:
        found: dict[str, Observed] = {}
        with self._faults():
            # Read before the domains, and again after them: an operation may change both meanwhile.
            records = self._records.all()
            domains: dict[str, dict[int, Domain]] = {}
            for name, domain in self._virsh.domains(self._prefix).items():
                if (of := split_name(self._prefix, name)) is not None:
                    domains.setdefault(of[0], {})[of[1]] = domain
            for uuid in {*records, *domains}:
                own, of_libvirt = records.get(uuid, {}), domains.get(uuid, {})
                # A call that holds an instance may have made nothing of it yet.
                if token := max([*own, *of_libvirt], default=0):
                    seen = self._observed(uuid, token, own.get(token), of_libvirt.get(token))
                    if seen is not None:
                        found[uuid] = seen
        return found

    @override
    def resources(self) -> HostResources:
        """Processors and memory of the host, also what its own system uses, and the trait of its architecture.

        Disks, GPUs and traits of processors are none: machines get no disk of the host and no devices, and which features of its
        processors they see is libvirt's choice.
        """
        with self._faults():
            return host_resources(self._virsh.capabilities(), self._section.virt_type)

    # -- further powers -------------------------------------------------------------------------------------------

    def stop(self, uuid: str, token: int, order: int) -> None:
        """See :class:`moorage.drivers.interface.PowerControl`."""
        with self._ordered(uuid, token, order) as held:
            if held is None:
                return
            record, domain, lock = held
            if domain is None or not domain.active:
                # What has ended stays that; what a killed stop has ended is stopped.
                power = Power.OFF if record.power is Power.STOPPING else record.power
                self._records.write(uuid, token, dataclasses.replace(record, power=power))
                return
            stopping = self._records.write(uuid, token, dataclasses.replace(record, power=Power.STOPPING))
            self._shut_down(uuid, token, lock)
            self._end(uuid, token, lock)
            self._records.write(uuid, token, dataclasses.replace(stopping, power=Power.OFF))

    def start(self, uuid: str, token: int, order: int) -> None:
        """See :class:`moorage.drivers.interface.PowerControl`."""
        with self._ordered(uuid, token, order) as held:
            if held is None:
                return
            record, domain, lock = held
            if domain is None:
                raise DriverError("libvirt does not know the machine of the instance any more; rebuild the instance")
            if record.power is Power.STOPPING and domain.active:
                # The stop was killed, and its machine may be about to end.
                self._end(uuid, token, lock)
                domain = None
            starting = self._records.write(uuid, token, dataclasses.replace(record, power=Power.ON))
            self._execute(uuid, token, domain, lock)
            # Tells a reader that this happened after it had looked.
            self._records.write(uuid, token, starting)

    def reboot(self, uuid: str, token: int, order: int) -> None:
        """See :class:`moorage.drivers.interface.PowerControl`."""
        self.stop(uuid, token, order)
        self.start(uuid, token, order)

    def prepare(self, workload: Workload, token: int) -> str:
        """See :class:`moorage.drivers.interface.Migration`.

        A machine writes to no disk, so a move carries nothing: the machine boots again.
        """
        uuid, definition = workload.uuid, self._definition(workload, token)
        with self._faults(), self._records.held(uuid, self._patience) as lock:
            domains = self._domains(uuid)
            newer = max([*domains, self._ended(uuid) + 1])
            if newer <= token and self._records.read(uuid, token) is None:
                self._take_place(uuid, token, definition, domains, lock)
                self._records.write(uuid, token, Record(Power.OFF))
                for older in domains:
                    if older < token:
                        self._remove(uuid, older, lock)
        return ""

    def console(self, uuid: str, lines: int) -> str:
        """See :class:`moorage.drivers.interface.Console`: what the machine writes to its first serial line."""
        kept = b""
        with self._faults():
            token = max(self._records.tokens(uuid), default=0)
            if not token:
                raise DriverError(f"there is nothing of instance {uuid} on this host")
            for path in self._logs(uuid, token):
                # libvirt may rename it in this moment.
                with contextlib.suppress(FileNotFoundError):
                    kept = _tail(path, _CONSOLE - len(kept)) + kept
        return "".join(kept.decode("utf-8", "replace").splitlines(keepends=True)[-lines:]) if lines > 0 else ""

    def usage(self) -> Mapping[str, Usage]:
        """See :class:`moorage.drivers.interface.UsageReport`."""
        with self._faults():
            found = {split_name(self._prefix, name): used for name, used in self._virsh.usage(self._prefix).items()}
            return {
                of[0]: Usage(*used)
                for of, used in found.items()
                if of is not None and of[1] == max(self._records.tokens(of[0]), default=of[1])
            }

    # -- parts ----------------------------------------------------------------------------------------------------

    def _definition(self, workload: Workload, token: int) -> str:
        return machine_xml(
            workload,
            name=name_of(self._prefix, workload.uuid, token),
            token=token,
            host=self.tools.host,
            kind=self._section.virt_type,
            image=find_image(self._images, workload),
            log=self._log(workload.uuid, token),
        )

    def _log(self, uuid: str, token: int) -> Path:
        return self._consoles / f"{name_of(self._prefix, uuid, token)}.log"

    def _logs(self, uuid: str, token: int) -> Sequence[Path]:
        """Returns the files that libvirt keeps of what a machine wrote, the newest first."""
        log = self._log(uuid, token)
        return [log, *sorted(self._consoles.glob(f"{log.name}.*"))]

    def _domains(self, uuid: str) -> Mapping[int, Domain | None]:
        """Token -> domain of an instance, from the oldest to the newest; None for a token without one."""
        prefix = f"{self._prefix}{uuid}-"
        found: dict[int, Domain | None] = dict.fromkeys(self._records.tokens(uuid))
        for name, domain in self._virsh.domains(prefix).items():
            of = split_name(self._prefix, name)
            if of is not None and of[0] == uuid:
                found[of[1]] = domain
        return dict(sorted(found.items()))

    @contextlib.contextmanager
    def _ordered(self, uuid: str, token: int, order: int) -> Iterator[tuple[Record, Domain | None, int] | None]:
        """Holds a workload for a power call, and keeps its order; None where the call comes too late, or nothing ever ran."""
        with self._faults(), self._records.held(uuid, self._patience) as lock:
            domains = self._domains(uuid)
            record = self._records.read(uuid, token)
            if max(domains, default=0) != token or record is None or record.order > order:
                yield None
                return
            yield dataclasses.replace(record, order=order), domains[token], lock

    def _take_place(
        self, uuid: str, token: int, definition: str, domains: Mapping[int, Domain | None], lock: int
    ) -> int:
        """Defines a machine that does not execute, and ends what runs under older tokens.

        Returns the token of what is to run again if the new one cannot, 0 for none.
        """
        self._records.begin(uuid, token)
        try:
            if domains.get(token) is None:
                self._define(definition, lock)
            return self._end_older(uuid, token, domains, lock)
        except DriverError:
            # An older one may run still.
            self._remove(uuid, token, lock)
            raise

    def _define(self, definition: str, lock: int) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".xml", encoding="utf-8") as file:
            file.write(definition)
            file.flush()
            self._virsh.run("define", file.name, lock=lock)

    def _end_older(self, uuid: str, token: int, domains: Mapping[int, Domain | None], lock: int) -> int:
        """Ends what runs under older tokens; the token of what is to run again if the new one cannot, 0 for none."""
        before = 0
        for older, domain in domains.items():
            if older >= token:
                continue
            record = self._records.read(uuid, older)
            ran = domain is not None and domain.active
            if ran and record is not None:
                self._records.write(uuid, older, dataclasses.replace(record, power=Power.REPLACED))
            if ran:
                self._end(uuid, older, lock)
            if record is not None and domain is not None and (ran or record.power is Power.REPLACED):
                before = older
        return before

    def _restored(self, uuid: str, before: int, token: int, lock: int) -> str:
        """Runs an older workload again whose replacement cannot run; returns a sentence with the result.

        :param token: of the workload that cannot run. Power calls of operations before its own come too late from here on.
        """
        self._records.write(uuid, before, Record(Power.ON, token))
        try:
            self._execute(uuid, before, None, lock)
        except DriverError as error:
            return f"What ran before was ended, and cannot be started again: {error}"
        return "What ran before was started again."

    def _execute(self, uuid: str, token: int, domain: Domain | None, lock: int) -> None:
        """Has a defined machine execute.

        :param domain: as it was seen; None: it does not run.
        :raises DriverError: it does not execute.
        """
        active = domain is not None and domain.active
        if domain is not None and active and not domain.paused:
            return
        self._request(
            "resume" if active else "start",
            uuid,
            token,
            lock,
            lambda found: found is not None and found.active and not found.paused,
        )

    def _shut_down(self, uuid: str, token: int, lock: int) -> None:
        """Asks the system of a machine to end, and waits for it."""
        if not self._section.shutdown_timeout:
            return
        end = self._clock.monotonic() + self._section.shutdown_timeout
        # One that does not listen is ended otherwise.
        with contextlib.suppress(VirshError):
            self._virsh.run("shutdown", name_of(self._prefix, uuid, token), "--mode", "acpi", lock=lock)
        while self._clock.monotonic() < end:
            domain = self._domains(uuid).get(token)
            if domain is None or not domain.active:
                return
            self._clock.sleep(_PAUSE)

    def _end(self, uuid: str, token: int, lock: int) -> None:
        """Ends what runs under a token, at once.

        :raises DriverError: it may still run.
        """
        self._request("destroy", uuid, token, lock, lambda found: found is None or not found.active)

    def _remove(self, uuid: str, token: int, lock: int) -> None:
        """Removes all that there is of a token.

        :raises DriverError: it may still run.
        """
        domain = self._domains(uuid).get(token)
        if domain is not None and domain.active:
            self._end(uuid, token, lock)
        if domain is not None:
            self._request("undefine", uuid, token, lock, lambda found: found is None, *_WITH_IT)
        for path in self._logs(uuid, token):
            path.unlink(missing_ok=True)
        self._records.clear(uuid, token)

    def _request(
        self, what: str, uuid: str, token: int, lock: int, done: Callable[[Domain | None], bool], *options: str
    ) -> None:
        """Has libvirt do something with a domain, which may be done already.

        :raises VirshError: it is not done.
        """
        try:
            self._virsh.run(what, name_of(self._prefix, uuid, token), *options, lock=lock)
        except VirshError:
            if not done(self._domains(uuid).get(token)):
                raise

    def _observed(self, uuid: str, token: int, before: Record | None, domain: Domain | None) -> Observed | None:
        """What there is of a workload; None when it is removed in this moment.

        :param before: its record before the domains were read.
        """
        if domain is not None and domain.paused:
            return Observed(token, WorkloadState.PAUSED, None, "It was paused outside of Moorage, or its disk failed.")
        busy = self._records.busy(uuid)
        record = self._records.read(uuid, token)
        since = record.since if record is not None else None
        if domain is not None and domain.active:
            return Observed(token, WorkloadState.RUNNING, since)
        if record is None and domain is None and token not in self._records.tokens(uuid):
            return None
        if busy and (record is None or record.power is not Power.OFF):
            return Observed(token, WorkloadState.RUNNING, since, "An operation works on it now.")
        if record is None:
            return Observed(token, WorkloadState.FAILED, None, "No start of it has succeeded.")
        return _at_rest(token, record, domain, changed=record != before)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except DriverError as error:
            cause = error if isinstance(error, VirshError) else error.__cause__
            if isinstance(cause, VirshError):
                LOG.warning("libvirt at %s: %s", self._section.uri, cause.detail)
            raise
        except OSError as error:
            LOG.error("A file of the driver libvirt failed: %s", error)
            raise DriverError(
                f"a file of the driver libvirt failed ({error.strerror}); the log of the agent names it"
            ) from error


def _tail(path: Path, most: int) -> bytes:
    """Returns the end of a file, at most so many bytes."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


def _at_rest(token: int, record: Record, domain: Domain | None, *, changed: bool) -> Observed:
    """What there is of a machine that ran once and does not run.

    :param changed: an operation has changed the record since the domain was read.
    """
    if record.power in (Power.OFF, Power.STOPPING):
        return Observed(token, WorkloadState.STOPPED, record.since)
    if changed:
        return Observed(token, WorkloadState.RUNNING, record.since, "An operation has worked on it.")
    if record.power is Power.REPLACED:
        return Observed(token, WorkloadState.FAILED, None, "It was ended for a rebuild, which was not done.")
    if domain is None:
        return Observed(token, WorkloadState.FAILED, None, "libvirt does not know it any more.")
    if domain.shut_down:
        return Observed(token, WorkloadState.ENDED, None, "It shut down.")
    return Observed(token, WorkloadState.FAILED, None, domain.ended_because)
