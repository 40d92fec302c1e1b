# SPDX-License-Identifier: Apache-2.0
"""The local job engine: a cluster is a folder, a job a process in it that leaves its exit code in a file.

Only the machine that a process runs on can say what has become of it, so all this is called by the agent of the cluster's host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from moorage import errors
from moorage.clock import SystemClock

__all__ = ["LocalEngine"]

_CLOCK = SystemClock()

#: Runs $2... when it reads "go", and leaves the exit code in $1. Its parent first writes down its id. If the parent dies before,
#: nothing runs.
_WRAPPER = 'read -r go && [ "$go" = go ] || exit; e=$1; shift; "$@" </dev/null; echo $? > "$e.new" && mv "$e.new" "$e"'
#: The files of a job: who runs it, that it shall not run, its exit code.
#: Seconds that killed processes are waited for at most, and between two looks.
_DYING, _LOOK = 5.0, 0.005
_PROCESS, _CANCELLED, _EXIT = "process", "cancelled", "exit"


class LocalEngine:
    """Everything lies below one folder, and can be found there after a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self, cluster: str) -> None:
        """Make a cluster; one that is there already is kept.

        :raises Unavailable: the folder cannot be written.
        """
        try:
            self._path(cluster).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise errors.Unavailable(
                f"Cluster {cluster} cannot be made in {self._folder}: {error.strerror}."
            ) from error

    def healthy(self, cluster: str) -> bool:
        """Returns whether the cluster can be written to."""
        return os.access(self._path(cluster), os.W_OK)

    def start(self, cluster: str, job: str, command: Sequence[str]) -> None:
        """Start a job once; a second call finds who the first one started, and does nothing.

        :raises Unavailable: the cluster is not there.
        """
        folder = self._path(cluster) / job
        try:
            folder.mkdir(exist_ok=True)
            if (folder / _PROCESS).exists() or (folder / _CANCELLED).exists():
                return
            with (folder / "output").open("wb") as output:
                process = subprocess.Popen(  # noqa: S603  (running what the user asked for is what a job is)
                    ["/bin/sh", "-c", _WRAPPER, "job", str(folder / _EXIT), *command],
                    cwd=folder,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            assert process.stdin is not None  # noqa: S101  (a pipe was asked for)
            with process.stdin:
                (folder / "new").write_text(f"{process.pid} {_began(process.pid)}\n", encoding="ascii")
                (folder / "new").rename(folder / _PROCESS)
                process.stdin.write(b"go\n")
        except OSError as error:
            raise errors.Unavailable(f"Job {job} cannot be started in cluster {cluster}: {error.strerror}.") from error

    def status(self, cluster: str, job: str) -> tuple[str, int | None]:
        """(status, exit code): ``Pending``, ``Running``, ``Succeeded``, ``Failed``, or ``Killed``."""
        folder = self._path(cluster) / job
        # Who runs it goes before the exit code, which is written at the end.
        known = (folder / _PROCESS).exists()
        running = _group(folder) is not None
        code = _number(folder / _EXIT)
        if code is not None:
            return ("Succeeded", 0) if code == 0 else ("Failed", code)
        if running:
            return ("Running", None)
        return ("Killed" if known or (folder / _CANCELLED).exists() else "Pending", None)

    def cancel(self, cluster: str, job: str) -> None:
        """Kill a job, or see to it that it is never started; one that has ended stays as it is.

        :raises Unavailable: the cluster is not there.
        """
        folder = self._path(cluster) / job
        try:
            folder.mkdir(exist_ok=True)
            (folder / _CANCELLED).touch()
        except OSError as error:
            raise errors.Unavailable(f"Job {job} cannot be killed in cluster {cluster}: {error.strerror}.") from error
        _kill(folder)

    def remove(self, cluster: str) -> None:
        """Kill the cluster's jobs and remove its folder; what is gone already is no error.

        :raises Unavailable: something of it cannot be removed.
        """
        path = self._path(cluster)
        jobs = [each.parent for each in path.glob(f"*/{_PROCESS}")]
        for each in jobs:
            _kill(each)
        # What is dying may still write.
        end = _CLOCK.monotonic() + _DYING
        while any(_group(each) is not None for each in jobs) and _CLOCK.monotonic() < end:
            _CLOCK.sleep(_LOOK)
        try:
            shutil.rmtree(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise errors.Unavailable(f"Cluster {cluster} cannot be removed: {error.strerror}.") from error

    def clusters(self) -> list[str]:
        """Returns the clusters that have folders."""
        try:
            return sorted(path.name for path in self._folder.iterdir() if path.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _path(self, cluster: str) -> Path:
        return self._folder / cluster


def _kill(job: Path) -> None:
    """Kill what runs in the folder of a job."""
    group = _group(job)
    if group is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _group(job: Path) -> int | None:
    """Returns the process group of a job that runs, or None. A number that another process has by now is not taken for it."""
    try:
        number, began = (job / _PROCESS).read_text(encoding="ascii").split(maxsplit=1)
        return int(number) if _began(int(number)) == began.strip() else None
    except (OSError, ValueError):
        return None


def _began(process: int) -> str:
    """When a process that runs began, in a form that no other process of any machine has together with its number.

    :raises OSError: there is none. :raises ValueError: it has ended and was not waited for.
    """
    after_name = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    if after_name[0] in "ZX":
        raise ValueError(process)
    # The 22nd field of the line, of which the third is the first here.
    return f"{after_name[19]} {_boot()}"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
