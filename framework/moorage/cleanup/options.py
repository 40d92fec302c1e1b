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
        help="Seconds that an operation's owner, a service or a cleaner, keeps it without renewing. It renews at a third of that: "
        "when one renewal fails, the next is in time. What a dead cleaner had is taken over after it. Needs a restart.",
    ),
    cfg.ListOpt(
        "enabled_handlers",
        default=["volume", "snapshot", "backup", "instance", "cluster"],
        help="The plugins (entry-point group moorage.cleanup_handlers) that clean, one for each type of resource, at the same "
        "time. The API refuses requests for other types. Needs a restart.",
    ),
    cfg.ListOpt(
        "paused",
        mutable=True,
        default=[],
        help="Types of resources that are not cleaned at present; * is all of them. What is being cleaned is not interrupted.",
    ),
    cfg.DictOpt(
        "limits",
        mutable=True,
        default={},
        help="How many resources of a type one cleaner cleans at the same time, as type:number pairs. The default of a type is its "
        "handler's number, or [cleanup] batch if the handler finishes sets in one transaction.",
    ),
    cfg.IntOpt(
        "batch",
        mutable=True,
        default=2000,
        min=1,
        help="Rows that are taken in one transaction at most; the more there are, the longer it holds their locks.",
    ),
    cfg.FloatOpt(
        "interval",
        default=5.0,
        min=0.05,
        help="Seconds between a cleaner's searches for requests whose message was lost, for expired leases of other cleaners, and "
        "for tries that are due. A search that finds nothing is one read for each. Needs a restart.",
    ),
    cfg.FloatOpt(
        "unclaimed_timeout",
        mutable=True,
        default=300.0,
        min=0.0,
        help="Seconds after which an operation that no service came for, or that was given back, and that no living one has in its "
        "queue, is cleaned; at least three [agent] sweep_interval. Keep it longer than agents are away for an upgrade: until then "
        "they would still do it.",
    ),
    cfg.IntOpt(
        "max_attempts",
        mutable=True,
        default=5,
        min=1,
        help="Tries to clean one operation, in all, before it is quarantined and waits for an operator.",
    ),
    cfg.FloatOpt(
        "backoff",
        mutable=True,
        default=2.0,
        min=0.01,
        help="Seconds before a failed cleanup is tried again; doubles with each try. By chance it is up to a half less, so that "
        "not all come back at once.",
    ),
    cfg.FloatOpt(
        "backoff_longest",
        mutable=True,
        default=300.0,
        min=0.01,
        help="The longest such time, in seconds, before chance.",
    ),
    cfg.BoolOpt(
        "auto_cleanup_enabled",
        mutable=True,
        default=False,
        help="Whether schedulers have services cleaned after that stay dead, by themselves. POST /cleanup/auto does it once, even "
        "when this is off.",
    ),
    cfg.IntOpt(
        "auto_cleanup_checks",
        mutable=True,
        default=3,
        min=1,
        help="How many samples in a row, one every [services] service_down_time, must find a service dead before it is cleaned "
        "after automatically; each scheduler counts by itself, from its start.",
    ),
    cfg.IntOpt(
        "history_days",
        mutable=True,
        default=30,
        min=1,
        help="Days after which lines of the history, ended requests and fences of resources without an operation are removed, a "
        "thousand in a transaction. What /metrics counts stays.",
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
