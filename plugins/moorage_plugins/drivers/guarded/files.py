# SPDX-License-Identifier: Apache-2.0
"""How a workload of the process driver lies on disk, and the lock by which its guardian is found.

``FOLDER/UUID/TOKEN/`` has the files of one workload under one token:

* ``spec.json``: what is to be run. Written before the folder gets its name.
* ``alive``: the guardian holds a lock (flock) on it, and so does the sandbox. As long as any process of the workload lives, the
  lock is taken. It contains the guardian's process id and start.
* ``state.json``: what became of it. Absent until it ran for the first time.
* ``order``: the highest order of the power calls (stop, start, reboot) for it, and whether it is to be stopped. A lock (flock) on
  it is taken for moments only.
* ``log`` and ``log.1``: what it wrote, the newest last.

The folder ``lease`` beside those of the instances says until when workloads may run
(:mod:`moorage_plugins.drivers.guarded.lease`). A folder of a token appears and disappears by one rename each. Nothing is flushed to
the disk: after a crash of the machine nothing runs, and a file that cannot be read counts as absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "LOG_FILE",
    "OLD_LOG_FILE",
    "SPEC",
    "STATE",
    "children_of",
    "make_lock",
    "name_of",
    "power_call",
    "read_json",
    "say_who",
    "signal_guardian",
    "start_of",
    "tokens_of",
    "try_lock",
    "was_stopped",
    "write_json",
]

SPEC, STATE, ALIVE, ORDER = "spec.json", "state.json", "alive", "order"
LOG_FILE, OLD_LOG_FILE = "log", "log.1"


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the content of a file; None when it is absent or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a file by one rename."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_text(json.dumps(content), encoding="utf-8")
    made.replace(path)


def tokens_of(folder: Path) -> list[int]:
    """Returns the tokens that have a folder below the folder of an instance; empty without folders."""
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def make_lock(folder: Path) -> None:
    """Makes the file of the lock, in a folder that has not got its name yet."""
    (folder / ALIVE).touch(mode=0o600)


def try_lock(folder: Path, *, shared: bool = False) -> int | None:
    """Takes the lock of a workload; its file descriptor, which holds the lock until it is closed. None: the workload lives.

    :raises FileNotFoundError: the folder is not there any more.
    """
    while True:
        descriptor = os.open(folder / ALIVE, os.O_RDWR)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # The folder may have been removed, or removed and made again, since the file was opened.
            if os.path.samestat(os.fstat(descriptor), os.stat(folder / ALIVE)):
                if shared or not _is_dying(folder):
                    return descriptor
                os.close(descriptor)
                return None
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextlib.contextmanager
def power_call(folder: Path, order: int, *, stop: bool | None = None) -> Iterator[bool]:
    """Keeps the order of a power call; yields False, and keeps nothing, where a later call was before it.

    No other power call of the workload compares its order before the block ends.

    :param stop: whether the workload is to be stopped from now on; None: as it was.
    :raises FileNotFoundError: the folder is not there any more.
    """
    descriptor = os.open(folder / ORDER, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        kept, stopped = _order(os.pread(descriptor, 100, 0))
        if kept <= order:
            # Of one length always, so that a killed writer leaves one or the other.
            os.pwrite(descriptor, f"{order:020d} {int(stopped if stop is None else stop)}\n".encode(), 0)
        yield kept <= order
    finally:
        os.close(descriptor)


def was_stopped(folder: Path) -> bool:
    """Returns whether the last power call of a workload wants it stopped."""
    try:
        return _order((folder / ORDER).read_bytes())[1]
    except FileNotFoundError:
        return False


def _order(content: bytes) -> tuple[int, bool]:
    order, _, stopped = content.partition(b" ")
    return int(order or 0), stopped.strip() == b"1"


def say_who(lock: int) -> None:
    """Writes into the file of the lock which process holds it."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()} {start_of(os.getpid())}\n".encode(), 0)


def signal_guardian(folder: Path, number: signal.Signals) -> None:
    """Sends a signal to the guardian of a workload, if it is there.

    Another process that has got the number of a dead guardian gets no signal.
    """
    try:
        pid, start = map(int, (folder / ALIVE).read_text().split())
        process = os.pidfd_open(pid)
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return
    try:
        if start_of(pid) == start:
            signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(process)


def start_of(pid: int) -> int:
    """When a process began, in ticks since the start of the machine; 0 when there is no such process, or it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # The second field is the name of the program in parentheses, which may contain anything.
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def _is_dying(folder: Path) -> bool:
    """Returns whether the sandbox has let go of the lock and its processes end just now.

    The kernel closes the files of the sandbox's first process before it ends the others.
    """
    state = read_json(folder / STATE) or {}
    return "init" in state and start_of(state["init"]) == state["init_start"]


def children_of(pid: int) -> Iterator[int]:
    """Returns the processes that a process has begun, and theirs, each after its parent."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # Each thread has its own.
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    for child in sorted(found):
        yield child
        yield from children_of(child)


def name_of(pid: int) -> str:
    """Returns the name that the kernel shows for a process; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
