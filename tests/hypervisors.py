# SPDX-License-Identifier: Apache-2.0
"""Reads and changes the workloads of simulated hypervisors without their driver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moorage.drivers.interface import WorkloadState
from moorage_plugins.drivers import simulated

__all__ = ["Found", "executing", "found", "put", "remove"]


class Found(NamedTuple):
    """One workload. ``run`` is its memory."""

    host: str
    uuid: str
    token: int
    state: WorkloadState
    run: str


def found(state_dir: str | Path, host: str = "*", uuid: str = "*") -> list[Found]:
    """Returns the workloads of all hosts or one, of all instances or one, ordered by host and uuid."""
    return sorted(_found(f"{state_dir}/hypervisors", host, uuid), key=lambda each: each[:2])


def _found(folder: str, host: str, uuid: str) -> Iterator[Found]:
    for where in _names(folder, host):
        for name in _names(f"{folder}/{where}", uuid):
            # Not what a driver keeps beside them, for example a lease.
            if not name.startswith(".") and os.path.islink(path := f"{folder}/{where}/{name}"):
                now = simulated._read(path)
                if now is not None:
                    yield Found(where, name, now.token, now.state, now.run)


def _names(folder: str, wanted: str) -> list[str]:
    try:
        return os.listdir(folder) if wanted == "*" else [wanted]
    except FileNotFoundError:
        return []


def executing(state_dir: str | Path, uuid: str = "*") -> list[str]:
    """Returns the hosts that execute an instance."""
    return [each.host for each in found(state_dir, uuid=uuid) if each.state is WorkloadState.RUNNING]


def put(
    state_dir: str | Path, host: str, uuid: str, token: int | None = None, state: WorkloadState = WorkloadState.RUNNING
) -> None:
    """Puts a workload on a host; without a token, changes the state of the workload that is there."""
    folder = Path(state_dir) / "hypervisors" / host
    folder.mkdir(parents=True, exist_ok=True)
    now = simulated._read(f"{folder}/{uuid}")
    if token is None:
        assert now is not None, f"nothing of {uuid} is on {host}"
        token = now.token
    order, run = (now.order, now.run) if now is not None else (0, "-")
    simulated._replace(str(folder), uuid, simulated._Content(token, state, order, run))


def remove(state_dir: str | Path, host: str, uuid: str) -> None:
    """Removes a workload from a host."""
    (Path(state_dir) / "hypervisors" / host / uuid).unlink()
