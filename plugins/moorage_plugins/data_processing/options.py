# SPDX-License-Identifier: Apache-2.0
"""Options of the data processing plugin, in the group ``[data_processing]``; the seed's names where it has one."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["GROUP", "OPTS", "list_opts", "register_opts"]

GROUP = cfg.OptGroup("data_processing", title="The reference data processing service")

OPTS: Sequence[cfg.Opt] = (
    cfg.StrOpt(
        "folder",
        default="",
        help="Where clusters keep their files; the same for engines and agents. Empty: data_processing in the state folder. "
        "Needs a restart.",
    ),
    cfg.FloatOpt(
        "min_transient_cluster_active_time",
        default=30.0,
        min=0.0,
        deprecated_opts=[cfg.DeprecatedOpt("min_transient_cluster_active_time", group="DEFAULT")],
        help="Seconds that a transient cluster stays after its last job ended.",
    ),
    cfg.FloatOpt(
        "cleanup_time_for_incomplete_clusters",
        default=0.0,
        min=0.0,
        deprecated_opts=[cfg.DeprecatedOpt("cleanup_time_for_incomplete_clusters", group="DEFAULT")],
        help="Hours after which a cluster that did not become active is terminated; 0: never.",
    ),
    cfg.FloatOpt("update_job_statuses_interval", default=45.0, min=0.05, help="Seconds between checks of jobs."),
    cfg.FloatOpt(
        "transient_clusters_interval", default=90.0, min=0.05, help="Seconds between searches for idle clusters."
    ),
    cfg.FloatOpt(
        "incomplete_clusters_interval", default=3600.0, min=0.05, help="Seconds between searches for stuck clusters."
    ),
    cfg.FloatOpt("zombie_proxy_users_interval", default=300.0, min=0.05, help="Seconds between checks of proxy users."),
    cfg.FloatOpt(
        "cluster_health_interval", default=600.0, min=0.05, help="Seconds between checks of the clusters' health."
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
