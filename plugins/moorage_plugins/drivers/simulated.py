# SPDX-License-Identifier: Apache-2.0
"""Simulates a hypervisor. Its workloads are symbolic links, so that an agent finds them again after it was killed.

A flavor's extra specs can make it slow or fail: ``sim:delay_ms`` (milliseconds) and ``sim:fail`` (the text of the fault) its
builds, ``sim:<operation>_delay_ms`` and ``sim:<operation>_fail`` another operation (rebuild, resize, migrate, live_migrate,
unshelve, shelve_offload). Of a move it is the preparation of the destination that they make slow, or have fail.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import randomness
from moorage.drivers.ended_tokens import EndedTokens
from moorage.drivers.interface import ComputeDriver, DriverError, DriverTools, Observed, Workload, WorkloadState

__all__ = ["SimulatedDriver"]

LOG = logging.getLogger(__name__)
#: Names in the folder of a host that are no instances: a link that is going to replace another, and, with a uuid behind it, a
#: folder that is being converted.
_DRAFT, _EARLIER = ".draft", ".earlier-"
#: The longest simulated delay, in seconds.
_LONGEST = 3600.0
_RUNNING, _STOPPED, _PAUSED = WorkloadState.RUNNING, WorkloadState.STOPPED, WorkloadState.PAUSED


@dataclass(frozen=True, slots=True)
class _Content:
    """The state of a workload, and the text of the link that holds it.

    :param order: the highest order of the calls for it. :param run: the memory of the workload; each start of it has another one.
    """

    token: int
    state: WorkloadState
    order: int
    run: str

    @classmethod
    def parse(cls, text: str) -> _Content:
        """Reads the text of a link.

        :raises ValueError: it is not the text of a workload.
        """
        token, state, order, run = text.split()
        return cls(int(token), WorkloadState(state), int(order), run)

    def __str__(self) -> str:
        return f"{self.token} {self.state.value} {self.order} {self.run}"


class SimulatedDriver(ComputeDriver):
    """Builds and destroys instances as links, and moves them between hosts with the same state folder.

    ``hypervisors/HOST/UUID`` in the state folder is a symbolic link to a text: the token, the state, the order and the memory of
    the workload. One call of the system makes or replaces it, so that a killed agent leaves one or the other. ``[compute]
    build_delay``, ``destroy_delay`` and ``fail_builds`` say how slow it is, and how it fails, where the flavor does not say.
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
        with self._exclusive():
            _convert(self._folder)
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
        self._make(workload.uuid, _Content(token, _RUNNING, 0, randomness.new_hex()))

    @override
    def destroy(self, uuid: str, up_to_token: int) -> None:
        self._clock.sleep(self._destroy_delay)
        with self._exclusive():
            self._ended.note(uuid, up_to_token)
            now = _read(self._path(uuid))
            if now is not None and now.token <= up_to_token:
                os.unlink(self._path(uuid))

    @override
    def inspect(self) -> Mapping[str, Observed]:
        # Only the names are read under the lock: without it, one that is being replaced might be missed. A link that is replaced
        # later has its earlier or its later text.
        with self._exclusive(), os.scandir(self._folder) as entries:
            names = [entry.name for entry in entries if entry.is_symlink() and entry.name != _DRAFT]
        try:
            return {name: _observed(now.token, now.state) for name in names if (now := _read(self._path(name)))}
        except OSError as error:
            raise self._failure(error) from error

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
        self._make(workload.uuid, _Content(token, _STOPPED, 0, "-"))
        return f"{os.path.basename(self._folder)}/{workload.uuid}/{token}"

    def transfer(self, uuid: str, token: int, order: int, to: str) -> None:
        """See :class:`moorage.drivers.interface.LiveMigration`."""
        host, name, arriving = to.split("/")
        folder = os.path.join(os.path.dirname(self._folder), host)
        with self._exclusive(folder):
            before = _read(self._path(uuid))
            if before is None or before.token != token or before.order > order:
                return
            arrives = _read(f"{folder}/{name}")
            if arrives is None or arrives.token != int(arriving):
                raise DriverError("the destination knows nothing of the instance")
            if arrives.state is _RUNNING:
                raise DriverError("the instance runs on the destination already")
            _replace(self._folder, uuid, replace(before, state=_PAUSED, order=order))
            _replace(folder, name, replace(arrives, state=_PAUSED, run=before.run))

    # -- parts ----------------------------------------------------------------------------------------------------

    def _make(self, uuid: str, content: _Content) -> None:
        """Has there be this workload and none of an older token, unless there is, or was, one of this or a newer token."""
        with self._exclusive():
            now = _read(self._path(uuid))
            if (now is None or now.token < content.token) and self._ended(uuid) < content.token:
                self._create(uuid, content, now)

    def _create(self, uuid: str, content: _Content, before: _Content | None) -> None:
        if before is None:
            os.symlink(str(content), self._path(uuid))
        else:
            _replace(self._folder, uuid, content)

    def _change(self, uuid: str, token: int, order: int, change: Callable[[_Content], _Content]) -> None:
        """Changes the workload with this token, unless a later call has changed it."""
        with self._exclusive():
            now = _read(self._path(uuid))
            if now is not None and now.token == token and now.order <= order:
                _replace(self._folder, uuid, replace(change(now), order=order))

    def _path(self, uuid: str) -> str:
        return f"{self._folder}/{uuid}"

    @contextlib.contextmanager
    def _exclusive(self, *others: str) -> Iterator[None]:
        """One call at a time changes a host, also calls of several agents.

        :param others: folders of further hosts.
        """
        locked: list[int] = []
        try:
            # In one order, so that two moves do not wait for each other.
            for folder in sorted({self._folder, *others}):
                locked.append(os.open(folder, os.O_RDONLY))
                fcntl.flock(locked[-1], fcntl.LOCK_EX)
            yield
        except OSError as error:
            raise self._failure(error) from error
        finally:
            for descriptor in locked:
                os.close(descriptor)

    def _failure(self, error: OSError) -> DriverError:
        """Logs an error of the system, and returns what is raised for it."""
        LOG.error("The folder %s failed: %s", self._folder, error)
        return DriverError(f"the hypervisor's folder failed ({error.strerror}); the log of the agent names it")


@functools.lru_cache(1024)
def _observed(token: int, state: WorkloadState) -> Observed:
    """Returns what :meth:`SimulatedDriver.inspect` says of a workload. Workloads with the same token and state share one object."""
    return Observed(token, state, None, "" if state is _RUNNING else f"It is {state.value}.")


def _started(now: _Content) -> _Content:
    run = now.run if now.state in (_RUNNING, _PAUSED) else randomness.new_hex()
    return replace(now, state=_RUNNING, run=run)


def _read(path: str) -> _Content | None:
    try:
        return _Content.parse(os.readlink(path))
    except FileNotFoundError:
        return None
    except ValueError:
        raise OSError(errno.EINVAL, f"{path} is no link of a workload") from None


def _replace(folder: str, uuid: str, content: _Content) -> None:
    draft = f"{folder}/{_DRAFT}"
    with contextlib.suppress(FileNotFoundError):
        # A killed call has left it.
        os.unlink(draft)
    os.symlink(str(content), draft)
    os.rename(draft, f"{folder}/{uuid}")


def _convert(folder: str) -> None:
    """Converts the workloads of an earlier release to links. That release kept a folder per workload, with a file per token."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in names:
        path, uuid = f"{folder}/{name}", name.removeprefix(_EARLIER)
        tokens = [int(each) for each in os.listdir(path) if each.isdigit()]
        if name == uuid:
            os.rename(path, path := f"{folder}/{_EARLIER}{uuid}")
        if tokens:
            with open(f"{path}/{max(tokens)}", encoding="ascii") as file:
                # One without content is of a workload that runs.
                content = _Content.parse(f"{max(tokens)} {file.read() or f'{_RUNNING.value} 0 -'}")
            with contextlib.suppress(FileExistsError):
                os.symlink(str(content), f"{folder}/{uuid}")
        shutil.rmtree(path)


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
