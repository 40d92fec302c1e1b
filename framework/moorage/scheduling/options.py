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
        help="Plugins (entry-point group moorage.filters) that decide which nodes an instance may be placed on, in this order. A "
        "path (package.module.Class, or of a function that returns classes) names a filter that was written for Nova.",
    ),
    cfg.BoolOpt(
        "nova_shim",
        default=False,
        help="Provides stand-ins for Nova's base classes to filters and weighers that are named by a path, if Nova is not "
        "installed. Needs a restart.",
    ),
    cfg.StrOpt(
        "preset",
        mutable=True,
        default=DEFAULT_PRESET,
        choices=[(name, preset.meaning) for name, preset in PRESETS.items()],
        help="How nodes are ranked: sets the defaults of enabled_weighers and of the weighers' multipliers. Values in the "
        "configuration win.",
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
        help="The node is chosen at random among so many best nodes. With more than 1, several schedulers conflict less often.",
    ),
    cfg.BoolOpt(
        "shuffle_best_same_weighed_hosts",
        mutable=True,
        default=False,
        help="Tries equally good nodes in random order.",
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
        "does not spread instances (presets pack, gpu and nova), a filter does not judge each host alone, an aggregate sets a "
        "negative multiplier, or any node has several providers. 0: no fleet is sampled.",
    ),
    cfg.IntOpt(
        "alternates",
        mutable=True,
        default=2,
        min=0,
        help="How many of the next best nodes each answer contains, and how often a failed build is tried again on another node.",
    ),
    cfg.IntOpt(
        "max_attempts",
        mutable=True,
        default=16,
        min=1,
        help="How many nodes are tried for one instance if claims are refused.",
    ),
    cfg.FloatOpt(
        "plugin_deadline",
        mutable=True,
        default=10.0,
        min=0.01,
        help="Seconds that one filter or weigher may take for one request. A plugin that takes longer counts as hanging: the "
        "request gets 503, and a new process replaces the scheduler's process.",
    ),
    cfg.IntOpt(
        "breaker_threshold",
        mutable=True,
        default=3,
        min=1,
        help="A plugin that hung so often within breaker_window is not called any more. Requests get 503, with the plugin's name.",
    ),
    cfg.FloatOpt(
        "breaker_window", mutable=True, default=300.0, min=1.0, help="Seconds for which a hung plugin is remembered."
    ),
    cfg.StrOpt(
        "advisory_errors",
        mutable=True,
        default="skip",
        choices=[("skip", "the request continues without it"), ("refuse", "the request is refused")],
        help="What happens to a request if a filter raises that declares itself advisory.",
    ),
    cfg.BoolOpt(
        "track_instance_changes",
        default=True,
        help="Schedulers keep all instances in memory, and agents report changes to them. Off: schedulers do not start with "
        "filters that need instances.",
    ),
    cfg.ListOpt(
        "instance_fields",
        default=[],
        help="Fields of instances that agents report, besides the usual ones and those that enabled filters declare: attributes, "
        "or parts of the request (name, hints, image, ...); * for all of them. Needs a restart.",
    ),
    cfg.IntOpt(
        "scheduler_instance_sync_interval",
        default=_SYNC_INTERVAL,
        help="Seconds between comparisons of an agent's instances with those that schedulers have, which repair lost messages. "
        "0: the default; below 0: never.",
    ),
    cfg.FloatOpt(
        "silent_hosts_age",
        default=10.0,
        min=0.0,
        help="Seconds after which instances of hosts are read from the store again whose agents report nothing (agents of an older "
        "release). The next request then reads all of them, by one query.",
    ),
    cfg.FloatOpt(
        "heal_timeout",
        default=5.0,
        min=0.1,
        help="Seconds in which a host must report its instances if they differ from those of a scheduler. After that, the "
        "scheduler reads them from the store. Meanwhile the host can be chosen.",
    ),
    cfg.FloatOpt(
        "refresh_interval",
        default=60.0,
        min=0.1,
        help="Seconds between readings of the nodes and their use. A reading reads only what has changed since the last one. The "
        "states of agents and nodes (up, disabled, maintenance) are read every second.",
    ),
    cfg.IntOpt("decisions", default=2000, min=1, help="How many recent decisions a scheduler remembers."),
)


def sync_seconds(conf: cfg.ConfigOpts) -> float | None:
    """Returns the seconds between comparisons of instances; None: never."""
    section = conf.scheduling
    interval = float(section.scheduler_instance_sync_interval)
    if interval < 0 or not section.track_instance_changes:
        return None
    return interval or _SYNC_INTERVAL


def apply_preset(conf: cfg.ConfigOpts) -> None:
    """Sets the defaults of ``[scheduling] preset``. Values of files and the command line stay."""
    preset = PRESETS[conf.scheduling.preset]
    conf.set_default("enabled_weighers", list(preset.weighers), group=GROUP.name)
    for name, multiplier in preset.multipliers.items():
        # A weigher whose package is not installed has no options.
        with contextlib.suppress(cfg.NoSuchOptError, cfg.NoSuchGroupError):
            conf.set_default("multiplier", multiplier, group=f"weigher_{name}")


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Registers the options in ``conf``."""
    conf.register_opts(OPTS, group=GROUP.name)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Returns the options by group, for the sample configuration."""
    return [(GROUP.name, OPTS)]
