# SPDX-License-Identifier: Apache-2.0
"""The local job engine: a cluster is a folder, a job a process in it that leaves its exit code in a file."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from moorage import errors

__all__ = ["LocalEngine"]

#: Runs $3... in the folder of the job; leaves its own process group in $1 and, last of all, the exit code in $2.
_WRAPPER = 'echo $$ > "$1.new" && mv "$1.new" "$1"; p=$1; e=$2; shift 2; "$@"; echo $? > "$e.new" && mv "$e.new" "$e"'


class LocalEngine:
    """Everything lies below one folder, so that a status can be asked for by any process of the machine."""

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
        """Whether the cluster can be written to."""
        return os.access(self._path(cluster), os.W_OK)

    def start(self, cluster: str, job: str, command: Sequence[str]) -> None:
        """Start a job once; a second call finds the first one's traces and does nothing.

        :raises Unavailable: the cluster is not there.
        """
        folder = self._path(cluster) / job
        try:
            folder.mkdir()
        except FileExistsError:
            return
        except OSError as error:
            raise errors.Unavailable(f"Job {job} cannot be started in cluster {cluster}: {error.strerror}.") from error
        with (folder / "output").open("wb") as output:
            subprocess.Popen(  # noqa: S603  (running what the user asked for is what a job is)
                ["/bin/sh", "-c", _WRAPPER, "job", str(folder / "pid"), str(folder / "exit"), *command],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def status(self, cluster: str, job: str) -> tuple[str, int | None]:
        """(status, exit code): ``Pending``, ``Running``, ``Succeeded``, ``Failed``, or ``Killed``."""
        folder = self._path(cluster) / job
        # The exit code goes before the process: it is written at the end.
        code = _number(folder / "exit")
        if code is None:
            group = _number(folder / "pid")
            if group is None:
                return ("Pending", None)
            if _lives(group):
                return ("Running", None)
            code = _number(folder / "exit")
        if code is None:
            return ("Killed", None)
        return ("Succeeded", 0) if code == 0 else ("Failed", code)

    def remove(self, cluster: str) -> None:
        """Kill the cluster's jobs and remove its folder; what is gone already is no error."""
        path = self._path(cluster)
        for pid in path.glob("*/pid"):
            group = _number(pid)
            if group is not None and _number(pid.parent / "exit") is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
        shutil.rmtree(path, ignore_errors=True)

    def _path(self, cluster: str) -> Path:
        return self._folder / cluster


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _lives(group: int) -> bool:
    """Whether a process group has a process that runs; one that has ended and was not waited for does not count."""
    try:
        os.killpg(group, 0)
        state = Path(f"/proc/{group}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"
