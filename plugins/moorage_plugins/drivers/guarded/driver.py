# SPDX-License-Identifier: Apache-2.0
"""What compute drivers share whose workloads run in sandboxes on the agent's machine: ``process`` and ``container``.

A guardian process (:mod:`moorage_plugins.drivers.guarded.guardian`) runs each workload and survives the agent. A driver and its
guardians share files alone (:mod:`moorage_plugins.drivers.guarded.files`), so a driver that is built again finds everything.

At most one copy of a workload runs on a host, however many agents, living and late, call at once. A newer token makes its folder
first, then ends older ones and waits for their locks, then starts its guardian. A guardian looks for newer folders after it has
its lock. So either the newer token sees the lock and ends the older guardian, or the older guardian sees the newer folder and ends
itself.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, randomness
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
from moorage_plugins.drivers.guarded.files import (
    LOG_FILE,
    OLD_LOG_FILE,
    SPEC,
    STATE,
    children_of,
    make_lock,
    power_call,
    read_json,
    signal_guardian,
    start_of,
    tokens_of,
    try_lock,
    was_stopped,
    write_json,
)
from moorage_plugins.drivers.guarded.guardian import ANSWER
from moorage_plugins.drivers.guarded.lease import NEVER, OutdatedError, keep_lease
from moorage_plugins.drivers.guarded.limits import clean_up, group_name, groups_for, remove
from moorage_plugins.drivers.guarded.machine import memory_mib, processor_traits, processors, unoffered_gpus

__all__ = ["PATH", "GuardedDriver", "Sandbox"]

LOG = logging.getLogger(__name__)
_GUARDIAN = "moorage_plugins.drivers.guarded.guardian"
#: Where guardians and commands look for programs.
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_UIDS = 65_536
_PAUSE = 0.02
#: Seconds that a guardian has to kill its sandbox after ``stop_timeout``, and that the kernel has to end a killed guardian.
_GRACE = 5.0
_MIB = 2**20
#: Bytes of the logs that are read for a console.
_CONSOLE = _MIB
_NO_ANSWER = (
    "the guardian of the workload ended before it could say whether it runs; the log of the agent has what is known"
)
#: Names of folders that appear or disappear by a rename; the token follows.
_NEW, _OLD = ".new", ".old"


@dataclass(frozen=True, slots=True)
class Sandbox:
    """How a workload is run, kept for its guardian beside the limits.

    :param arguments: the command line of the sandbox.
    :param uid: the user that the sandbox is started as; None for the agent's.
    :param owner: the user of the workload; None for the agent's.
    :param not_found: what is said when the sandbox does not find the command.
    :param not_found_mark: the text in its last line by which that is seen; empty where the sandbox says it by itself.
    :param becoming: the beginning of the name of a process that is about to become the command; empty for none.
    :param cleanup: a command line that removes what a sandbox left; empty for none.
    :param joins_groups: the sandbox puts the workload into the control groups itself.
    :param memory_mb: the limit of each process where there are no control groups; 0 for none.
    """

    arguments: Sequence[str]
    uid: int | None
    owner: int | None
    not_found: str
    not_found_mark: str = ""
    becoming: str = ""
    cleanup: Sequence[str] = ()
    joins_groups: bool = False
    memory_mb: int = 0


class GuardedDriver(ComputeDriver):
    """Runs workloads in sandboxes, each watched by a guardian process that survives the agent.

    Subclasses say what the sandbox is: :meth:`_find_programs`, ``check`` and :meth:`_sandbox`.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    runs_commands: ClassVar[bool] = True
    #: The name of the driver, and that of the folder in the state folder where the files of workloads lie by default.
    name: ClassVar[str]
    folder_name: ClassVar[str]
    #: Processes around the workload that its usage leaves out.
    around: ClassVar[int] = 0

    def __init__(self, tools: DriverTools) -> None:
        super().__init__(tools)
        self._section = section = tools.conf[f"driver_{self.name}"]
        self._find_programs()
        self._clock = tools.clock
        state_dir = Path(tools.conf.control_plane.state_dir)
        self._folder = Path(section.folder or state_dir / self.folder_name) / tools.host
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise errors.ConfigError(
                f"The folder {self._folder} of [driver_{self.name}] folder cannot be made: {error.strerror}."
            ) from error
        self._ended = EndedTokens(self.name, tools)
        for uuid in os.listdir(self._folder):
            self._tidy(uuid, sys.maxsize)

    # -- the driver -----------------------------------------------------------------------------------------------

    @override
    def spawn(self, workload: Workload, token: int) -> None:
        self.check(workload)
        folder = self._folder / workload.uuid
        with self._faults():
            if self._newest(workload.uuid) > token:
                return
            self._make(folder, token, workload)
            if self._came_late(folder, token):
                return
            try:
                before = self._end_older(folder, token)
            except DriverError:
                if read_json(folder / str(token) / STATE) is None:
                    # A later start would run it beside what cannot be ended.
                    self._remove(folder / str(token))
                raise
            try:
                self._guard(folder / str(token))
            except DriverError as error:
                if before is None:
                    raise
                raise DriverError(f"{str(error).removesuffix('.')}. {self._restored(before, token)}") from error
            for older in tokens_of(folder):
                if older < token:
                    self._remove(folder / str(older))

    @override
    def destroy(self, uuid: str, up_to_token: int) -> None:
        with self._faults():
            self._ended.note(uuid, up_to_token)
            for token in tokens_of(self._folder / uuid):
                if token <= up_to_token:
                    self._remove(self._folder / uuid / str(token))
            self._tidy(uuid, up_to_token)

    @override
    def inspect(self) -> Mapping[str, Observed]:
        found = {}
        with self._faults():
            for uuid, token in self._all_newest():
                # It may be removed in this moment.
                seen = _look(self._folder / uuid / str(token), token)
                if seen is not None:
                    found[uuid] = seen
        return found

    @override
    def resources(self) -> HostResources:
        """Processors and memory that workloads may use, the disk that the folder is on, and the traits of the processors.

        GPUs are none of its resources: the sandbox gives workloads no devices. The log of the agent names those that there are.
        """
        if gpus := unoffered_gpus():
            LOG.warning(
                "The driver %s offers no GPUs, because its sandbox has no devices: %s.", self.name, ", ".join(gpus)
            )
        with self._faults():
            disk = shutil.disk_usage(self._folder).total // 2**30
        inventory = {"VCPU": processors(), "MEMORY_MB": memory_mib(), "DISK_GB": disk}
        return HostResources({name: units for name, units in inventory.items() if units > 0}, processor_traits())

    # -- further powers -------------------------------------------------------------------------------------------

    def stop(self, uuid: str, token: int, order: int) -> None:
        """See :class:`moorage.drivers.interface.PowerControl`."""
        with self._faults():
            if self._newest(uuid) == token:
                self._stop(self._folder / uuid / str(token), order)

    def start(self, uuid: str, token: int, order: int) -> None:
        """See :class:`moorage.drivers.interface.PowerControl`."""
        with self._faults():
            if self._newest(uuid) == token:
                self._start(self._folder / uuid / str(token), order)

    def reboot(self, uuid: str, token: int, order: int) -> None:
        """See :class:`moorage.drivers.interface.PowerControl`."""
        self.stop(uuid, token, order)
        self.start(uuid, token, order)

    def prepare(self, workload: Workload, token: int) -> str:
        """See :class:`moorage.drivers.interface.Migration`.

        A workload has no files outside of its sandbox, so a move carries nothing: the command begins again.
        """
        self.check(workload)
        folder = self._folder / workload.uuid
        with self._faults():
            if self._newest(workload.uuid) <= token:
                self._make(folder, token, workload, stopped=True)
                if self._came_late(folder, token):
                    return ""
                for older in tokens_of(folder):
                    if older < token:
                        self._remove(folder / str(older))
        return ""

    def console(self, uuid: str, lines: int) -> str:
        """See :class:`moorage.drivers.interface.Console`."""
        kept = b""
        with self._faults():
            token = self._newest(uuid)
            if not token:
                raise DriverError(f"there is nothing of instance {uuid} on this host")
            for name in (LOG_FILE, OLD_LOG_FILE):
                # The guardian may rename it in this moment.
                with contextlib.suppress(FileNotFoundError):
                    kept = _tail(self._folder / uuid / str(token) / name, _CONSOLE - len(kept)) + kept
        return "".join(kept.decode("utf-8", "replace").splitlines(keepends=True)[-lines:]) if lines > 0 else ""

    def usage(self) -> Mapping[str, Usage]:
        """See :class:`moorage.drivers.interface.UsageReport`."""
        found = {}
        with self._faults():
            for uuid, token in self._all_newest():
                state = read_json(self._folder / uuid / str(token) / STATE) or {}
                if state.get("state") == "running" and start_of(state["pid"]) == state["start"]:
                    found[uuid] = _usage([state["pid"], *children_of(state["pid"])][self.around :])
        return {uuid: usage for uuid, usage in found.items() if usage.memory_bytes}

    @property
    def self_fence(self) -> float:
        """See :class:`moorage.drivers.interface.SelfFencing`."""
        return float(self._section.self_fence)

    def renew(self, epoch: int, until: float) -> None:
        """See :class:`moorage.drivers.interface.SelfFencing`."""
        with self._faults():
            try:
                keep_lease(self._folder, epoch, until if self.self_fence else NEVER)
            except OutdatedError as error:
                LOG.error(
                    "The folder %s has a lease of epoch %s, and this agent has epoch %d.",
                    self._folder / "lease",
                    error,
                    epoch,
                )
                raise DriverError(
                    f"an agent of a later epoch ({error}) has the lease; if there is none, because the store was restored from a "
                    f"copy, stop the agent, rename the file {error}.json in the folder that its log names to 0.json, and start the "
                    "agent again (workloads go on until that lease is over; to remove the file or the folder ends them at once)"
                ) from error

    def not_fenced(self) -> Collection[str]:
        """See :class:`moorage.drivers.interface.SelfFencing`."""
        with self._faults():
            return {
                uuid
                for uuid in os.listdir(self._folder)
                for token in tokens_of(self._folder / uuid)
                if _goes_on(self._folder / uuid / str(token))
            }

    # -- the sandbox ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _find_programs(self) -> None:
        """Looks for the programs that make the sandbox.

        :raises ConfigError: one is not there, or may not be used.
        """

    @abc.abstractmethod
    def _sandbox(self, made: Path, own: Path, workload: Workload) -> Sandbox:
        """How the workload is run; writes more files into the folder where the sandbox needs some.

        :param made: the folder as it is now. :param own: the path that it gets afterwards.
        """

    # -- parts ----------------------------------------------------------------------------------------------------

    def _make(self, folder: Path, token: int, workload: Workload, *, stopped: bool = False) -> None:
        """Has the folder of the token appear with all that its guardian needs; nothing when it is there.

        :param stopped: it does not run until a power call starts it.
        """
        own = folder / str(token)
        while not own.exists():
            made = folder / f"{_NEW}-{token}-{randomness.new_hex()}"
            try:
                made.mkdir(parents=True, mode=0o700)
                write_json(
                    made / SPEC,
                    {**self._limits(workload, token), **dataclasses.asdict(self._sandbox(made, own, workload))},
                )
                make_lock(made)
                if stopped:
                    detail = "It waits for the end of a move."
                    write_json(made / STATE, {"state": "stopped", "since": self._clock.wall(), "detail": detail})
                    with power_call(made, 0, stop=True):
                        pass
                made.rename(own)
            except FileNotFoundError:
                # The instance was destroyed in this moment, by an operation with another token.
                continue
            except OSError:
                shutil.rmtree(made, ignore_errors=True)
                if not own.exists():
                    raise

    def _came_late(self, folder: Path, token: int) -> bool:
        """Returns whether a call destroyed what this token left before its folder was there; the folder is removed then.

        A call that does so later finds the folder.
        """
        if self._ended(folder.name) < token:
            return False
        self._remove(folder / str(token))
        self._tidy(folder.name, token)
        return True

    def _end_older(self, folder: Path, token: int) -> Path | None:
        """Ends what runs under older tokens; returns the newest workload that ever ran under one, unless it had ended before.

        The files of that workload stay until the new one runs. The others are removed: a try that was killed may not have run.
        """
        older = sorted(each for each in tokens_of(folder) if each < token)
        kept = max((each for each in older if read_json(folder / str(each) / STATE) is not None), default=0)
        for each in older:
            if each != kept:
                self._remove(folder / str(each))
        if not kept:
            return None
        newest = folder / str(kept)
        seen = _look(newest, kept)
        lock = self._end(newest)
        if lock is not None:
            os.close(lock)
        # What no power call stopped was ended for a replacement that was killed.
        replaced = seen is not None and seen.state is WorkloadState.STOPPED and not was_stopped(newest)
        running = seen is not None and seen.state is WorkloadState.RUNNING
        return newest if running or replaced else None

    def _restored(self, own: Path, token: int) -> str:
        """Runs the older workload again, after its replacement failed to run; returns a sentence with the result.

        :param token: of the workload that cannot run. Power calls of operations before its own come too late from here on.
        """
        try:
            again = self._guard(own, again=token)
        except DriverError as error:
            return f"What ran before was ended, and cannot be started again: {error}"
        return "What ran before was started again." if again else "What ran before was ended."

    def _guard(self, own: Path, *, again: int | None = None) -> bool:
        """Starts the guardian; returns True when the workload runs, or has ended, and False when a newer one has its place.

        :param again: the order with which a workload that has ended is run once more; False also when a later order was before it.
        :raises DriverError: it cannot run; then nothing of it is left, unless it has run before.
        """
        command = [
            sys.executable,
            "-I",
            "-m",
            _GUARDIAN,
            str(own),
            *(["--again", str(again)] if again is not None else []),
        ]
        try:
            done = subprocess.run(  # noqa: S603  (our own program)
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={"PATH": PATH, "LANG": "C.UTF-8"},
                start_new_session=True,
                timeout=self._section.start_timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            if again is None:
                # It may begin later.
                self._remove(own)
            raise DriverError(f"the workload did not run within {self._section.start_timeout:g} seconds") from error
        except OSError as error:
            if again is None:
                self._remove(own)
            LOG.error("The guardian of %s cannot be started: %s", own, error)
            raise DriverError(f"the guardian of the workload cannot be started: {error.strerror}") from error
        said, detail = _answer_of(done.stdout)
        if detail:
            LOG.warning("The workload in %s does not run: %s %s", own, said, detail)
        if said == "ready":
            return True
        if again is None:
            self._remove(own)
        if said != "newer":
            raise DriverError(said or _NO_ANSWER)
        return False

    def _remove(self, own: Path) -> None:
        """Ends what runs under one token, and has its folder disappear."""
        lock = self._end(own)
        if lock is None:
            return
        try:
            spec = read_json(own / SPEC) or {}
            clean_up(spec.get("cleanup", ()), lock)
            remove(group["folder"] for group in spec.get("groups", ()))
            _discard(own)
        finally:
            os.close(lock)

    def _end(self, own: Path, order: int | None = None) -> int | None:
        """Ends the guardian with its workload; returns the lock, with which nothing can run there. None: the folder is gone.

        :param order: of the power call that ends it; None is returned where a later power call comes meanwhile.
        :raises DriverError: it still runs.
        """
        begun = self._clock.monotonic()
        while True:
            try:
                lock = try_lock(own)
            except FileNotFoundError:
                return None
            if lock is not None:
                return lock
            waited = self._clock.monotonic() - begun
            late = waited > self._section.stop_timeout + _GRACE
            # Each time: a late call may have started another guardian meanwhile.
            if not self._signal(own, signal.SIGKILL if late else signal.SIGTERM, order):
                return None
            if waited > self._section.stop_timeout + 3 * _GRACE:
                LOG.error("What runs in %s could not be ended within %.0f seconds.", own, waited)
                raise DriverError(f"the workload could not be ended within {waited:.0f} seconds")
            self._clock.sleep(_PAUSE)

    def _signal(self, own: Path, number: signal.Signals, order: int | None) -> bool:
        """Signals the guardian; False when it must not be ended with this order, or is gone."""
        if order is None:
            signal_guardian(own, number)
            return True
        with contextlib.suppress(FileNotFoundError), power_call(own, order) as newest:
            # A start that finds the workload running keeps its order before it leaves it alone: so no signal after that.
            if newest:
                signal_guardian(own, number)
            return newest
        return False

    def _start(self, own: Path, order: int) -> None:
        with contextlib.suppress(FileNotFoundError), power_call(own, order) as newest:
            if not newest:
                return
        if was_stopped(own):
            # The stop may be under way, or was killed.
            lock = self._end(own, order)
            if lock is None:
                return
            os.close(lock)
        self._guard(own, again=order)

    def _stop(self, own: Path, order: int) -> None:
        with contextlib.suppress(FileNotFoundError), power_call(own, order, stop=True) as newest:
            if not newest:
                return
        lock = self._end(own, order)
        if lock is None:
            return
        try:
            if (read_json(own / STATE) or {}).get("state") == "running":
                # Its guardian was killed.
                write_json(own / STATE, {"state": "stopped", "since": self._clock.wall(), "detail": "It was stopped."})
        finally:
            os.close(lock)

    def _newest(self, uuid: str) -> int:
        """Returns the newest token that has a folder; 0: none has."""
        return max(tokens_of(self._folder / uuid), default=0)

    def _all_newest(self) -> Iterator[tuple[str, int]]:
        """Returns the newest token of each instance that has a folder."""
        for uuid in os.listdir(self._folder):
            if token := self._newest(uuid):
                yield uuid, token

    def _tidy(self, uuid: str, up_to_token: int) -> None:
        """Removes the files of renames that were interrupted, and then the instance's folder if it is empty."""
        folder = self._folder / uuid
        with contextlib.suppress(NotADirectoryError, FileNotFoundError):
            for name in os.listdir(folder):
                kind, _, rest = name.partition("-")
                token = rest.partition("-")[0]
                if kind in (_NEW, _OLD) and token.isdigit() and int(token) <= up_to_token:
                    _discard(folder / name)
        # Fails while another token is there.
        with contextlib.suppress(OSError):
            folder.rmdir()

    def _limits(self, workload: Workload, token: int) -> dict[str, Any]:
        section = self._section
        groups = groups_for(group_name(workload.uuid, token), workload.resources, section.max_processes)
        return {
            "groups": [dataclasses.asdict(group) for group in groups],
            "log_bytes": section.log_size * _MIB,
            "stop_seconds": section.stop_timeout,
        }

    def _uid(self, project_id: str) -> int | None:
        """Returns the user that a project's workloads have; None: the agent's own, since it may choose no other."""
        if os.getuid() != 0:
            return None
        digest = hashlib.sha256(project_id.encode()).digest()
        return int(self._section.first_uid) + int.from_bytes(digest[:4], "big") % _UIDS

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            LOG.error("The folder %s failed: %s", self._folder, error)
            raise DriverError(
                f"the folder of the driver {self.name} failed ({error.strerror}); the log of the agent names it"
            ) from error


def _answer_of(output: bytes) -> tuple[str, str]:
    """What a guardian answered, empty where it could not, and what else it wrote, which is for the log alone."""
    lines = output.decode("utf-8", "replace").split("\n")
    said = [line.removeprefix(ANSWER) for line in lines if line.startswith(ANSWER)]
    return "".join(said[-1:]), "\n".join(line for line in lines if not line.startswith(ANSWER)).strip()


def _discard(folder: Path) -> None:
    """Has a folder disappear by one rename, and removes what is in it: a call that makes it just now fails as a whole."""
    token = folder.name.split("-")[1] if folder.name.startswith(".") else folder.name
    gone = folder.with_name(f"{_OLD}-{token}-{randomness.new_hex()}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _look(own: Path, token: int) -> Observed | None:
    """What there is of one workload; None when it is removed in this moment."""
    try:
        lock = try_lock(own, shared=True)
    except FileNotFoundError:
        return None
    # What a guardian says last it says before it lets go of the lock.
    state = read_json(own / STATE)
    if lock is not None:
        os.close(lock)
    if state is None:
        if lock is None:
            return Observed(token, WorkloadState.RUNNING, None, "It is being started.")
        return Observed(token, WorkloadState.FAILED, None, "It was never started.")
    if state["state"] == "running" and lock is not None:
        detail = "Its guardian ended: it was killed, or the machine was started again."
        return Observed(token, WorkloadState.FAILED, None, detail)
    return Observed(token, WorkloadState(state["state"]), state["since"], state["detail"])


def _goes_on(own: Path) -> bool:
    """Returns whether a workload runs, or begins, whose guardian may not look at the lease of the host."""
    try:
        lock = try_lock(own, shared=True)
    except FileNotFoundError:
        return False
    if lock is not None:
        os.close(lock)
        return False
    state = read_json(own / STATE) or {}
    # Of the process that runs now, not of one before it.
    return not (state.get("lease") and start_of(state["pid"]) == state["start"])


def _tail(path: Path, most: int) -> bytes:
    """Returns the end of a file, at most so many bytes."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


def _usage(pids: Sequence[int]) -> Usage:
    """What processes use, with the processor time of their children that have ended."""
    ticks = pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            # utime, stime, cutime and cstime
            ticks += sum(map(int, stat[11:15]))
            pages += int(stat[21])
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))
