# SPDX-License-Identifier: Apache-2.0
"""Checks the message broker for the upgrade check."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from oslo_config import cfg

from moorage import errors

__all__ = ["upgrade_check"]

#: Of a broker whose URL names none, and seconds that one may take to answer.
_PORT = 5672
_PATIENCE = 5.0


def upgrade_check(conf: cfg.ConfigOpts) -> Sequence[str]:
    """A message broker, where there is one, can be reached from here.

    :raises Unavailable: none of them can.
    """
    places = _places(conf.rpc.transport_url)
    wrong = [f"{host}:{port} ({why})" for host, port in places if (why := _unreachable(host, port))]
    if not wrong:
        return []
    text = f"[rpc] transport_url: cannot be reached from here: {', '.join(wrong)}."
    if len(wrong) == len(places):
        raise errors.Unavailable(text)
    return [text]


def _places(url: str) -> list[tuple[str, int]]:
    """Returns the brokers in a transport URL; empty for transports of one machine."""
    network = urlsplit(url).netloc
    found = [urlsplit(f"//{each}") for each in network.split(",") if each]
    return [(each.hostname, each.port or _PORT) for each in found if each.hostname]


def _unreachable(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=_PATIENCE).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
