# SPDX-License-Identifier: Apache-2.0
"""The compute driver ``process``: each workload is a command in a sandbox of bubblewrap on the agent's machine.

Guardians watch the sandboxes (:mod:`moorage_plugins.drivers.guarded.driver`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.drivers.interface import DriverError, Workload
from moorage_plugins.drivers.guarded.driver import PATH, GuardedDriver, Sandbox
from moorage_plugins.drivers.guarded.guardian import LOCK_FD, STATUS_FD

__all__ = ["ProcessDriver"]

LOG = logging.getLogger(__name__)
#: What the sandbox runs: it says whether the command is found, and becomes the command.
_WRAPPER = (
    f'command -v -- "$1" >/dev/null 2>&1 || {{ printf n >&{STATUS_FD}; exit 127; }}; '
    f'printf y >&{STATUS_FD}; exec {STATUS_FD}>&-; exec "$@"'
)
#: The first version of bubblewrap that can forbid user namespaces.
_DISABLES_USERNS = (0, 8)
_MIB = 2**20


class ProcessDriver(GuardedDriver):
    """Runs commands in sandboxes of bubblewrap, each watched by a guardian process that survives the agent.

    A workload has users, files, processes and a network of its own: no network but its loopback, the host's programs read-only, and
    ``/tmp`` and ``/dev/shm`` in memory to write to. Memory, processor time and processes are limited by control groups where the
    system allows.
    """

    name: ClassVar[str] = "process"
    folder_name: ClassVar[str] = "processes"

    @override
    def check(self, workload: Workload) -> None:
        if not workload.command:
            raise DriverError(
                "the instance has no command, and the driver process runs nothing else; say one with "
                "moorage instance create --command"
            )

    @override
    def _find_programs(self) -> None:
        bwrap = shutil.which(self._section.bwrap)
        if bwrap is None:
            raise errors.ConfigError(
                f"[compute] driver = process needs the program {self._section.bwrap} (bubblewrap), which is not on this machine. "
                "Install the package bubblewrap, write its path to [driver_process] bwrap, or choose another driver."
            )
        self._bwrap = bwrap
        #: In a user namespace of its own a command could mount memory without a limit.
        self._no_namespaces = ("--disable-userns",) if _version(bwrap) >= _DISABLES_USERNS else ()
        if not self._no_namespaces:
            LOG.warning(
                "%s is older than 0.8, so commands may make user namespaces, and in them use memory beyond [driver_process] "
                "tmp_size where control groups do not limit it.", bwrap,
            )  # fmt: skip

    @override
    def _sandbox(self, made: Path, own: Path, workload: Workload) -> Sandbox:
        uid = self._uid(workload.project_id)
        return Sandbox(
            self._arguments(workload, os.getuid() if uid is None else uid),
            uid=uid,
            owner=uid,
            not_found=f"The command {workload.command[0]!r} is not found in the sandbox. It sees only the folders of "
            "[driver_process] read_only_paths of this host.",
            memory_mb=workload.resources.get("MEMORY_MB", 0),
        )

    def _arguments(self, workload: Workload, uid: int) -> Sequence[str]:
        """Returns the command line of the sandbox."""
        section = self._section
        size = str(section.tmp_size * _MIB)
        paths = [item for path in section.read_only_paths for item in ("--ro-bind-try", path, path)]
        environment = {
            "PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8", "MOORAGE_INSTANCE": workload.uuid,  # noqa: S108
        }  # fmt: skip
        settings = [item for name, value in environment.items() for item in ("--setenv", name, value)]
        return [
            self._bwrap,
            *self._no_namespaces,
            *("--unshare-user", "--unshare-all", "--uid", str(uid), "--gid", str(uid)),
            *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--sync-fd", str(LOCK_FD)),
            *("--hostname", f"i-{workload.uuid}", "--clearenv", *settings),
            *paths,
            *("--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),  # noqa: S108
            *("--size", size, "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"),  # noqa: S108
            *("--", "/bin/sh", "-c", _WRAPPER, "sh", *workload.command),
        ]


def _version(bwrap: str) -> tuple[int, ...]:
    """Returns the version of bubblewrap; (0,) where it does not say one."""
    try:
        said = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    return tuple(int(part) for part in re.findall(r"\d+", said)[:2]) or (0,)
