# SPDX-License-Identifier: Apache-2.0
"""Options of the group ``[sharding]``."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["GROUP", "OPTS", "list_opts", "register_opts"]

GROUP = cfg.OptGroup("sharding", title="Shards of the fleet")

OPTS: Sequence[cfg.Opt] = (
    cfg.StrOpt(
        "strategy",
        default="balanced",
        help="The plugin (entry-point group moorage.shard_strategies) that divides nodes into shards, for plans that name no "
        "strategy, and at enrolment.",
    ),
    cfg.BoolOpt(
        "assign_at_enrolment",
        default=False,
        help="Give a new node without a shard one, by the strategy, which must be able to place single nodes. Needs a restart.",
    ),
    cfg.ListOpt(
        "shards",
        default=[],
        help="The shards that new nodes are given. Empty: those that nodes are in already; then the first one is an operator's.",
    ),
    cfg.StrOpt(
        "my_shard",
        help="The shard that this agent serves. It then gets the nodes of that shard and no others, and none when the shard is "
        "empty; never the whole fleet. The shard belongs to the agents that name it here: other agents do not get its nodes, also "
        "while those agents are away. Unset: the agent shares the nodes of all other shards with all such agents. Needs a restart.",
    ),
    cfg.IntOpt("batch", default=500, min=1, max=10_000, help="Moves of a plan that one transaction does."),
    cfg.IntOpt("keep_plans", default=50, min=1, help="Plans that are kept, with their journals; the oldest go first."),
)


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the options on ``conf``."""
    conf.register_opts(OPTS, group=GROUP.name)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(GROUP.name, OPTS)]
