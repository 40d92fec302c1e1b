# SPDX-License-Identifier: Apache-2.0
"""Options of the groups ``[coordination]`` and ``[periodic]``.

The names are those of the specification of distributed periodic tasks; the names that Sahara gave them in the end are taken too.
"""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

from moorage import errors
from moorage.ring import HASH_FUNCTIONS

__all__ = ["COORDINATION", "PERIODIC", "check", "list_opts", "register_opts"]

COORDINATION = cfg.OptGroup("coordination", title="Which engine does which periodic work")
PERIODIC = cfg.OptGroup("periodic", title="Periodic tasks")


def _sahara(name: str) -> list[cfg.DeprecatedOpt]:
    return [cfg.DeprecatedOpt(name, group="DEFAULT")]


COORDINATION_OPTS: Sequence[cfg.Opt] = (
    cfg.StrOpt(
        "periodic_coordination_backend",
        default="",
        deprecated_opts=_sahara("periodic_coordinator_backend_url"),
        secret=True,
        help="Who knows which engines are there: the name of a plugin (entry-point group moorage.coordination: zookeeper, "
        "tooz, database, memory) or a URL that one of them or tooz drives (zookeeper://host:2181, etcd3+http://host:2379, "
        "redis://host:6379, file:///var/lib/moorage/members). Empty: every engine runs every periodic task for everything. "
        "Needs a restart.",
    ),
    cfg.StrOpt(
        "backend_url", default="", secret=True, help="The URL for a backend that is chosen by name. Needs a restart."
    ),
    cfg.StrOpt("group", default="moorage-periodic-tasks", help="The group that engines join. Needs a restart."),
    cfg.FloatOpt(
        "heartbeat_timeout",
        default=1.0,
        min=0.05,
        deprecated_opts=_sahara("coordinator_heartbeat_interval"),
        help="Seconds between two heartbeats of a member to the backend (the interval, in spite of its name). The "
        "database backend renews the membership each poll_interval instead. Needs a restart.",
    ),
    cfg.FloatOpt(
        "session_timeout",
        default=10.0,
        min=0.5,
        help="Seconds without a heartbeat after which the backend drops a member; at least three times heartbeat_timeout. The "
        "database backend uses [services] service_down_time instead. Needs a restart.",
    ),
    cfg.FloatOpt(
        "lease_margin",
        default=1.0,
        min=0.0,
        help="Seconds before the end of its session at which a member stops working; with 2 % of session_timeout on top for "
        "clocks that run at different rates. Needs a restart.",
    ),
    cfg.FloatOpt("connect_timeout", default=10.0, min=0.1, help="The longest that connecting may take, in seconds."),
    cfg.FloatOpt("call_timeout", default=3.0, min=0.1, help="The longest that one call of the backend may take."),
    cfg.FloatOpt(
        "reset_after",
        default=0.0,
        min=0.0,
        help="Seconds without an answer after which the client of the backend is replaced by a new one, which joins again; 0 "
        "means session_timeout. Needs a restart.",
    ),
    cfg.StrOpt(
        "startup_policy",
        default="fail",
        choices=[
            ("fail", "the engine does not start, and logs the reason"),
            ("wait", "the engine starts, logs the reason, and does no periodic work until it is a member"),
        ],
        help="What happens if the backend cannot be reached at the start. With a wrong configuration the engine never starts.",
    ),
    cfg.FloatOpt(
        "poll_interval",
        default=1.0,
        min=0.02,
        help="Seconds between two readings of the members. Needs a restart.",
    ),
    cfg.FloatOpt(
        "settle",
        default=1.0,
        min=0.0,
        help="Seconds that a new member must have been there before the ring takes it in, so that many that start together "
        "change it once. One that is gone is dropped at once. Needs a restart.",
    ),
    cfg.StrOpt(
        "handover",
        default="immediate",
        choices=[
            ("immediate", "the new owner begins at once; the old one may be handling one more object for a moment"),
            ("drain", "the new owner begins when every living member has stopped what it had before"),
        ],
        help="What happens between two rings. Needs a restart.",
    ),
    cfg.IntOpt(
        "hash_ring_replicas_count",
        default=40,
        min=1,
        max=10000,
        deprecated_opts=_sahara("hash_ring_replicas_count"),
        help="Points of a member on the ring. With 40 the busiest of 100 members has 1.5 times the mean, with 160 1.2 times.",
    ),
    cfg.StrOpt(
        "hash_function",
        default="md5",
        choices=[(name, "Sahara's owners" if name == "md5" else "the fast one") for name in HASH_FUNCTIONS],
        help="The hash function of the ring. Stored positions of objects must be of the same.",
    ),
    cfg.FloatOpt("weight", default=1.0, min=0.01, max=1000.0, help="This engine's share, relative to the others'."),
)

PERIODIC_OPTS: Sequence[cfg.Opt] = (
    cfg.ListOpt(
        "enabled_tasks",
        default=["reconcile"],
        help="The plugins (entry-point group moorage.periodic_tasks) that engines run, besides expire_claims and "
        "purge_idempotency_keys, which all do. "
        "Needs a restart.",
    ),
    cfg.IntOpt(
        "workers",
        default=1,
        min=1,
        max=64,
        deprecated_opts=_sahara("periodic_workers_number"),
        help="Threads of an engine that do periodic work, each a member of its own; 1 without a backend. Needs a restart.",
    ),
    cfg.DictOpt("spacing", default={}, help="Seconds between two ticks, by task: update_job_statuses:45."),
    cfg.DictOpt("timeout", default={}, help="Seconds after which one handling loses its lease, by task."),
    cfg.DictOpt("concurrency", default={}, help="Objects that one member handles at the same time, by task."),
    cfg.FloatOpt(
        "initial_delay",
        default=0.0,
        min=0.0,
        deprecated_opts=_sahara("periodic_fuzzy_delay"),
        help="An engine begins its periodic work after a random time of up to this many seconds.",
    ),
    cfg.FloatOpt(
        "jitter",
        default=0.05,
        min=0.0,
        max=0.5,
        help="Members begin a tick apart from each other, by up to this share of the time between two ticks.",
    ),
    cfg.IntOpt("claim_batch", default=500, min=1, max=5000, help="Objects that are claimed in one transaction."),
    cfg.FloatOpt(
        "error_backoff",
        default=1.0,
        min=0.0,
        help="An object whose handling failed n times in a row is left out for this many ticks times 2^(n-1), 64 at most.",
    ),
    cfg.IntOpt("history", default=100, min=1, max=100000, help="Sweeps of each task that are remembered."),
    cfg.FloatOpt(
        "poll", default=1.0, min=0.02, help="Seconds between two searches for due ticks and for requests of operators."
    ),
)

#: Points of one member.
_MOST_POINTS = 100_000
_ALL = ((COORDINATION, COORDINATION_OPTS), (PERIODIC, PERIODIC_OPTS))


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the options on ``conf``."""
    for group, options in _ALL:
        # A group of its own: what is set on one that is shared would be set in every configuration of the process.
        conf.register_group(cfg.OptGroup(group.name, title=group.title))
        conf.register_opts(options, group=group.name)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(group.name, options) for group, options in _ALL]


def check(conf: cfg.ConfigOpts) -> None:
    """Refuse what the options' own limits cannot see.

    :raises ConfigError: says which options contradict each other.
    """
    section = conf.coordination
    if section.session_timeout < 3 * section.heartbeat_timeout:
        raise errors.ConfigError(
            f"[coordination] session_timeout = {section.session_timeout:g} is less than three times heartbeat_timeout = "
            f"{section.heartbeat_timeout:g}; one late heartbeat would cost a member its work."
        )
    if section.lease_margin >= section.session_timeout / 2:
        raise errors.ConfigError(
            f"[coordination] lease_margin = {section.lease_margin:g} leaves a member less than half of session_timeout = "
            f"{section.session_timeout:g} to work in; make it smaller."
        )
    points = section.weight * section.hash_ring_replicas_count
    if points > _MOST_POINTS:
        raise errors.ConfigError(
            f"[coordination] weight = {section.weight:g} times hash_ring_replicas_count = {section.hash_ring_replicas_count} "
            f"gives this engine {points:.0f} points on the ring, which every engine computes at each change; {_MOST_POINTS} at "
            "most. Weights count relative to each other: make them smaller."
        )
    for name, smallest in (("spacing", 0.05), ("timeout", 0.05), ("concurrency", 1.0)):
        for task, text in getattr(conf.periodic, name).items():
            _number(name, task, text, smallest)


def _number(option: str, task: str, text: str, smallest: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not smallest <= value < 1e9:
        raise errors.ConfigError(f"[periodic] {option} says {task}:{text}; write a number of at least {smallest:g}.")
    return value
