# SPDX-License-Identifier: Apache-2.0
"""The lease of a host that fences itself, as files: until when its workloads may run.

``FOLDER/lease/EPOCH.json`` is what the agent of that epoch has said last; the file of the highest epoch counts. So what an agent
says that was replaced, and does not know it yet, has no effect, and no agent waits for a lock of another one. Guardians read the
file.

A renewal replaces the file by a rename. Where the disk is full, it overwrites the file in place. The file always has the same
length, and contains the end of the lease twice: a reader that sees two different ends reads in the midst of an overwrite.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

from moorage_plugins.drivers.guarded.files import read_json, write_json

__all__ = ["EARLIER", "NEVER", "OutdatedError", "keep_lease", "lease_until"]

#: Ends of a lease: of one that is over for certain, and of one that was turned off.
EARLIER, NEVER = float("-inf"), float("inf")
_LEASE, _SUFFIX = "lease", ".json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class OutdatedError(Exception):
    """An agent of a higher epoch has kept a lease; its epoch is the argument."""


def keep_lease(folder: Path, epoch: int, until: float) -> None:
    """Keeps until when workloads of a host may run, in seconds since the machine started; :data:`NEVER` turns the lease off.

    :raises OutdatedError: an agent of a higher epoch has kept one. Two agents that turn the lease off agree.
    """
    held = folder / _LEASE
    known = _epochs(held)
    newest = max(known, default=0)
    if newest > epoch:
        if until == NEVER and lease_until(folder) == NEVER:
            return
        raise OutdatedError(newest)
    if until == NEVER and not known:
        return
    held.mkdir(exist_ok=True, mode=0o700)
    # Exact, and of one length for all numbers.
    end = f"{until:25.17e}"
    content = {"boot": _boot_id(), "until": end, "check": end}
    path = held / f"{epoch}{_SUFFIX}"
    try:
        write_json(path, content)
    except OSError:
        if not _overwrite(path, content):
            raise
    for earlier in known:
        if earlier < epoch:
            (held / f"{earlier}{_SUFFIX}").unlink(missing_ok=True)


def lease_until(folder: Path) -> float | None:
    """Reads until when workloads of a host may run; None: no agent has ever kept a lease there.

    :data:`EARLIER` where the file is damaged, or was written before the machine was started again.

    :raises OSError: it cannot be read now.
    """
    held = folder / _LEASE
    while known := _epochs(held):
        path = held / f"{max(known)}{_SUFFIX}"
        content = read_json(path)
        if content is None and not path.exists():
            # A later agent has removed it, after it kept its own.
            continue
        if content is None or content.get("boot") != _boot_id():
            return EARLIER
        until = content.get("until", "-inf")
        if content.get("check", until) != until:
            raise BlockingIOError(errno.EAGAIN, "it is being overwritten", str(path))
        # None is what agents of an earlier release write.
        return NEVER if until is None else float(until)
    return None


def _overwrite(path: Path, content: Mapping[str, str]) -> bool:
    """Overwrites a file of the same length in place, which needs no room on the disk; False when there is none."""
    data = json.dumps(content).encode()
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        return os.fstat(descriptor).st_size == len(data) and os.pwrite(descriptor, data, 0) == len(data)
    finally:
        os.close(descriptor)


def _epochs(held: Path) -> list[int]:
    try:
        names = os.listdir(held)
    except FileNotFoundError:
        return []
    return [int(name.removesuffix(_SUFFIX)) for name in names if name.removesuffix(_SUFFIX).isdigit()]


def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()
