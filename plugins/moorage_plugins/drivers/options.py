# SPDX-License-Identifier: Apache-2.0
"""Options of the reference drivers. Those of the process driver are in the group ``[driver_process]``."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["GROUP", "OPTS", "list_opts"]

GROUP = cfg.OptGroup("driver_process", title="The compute driver process: commands in sandboxes")

OPTS: Sequence[cfg.Opt] = (
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
    cfg.IntOpt(
        "first_uid",
        default=700_000,
        min=1,
        max=2**31,
        help="The first of 65,536 user ids, one of which each project gets, by its id; two projects may get one. They must belong "
        "to no user of the host. An agent that is not root runs workloads as its own user instead. Needs a restart.",
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
        "start_timeout",
        default=60.0,
        min=1.0,
        help="Seconds after which a workload that does not run counts as failed. Needs a restart.",
    ),
)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(GROUP.name, OPTS)]
