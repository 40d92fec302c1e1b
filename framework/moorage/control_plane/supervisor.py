# SPDX-License-Identifier: Apache-2.0
"""The supervisor: starts the roles of a machine as separate processes and restarts dead ones.

A child says that it is ready by a line on a pipe. One that ends is started again after a delay that doubles while it keeps
ending; one that grows above ``max_rss`` is ended and restarted, and so is one that stays stopped. A child that refuses its
configuration at the first start (exit status :data:`EXIT_CONFIG`) ends the whole start with its message, because starting it
again could not help; one that gave up by itself (:data:`EXIT_FATAL`: the store was too slow for its heartbeats while all others
started) is started again until ``start_timeout``. Each child has a session of its own, and what is left of its process group when
it has ended (a copy that a plugin forked, a program that hangs) is killed: it would hold sockets and locks that the next one needs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from oslo_log import log as logging

from moorage import errors, threads
from moorage.clock import Clock

__all__ = ["EXIT_CONFIG", "EXIT_FATAL", "Program", "Supervisor", "writer_limit"]

LOG = logging.getLogger(__name__)

#: Exit status of a role that cannot use its configuration (EX_CONFIG of sysexits.h).
EXIT_CONFIG = 78
#: Exit status of a role that gave up by itself: fenced off, or a plugin hung (EX_SOFTWARE).
EXIT_FATAL = 70

#: A process that ran this many seconds starts again with the shortest delay.
_STABLE_AFTER = 20.0
#: Seconds between looks at the children: while all start or end; while one is being ended, or its end cannot be waited for; later.
_PAUSE, _SHORT_PAUSE, _LONG_PAUSE = 0.05, 0.25, 1.0
#: Looks within the time that a child may be stopped, or hold the writer's turn.
_LOOKS = 4
#: How many times as long as a stopped process one that runs may hold the writer's turn.
_RUNNING_WRITER = 3
_PAGE = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class Program:
    """A process to keep running: its name, its role and the command."""

    name: str
    role: str
    command: Sequence[str]


def writer_limit(conf: Any) -> float:
    """Seconds for which a stopped process may hold SQLite's writer's turn; 0: for ever.

    A quarter of ``service_down_time`` at most: all other roles give up when their heartbeats reach no store for that long, and one
    that runs has three times as long as one that is stopped.
    """
    return float(
        min(
            conf.coordination.session_timeout,
            conf.control_plane.stopped_timeout,
            conf.services.service_down_time / (_RUNNING_WRITER + 1),
        )
    )


@dataclass(slots=True)
class _Child:
    program: Program
    process: subprocess.Popen[bytes] | None = None
    ready_pipe: int | None = None
    ready: bool = False
    started_at: float = 0.0
    restarts: int = 0
    delay: float = 0.0
    start_again_at: float = 0.0
    ending: bool = False
    stopped_at: float | None = None
    kill_at: float = 0.0
    heard: bytes = field(default=b"")
    #: Whether there may be processes of its group.
    grouped: bool = False
    #: A descriptor that is readable when the process has ended; None where the system has none.
    end: int | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self.process.pid if self.process is not None and self.status() is None else None

    def status(self) -> int | None:
        """Its exit status; None while it runs, or was never started. What it has left of its group is killed."""
        process = self.process
        if process is None:
            return None
        # Until its status is taken no other process can get its number, so the group is certainly its own.
        if self.grouped and (process.returncode is not None or _has_ended(process.pid)):
            self.grouped = False
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.poll()

    def send(self, number: signal.Signals) -> None:
        """Signal the process itself, not its group, if it runs."""
        if self.process is not None and self.status() is None:
            self.process.send_signal(number)


class Supervisor:
    """Keeps programs running until :meth:`stop` is called.

    :param folder: where ``run/processes.json`` and ``log/<name>.log`` are written.
    :param delay: seconds before the first new start; doubles up to ``longest_delay``.
    :param max_rss: bytes.
    :param stopped_timeout: seconds after which a child that is stopped (SIGSTOP) is killed; 0: never.
    :param writer: what writes to the store now, as (something that differs for each transaction, process id); None: nothing does.
    :param writer_timeout: seconds after which a stopped child is killed that ``writer`` names all the time; one that runs is
        killed after three times as long. 0: never.
    :param stopping: set to have :meth:`start` and :meth:`run` end; a new one when None.
    :param may_reload: asked before SIGHUP is passed on, in the thread of :meth:`run`; False keeps it from the children.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        folder: Path,
        clock: Clock,
        *,
        delay: float,
        longest_delay: float,
        max_rss: int,
        drain_timeout: float,
        start_timeout: float,
        stopped_timeout: float = 0.0,
        writer: Callable[[], tuple[int, int] | None] = lambda: None,
        writer_timeout: float = 0.0,
        environment: Mapping[str, str] | None = None,
        stopping: threads.Event | None = None,
        may_reload: Callable[[], bool] = lambda: True,
    ) -> None:
        self._children = [_Child(program) for program in programs]
        self._folder = folder
        self._clock = clock
        self._delay = delay
        self._longest_delay = longest_delay
        self._max_rss = max_rss
        self._drain_timeout = drain_timeout
        self._start_timeout = start_timeout
        self._stopped_timeout = stopped_timeout
        self._writer = writer
        self._writer_timeout = writer_timeout
        self._writes: tuple[int, int] | None = None
        self._writes_since = 0.0
        self._environment = dict(os.environ if environment is None else environment)
        self._stopping = stopping or threads.signal_event()
        self._may_reload = may_reload
        self._reload = threads.signal_event()
        limits = [seconds / _LOOKS for seconds in (stopped_timeout, writer_timeout) if seconds]
        self._pause = min([_LONG_PAUSE, *limits])
        self._asked, self._ask = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for each in (self._asked, self._ask):
            weakref.finalize(self, os.close, each)

    def stop(self) -> None:
        """Ask :meth:`run` to end; may be called from a signal handler."""
        self._stopping.set()
        self._wake()

    def reload(self) -> None:
        """Ask :meth:`run` to pass SIGHUP on; may be called from a signal handler."""
        self._reload.set()
        self._wake()

    def _wake(self) -> None:
        # A pipe that is full wakes too.
        with contextlib.suppress(BlockingIOError):
            os.write(self._ask, b"x")

    def start(self) -> None:
        """Start all programs and wait until every one is ready.

        :raises ConfigError: a child refused its configuration; all others are ended.
        :raises Unavailable: a child ended before it was ready (except by :data:`EXIT_FATAL`), or was not ready in time; all others
            are ended. A later try may succeed.
        """
        (self._folder / "run").mkdir(parents=True, exist_ok=True, mode=0o700)
        (self._folder / "log").mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            for child in self._children:
                self._spawn_first(child)
            self._write_table()
            deadline = self._clock.monotonic() + self._start_timeout
            while not all(child.ready for child in self._children) and not self._stopping.is_set():
                ended = [child for child in self._children if child.process is None or child.status() is not None]
                self._listen()
                for child in ended:
                    if child.process is not None and not child.ready and child.status() != EXIT_FATAL:
                        refused = errors.ConfigError if child.status() == EXIT_CONFIG else errors.Unavailable
                        raise refused(self._why(child))
                # They were ready before others are, or gave up: they are started again, as they are later.
                changed = [self._watch(child) for child in ended]
                if any(changed):
                    self._write_table()
                if self._clock.monotonic() > deadline:
                    late = ", ".join(
                        child.program.name + (f" (started again {child.restarts} times)" if child.restarts else "")
                        for child in self._children
                        if not child.ready
                    )
                    raise errors.Unavailable(
                        f"Not ready within {self._start_timeout:g} seconds: {late}. See the files in {self._folder / 'log'}."
                    )
                self._clock.sleep(_PAUSE)
        except errors.MoorageError:
            self._end_all()
            raise

    def run(self) -> None:
        """Watch the children until :meth:`stop`; then let them drain and end them."""
        while not self._stopping.is_set():
            self._listen()
            if self._reload.is_set():
                self._reload.clear()
                if self._may_reload():
                    self._signal_all(signal.SIGHUP)
            self._free_writers_turn()
            changed = [self._watch(child) for child in self._children]
            if any(changed):
                self._write_table()
            self._wait()
        self._end_all()
        self._write_table()

    def _wait(self) -> None:
        """Wait until a child ends or says something, until this is asked to end or reload, or until the next look is due."""
        pause, now = self._pause, self._clock.monotonic()
        poll = select.poll()
        poll.register(self._asked, select.POLLIN)
        for child in self._children:
            if child.process is None:
                pause = min(pause, max(0.0, child.start_again_at - now))
            elif child.end is None or child.ending:
                pause = min(pause, _SHORT_PAUSE)
            for each in (child.end, child.ready_pipe):
                if each is not None:
                    poll.register(each, select.POLLIN)
        poll.poll(math.ceil(1000 * pause))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._asked, 1024):
                pass

    def _spawn_first(self, child: _Child) -> None:
        try:
            self._spawn(child)
        except OSError as error:
            raise errors.Unavailable(f"{child.program.name} cannot be started: {error}.") from error

    # -- one child ------------------------------------------------------------------------------------------------

    def _spawn(self, child: _Child) -> None:
        reader, writer = os.pipe()
        log: IO[bytes]
        try:
            os.set_blocking(reader, False)
            with open(self._folder / "log" / f"{child.program.name}.log", "ab") as log:
                child.process = subprocess.Popen(  # noqa: S603  (our own command line)
                    list(child.program.command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(writer,),
                    env={**self._environment, "MOORAGE_READY_FD": str(writer), "MOORAGE_PARENT": str(os.getpid())},
                    start_new_session=True,
                )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        if child.ready_pipe is not None:
            os.close(child.ready_pipe)
        child.end = _end_of(child.process.pid)
        child.ready_pipe, child.ready, child.heard, child.grouped = reader, False, b"", True
        child.started_at = self._clock.monotonic()
        child.ending, child.start_again_at, child.stopped_at = False, 0.0, None

    def _watch(self, child: _Child) -> bool:
        """Look after one child; True when it was started or has ended."""
        now = self._clock.monotonic()
        if child.process is None:
            if now < child.start_again_at:
                return False
            child.restarts += 1
            try:
                self._spawn(child)
            except OSError as error:
                # No memory, no processes, no room on the disk: the others must not be left alone for that.
                child.delay = min(self._longest_delay, max(self._delay, child.delay * 2))
                child.start_again_at = now + child.delay
                LOG.error("%s cannot be started (%s); again in %.1f s.", child.program.name, error, child.delay)
                return False
            return True
        status = child.status()
        if status is not None:
            self._plan_restart(child, status, now)
            return True
        if self._stopped_too_long(child, child.process.pid, now):
            LOG.warning(
                "%s has been stopped for %g s and may hold what all others wait for; it is killed and restarted.",
                child.program.name,
                self._stopped_timeout,
            )
            child.send(signal.SIGKILL)
        elif child.ending:
            if now > child.kill_at:
                child.send(signal.SIGKILL)
        elif _resident(child.process.pid) > self._max_rss:
            LOG.warning(
                "%s uses more than %d MiB of memory; it is ended and restarted.",
                child.program.name,
                self._max_rss // 2**20,
            )
            child.ending, child.kill_at = True, now + self._drain_timeout
            child.send(signal.SIGTERM)
        return False

    def _free_writers_turn(self) -> None:
        """Kill a child that does not end its transaction on SQLite: all other processes wait for it."""
        if not self._writer_timeout:
            return
        now, writes = self._clock.monotonic(), self._writer()
        child = None if writes is None else next((each for each in self._children if each.pid == writes[1]), None)
        if writes is None or child is None or writes != self._writes:
            self._writes, self._writes_since = writes, now
            return
        limit = self._writer_timeout * (1 if _stopped(writes[1]) else _RUNNING_WRITER)
        if now - self._writes_since > limit:
            LOG.warning(
                "%s has not ended its transaction within %g s, and all other processes wait for it. It is killed and started "
                "again.",
                child.program.name,
                limit,
            )
            child.send(signal.SIGKILL)

    def _stopped_too_long(self, child: _Child, pid: int, now: float) -> bool:
        if not self._stopped_timeout or not _stopped(pid):
            child.stopped_at = None
        elif child.stopped_at is None:
            child.stopped_at = now
        return child.stopped_at is not None and now - child.stopped_at > self._stopped_timeout

    def _plan_restart(self, child: _Child, status: int, now: float) -> None:
        lived = now - child.started_at
        child.delay = (
            self._delay if lived > _STABLE_AFTER else min(self._longest_delay, max(self._delay, child.delay * 2))
        )
        child.start_again_at = now + child.delay
        child.process, child.ready = None, False
        if child.end is not None:
            os.close(child.end)
            child.end = None
        LOG.warning("%s ended (%s); it is started again in %.1f s.", child.program.name, _meaning(status), child.delay)

    def _listen(self) -> None:
        pipes = {child.ready_pipe: child for child in self._children if child.ready_pipe is not None}
        readable, _, _ = select.select(list(pipes), [], [], 0)
        for pipe in readable:
            child = pipes[pipe]
            data = os.read(pipe, 4096)
            child.heard += data
            if b"ready\n" in child.heard:
                child.ready = True
            if not data:
                os.close(pipe)
                child.ready_pipe = None

    def _why(self, child: _Child) -> str:
        status = child.status()
        log = self._folder / "log" / f"{child.program.name}.log"
        said = child.heard.decode("utf-8", "replace").strip()
        return said or f"{child.program.name} ended at its start ({_meaning(status)}); its log is {log}."

    # -- all of them ----------------------------------------------------------------------------------------------

    def _signal_all(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.ready:
                child.send(number)

    def _end_all(self) -> None:
        """End the children in the order they were given, so that what takes requests ends first."""
        # The API goes first and may still need the others for the requests it is answering; how long it takes for that is not
        # taken from them.
        self._end_some([child for child in self._children if child.program.role == "api"])
        self._end_some([child for child in self._children if child.program.role != "api"])

    def _end_some(self, children: Sequence[_Child]) -> None:
        deadline = self._clock.monotonic() + self._drain_timeout
        for child in children:
            child.send(signal.SIGTERM)
        for child in children:
            self._await(child, deadline)
            if child.pid is not None:
                LOG.warning("%s did not end within %.0f s and is killed.", child.program.name, self._drain_timeout)
                child.send(signal.SIGKILL)
                while child.pid is not None:
                    self._clock.sleep(_PAUSE)

    def _await(self, child: _Child, deadline: float) -> None:
        while child.pid is not None and self._clock.monotonic() < deadline:
            self._clock.sleep(_PAUSE)

    def _write_table(self) -> None:
        """For people and for ``moorage replay --kill``: who runs here."""
        table = [
            {
                "name": child.program.name,
                "role": child.program.role,
                "pid": child.pid,
                "restarts": child.restarts,
            }
            for child in self._children
        ]
        path = self._folder / "run" / "processes.json"
        temporary = path.with_suffix(".new")
        try:
            temporary.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            LOG.warning("%s cannot be written (%s); it lists processes that have ended.", path, error)


def _end_of(pid: int) -> int | None:
    """Returns a descriptor that is readable when the process has ended; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        # The kernel is older than 5.3.
        LOG.debug(
            "The end of process %d cannot be waited for (%s); it is looked for each %g s.", pid, error, _SHORT_PAUSE
        )
        return None


def _has_ended(pid: int) -> bool:
    """Returns whether a child has ended, without taking its status."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _resident(pid: int) -> int:
    """Resident memory of a process in bytes; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def _stopped(pid: int) -> bool:
    """Returns whether the process is stopped by a signal; one that a debugger holds (t) is not meant."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            # The name, in brackets, may contain anything.
            return stat.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _meaning(status: int | None) -> str:
    if status is None:
        return "it is running"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return {
        0: "exit status 0",
        EXIT_CONFIG: "its configuration cannot be used",
        EXIT_FATAL: "it gave up by itself",
    }.get(status, f"exit status {status}")


def command(role: str, name: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command line of a role's process, with this very interpreter."""
    return [sys.executable, "-m", "moorage.cli.roles", role, "--name", name, *arguments]
