# SPDX-License-Identifier: Apache-2.0
"""Options of the group ``[cleanup]``."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["GROUP", "OPTS", "list_opts", "register_opts"]

GROUP = cfg.OptGroup("cleanup", title="Operations in progress and what dead services left")

OPTS: Sequence[cfg.Opt] = (
    cfg.FloatOpt(
        "lease_seconds",
        default=60.0,
        min=0.2,
        help="Seconds that an operation's owner keeps it without renewing; it renews at a third of that.",
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
