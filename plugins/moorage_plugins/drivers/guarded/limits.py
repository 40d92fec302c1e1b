# SPDX-License-Identifier: Apache-2.0
"""Limits of a workload: control groups where the system allows to make some, else the limits of processes.

Both versions of control groups are known. A group lies in the group ``moorage`` at the root of the hierarchy: memory, processor
time and the number of processes of all of a workload. Without control groups only the memory of each single process is limited.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["PARENT", "Group", "Limits", "clean_up", "group_name", "groups_for", "remove"]

#: The control group, at the root of each hierarchy, that holds those of workloads.
PARENT = "moorage"
_ROOT = Path("/sys/fs/cgroup")
_PERIOD = 100_000
_MIB = 2**20
#: Seconds that the command which cleans up may take.
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Group:
    """A control group that is to be made: its folder, and what is written into its files.

    :param limits: the controllers that it stands for: memory, cpu, pids.
    """

    folder: str
    values: Mapping[str, str]
    limits: Sequence[str]


def group_name(uuid: str, token: int) -> str:
    """Returns the name of the control groups of a workload under its token."""
    return f"{uuid}-{token}"


def groups_for(name: str, resources: Mapping[str, int], processes: int, root: Path = _ROOT) -> list[Group]:
    """Returns the control groups of a workload; empty without control groups. Creates nothing."""
    memory, cpus = resources.get("MEMORY_MB"), resources.get("VCPU")
    if (root / "cgroup.controllers").exists():
        values = {"pids.max": str(processes)}
        if memory:
            values |= {"memory.max": str(memory * _MIB)}
        if cpus:
            values |= {"cpu.max": f"{cpus * _PERIOD} {_PERIOD}"}
        return [Group(str(root / PARENT / name), values, ("memory", "cpu", "pids"))]
    by_controller: dict[str, dict[str, str]] = {"memory": {}, "cpu": {}, "pids": {"pids.max": str(processes)}}
    if memory:
        by_controller["memory"] = {"memory.limit_in_bytes": str(memory * _MIB)}
    if cpus:
        by_controller["cpu"] = {"cpu.cfs_period_us": str(_PERIOD), "cpu.cfs_quota_us": str(cpus * _PERIOD)}
    return [
        Group(str(root / controller / PARENT / name), values, (controller,))
        for controller, values in by_controller.items()
        if (root / controller).is_dir()
    ]


@dataclass(slots=True)
class Limits:
    """The limits of one workload.

    :param memory_mb: the limit of each process where there is no control group of memory; 0 for none.
    :param joined: another program makes the groups and puts the workload into them, or does not run it.
    :ivar made: the groups that could be made.
    """

    groups: Sequence[Group]
    memory_mb: int
    joined: bool = False
    made: list[Group] = field(default_factory=list)

    def make(self) -> None:
        """Makes those of the groups that the system allows."""
        if self.joined:
            self.made = list(self.groups)
            return
        for group in self.groups:
            try:
                _make(group)
            except OSError:
                remove([group.folder])
            else:
                self.made.append(group)

    def enter(self) -> None:
        """Puts the calling process under the limits, with all that it starts."""
        for group in () if self.joined else self.made:
            Path(group.folder, "cgroup.procs").write_text("0")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.memory_mb and not self._has("memory"):
            resource.setrlimit(resource.RLIMIT_AS, (self.memory_mb * _MIB,) * 2)

    def missing(self) -> str:
        """What is not limited as it should be, a sentence; empty when nothing is."""
        if self.joined:
            return ""
        lacking = []
        if not self._has("memory"):
            lacking.append("memory is limited for each process alone")
        if not self._has("cpu"):
            lacking.append("processor time is not limited")
        if not self._has("pids"):
            lacking.append("the number of processes is not limited")
        return f"No control groups: {', '.join(lacking)}." if lacking else ""

    def out_of_memory(self) -> bool:
        """Returns whether the kernel has killed a process since the workload used more memory than it may."""
        for group in self.made:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    lines = dict(line.split() for line in Path(group.folder, name).read_text().splitlines())
                    if int(lines.get("oom_kill", 0)):
                        return True
        return False

    def _has(self, controller: str) -> bool:
        return any(controller in group.limits for group in self.made)


def _make(group: Group) -> None:
    folder = Path(group.folder)
    folder.parent.mkdir(exist_ok=True)
    if len(group.limits) > 1:
        # In version 2 a group has the controllers that its parent gives to its children.
        wanted = " ".join(f"+{each}" for each in group.limits)
        for parent in (folder.parent.parent, folder.parent):
            (parent / "cgroup.subtree_control").write_text(wanted)
    folder.mkdir(exist_ok=True)
    for name, value in group.values.items():
        (folder / name).write_text(value)


def remove(folders: Iterable[str]) -> None:
    """Removes control groups; those that still have processes stay."""
    for folder in folders:
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def clean_up(command: Sequence[str], lock: int) -> None:
    """Runs the command that removes what a sandbox left besides its control groups; an empty one does nothing.

    What stays is removed by the next call for the same sandbox.

    :param lock: descriptor of the lock of the workload, which the command holds too: it may outlive its caller.
    """
    if command:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(  # noqa: S603  (the driver's own)
                list(command), capture_output=True, timeout=_PATIENCE, check=False, pass_fds=(lock,)
            )
