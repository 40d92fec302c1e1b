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
        "claims_per_transaction",
        default=128,
        min=1,
        max=256,
        help="How many claims of new consumers one transaction makes at most. Claims that come from several threads of one "
        "process while its transactions run share the next one. 1 makes each claim in a transaction of its own. With few clients "
        "and a slow network to the database server, that makes more claims per second, for about twice the processor time. Needs "
        "a restart.",
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
