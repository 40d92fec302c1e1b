# SPDX-License-Identifier: Apache-2.0
"""Options of the reference observers; a reload takes them over."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["list_opts"]

_LOG: Sequence[cfg.Opt] = (
    cfg.ListOpt(
        "kinds",
        mutable=True,
        default=[],
        help="The kinds of events that the observer log writes, for example request.refused,service.fenced. Empty: all.",
    ),
)
_METRICS: Sequence[cfg.Opt] = (
    cfg.StrOpt(
        "folder",
        mutable=True,
        default="",
        help="Where the observer metrics writes a file for each process, in Prometheus' text format. Empty: metrics in the state "
        "folder.",
    ),
    cfg.FloatOpt(
        "interval", mutable=True, default=10.0, min=0.1, help="Seconds between writings while events keep coming."
    ),
)


_NOTIFICATIONS: Sequence[cfg.Opt] = (
    cfg.StrOpt(
        "transport_url",
        mutable=True,
        default="",
        secret=True,
        help="The broker that the observer notifications sends to, as a URL of oslo.messaging: "
        "rabbit://user:password@host:5672/vhost. Empty: that of [rpc] transport_url.",
    ),
    cfg.ListOpt(
        "topics",
        mutable=True,
        default=["versioned_notifications"],
        help="The topics that notifications are sent to, with the priority info.",
    ),
)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group."""
    return [("observer_log", _LOG), ("observer_metrics", _METRICS), ("observer_notifications", _NOTIFICATIONS)]
