# SPDX-License-Identifier: Apache-2.0
"""Prepares the process for oslo_messaging, by being imported before it, and opens transports.

oslo.service, which oslo_messaging imports, chooses eventlet for the whole process unless a backend was chosen before. This module
chooses threads. A backend that the program has chosen already stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from moorage_plugins import eventlet_import  # noqa: F401  (before oslo_service)

# isort: split
from oslo_config import cfg
from oslo_service import backend

from moorage import errors

__all__ = ["open_url"]

T = TypeVar("T")

if backend.get_backend_type() is None:
    backend.register_backend_default_hook(lambda: backend.BackendType.THREADING)


def open_url(make: Callable[[cfg.ConfigOpts, str], T], conf: cfg.ConfigOpts, url: str, section: str) -> T:
    """Make a transport of oslo.messaging; connects to nothing.

    :param make: ``get_rpc_transport`` or ``get_notification_transport``.
    :param section: where ``transport_url`` is configured, as messages name it.
    :raises ConfigError: the URL cannot be used. Neither the message nor a cause contains the URL, which may have a password.
    """
    # Only now: oslo.service has its backend.
    import oslo_messaging  # noqa: PLC0415

    wrong = (oslo_messaging.InvalidTransportURL, oslo_messaging.DriverLoadFailure, ValueError, RuntimeError)
    try:
        return make(conf, url)
    except wrong as error:
        raise errors.ConfigError(
            f"{section} transport_url ({url.partition(':')[0]}:...) cannot be used: {type(error).__name__}. Write for example "
            "rabbit://user:password@host:5672/vhost, and see [oslo_messaging_rabbit]."
        ) from None
