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


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group."""
    return [("observer_log", _LOG), ("observer_metrics", _METRICS)]
