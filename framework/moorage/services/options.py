# SPDX-License-Identifier: Apache-2.0
"""Options of the groups ``[services]`` and ``[evacuation]``."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

from moorage import errors

__all__ = ["EVACUATION", "EVACUATION_OPTS", "GROUP", "OPTS", "check", "check_times", "list_opts", "register_opts"]

GROUP = cfg.OptGroup("services", title="Heartbeats of services")

OPTS: Sequence[cfg.Opt] = (
    cfg.FloatOpt(
        "report_interval",
        default=10.0,
        min=0.05,
        help="Seconds between two heartbeats of a service, each one write. Needs a restart.",
    ),
    cfg.FloatOpt(
        "service_down_time",
        default=60.0,
        min=0.15,
        help="Seconds without a heartbeat after which a service counts as dead; at least three times report_interval, by default "
        "six times, so that several heartbeats may fail. A service whose own heartbeats fail stops a little earlier. Schedulers "
        "also search for services to clean up after in this interval. Set it to one value for all services. Needs a restart.",
    ),
)

EVACUATION = cfg.OptGroup("evacuation", title="The brake of the periodic task evacuate_hosts")

EVACUATION_OPTS: Sequence[cfg.Opt] = (
    cfg.IntOpt(
        "max_hosts",
        default=1,
        min=1,
        max=1000,
        help="Hosts that the periodic task evacuate_hosts fences within period seconds at most. The same for all engines. Needs a "
        "restart.",
    ),
    cfg.FloatOpt(
        "period",
        default=3600.0,
        min=1.0,
        help="Seconds that max_hosts is counted in. The same for all engines. Needs a restart.",
    ),
)


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the options on ``conf``."""
    conf.register_opts(OPTS, group=GROUP.name)
    conf.register_opts(EVACUATION_OPTS, group=EVACUATION.name)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(GROUP.name, OPTS), (EVACUATION.name, EVACUATION_OPTS)]


def check(conf: cfg.ConfigOpts) -> None:
    """Refuse what the options' own limits cannot see.

    :raises ConfigError: a service would be dead between two heartbeats.
    """
    check_times(conf.services.report_interval, conf.services.service_down_time)


def check_times(interval: float, down_time: float) -> None:
    """The same of two numbers, in seconds.

    :raises ConfigError: says which contradict each other.
    """
    if down_time < 3 * interval:
        raise errors.ConfigError(
            f"[services] service_down_time = {down_time:g} is less than three times report_interval = {interval:g}; one late "
            "heartbeat would kill a service."
        )
