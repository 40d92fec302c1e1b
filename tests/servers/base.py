# SPDX-License-Identifier: Apache-2.0
"""What every server of a test has in common: its folder, its processes, its guard, its life."""

from __future__ import annotations

import abc
import contextlib
import glob
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import psutil

HOST = "127.0.0.1"
READY_SECONDS = 180.0
STOP_SECONDS = 60.0
ATTEMPTS = 3
#: Ends the process groups $2... with signal $1 once standard input closes, and removes the folder $0.
GUARD = (
    'read _; s=$1; shift; for g; do kill -s "$s" -- "-$g"; done; sleep 1; for g; do kill -9 -- "-$g"; done; rm -rf "$0"'
)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended in this moment
        return False


class StartError(Exception):
    """A server did not become ready; the message ends with the last lines of its log."""


def wait_until(condition: Callable[[], object], what: str, seconds: float = READY_SECONDS) -> None:
    """Poll ``condition`` until it holds. :raises AssertionError: not within ``seconds``, saying ``what`` was awaited."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def newest(pattern: str) -> str | None:
    """The file that matches, of the highest version when there are several."""
    return max(glob.glob(pattern), key=lambda path: [int(n) for n in path.split("/") if n.isdigit()], default=None)


class Server(abc.ABC):
    """A server process of a test, with a folder of its own that is removed at the end.

    :ivar url: what a client is configured with.  :ivar port: where it listens on 127.0.0.1.
    :ivar pid: the main process while it runs.
    """

    NAME: ClassVar[str]
    #: Who it runs as when the tests run as root; None: as root.
    USER: ClassVar[str | None] = None
    #: The quickest signal after which nothing (shared memory, say) is left behind.
    QUICK: ClassVar[signal.Signals] = signal.SIGKILL
    #: What ``answers`` raises while it does not serve.
    REFUSALS: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def __init__(self, *, durable: bool = False) -> None:
        self.durable = durable
        self.host = HOST
        self.port = 0
        self.password = secrets.token_hex(8)
        self.folder = Path()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._guard: subprocess.Popen[bytes] | None = None

    # What each kind of server says about itself.
    @classmethod
    @abc.abstractmethod
    def programs(cls) -> Mapping[str, str | None]:
        """The files it needs by what they are called, None for one that is missing."""

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """What a client is configured with."""

    @abc.abstractmethod
    def commands(self) -> Sequence[Sequence[str]]:
        """What to run, the server itself last."""

    @abc.abstractmethod
    def answers(self) -> bool:
        """Whether it serves clients now; may raise one of REFUSALS when it does not."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """Write the configuration; the folder and the port are there. Runs again after a port turned out to be taken."""

    def environment(self) -> dict[str, str]:
        """Variables for the processes."""
        return dict(os.environ)

    # Life.
    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The main process."""
        return self._processes[-1].pid

    def pids(self) -> set[int]:
        """Every process of the server that lives now."""
        return {process.pid for process in self._tree()}

    @property
    def running(self) -> bool:
        """Whether the main process lives."""
        return bool(self._processes) and self._processes[-1].poll() is None

    def start(self) -> Self:
        """Start it in a new folder on a free port and wait until it answers. :raises StartError: it did not."""
        # Unix sockets lie in it, and their paths must stay short; other users must be able to pass through.
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-"))
        self._give(self.folder)
        try:
            for attempt in range(ATTEMPTS):
                self.port = free_port()
                try:
                    self.prepare()
                    self._launch()
                    break
                except StartError:  # most likely somebody was quicker with the port
                    if attempt == ATTEMPTS - 1:
                        raise
        except BaseException:
            self.stop(quick=True)
            raise
        return self

    def stop(self, *, quick: bool = False) -> None:
        """End it, in order unless ``quick``, and remove everything it had. Ending twice does no harm."""
        self._end(self.QUICK if quick else signal.SIGTERM)
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the signal to the main process and wait until all of the server is gone; its data stay for ``restart``."""
        self._end(number)

    def restart(self) -> None:
        """Start it again on the same port and data, after ``kill`` or as it is."""
        self._end(signal.SIGTERM)
        self._launch()

    def pause(self) -> None:
        """Stop every process of it where it stands, connections stay open."""
        stopped: set[int] = set()
        while new := [process for process in self._tree() if process.pid not in stopped]:
            for process in new:
                stopped.add(process.pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()

    def resume(self) -> None:
        """Let it go on after ``pause``."""
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    # How.
    def _tree(self) -> list[psutil.Process]:
        found = []
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                main = psutil.Process(process.pid)
                found += [main, *main.children(recursive=True)]
        return [process for process in found if _lives(process)]

    def _account(self) -> dict[str, object]:
        """Arguments of Popen that make it run as the user that it insists on."""
        if self.USER is None or os.geteuid() != 0:
            return {}
        return {"user": self.USER, "group": pwd.getpwnam(self.USER).pw_gid, "extra_groups": []}

    def _give(self, path: Path) -> None:
        if self.USER is not None and self._account():
            shutil.chown(path, self.USER)

    def _run(self, *command: str) -> None:
        """Run a program of preparation to its end."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            check=False,
            **self._account(),  # type: ignore[call-overload]
        )
        if done.returncode:
            raise StartError(
                f"{self.NAME}: {command[0]}: {(done.stdout + done.stderr).decode(errors='replace')[-2000:]}"
            )

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        self._give(path)
        return path

    def _launch(self) -> None:
        self._processes = []
        with (self.folder / "server.log").open("ab") as log:
            for command in self.commands():
                process = subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    **self._account(),  # type: ignore[call-overload]
                )
                self._processes.append(process)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, str(self.folder), str(self.QUICK.value), *(str(p.pid) for p in self._processes)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + READY_SECONDS
        while not self._ready():
            if not self.running or time.monotonic() > deadline:
                self._end(self.QUICK)
                raise StartError(f"{self.NAME} did not start: {self._log_tail()}")
            time.sleep(0.02)

    def _ready(self) -> bool:
        """Whether it answers, and it is ours that answers, not one that took the port in the meantime."""
        try:
            return self.answers() and self._listens()
        except self.REFUSALS:
            return False

    def _listens(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(
                socket_.status == psutil.CONN_LISTEN and socket_.laddr.port == self.port
                for process in self._tree()
                for socket_ in process.net_connections("tcp")
            )
        return False

    def _log_tail(self) -> str:
        return (self.folder / "server.log").read_bytes()[-2000:].decode(errors="replace")

    def _end(self, number: signal.Signals) -> None:
        tree = self._tree()
        if number != signal.SIGKILL:
            self.resume()  # a stopped process does not hear the others
        for process in reversed(self._processes):  # the server, then what stood before it
            if process.poll() is None:
                process.send_signal(number)
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        _, left = psutil.wait_procs(tree, timeout=STOP_SECONDS)
        for straggler in left:
            straggler.kill()
        psutil.wait_procs(left, timeout=STOP_SECONDS)
        self._processes = []
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    def _talk(self, say: bytes, hear: bytes) -> bool:
        """Whether ``hear`` is in what comes back first."""
        with socket.create_connection((HOST, self.port), timeout=5) as connection:
            connection.sendall(say)
            return hear in connection.recv(4096)
