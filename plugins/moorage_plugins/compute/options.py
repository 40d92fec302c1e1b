# SPDX-License-Identifier: Apache-2.0
"""Options of the compute plugin, in the group ``[compute]``."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["GROUP", "OPTS", "list_opts", "register_opts"]

GROUP = cfg.OptGroup("compute", title="The reference compute service")

OPTS: Sequence[cfg.Opt] = (
    cfg.StrOpt(
        "driver",
        default="simulated",
        help="The plugin (entry-point group moorage.compute_drivers) that runs the instances of an agent's host. Each agent may "
        "have another one. Needs a restart.",
    ),
    cfg.IntOpt("operations", default=4, min=1, help="Operations that an agent does at the same time. Needs a restart."),
    cfg.IntOpt(
        "batch",
        default=256,
        min=1,
        help="Operations that are taken, and finished, in one transaction at most. Needs a restart.",
    ),
    cfg.IntOpt(
        "queue",
        default=10000,
        min=1,
        help="Messages that an agent remembers at most; what comes beyond is found by its sweep. Needs a restart.",
    ),
    cfg.BoolOpt(
        "destroy_unknown",
        default=False,
        help="Whether an agent destroys workloads on its host that this control plane never made. They are named in the log "
        "otherwise. Never set it where another control plane uses the same hypervisor. Needs a restart.",
    ),
    cfg.IntOpt(
        "restart_limit",
        default=5,
        min=0,
        help="How often an ended instance is started again, if the extra spec compute:restart of its flavor asks for it. The count "
        "begins again when the instance has run for restart_window seconds. Needs a restart.",
    ),
    cfg.FloatOpt(
        "restart_delay",
        default=1.0,
        min=0.0,
        help="Seconds before an instance that ended is started again; doubles with each time, up to five minutes. Needs a restart.",
    ),
    cfg.FloatOpt(
        "restart_window",
        default=600.0,
        min=0.0,
        help="Seconds that an instance must run before its restarts are forgotten. Needs a restart.",
    ),
    cfg.FloatOpt(
        "resize_confirm_after",
        default=0.0,
        min=-1.0,
        help="Seconds, by the clock of the database, after which a resize confirms itself. Until then the instance is ``resized``, "
        "and its resize can be reverted: its old place is kept. 0: resizes are confirmed at once, and cannot be reverted. A "
        "negative number: never by itself. A resize whose instance does not run, or has a fault, does not confirm itself. The "
        "agent of the host to which an instance is resized decides. Needs a restart.",
    ),
    cfg.FloatOpt(
        "build_delay",
        default=0.0,
        min=0.0,
        help="Seconds that the simulated driver takes to build an instance; the flavor's extra spec sim:delay_ms "
        "(milliseconds) overrides it. Needs a restart.",
    ),
    cfg.FloatOpt(
        "destroy_delay",
        default=0.0,
        min=0.0,
        help="Seconds that the simulated driver takes to destroy an instance. Needs a restart.",
    ),
    cfg.StrOpt(
        "fail_builds",
        default="",
        help="The fault with which the simulated driver fails every build; empty for none. The flavor's extra spec "
        "sim:fail overrides it. Needs a restart.",
    ),
)


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the options on ``conf``."""
    # A group of its own: what is set on one that is shared would be set in every configuration of the process.
    conf.register_group(cfg.OptGroup(GROUP.name, title=GROUP.title))
    conf.register_opts(OPTS, group=GROUP.name)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(GROUP.name, OPTS)]
