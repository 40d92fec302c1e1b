# SPDX-License-Identifier: Apache-2.0
"""Options of the group ``[scheduling]``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oslo_config import cfg

__all__ = ["GROUP", "OPTS", "PRESETS", "Preset", "apply_preset", "list_opts", "register_opts", "sync_seconds"]

_SYNC_INTERVAL = 120
GROUP = cfg.OptGroup("scheduling", title="Scheduling")


@dataclass(frozen=True, slots=True)
class Preset:
    """Defaults for ranking nodes.

    :param weighers: the default of ``enabled_weighers``.
    :param multipliers: weigher -> the default of its multiplier, where it is another one than usual.
    """

    meaning: str
    weighers: tuple[str, ...]
    multipliers: Mapping[str, float] = field(default_factory=dict)


DEFAULT_PRESET = "spread"
PRESETS: Mapping[str, Preset] = {
    "spread": Preset(
        "keep scarce resources for the requests that ask for them, then take the node with the most free processors and memory",
        ("least_waste", "cpu", "ram"),
    ),
    "pack": Preset(
        "keep scarce resources for the requests that ask for them, then take the node with the least free processors and memory",
        ("least_waste", "cpu", "ram"),
        {"cpu": -1.0, "ram": -1.0},
    ),
    "gpu": Preset(
        "keep GPUs usable for the requests for GPUs that are expected, then as pack",
        ("gpu_fragmentation", "least_waste", "cpu", "ram"),
        {"cpu": -1.0, "ram": -1.0},
    ),
    "nova": Preset(
        "the weighers that Nova enables, with its multipliers",
        ("cpu", "ram", "disk", "io_ops", "soft_affinity", "soft_anti_affinity", "build_failure", "hypervisor_version"),
    ),
}

OPTS: Sequence[cfg.Opt] = (
    cfg.ListOpt(
        "enabled_filters",
        mutable=True,
        default=["compute", "capacity", "required_traits", "same_host", "different_host"],
        help="Plugins (entry-point group moorage.filters) that decide where an instance may go, in this order. A path "
        "(package.module.Class, or of a function that answers classes) names a filter that was written for Nova.",
    ),
    cfg.BoolOpt(
        "nova_shim",
        default=False,
        help="Let filters and weighers that are named by the path of a class import stand-ins for Nova's base classes, where Nova "
        "is not installed. Needs a restart.",
    ),
    cfg.StrOpt(
        "preset",
        mutable=True,
        default=DEFAULT_PRESET,
        choices=[(name, preset.meaning) for name, preset in PRESETS.items()],
        help="How nodes are ranked: sets the defaults of enabled_weighers and of the multipliers of the weighers. What the "
        "configuration sets itself wins.",
    ),
    cfg.ListOpt(
        "enabled_weighers",
        mutable=True,
        default=list(PRESETS[DEFAULT_PRESET].weighers),
        help="Plugins (entry-point group moorage.weighers) that rank the nodes that passed. A path names a weigher that was "
        "written for Nova. The default depends on preset.",
    ),
    cfg.IntOpt(
        "host_subset_size",
        mutable=True,
        default=1,
        min=1,
        help="One of this many best nodes is taken at random; more than 1 keeps several schedulers apart.",
    ),
    cfg.BoolOpt(
        "shuffle_best_same_weighed_hosts",
        mutable=True,
        default=False,
        help="Nodes that are equally good are tried in random order.",
    ),
    cfg.IntOpt(
        "sample_above",
        mutable=True,
        default=16384,
        min=0,
        help="Fleets of more nodes than this are sampled: 256 random nodes decide a request, or all nodes if fewer than 64 of the "
        "256 can take it without wasting scarce resources. Requests alike that are decided together share a sample, which has 256 "
        "nodes for each of them. The chosen node is one of the best ones, and seldom the very best. All nodes decide requests with "
        "hints, a server group, request groups, or named hosts or nodes. They decide all requests while a weigher is enabled that "
        "does not spread instances (presets pack, gpu and nova), a filter does not judge each host alone, an aggregate turns a "
        "weigher's multiplier round, or any node has several providers. 0: no fleet is sampled.",
    ),
    cfg.IntOpt(
        "alternates",
        mutable=True,
        default=2,
        min=0,
        help="How many of the next best nodes each answer has, and how often a build that fails is tried again on another node.",
    ),
    cfg.IntOpt(
        "max_attempts",
        mutable=True,
        default=16,
        min=1,
        help="How many nodes are tried for one instance when claims are refused.",
    ),
    cfg.FloatOpt(
        "plugin_deadline",
        mutable=True,
        default=10.0,
        min=0.01,
        help="Seconds that one filter or weigher may take for one request. One that takes longer is taken for hung: the request "
        "answers 503 and another process takes its place.",
    ),
    cfg.IntOpt(
        "breaker_threshold",
        mutable=True,
        default=3,
        min=1,
        help="A plugin that hung this often within breaker_window is not run any more; requests answer 503 and name it.",
    ),
    cfg.FloatOpt(
        "breaker_window", mutable=True, default=300.0, min=1.0, help="Seconds for which a hung plugin is remembered."
    ),
    cfg.StrOpt(
        "advisory_errors",
        mutable=True,
        default="skip",
        choices=[("skip", "the request goes on without it"), ("refuse", "the request is refused")],
        help="What happens when a filter that declares itself advisory raises.",
    ),
    cfg.BoolOpt(
        "track_instance_changes",
        default=True,
        help="Agents tell schedulers of their instances. Off: nothing is loaded, sent or attached, and filters that need "
        "instances stop the start.",
    ),
    cfg.ListOpt(
        "instance_fields",
        default=[],
        help="What agents tell of instances beyond what is always told and what the enabled filters declare: names of attributes "
        "or of what the request had (name, hints, image, ...); * for everything. Needs a restart.",
    ),
    cfg.IntOpt(
        "scheduler_instance_sync_interval",
        default=_SYNC_INTERVAL,
        help="Seconds between comparisons of what an agent has with what schedulers believe, which repair lost messages; 0 is "
        "the default, less than 0 is never.",
    ),
    cfg.FloatOpt(
        "silent_hosts_age",
        default=10.0,
        min=0.0,
        help="Seconds for which the instances of hosts that never told of theirs (agents of an older release) are believed; "
        "then the next request reads all of them again, by one query.",
    ),
    cfg.FloatOpt(
        "heal_timeout",
        default=5.0,
        min=0.1,
        help="Seconds that a host, whose instances differ from what a scheduler believes, has to tell them; then the store is "
        "asked. The host can be chosen meanwhile.",
    ),
    cfg.FloatOpt(
        "refresh_interval",
        default=60.0,
        min=0.1,
        help="Seconds between readings of the nodes and their use. A reading costs what changed since the last one. The states of "
        "agents and nodes (up, disabled, maintenance) are read every second.",
    ),
    cfg.IntOpt("decisions", default=2000, min=1, help="How many recent decisions a scheduler remembers."),
)


def sync_seconds(conf: cfg.ConfigOpts) -> float | None:
    """Seconds between comparisons of instances; None: never."""
    section = conf.scheduling
    interval = float(section.scheduler_instance_sync_interval)
    if interval < 0 or not section.track_instance_changes:
        return None
    return interval or _SYNC_INTERVAL


def apply_preset(conf: cfg.ConfigOpts) -> None:
    """Makes the defaults those of ``[scheduling] preset``; what files and the command line set stays."""
    preset = PRESETS[conf.scheduling.preset]
    conf.set_default("enabled_weighers", list(preset.weighers), group=GROUP.name)
    for name, multiplier in preset.multipliers.items():
        # A weigher whose package is not installed has no options.
        with contextlib.suppress(cfg.NoSuchOptError, cfg.NoSuchGroupError):
            conf.set_default("multiplier", multiplier, group=f"weigher_{name}")


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the options on ``conf``."""
    conf.register_opts(OPTS, group=GROUP.name)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(GROUP.name, OPTS)]
