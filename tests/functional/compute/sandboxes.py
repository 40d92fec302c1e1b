# SPDX-License-Identifier: Apache-2.0
"""What runs in sandboxes, read from the processes of the machine and not from the driver."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["guardians_of", "guards", "kill_guardians", "pids_of", "pids_of_instance", "require_bubblewrap"]

_GUARDIAN = "moorage_plugins.drivers.guarded.guardian"
_TRY = (
    "bwrap",
    "--unshare-user",
    "--unshare-all",
    "--uid",
    "1",
    "--gid",
    "1",
    "--ro-bind",
    "/",
    "/",
    "--",
    "/bin/true",
)


@functools.cache
def _refusal() -> str:
    """What the system says against a sandbox of a user that is not root; empty when it makes one."""
    other: dict[str, Any] = {"user": 700_000, "group": 700_000, "extra_groups": []} if os.getuid() == 0 else {}
    done = subprocess.run(_TRY, capture_output=True, text=True, check=False, cwd="/", **other)
    return f"no sandbox can be made here: {done.stderr.strip()}" if done.returncode else ""


def require_bubblewrap(test: unittest.TestCase) -> None:
    """Skips the test where no sandbox can be made: the kernel or a container may forbid it.

    Fails the test where all that bindep.txt lists is required and bubblewrap is not installed.
    """
    if shutil.which("bwrap") is None:
        missing = "bubblewrap is not installed (bindep.txt)"
        if os.environ.get("MOORAGE_REQUIRE_SERVERS"):
            test.fail(missing)
        test.skipTest(missing)
    if refusal := _refusal():
        test.skipTest(refusal)


def pids_of(uuid: str, folder: Path) -> list[int]:
    """The commands of an instance that run: those that guardians of the folder guard, and those whose guardian is gone."""
    found = {pid for guardian in _guardians(f"{folder}/", uuid) for pid in _commands_below(guardian)}
    return sorted(found.union(pid for pid in pids_of_instance(uuid) if _guardian_of(pid) is None))


def pids_of_instance(uuid: str) -> list[int]:
    """All processes that have the variable which names the instance in their environment."""
    wanted = f"MOORAGE_INSTANCE={uuid}".encode()
    return [pid for pid in _pids() if wanted in _read(pid, "environ").split(b"\0")]


def guards(folder: Path, pid: int) -> bool:
    """Whether a guardian of this folder guards a process, or none does."""
    guardian = _guardian_of(pid)
    return guardian is None or f"{folder}/" in _read(guardian, "cmdline").decode(errors="replace")


def guardians_of(uuid: str) -> list[int]:
    """The guardians of an instance that guard a command now."""
    return sorted(pid for pid in _guardians("/", uuid) if _commands_below(pid))


def kill_guardians(folder: Path) -> None:
    """Ends everything that guardians of a folder run."""
    for pid in _guardians(f"{folder}/", ""):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _guardians(folder: str, uuid: str) -> Iterator[int]:
    for pid in _pids():
        arguments = _read(pid, "cmdline").decode(errors="replace").split("\0")
        if _GUARDIAN in arguments and any(folder in each and f"/{uuid}" in each for each in arguments):
            yield pid


def _commands_below(guardian: int) -> list[int]:
    """The command is a child of the sandbox's first process, and that one of bubblewrap, which the guardian has started."""
    return [pid for outer in _children(guardian) for first in _children(outer) for pid in _children(first)]


def _children(pid: int) -> list[int]:
    """Of all its threads."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(each) for thread in threads for each in _read(pid, f"task/{thread}/children").split()]


def _guardian_of(pid: int) -> int | None:
    while pid > 1:
        if _GUARDIAN in _read(pid, "cmdline").decode(errors="replace").split("\0"):
            return pid
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        pid = int(fields[1]) if fields else 0
    return None


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
