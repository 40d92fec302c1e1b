# SPDX-License-Identifier: Apache-2.0
"""Options of the roles and their supervisor."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["AGENT", "CONTROL_PLANE", "list_opts", "register_opts"]

CONTROL_PLANE = cfg.OptGroup("control_plane", title="Roles and their supervisor")
AGENT = cfg.OptGroup("agent", title="The agent role")

CONTROL_PLANE_OPTS: Sequence[cfg.Opt] = (
    cfg.StrOpt(
        "state_dir",
        default="/var/lib/moorage",
        help="The folder that everything lies in: the SQLite file, sockets, credentials, logs. Needs a restart.",
    ),
    cfg.StrOpt(
        "instance_store",
        default="compute",
        help="The plugin (entry-point group moorage.instance_stores) that keeps the instances. Needs a restart.",
    ),
    cfg.IntOpt(
        "drain_timeout", default=30, min=1, help="Seconds that a role may take to end what it is doing on SIGTERM."
    ),
    cfg.IntOpt(
        "max_rss",
        default=2048,
        min=64,
        help="Resident memory, in MiB, above which the supervisor ends a process and restarts it.",
    ),
    cfg.FloatOpt(
        "stopped_timeout",
        default=30.0,
        min=0,
        help="Seconds after which the supervisor kills a process that is stopped (SIGSTOP), and restarts it: stopped in the "
        "middle of a transaction it holds up all others on SQLite. Keep it below [services] service_down_time, after which those "
        "give up. 0: never.",
    ),
    cfg.FloatOpt(
        "restart_delay", default=0.5, min=0.05, help="Seconds before a dead process is started again; doubles."
    ),
    cfg.FloatOpt("restart_delay_longest", default=30.0, min=0.1, help="The longest such delay, in seconds."),
    cfg.IntOpt(
        "start_timeout", default=60, min=1, help="Seconds after which a process that is not ready has failed to start."
    ),
    cfg.IntOpt("create_attempts", default=3, min=1, help="How many schedulers the API asks for one request, in all."),
    cfg.FloatOpt(
        "create_timeout",
        default=15.0,
        min=0.1,
        help="Seconds the API waits for one scheduler before it asks another; keep it above [scheduling] plugin_deadline.",
    ),
    cfg.FloatOpt(
        "reconcile_interval", default=60.0, min=0.1, help="Seconds between comparisons of nodes and providers."
    ),
)

AGENT_OPTS: Sequence[cfg.Opt] = (
    cfg.ListOpt(
        "services",
        default=["compute", "block_storage"],
        help="The plugins (entry-point group moorage.agent_services) that this agent runs, in order. Needs a restart.",
    ),
    cfg.StrOpt(
        "cluster",
        default="",
        help="The cluster that this agent belongs to: its members reach the same backends, so that each can do operations that are "
        "addressed to the cluster, and clean after the others. Empty: none. Needs a restart.",
    ),
    cfg.BoolOpt(
        "enrol",
        default=False,
        help="Whether the agent makes the node of its host at each start, with what its driver sees. The node has the agent's "
        "name; inventories and traits are brought in line. moorage agent --enrol sets it. moorage up sets it where its one "
        "agent has a driver that sees the machine. Needs a restart.",
    ),
    cfg.IntOpt(
        "reserved_host_cpus",
        default=0,
        min=0,
        help="VCPU that enrol keeps for the host itself. Needs a restart.",
    ),
    cfg.IntOpt(
        "reserved_host_memory_mb",
        default=512,
        min=0,
        help="MEMORY_MB that enrol keeps for the host itself, the agent among it. Needs a restart.",
    ),
    cfg.IntOpt(
        "reserved_host_disk_gb",
        default=0,
        min=0,
        help="DISK_GB that enrol keeps for the host itself. Needs a restart.",
    ),
    cfg.FloatOpt(
        "sweep_interval",
        default=5.0,
        min=0.05,
        help="Seconds between searches for operations whose message was lost. A search is a few reads. Needs a restart.",
    ),
    cfg.FloatOpt(
        "operation_deadline",
        default=3600.0,
        min=0.05,
        help="Seconds without a sign of progress after which the agent gives an operation up: it renews the lease no longer and "
        "releases the operation, to be tried again. The call that hangs keeps its thread. Services may declare another number. "
        "Needs a restart.",
    ),
)


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the options on ``conf``."""
    conf.register_opts(CONTROL_PLANE_OPTS, group=CONTROL_PLANE.name)
    conf.register_opts(AGENT_OPTS, group=AGENT.name)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(CONTROL_PLANE.name, CONTROL_PLANE_OPTS), (AGENT.name, AGENT_OPTS)]
