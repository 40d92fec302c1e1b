# SPDX-License-Identifier: Apache-2.0
"""The guardian of one workload: runs it in its sandbox, keeps what it writes, and says what became of it.

A program of its own, which the driver starts as ``python -m moorage_plugins.drivers.guarded.guardian FOLDER``; with
``--again ORDER`` it runs what has ended once more, unless there was a power call with a higher order. It leaves the session and the
parent that it was started from, so it goes on when the agent ends. It answers with one line on its standard output, ``ready`` or
why not after :data:`ANSWER`, and closes it.

The guardian holds the lock of the workload and hands it to the sandbox. The sandbox dies with the guardian. So the lock is free
exactly when nothing of the workload runs, however the guardian ended.

SIGTERM ends the workload: its processes get SIGTERM, and after ``stop_seconds`` the sandbox is killed.

Where the host fences itself, the guardian kills the sandbox when the lease of the host is over, and begins nothing without one. It
decides whether it looks at the lease after it has the lock of the workload; an agent begins the lease, and then looks for workloads
that go on without one. So either the guardian sees the lease, or the agent sees the workload.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moorage.clock import Clock, SystemClock
from moorage_plugins.drivers.guarded.files import (
    LOG_FILE,
    OLD_LOG_FILE,
    SPEC,
    STATE,
    children_of,
    name_of,
    power_call,
    read_json,
    say_who,
    start_of,
    tokens_of,
    try_lock,
    write_json,
)
from moorage_plugins.drivers.guarded.lease import lease_until
from moorage_plugins.drivers.guarded.limits import Group, Limits, clean_up, remove

__all__ = ["ANSWER", "LOCK_FD", "STATUS_FD", "Guardian", "main"]

#: File descriptors with which the sandbox is started: where it says that the command was found, and the lock.
STATUS_FD, LOCK_FD = 3, 4
#: What the line of the answer begins with. Whatever else is written to the standard output and error may name paths of the host.
ANSWER = "moorage-guardian: "
_PR_SET_PDEATHSIG = 1
_PAUSE = 0.02
#: Seconds that another guardian of the workload may take to start it.
_PATIENCE = 30.0
_CHUNK = 65536
#: Seconds between two reads of what the workload writes. It bounds the guardian's own processor time and the rate of the log: a
#: pipe holds 64 KiB, so a workload that writes more than 3 MiB a second waits.
_REST = 0.02
_NEVER = float("inf")
#: Seconds between two looks at the lease of the host at most: the agent may have made it shorter, and the machine may have been
#: suspended, which the waits of this process do not count.
_LOOK = 1.0
_NO_LEASE = (
    "The lease of its host was over: the agent there had not reached the store in time, so the host fenced itself."
)


class Refused(Exception):
    """The workload does not run; the text says why. Members of the project read it, so it names no path of the host.

    :param detail: what only operators may read; empty for nothing.
    """

    def __init__(self, text: str, detail: str = "") -> None:
        super().__init__(text)
        self.detail = detail


class Guardian:
    """See the module."""

    def __init__(self, folder: Path, clock: Clock, *, again: int | None) -> None:
        self._folder = folder
        self._clock = clock
        self._again = again
        self._spec: dict[str, Any] = {}
        self._limits = Limits((), 0)
        self._process: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        #: Descriptors of what the workload writes, and of the sandbox's first process.
        self._out: int | None = None
        self._init: int | None = None
        self._log_size = 0
        self._last_output = b""
        self._running = self._stopping = self._fenced = False
        self._kill_at = self._read_at = _NEVER
        #: When the lease is looked at next; never where the host does not fence itself.
        self._look_at = _NEVER
        #: The end of the lease as it was read last.
        self._until: float | None = None

    def run(self) -> None:
        """Guards the workload until it has ended; returns at once where there is nothing to do."""
        try:
            if not self._acquire():
                _answer("ready")
                return
            if self._is_overtaken():
                _answer("newer")
                return
            self._begin()
        except FileNotFoundError:
            _answer("The workload was destroyed before it could begin.")
        except Refused as refusal:
            self._end_groups()
            if self._again is not None:
                # Where it cannot be written, as on a full disk, the answer says it.
                with contextlib.suppress(OSError):
                    self._write("failed", str(refusal))
            _answer(str(refusal), refusal.detail)
        else:
            self._watch()

    def _acquire(self) -> bool:
        """Takes the lock of the workload and returns True, or returns False when there is nothing to run.

        A guardian that waits for another one's lock gives up when that one has started the workload.

        :raises FileNotFoundError: the workload is gone.
        """
        end = self._clock.monotonic() + _PATIENCE
        while True:
            lock = try_lock(self._folder)
            state = read_json(self._folder / STATE)
            if lock is not None:
                os.dup2(lock, LOCK_FD, inheritable=True)
                os.close(lock)
                return state is None or self._again is not None
            # The lock may be that of a reader, while what it says ran was killed.
            if state is not None and state["state"] == "running" and start_of(state["pid"]) == state["start"]:
                return False
            if self._clock.monotonic() > end:
                raise Refused("Another guardian has the workload, and did not begin it in time.")
            self._clock.sleep(_PAUSE)

    def _is_overtaken(self) -> bool:
        """Returns whether a newer workload or a later power call has come; asked with the lock of the workload."""
        # A newer token makes its folder before it ends older ones. Either it sees this lock, or its folder is seen here.
        if max(tokens_of(self._folder.parent), default=0) > int(self._folder.name):
            return True
        if self._again is None:
            return False
        # A stop keeps its order before it ends the workload. Either it sees this lock, or its order is seen here.
        with power_call(self._folder, self._again, stop=False) as newest:
            return not newest

    def _begin(self) -> None:
        """Starts the sandbox, and waits until the command runs in it."""
        say_who(LOCK_FD)
        signals, self._wakeup = socket.socketpair()
        for each in (signals, self._wakeup):
            each.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        spec = read_json(self._folder / SPEC)
        if spec is None:
            raise Refused("The file that says what to run is damaged. Delete the instance, or rebuild it.")
        self._spec = spec
        groups = [Group(**each) for each in spec["groups"]]
        self._limits = Limits(groups, spec["memory_mb"], joined=spec["joins_groups"])
        # An earlier sandbox of the workload was killed, or has ended.
        clean_up(spec["cleanup"], LOCK_FD)
        try:
            self._until = self._lease()
        except OSError as error:
            raise Refused("The lease of its host cannot be read; the log of the agent says why.", str(error)) from error
        if self._until is not None:
            self._look_at = self._clock.monotonic()
            self._check_lease()
            if self._fenced:
                raise Refused(_NO_LEASE)
        self._limits.make()
        with contextlib.suppress(FileNotFoundError):
            self._log_size = (self._folder / LOG_FILE).stat().st_size
        self._selector.register(signals, selectors.EVENT_READ, lambda: signals.recv(_CHUNK))
        self._start()
        while not self._running:
            self._step()

    def _start(self) -> None:
        found, status = os.pipe()
        output, written = os.pipe()
        owner = self._spec["owner"]
        if owner is not None:
            # So that the workload may open /dev/stdout.
            os.fchown(written, owner, owner)
        os.dup2(status, STATUS_FD, inheritable=True)
        os.close(status)
        library = ctypes.CDLL(None)
        guardian = os.getpid()
        program = self._spec["arguments"][0]
        try:
            self._process = subprocess.Popen(  # noqa: S603  (one thread; what is run is the driver's to check)
                self._spec["arguments"],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                pass_fds=(STATUS_FD, LOCK_FD),
                preexec_fn=lambda: self._enter(library, guardian),
                cwd="/",
                env={},
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Refused(
                "The sandbox cannot be started; the log of the agent says why.", f"{program}: {error}"
            ) from error
        os.close(written)
        os.close(STATUS_FD)
        os.set_inheritable(LOCK_FD, False)
        self._out = output
        process = os.pidfd_open(self._process.pid)
        for descriptor, read in ((found, self._found), (output, self._output), (process, self._ended)):
            os.set_blocking(descriptor, False)
            self._register(descriptor, read)

    def _enter(self, library: Any, guardian: int) -> None:
        """In the new process, before it becomes the sandbox."""
        self._limits.enter()
        if self._spec["uid"] is not None:
            os.setgroups([])
            os.setgid(self._spec["uid"])
            os.setuid(self._spec["uid"])
        # Forgotten by the kernel when the user changes; so after that.
        library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != guardian:
            os._exit(1)

    # -- what happens ---------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Waits for something to happen, and deals with it.

        :raises Refused: the workload has ended before its command was found.
        """
        now = self._clock.monotonic()
        if now >= self._kill_at and self._process is not None:
            self._process.kill()
            self._kill_at = _NEVER
        if now >= self._read_at:
            self._read_at = _NEVER
            if self._out is not None:
                self._register(self._out, self._output)
        if now >= self._look_at:
            self._check_lease()
        soonest = min(self._kill_at, self._read_at, self._look_at)
        for key, _ in self._selector.select(None if soonest == _NEVER else max(0.0, soonest - now)):
            key.data()

    def _lease(self) -> float | None:
        """Until when workloads of the host may run; None: it does not fence itself."""
        # The folders of the instance and of the host.
        until = lease_until(self._folder.parent.parent)
        return None if until == _NEVER and self._look_at == _NEVER else until

    def _check_lease(self) -> None:
        """Kills the sandbox when the lease of the host is over."""
        # Where it cannot be read for now, as when the system has no more file descriptors, the last one that was read holds.
        with contextlib.suppress(OSError):
            self._until = self._lease()
        moment = self._clock.boottime()
        # The file of the lease was removed, so nothing says until when the workload may run.
        left = 0.0 if self._until is None else self._until - moment
        if left > 0:
            self._look_at = self._clock.monotonic() + min(left, _LOOK)
            return
        self._fenced, self._look_at = True, _NEVER
        if self._process is not None:
            self._process.kill()

    def _register(self, descriptor: int, call: Callable[[int], object]) -> None:
        """Has a method called when there is something to read."""
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: call(descriptor))

    def _watch(self) -> None:
        process = self._process
        try:
            while process is not None and process.returncode is None:
                self._step()
        finally:
            self._end_groups()

    def _found(self, descriptor: int) -> None:
        """The sandbox says whether it has the command, or was closed before it could."""
        said = os.read(descriptor, 1)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        if said == b"y" and not self._stopping:
            self._await_command()
            try:
                self._write("running", self._limits.missing())
            except OSError as error:
                raise Refused(
                    f"What became of it cannot be written: {error.strerror}.", f"{self._folder / STATE}: {error}"
                ) from error
            self._running = True
            _answer("ready")
            return
        process = self._process
        if process is None:
            return
        process.kill()
        process.wait()
        self._drain()
        if self._fenced:
            raise Refused(_NO_LEASE)
        if self._stopping:
            raise Refused("It was stopped before it ran.")
        last, mark = self._last_line(), self._spec["not_found_mark"]
        if said == b"n" or (mark and mark in last):
            raise Refused(self._spec["not_found"], last)
        raise Refused(
            "The sandbox could not be made; the log of the agent says why.", last or "the sandbox said nothing"
        )

    def _await_command(self) -> None:
        """Waits until what the sandbox has made becomes the command, where its processes have another name before."""
        process, name = self._process, self._spec["becoming"]
        while (
            name
            and not self._stopping
            and process is not None
            and start_of(process.pid)
            and any(name_of(pid).startswith(name) for pid in children_of(process.pid))
        ):
            if self._clock.monotonic() >= self._look_at:
                self._check_lease()
            self._clock.sleep(_PAUSE)

    def _drain(self) -> None:
        """Reads what the workload wrote before it ended."""
        while self._out is not None and self._read(self._out):
            pass

    def _output(self, descriptor: int) -> None:
        """Reads a piece of what the workload writes, and rests before the next one."""
        self._selector.unregister(descriptor)
        self._read(descriptor)
        self._read_at = self._clock.monotonic() + _REST

    def _read(self, descriptor: int) -> bool:
        """Reads a piece of what the workload writes; False when there is none now."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
            os.close(descriptor)
            self._out = None
            return False
        self._last_output = (self._last_output + data)[-1000:]
        # A full disk costs lines of the log; it must not stop the workload.
        with contextlib.suppress(OSError):
            if self._log_size and self._log_size + len(data) > self._spec["log_bytes"] // 2:
                (self._folder / LOG_FILE).replace(self._folder / OLD_LOG_FILE)
                self._log_size = 0
            with open(self._folder / LOG_FILE, "ab") as log:
                log.write(data)
            self._log_size += len(data)
        return True

    def _ended(self, descriptor: int) -> None:
        process = self._process
        if process is None or process.poll() is None:
            return
        self._selector.unregister(descriptor)
        if not self._running:
            # That the status was closed is read too, and says more.
            return
        if self._init is not None:
            # Readable when it has ended, and with it all that ran in the sandbox.
            select.select([self._init], [], [])
        self._drain()
        code = process.returncode
        state = "stopped" if self._stopping else "failed" if code else "ended"
        # Where it cannot be written, what is seen is that the guardian has ended.
        with contextlib.suppress(OSError):
            self._write(state, self._how(code))

    def _how(self, code: int) -> str:
        if self._stopping:
            return "It was stopped."
        if self._fenced:
            return _NO_LEASE
        if code < 0:
            return f"Its sandbox was killed by {signal.Signals(-code).name}."
        text = f"It ended with exit code {code}"
        if 128 < code <= 128 + signal.SIGRTMAX:
            # So the sandbox says that the command was killed.
            text += f", as if killed by signal {code - 128}"
        if self._limits.out_of_memory():
            text += "; it used more memory than it has"
        return f"{text}."

    def _stop(self, *signal_and_frame: object) -> None:
        """Ends the workload; a handler of signals."""
        if self._stopping or self._process is None:
            if self._process is None:
                os._exit(0)
            return
        self._stopping = True
        self._kill_at = self._clock.monotonic() + (self._spec["stop_seconds"] if self._running else 0)
        # The sandbox's first process would be killed by the signal, and with it all others at once.
        for pid in list(children_of(self._process.pid))[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    # -- what is kept ---------------------------------------------------------------------------------------------

    def _write(self, state: str, detail: str) -> None:
        content: dict[str, Any] = {"state": state, "since": self._clock.wall(), "detail": detail}
        if state == "running" and self._process is not None:
            pid = self._process.pid
            content |= {"pid": pid, "start": start_of(pid), "lease": self._look_at != _NEVER}
            # A short command may have ended by now.
            with contextlib.suppress(ProcessLookupError):
                for init in children_of(pid):
                    self._init = os.pidfd_open(init)
                    content |= {"init": init, "init_start": start_of(init)}
                    break
        write_json(self._folder / STATE, content)

    def _last_line(self) -> str:
        lines = self._last_output.decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _end_groups(self) -> None:
        clean_up(self._spec.get("cleanup", ()), LOCK_FD)
        remove(group.folder for group in self._limits.made)


def _answer(text: str, detail: str = "") -> None:
    """Says one line to the driver after one for its log, and closes the way to it; the driver may be gone."""
    nothing = os.open(os.devnull, os.O_RDWR)
    with contextlib.suppress(OSError):
        os.write(1, f"{' '.join(detail.split())}\n{ANSWER}{text}\n".encode())
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)


def main() -> None:
    """Becomes a process of its own, and guards the workload of the folder that the command line names."""
    if os.fork():
        os._exit(0)
    os.setsid()
    # Nothing else may get these numbers.
    while (reserved := os.open(os.devnull, os.O_RDWR)) <= LOCK_FD:
        pass
    os.close(reserved)
    again = int(sys.argv[3]) if sys.argv[2:3] == ["--again"] else None
    Guardian(Path(sys.argv[1]), SystemClock(), again=again).run()


if __name__ == "__main__":
    main()
