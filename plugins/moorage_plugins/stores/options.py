# SPDX-License-Identifier: Apache-2.0
"""Options of the sql store, in the group ``[allocation_sql]``."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["GROUP", "OPTS", "list_opts", "register_opts"]

GROUP = cfg.OptGroup("allocation_sql", title="The sql allocation store")

OPTS: Sequence[cfg.Opt] = (
    cfg.IntOpt(
        "claim_attempts",
        default=5,
        min=1,
        help="How often a claim is tried that is refused, yet fits by what is read afterwards (others give room back in "
        "between). Transactions that lose a race are counted by [database] attempts. Needs a restart.",
    ),
    cfg.IntOpt(
        "group_commit",
        default=1,
        min=1,
        max=64,
        help="How many claims of new consumers on the same providers, which several threads of this process make at once, are "
        "made in one transaction; 1 makes each in its own. It pays where many claim of one provider. Needs a restart.",
    ),
)


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the options on ``conf``."""
    conf.register_group(GROUP)
    conf.register_opts(OPTS, group=GROUP)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(GROUP.name, OPTS)]
