# SPDX-License-Identifier: Apache-2.0
"""Options of the reference drivers: ``[driver_process]``, ``[driver_container]``, ``[driver_libvirt]`` and ``[driver_redfish]``."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["REDFISH_GROUP", "REDFISH_OPTS", "list_opts"]

#: What guardians need of every driver whose workloads they guard.
_GUARDED: Sequence[cfg.Opt] = (
    cfg.IntOpt(
        "first_uid",
        default=700_000,
        min=1,
        max=2**31,
        help="The first of 65,536 user ids, one of which each project gets, by its id; two projects may get one. They must belong "
        "to no user of the host. With the driver process, an agent that is not root runs workloads as its own user instead. Needs "
        "a restart.",
    ),
    cfg.IntOpt(
        "max_processes", default=512, min=1, help="Processes and threads of a workload at most. Needs a restart."
    ),
    cfg.IntOpt("log_size", default=2, min=1, help="MiB that are kept of what a workload writes. Needs a restart."),
    cfg.IntOpt(
        "tmp_size",
        default=64,
        min=1,
        help="MiB that a workload may write to /tmp, and as many to /dev/shm. Needs a restart.",
    ),
    cfg.FloatOpt(
        "stop_timeout",
        default=10.0,
        min=0.0,
        help="Seconds between SIGTERM and SIGKILL when a workload is ended. Needs a restart.",
    ),
    cfg.FloatOpt(
        "self_fence",
        default=0.0,
        min=0.0,
        help="Seconds after which the guardians end all workloads of the host if no heartbeat of its agent reached the store. Then "
        "its instances may be evacuated without a command of an operator. At least three times [services] report_interval. If the "
        "store is away for longer than 0.9 of it, all workloads of all such hosts end; if a restart of the agent takes longer, "
        "those of its host end. 0: workloads run on without the agent. Needs a restart.",
    ),
    cfg.FloatOpt(
        "start_timeout",
        default=60.0,
        min=1.0,
        help="Seconds after which a workload that does not run counts as failed. Needs a restart.",
    ),
)
_PROCESS: Sequence[cfg.Opt] = (
    cfg.StrOpt("bwrap", default="bwrap", help="The program bubblewrap: a name or a path. Needs a restart."),
    cfg.StrOpt(
        "folder",
        default="",
        help="Where the files of workloads lie, among them what they write. Empty: processes in the state folder. Needs a restart.",
    ),
    cfg.ListOpt(
        "read_only_paths",
        default=[
            *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"),
            *("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs"),
        ],
        help="What a workload sees of the host's files, read-only; paths that do not exist are left out. /bin/sh must be among "
        "them. Needs a restart.",
    ),
    *_GUARDED,
)
_CONTAINER: Sequence[cfg.Opt] = (
    cfg.StrOpt("runc", default="runc", help="The program runc: a name or a path. Needs a restart."),
    cfg.StrOpt(
        "unshare", default="unshare", help="The program unshare of util-linux: a name or a path. Needs a restart."
    ),
    cfg.StrOpt(
        "folder",
        default="",
        help="Where the files of workloads lie, among them what they write. Empty: containers in the state folder. Needs a "
        "restart.",
    ),
    cfg.StrOpt(
        "images",
        default="/var/lib/moorage/images",
        help="The folder of images. Each is a folder that has the id of the image as its name, with the files in rootfs and, "
        "optionally, an OCI runtime configuration in config.json, as umoci unpack makes them. Every user must be allowed to read "
        "it. Needs a restart.",
    ),
    *_GUARDED,
)

_LIBVIRT: Sequence[cfg.Opt] = (
    cfg.StrOpt("virsh", default="virsh", help="The program virsh: a name or a path. Needs a restart."),
    cfg.StrOpt(
        "uri",
        default="qemu:///system",
        help="The libvirt of this machine, as a connection URI. It must be on the machine of the agent. Needs a restart.",
    ),
    cfg.StrOpt(
        "virt_type",
        default="kvm",
        choices=["kvm", "qemu"],
        help="How machines are executed: kvm, by the processors of the host, or qemu, which emulates them and is slow. Needs a "
        "restart.",
    ),
    cfg.StrOpt(
        "images",
        default="/var/lib/moorage/images",
        help="The folder of images: files with the id of the image as their name and .raw or .qcow2 as their suffix. libvirt must "
        "be allowed to read them. Needs a restart.",
    ),
    cfg.StrOpt(
        "consoles",
        default="",
        help="The folder to which libvirt writes what machines say on their serial line. libvirt must be allowed to write there, "
        "and the agent to read. libvirt limits the files (virtlogd.conf, 2 MiB and three older files each by default). Empty: "
        "consoles in the state folder. Needs a restart.",
    ),
    cfg.FloatOpt(
        "timeout",
        default=60.0,
        min=1.0,
        help="Seconds that libvirt may take for one request, for example to start a machine. Needs a restart.",
    ),
    cfg.FloatOpt(
        "shutdown_timeout",
        default=60.0,
        min=0.0,
        help="Seconds that the system of a machine gets to shut down when its instance is stopped or rebooted; then the machine is "
        "ended. 0 ends it at once, as for deletions. Needs a restart.",
    ),
)

REDFISH_GROUP = cfg.OptGroup("driver_redfish", title="The compute driver redfish: whole machines through their BMCs")

REDFISH_OPTS: Sequence[cfg.Opt] = (
    cfg.StrOpt(
        "username",
        default="",
        help="The user name at BMCs whose node has no redfish_username in its driver_info. Needs a restart.",
    ),
    cfg.StrOpt(
        "password",
        default="",
        secret=True,
        help="The password at BMCs whose node has no redfish_password in its driver_info. Needs a restart.",
    ),
    cfg.StrOpt(
        "boot_device",
        default="pxe",
        choices=["cdrom", "disk", "none", "pxe", "uefi_http", "usb"],
        help="What a machine boots from when it is turned on for a new instance, where the flavor does not say it with the extra "
        "spec redfish:boot_device; later starts boot as the machine is set up. none: the first time, too. Needs a restart.",
    ),
    cfg.FloatOpt(
        "timeout",
        default=20.0,
        min=0.1,
        help="Seconds that a BMC may take to accept a connection, and to answer. Needs a restart.",
    ),
    cfg.FloatOpt(
        "power_timeout",
        default=60.0,
        min=0.1,
        help="Seconds within which a BMC must say that its machine is on, or off, after it was turned so. Needs a restart.",
    ),
    cfg.FloatOpt(
        "shutdown_timeout",
        default=60.0,
        min=0.0,
        help="Seconds that the operating system of a machine gets to shut down when its instance is stopped or rebooted; then the "
        "power is cut. 0 cuts it at once, as for deletions. Needs a restart.",
    ),
    cfg.FloatOpt(
        "poll_interval",
        default=10.0,
        min=0.0,
        help="Seconds after which a BMC is asked again whether its machine is on. Needs a restart.",
    ),
)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [
        ("driver_process", _PROCESS),
        ("driver_container", _CONTAINER),
        ("driver_libvirt", _LIBVIRT),
        (REDFISH_GROUP.name, REDFISH_OPTS),
    ]
