# SPDX-License-Identifier: Apache-2.0
"""Options of the journal."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from oslo_config import cfg

from moorage import errors

__all__ = ["GROUP", "OPTS", "allowed_networks", "list_opts", "register_opts"]

GROUP = cfg.OptGroup("journal", title="The journal of events")

OPTS: Sequence[cfg.Opt] = (
    cfg.FloatOpt(
        "retention_days",
        default=90.0,
        min=0,
        help="Days for which events are kept; 0 keeps them for ever. The periodic task purge_events removes older ones. Needs a "
        "restart of the engines.",
    ),
    cfg.ListOpt(
        "webhook_allowed_networks",
        mutable=True,
        default=[],
        help="Networks (10.1.0.0/16, fd00::/8, 127.0.0.1) that webhooks may reach although their addresses are not public. Empty: "
        "webhooks reach public addresses only, so that no caller of the API can make engines send requests into private networks.",
    ),
    cfg.FloatOpt(
        "webhook_timeout",
        mutable=True,
        default=10.0,
        min=0.1,
        max=60,
        help="Seconds that a receiver of webhooks may take to accept a message, from the connection to the status of its answer.",
    ),
)


def allowed_networks(conf: cfg.ConfigOpts) -> Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Returns the networks that webhooks may reach.

    :raises ConfigError: one of them is no network.
    """
    found = []
    for text in conf.journal.webhook_allowed_networks:
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise errors.ConfigError(
                f"[journal] webhook_allowed_networks: {error}. Write networks as 10.1.0.0/16."
            ) from None
    return found


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the options on ``conf``."""
    conf.register_opts(OPTS, group=GROUP.name)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(GROUP.name, OPTS)]
