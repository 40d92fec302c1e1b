# SPDX-License-Identifier: Apache-2.0
"""Options of the groups ``[allocation]`` and ``[quota]``."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["GROUP", "OPTS", "QUOTA_OPTS", "list_opts", "register_opts"]

GROUP = cfg.OptGroup("allocation", title="Allocation of resources")

OPTS: Sequence[cfg.Opt] = (
    cfg.StrOpt(
        "store",
        default="sql",
        help="The plugin (entry-point group moorage.allocation_stores) that keeps providers and claims. Needs a restart.",
    ),
    cfg.StrOpt(
        "step_size_rule",
        default="seed",
        choices=[
            ("seed", "an amount passes when it is min_unit or a multiple of step_size"),
            ("modulo", "an amount passes when it is a multiple of step_size, as in Placement"),
        ],
        help="How step_size limits the amount of a claim. All processes must agree. Needs a restart.",
    ),
    cfg.IntOpt(
        "max_candidates",
        default=20_000,
        min=1,
        help="How many candidates one query is answered with, whatever limit it asks for: where many groups meet many "
        "providers of one tree, there are millions. Needs a restart.",
    ),
    cfg.FloatOpt(
        "reap_interval",
        default=10.0,
        min=0.1,
        help="Seconds between searches for expired claims, by the periodic task expire_claims. Needs a restart.",
    ),
    cfg.ListOpt(
        "orphan_detectors",
        default=[],
        help="The plugins (entry-point group moorage.orphan_detectors) that the audit asks for consumers behind which there is "
        "nothing. Enable one only where it knows everything that claims for its types of consumers: instance knows what was "
        "placed here, not what another service claimed through the API. Needs a restart.",
    ),
)


QUOTA_OPTS: Sequence[cfg.Opt] = (
    cfg.StrOpt(
        "source",
        default="",
        help="The plugin (entry-point group moorage.quota_sources) that has the limits of projects. Limits that it does not have "
        "are removed, and moorage quota set is refused. Empty: limits are set with moorage quota set. Needs a restart.",
    ),
    cfg.FloatOpt(
        "interval",
        default=60.0,
        min=1.0,
        help="Seconds between readings of the source. So long may a limit be outdated. Needs a restart.",
    ),
)


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the options on ``conf``."""
    for group, options in list_opts():
        conf.register_opts(options, group=group)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(GROUP.name, OPTS), ("quota", QUOTA_OPTS)]
