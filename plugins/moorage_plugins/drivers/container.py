# SPDX-License-Identifier: Apache-2.0
"""The compute driver ``container``: each workload is an OCI container on the agent's machine, which runc runs.

Guardians watch the containers (:mod:`moorage_plugins.drivers.guarded.driver`), as they do for the driver ``process``.

runc does not end its container when it is killed. So it runs as the first process of a process namespace (``unshare --pid
--kill-child``) and the container in a namespace within that one: the kernel ends both with the guardian.

An image is a folder that an operator puts on the host. Of its OCI configuration the driver takes the arguments, the environment and
the working directory. Users, capabilities, mounts, devices and hooks are the driver's, so an image gets no rights on the host.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.drivers.interface import DriverError, Workload
from moorage_plugins.drivers.guarded.driver import GuardedDriver, Sandbox
from moorage_plugins.drivers.guarded.files import write_json
from moorage_plugins.drivers.guarded.guardian import STATUS_FD
from moorage_plugins.drivers.guarded.limits import PARENT, group_name

__all__ = ["ContainerDriver"]

#: The id of an image is the name of a folder.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CONFIG = "config.json"
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: What runc says when it does not find the program of a container.
_NOT_FOUND = "unable to start container process: exec: "
#: The name of the first process of a container until it becomes the program.
_BECOMING = "runc:["
_MIB = 2**20
#: Microseconds in which a container may use its processor time.
_PERIOD = 100_000
_ENOSYS = 38
_CLONE_NEWUSER = 0x10000000
#: Calls that a container without capabilities needs for nothing but to attack the kernel. clone3 is absent for it (ENOSYS), so that
#: libraries fall back to clone, whose flags can be compared.
_FORBIDDEN = (
    *("add_key", "bpf", "fsconfig", "fsmount", "fsopen", "fspick", "io_uring_enter", "io_uring_register", "io_uring_setup"),
    *("kexec_load", "keyctl", "mount", "mount_setattr", "move_mount", "open_by_handle_at", "open_tree", "perf_event_open"),
    *("pivot_root", "request_key", "setns", "umount2", "unshare", "userfaultfd"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Image:
    """An image as it lies on the host.

    :param arguments: what it runs by itself, the program first; empty for nothing.
    """

    folder: Path
    arguments: Sequence[str] = ()
    environment: Sequence[str] = ()
    working_directory: str = "/"


class ContainerDriver(GuardedDriver):
    """Runs OCI containers with runc, each watched by a guardian process that survives the agent.

    A container has a user, files, processes and a network of its own: no network but its loopback, the files of its image
    read-only, ``/tmp`` and ``/dev/shm`` in memory to write to, and no capabilities. Control groups limit memory, processor time and
    processes.
    """

    name: ClassVar[str] = "container"
    folder_name: ClassVar[str] = "containers"
    #: unshare and runc.
    around: ClassVar[int] = 2

    @override
    def _find_programs(self) -> None:
        if os.getuid() != 0:
            raise errors.ConfigError(
                "[compute] driver = container needs an agent that is root, because it makes control groups and user namespaces for "
                "its containers. Run the agent as root, or choose another driver: [compute] driver = process."
            )
        self._runc = self._program("runc", "runc", "runc")
        self._unshare = self._program("unshare", "unshare", "util-linux")
        self._shell = self._program("", "sh", "dash")
        images = Path(self._section.images)
        if not images.is_dir():
            raise errors.ConfigError(
                f"[driver_container] images is {images}, which is no folder. Make it, and put images into it (see the guide of the "
                "driver container), or write the path of another folder."
            )
        for folder in (images, *images.absolute().parents):
            if not folder.stat().st_mode & stat.S_IXOTH:
                raise errors.ConfigError(
                    f"Containers cannot read [driver_container] images, {images}: their users may not enter {folder}. Allow it "
                    f"with chmod o+x {folder}, or choose another folder."
                )

    def _program(self, option: str, default: str, package: str) -> str:
        wanted = self._section[option] if option else default
        found = shutil.which(wanted)
        if found is None:
            raise errors.ConfigError(
                f"[compute] driver = container needs the program {wanted}, which is not on this machine. Install the package "
                f"{package}"
                + (f", write its path to [driver_container] {option}," if option else "")
                + " or choose another driver."
            )
        return found

    @override
    def check(self, workload: Workload) -> None:
        image = self._image(workload)
        if not (workload.command or image.arguments):
            raise DriverError(
                f"the image {image.folder.name} does not say what to run; say a command with moorage instance create --command"
            )

    @override
    def _sandbox(self, made: Path, own: Path, workload: Workload) -> Sandbox:
        image = self._image(workload)
        arguments = [*(workload.command or image.arguments)]
        uid, name = self._uid(workload.project_id), group_name(workload.uuid, int(own.name))
        write_json(made / _CONFIG, self._config(image, arguments, workload, name, uid))
        runc = [self._runc, "--root", str(self._folder / ".runc")]
        return Sandbox(
            [
                *(self._unshare, "--pid", "--fork", "--kill-child", "--mount-proc"),
                *(*runc, "run", "--keep", "--bundle", str(own), name),
            ],
            uid=None,
            owner=uid,
            not_found=f"The program {arguments[0]!r} is not in the image {image.folder.name}, or cannot be run.",
            not_found_mark=_NOT_FOUND,
            becoming=_BECOMING,
            cleanup=[*runc, "delete", "--force", name],
            joins_groups=True,
        )

    def _image(self, workload: Workload) -> Image:
        """Returns the image of a workload's request.

        :raises DriverError: it asks for none, it is not on this host, or it is damaged.
        """
        wanted = str(workload.image.get("id") or "")
        if not wanted:
            raise DriverError(
                "the instance has no image, and the driver container runs nothing else; say one with "
                "moorage instance create --image"
            )
        folder = Path(self._section.images) / wanted
        if not _ID.fullmatch(wanted) or not (folder / "rootfs").is_dir():
            raise DriverError(f"there is no image {wanted!r} on this host; an operator puts images there")
        try:
            process = json.loads((folder / _CONFIG).read_bytes())["process"]
            image = Image(folder, process.get("args") or (), process.get("env") or (), process.get("cwd") or "/")
        except FileNotFoundError:
            return Image(folder)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DriverError(f"the file {_CONFIG} of the image {wanted} is no OCI runtime configuration") from error
        texts = [*image.arguments, *image.environment, image.working_directory]
        if not all(isinstance(text, str) for text in texts) or not image.working_directory.startswith("/"):
            raise DriverError(f"the process in the file {_CONFIG} of the image {wanted} is no OCI process")
        return image

    def _config(
        self, image: Image, arguments: Sequence[str], workload: Workload, name: str, uid: int | None
    ) -> Mapping[str, Any]:
        """Returns the OCI runtime configuration of a workload (https://github.com/opencontainers/runtime-spec, 1.0)."""
        environment = {each.partition("=")[0] for each in image.environment}
        mapping = [{"containerID": 0, "hostID": uid, "size": 1}]
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": arguments,
                "env": [
                    *([] if "PATH" in environment else [_PATH]),
                    *image.environment,
                    f"MOORAGE_INSTANCE={workload.uuid}",
                ],
                "cwd": image.working_directory,
                "noNewPrivileges": True,
                "capabilities": {},
                "rlimits": [{"type": "RLIMIT_CORE", "hard": 0, "soft": 0}],
            },
            "root": {"path": str(image.folder.absolute() / "rootfs"), "readonly": True},
            "hostname": f"i-{workload.uuid}",
            "mounts": [
                _mount("/proc", "proc", "nosuid", "noexec", "nodev"),
                _mount("/dev", "tmpfs", "nosuid", "noexec", "mode=755", "size=65536"),
                *(
                    _mount(path, "tmpfs", "nosuid", "nodev", "mode=1777", f"size={self._section.tmp_size * _MIB}")
                    for path in ("/dev/shm", "/tmp")  # noqa: S108  (of the container)
                ),
            ],
            # Tells the guardian that the program was found. It runs beside runc, the first process of its namespace.
            "hooks": {
                "poststart": [
                    {"path": self._shell, "args": ["sh", "-c", f"printf y >/proc/1/fd/{STATUS_FD}"], "timeout": 30}
                ]
            },
            "linux": {
                "namespaces": [{"type": each} for each in ("user", "pid", "ipc", "uts", "mount", "network", "cgroup")],
                "uidMappings": mapping,
                "gidMappings": mapping,
                "cgroupsPath": f"/{PARENT}/{name}",
                "resources": _resources(workload.resources, self._section.max_processes),
                "seccomp": _seccomp(),
                "maskedPaths": [
                    *("/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
                    *("/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/firmware"),
                ],
                "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
            },
        }


def _mount(destination: str, kind: str, *options: str) -> Mapping[str, Any]:
    return {"destination": destination, "type": kind, "source": kind, "options": list(options)}


def _resources(resources: Mapping[str, int], processes: int) -> Mapping[str, Any]:
    """What runc writes into the control groups; it runs no container whose groups it cannot make."""
    memory, cpus = resources.get("MEMORY_MB"), resources.get("VCPU")
    return {
        "pids": {"limit": processes},
        **({"memory": {"limit": memory * _MIB}} if memory else {}),
        **({"cpu": {"quota": cpus * _PERIOD, "period": _PERIOD}} if cpus else {}),
    }


def _seccomp() -> Mapping[str, Any]:
    forks = {"index": 0, "value": _CLONE_NEWUSER, "valueTwo": _CLONE_NEWUSER, "op": "SCMP_CMP_MASKED_EQ"}
    # No namespace separates the sockets between virtual machines.
    vsock = {"index": 0, "value": socket.AF_VSOCK, "op": "SCMP_CMP_EQ"}
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            {"names": list(_FORBIDDEN), "action": "SCMP_ACT_ERRNO"},
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
            {"names": ["clone"], "action": "SCMP_ACT_ERRNO", "args": [forks]},
            {"names": ["socket"], "action": "SCMP_ACT_ERRNO", "args": [vsock]},
        ],
    }
