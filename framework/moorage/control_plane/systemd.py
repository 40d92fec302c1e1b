# SPDX-License-Identifier: Apache-2.0
"""Telling systemd how a service is (the protocol of sd_notify(3): a datagram to the socket that NOTIFY_SOCKET names)."""

from __future__ import annotations

import os
import socket

from oslo_log import log as logging

__all__ = ["notify"]

LOG = logging.getLogger(__name__)


def notify(state: str) -> bool:
    """Sends a state to systemd, if it started the process with ``Type=notify``. Returns whether it was sent.

    :param state: ``READY=1``, ``STOPPING=1``, ``STATUS=...``.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    # A name that begins with @ is in Linux's abstract namespace, where it begins with a NUL.
    name = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.connect(name)
            sender.sendall(state.encode())
    except OSError as error:
        LOG.warning("The state '%s' could not be sent to systemd at %s: %s", state, address, error)
        return False
    return True
