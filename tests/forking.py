# SPDX-License-Identifier: Apache-2.0
"""``moorage up`` forked from a process that has imported everything, with roles that are forked too.

A control plane of five roles takes about ten seconds of a processor to start, and Python spends most of them on imports. Here each
process of tests has one process that imports everything, once. What is forked from it runs the same code, in processes of their own
that are killed, paused and restarted as always. Tests of the start itself use the real command: ``TestSlice``, and tests with other
plugins, of the guides and of installed packages.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from moorage.cli import main, roles
from moorage.control_plane import supervisor

__all__ = ["CONTEXT", "Command"]

#: Processes of tests are forked from the same process: it can be told once what to import.
CONTEXT = multiprocessing.get_context("forkserver")
# Each process of multiprocessing imports the module that the test runner was started as, unless that is a package's __main__.
_RUNNER = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "__main__")
CONTEXT.set_forkserver_preload(["tests.forked_modules", *([] if _RUNNER.endswith("__main__") else [_RUNNER])])
_ROLES = "moorage.cli.roles"


class Command:
    """A ``moorage`` command in a process of its own; has what tests use of ``subprocess.Popen``.

    :param words: after ``moorage``.
    :param stderr: the file to append to.
    :param program: is called with the words and returns its status. The standard output of another one than ``moorage`` goes to the
        file too.
    :param path: folders that come first on its ``sys.path``.
    """

    def __init__(
        self,
        words: Sequence[str],
        stderr: Path,
        *,
        program: Callable[[list[str]], int] = main.main,
        path: Sequence[str] = (),
    ) -> None:
        #: The same as a command line.
        self.args = [sys.executable, "-m", program.__module__, *words]
        stderr.touch()
        reader, writer = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(
            target=_run_command,
            args=(program, list(words), str(stderr), writer, dict(os.environ), list(path)),
            daemon=True,
        )
        self._process.start()
        writer.close()
        self.stdout: IO[str] = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """The exit status; negative: the signal that ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """:raises subprocess.TimeoutExpired: it runs on."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it still wrote to standard output; waits for its end."""
        self.wait(timeout)
        if self.stdout.closed:
            return "", None
        with self.stdout:
            return self.stdout.read(), None


class _Role:
    """A role that the supervisor forks; has what it uses of ``subprocess.Popen``."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: IO[bytes],
        pass_fds: tuple[int],
        env: Mapping[str, str],
        **_: Any,
    ) -> None:
        assert command[:3] == [sys.executable, "-m", _ROLES], command
        # A thread that another one needs would be missing in the child.
        assert threading.active_count() == 1, threading.enumerate()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _end_with(lambda: _become_role(command, stdout.fileno(), pass_fds[0], env))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _become_role(command: Sequence[str], log: int, ready: int, environment: Mapping[str, str]) -> int:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for place, target in enumerate((null, log, log)):
        os.dup2(target, place)
    # Not closed: objects of the parent that still have the numbers would close what gets them next.
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) > 2 and int(name) != ready:
                os.dup2(null, int(name), inheritable=False)
    os.environ.clear()
    os.environ.update(environment)
    os.set_inheritable(ready, True)
    sys.argv = [roles.__file__, *command[3:]]
    # A process that starts itself again becomes the command.
    sys.orig_argv = list(command)
    _forget_logging()
    return roles.main(command[3:])


def _run_command(
    program: Callable[[list[str]], int],
    words: list[str],
    stderr: str,
    stdout: Connection,
    environment: Mapping[str, str],
    path: list[str],
) -> None:
    """What the process of a :class:`Command` does."""
    with open(stderr, "ab") as said, open(os.devnull, "rb") as null:
        written = stdout if program is main.main else said
        for number, target in enumerate((null.fileno(), written.fileno(), said.fileno())):
            os.dup2(target, number)
    stdout.close()
    sys.path[:0] = path
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    sys.argv = [program.__module__, *words]
    sys.orig_argv = [sys.executable, "-m", program.__module__, *words]
    replaced = types.SimpleNamespace(Popen=_Role, DEVNULL=subprocess.DEVNULL)
    setattr(supervisor, "subprocess", replaced)  # noqa: B010
    _end_with(lambda: program(words))


def _end_with(program: Any) -> None:
    """Runs a program as Python would, and ends the process with its status. Nothing of the caller is run any more."""
    status = 1
    try:
        status = program()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _forget_logging() -> None:
    """As logging is in a process that has just begun."""
    for handler in logging.root.handlers[:]:
        logging.root.removeHandler(handler)
    logging.root.setLevel(logging.WARNING)
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.setLevel(logging.NOTSET)
