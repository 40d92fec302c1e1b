# SPDX-License-Identifier: Apache-2.0
"""Options of the observers."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["GROUP", "OPTS", "list_opts", "register_opts"]

GROUP = cfg.OptGroup("observers", title="Plugins that receive events")

OPTS: Sequence[cfg.Opt] = (
    cfg.ListOpt(
        "enabled",
        mutable=True,
        default=[],
        help="The plugins (entry-point group moorage.observers) that receive the events of every process.",
    ),
    cfg.IntOpt(
        "queue",
        mutable=True,
        default=1000,
        min=1,
        help="Events that may wait for one observer. More events are dropped, and counted.",
    ),
    cfg.IntOpt(
        "max_errors",
        mutable=True,
        default=10,
        min=1,
        help="Errors in a row after which an observer receives no more events, until a reload builds it again.",
    ),
    cfg.FloatOpt(
        "deadline",
        mutable=True,
        default=30.0,
        min=0.01,
        help="Seconds after which one call of an observer counts as hanging. The observer then receives no more events.",
    ),
)


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the options on ``conf``."""
    conf.register_opts(OPTS, group=GROUP.name)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(GROUP.name, OPTS)]
