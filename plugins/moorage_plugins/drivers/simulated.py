# SPDX-License-Identifier: Apache-2.0
"""A simulated hypervisor. What it runs are files, so that an agent that was killed finds what really exists.

A flavor's extra specs can make it slow or fail: ``sim:delay_ms`` (milliseconds) and ``sim:fail`` (the text of the fault) its
builds, ``sim:<operation>_delay_ms`` and ``sim:<operation>_fail`` another operation (rebuild, resize, migrate, live_migrate,
unshelve, shelve_offload). Of a move it is the preparation of the destination that they make slow, or have fail.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import randomness
from moorage.drivers.ended_tokens import EndedTokens
from moorage.drivers.interface import ComputeDriver, DriverError, DriverTools, Observed, Workload, WorkloadState

__all__ = ["SimulatedDriver"]

LOG = logging.getLogger(__name__)
#: The longest simulated delay, in seconds.
_LONGEST = 3600.0
_RUNNING, _STOPPED, _PAUSED = WorkloadState.RUNNING, WorkloadState.STOPPED, WorkloadState.PAUSED


@dataclass(frozen=True, slots=True)
class _Content:
    """What the file of a workload says.

    :param order: the highest order of the calls for it. :param run: the memory of the workload; each start of it has another one.
    """

    state: WorkloadState
    order: int
    run: str

    @classmethod
    def parse(cls, text: str) -> _Content:
        """A file without content is of a workload that runs."""
        state, order, run = text.split() if text.strip() else (_RUNNING, "0", "-")
        return cls(WorkloadState(state), int(order), run)

    def __str__(self) -> str:
        # Of one length always, so that a killed writer leaves one or the other.
        return f"{self.state.value:8} {self.order:020d} {self.run:32}\n"


class SimulatedDriver(ComputeDriver):
    """Builds and destroys instances as files, and moves them between hosts with the same state folder.

    Each effect lies under a name with its token, in a folder of the instance's own; the newest token is the instance, older
    ones are what tries left that were taken over. The file says whether it runs. ``[compute] build_delay``, ``destroy_delay`` and
    ``fail_builds`` say how slow it is, and how it fails, where the flavor does not say.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: DriverTools) -> None:
        super().__init__(tools)
        section = tools.conf.compute
        #: Text: a path object costs more than the call of the system.
        self._folder = os.path.join(tools.conf.control_plane.state_dir, "hypervisors", tools.host)
        self._clock = tools.clock
        self._build_delay = float(section.build_delay)
        self._destroy_delay = float(section.destroy_delay)
        self._fail_builds = str(section.fail_builds)
        os.makedirs(self._folder, exist_ok=True)
        self._ended = EndedTokens("simulated", tools)

    @override
    def check(self, workload: Workload) -> None:
        """Takes the time that the operation takes.

        :raises DriverError: the flavor or the configuration says that it fails.
        """
        extra_specs, operation = workload.extra_specs, workload.operation
        builds = operation == "build"
        prefix = "sim:" if builds else f"sim:{operation}_"
        self._clock.sleep(_seconds(prefix, extra_specs, self._build_delay))
        fault = extra_specs.get(f"{prefix}fail", (self._fail_builds or None) if builds else None)
        if fault is not None:
            raise DriverError(fault or f"the simulated {operation} failed")

    @override
    def spawn(self, workload: Workload, token: int) -> None:
        self.check(workload)
        self._make(workload.uuid, token, _Content(_RUNNING, 0, randomness.new_hex()))

    @override
    def destroy(self, uuid: str, up_to_token: int) -> None:
        self._clock.sleep(self._destroy_delay)
        with self._exclusive():
            self._ended.note(uuid, up_to_token)
            self._remove(uuid, (token for token in self._tokens(uuid, also_unfinished=True) if token <= up_to_token))

    @override
    def inspect(self) -> Mapping[str, Observed]:
        found = {}
        with self._exclusive():
            for entry in os.scandir(self._folder):
                if tokens := self._tokens(entry.name) if entry.is_dir() else set():
                    content = _read(self._file(entry.name, max(tokens)))
                    detail = "" if content.state is _RUNNING else f"It is {content.state.value}."
                    found[entry.name] = Observed(max(tokens), content.state, None, detail)
        return found

    # -- further powers -------------------------------------------------------------------------------------------

    def stop(self, uuid: str, token: int, order: int) -> None:
        """See :class:`moorage.drivers.interface.PowerControl`."""
        self._change(uuid, token, order, lambda now: replace(now, state=_STOPPED))

    def start(self, uuid: str, token: int, order: int) -> None:
        """See :class:`moorage.drivers.interface.PowerControl`."""
        self._change(uuid, token, order, _started)

    def reboot(self, uuid: str, token: int, order: int) -> None:
        """See :class:`moorage.drivers.interface.PowerControl`."""
        self._change(uuid, token, order, lambda now: replace(now, state=_RUNNING, run=randomness.new_hex()))

    def prepare(self, workload: Workload, token: int) -> str:
        """See :class:`moorage.drivers.interface.Migration`."""
        self.check(workload)
        self._make(workload.uuid, token, _Content(_STOPPED, 0, "-"))
        return os.path.relpath(self._file(workload.uuid, token), os.path.dirname(self._folder))

    def transfer(self, uuid: str, token: int, order: int, to: str) -> None:
        """See :class:`moorage.drivers.interface.LiveMigration`."""
        there = os.path.join(os.path.dirname(self._folder), to)
        with self._exclusive(os.path.dirname(os.path.dirname(there))):
            if max(self._tokens(uuid), default=0) != token:
                return
            source = self._file(uuid, token)
            before = _read(source)
            if before.order > order:
                return
            try:
                arrives = _read(there)
            except FileNotFoundError:
                raise DriverError("the destination knows nothing of the instance") from None
            if arrives.state is _RUNNING:
                raise DriverError("the instance runs on the destination already")
            _write(source, replace(before, state=_PAUSED, order=order))
            _write(there, replace(arrives, state=_PAUSED, run=before.run))

    # -- parts ----------------------------------------------------------------------------------------------------

    def _make(self, uuid: str, token: int, content: _Content) -> None:
        """Has there be this workload and none of an older token, unless there is, or was, one of this or a newer token."""
        with self._exclusive():
            tokens = self._tokens(uuid)
            if max(tokens, default=0) < token and self._ended(uuid) < token:
                if tokens:
                    self._remove(uuid, tokens)
                self._create(uuid, token, content)

    def _create(self, uuid: str, token: int, content: _Content) -> None:
        folder = f"{self._folder}/{uuid}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        made = f"{folder}/.{token}"
        _write(made, content, os.O_CREAT)
        os.rename(made, self._file(uuid, token))

    def _change(self, uuid: str, token: int, order: int, change: Callable[[_Content], _Content]) -> None:
        """Changes the workload with this token, unless a later call has changed it."""
        with self._exclusive():
            if max(self._tokens(uuid), default=0) != token:
                return
            now = _read(self._file(uuid, token))
            if now.order <= order:
                _write(self._file(uuid, token), replace(change(now), order=order))

    def _file(self, uuid: str, token: int) -> str:
        return f"{self._folder}/{uuid}/{token}"

    def _tokens(self, uuid: str, *, also_unfinished: bool = False) -> set[int]:
        """:param also_unfinished: those, too, whose making was killed."""
        try:
            names = os.listdir(f"{self._folder}/{uuid}")
        except FileNotFoundError:
            return set()
        return {int(name) for each in names if (name := each.lstrip(".") if also_unfinished else each).isdigit()}

    def _remove(self, uuid: str, tokens: Iterable[int]) -> None:
        for token in tokens:
            for file in (self._file(uuid, token), f"{self._folder}/{uuid}/.{token}"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file)
        # Fails while another try has a file there.
        with contextlib.suppress(OSError):
            os.rmdir(f"{self._folder}/{uuid}")

    @contextlib.contextmanager
    def _exclusive(self, *others: str) -> Iterator[None]:
        """One call at a time changes a host, also calls of several agents.

        :param others: folders of further hosts.
        """
        try:
            with contextlib.ExitStack() as locks:
                # In one order, so that two moves do not wait for each other.
                for folder in sorted({self._folder, *others}):
                    locks.enter_context(_locked(folder))
                yield
        except OSError as error:
            LOG.error("The folder %s failed: %s", self._folder, error)
            raise DriverError(
                f"the hypervisor's folder failed ({error.strerror}); the log of the agent names it"
            ) from error


def _started(now: _Content) -> _Content:
    run = now.run if now.state in (_RUNNING, _PAUSED) else randomness.new_hex()
    return replace(now, state=_RUNNING, run=run)


def _read(path: str) -> _Content:
    with open(path, encoding="ascii") as file:
        return _Content.parse(file.read())


def _write(path: str, content: _Content, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_WRONLY | flags, 0o666)
    try:
        os.pwrite(descriptor, str(content).encode(), 0)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _seconds(prefix: str, extra_specs: Mapping[str, str], default: float) -> float:
    milliseconds = extra_specs.get(f"{prefix}delay_ms")
    if milliseconds is None:
        return default
    try:
        seconds = float(milliseconds) / 1000
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST:
        raise DriverError(
            f"{prefix}delay_ms of the flavor is {milliseconds!r}; it must be milliseconds from 0 to {_LONGEST * 1000:.0f}"
        )
    return seconds
