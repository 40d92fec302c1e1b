# SPDX-License-Identifier: Apache-2.0
"""Creates the transport that ``[rpc] transport_url`` names."""

from __future__ import annotations

from collections.abc import Set

from oslo_config import cfg

from moorage import errors
from moorage.clock import Clock, SystemClock
from moorage.extensions import Loaded, entry_points
from moorage.rpc import options
from moorage.rpc.interface import CROSS_PROCESS, TRANSPORTS, Transport

__all__ = ["check_transport", "open_transport", "plugin_name"]

#: What oslo.messaging drives even where it is not installed (then the error says how to install it).
_OSLO_SCHEMES = frozenset({"rabbit", "kombu", "kafka", "fake"})


def plugin_name(url: str) -> str:
    """Returns the plugin that drives a URL: the one called like its scheme, or ``oslo`` for what oslo.messaging drives.

    :raises ConfigError: nothing does.
    """
    scheme, colon, _rest = url.partition(":")
    scheme = scheme.partition("+")[0]
    installed = TRANSPORTS.installed()
    if colon and scheme in installed:
        return scheme
    drivers = {point.name for point in entry_points("oslo.messaging.drivers")}
    if colon and scheme in drivers | _OSLO_SCHEMES:
        return "oslo"
    known = sorted((set(installed) - {"oslo"}) | drivers | _OSLO_SCHEMES)
    raise errors.ConfigError(
        f"[rpc] transport_url begins with '{scheme}', which no installed transport drives; known are: {', '.join(known)}. "
        "Write for example local:// or rabbit://user:password@host:5672/."
    )


def check_transport(url: str, needs: Set[str]) -> Loaded[Transport]:
    """Returns the transport plugin of a URL, after a check of its capabilities.

    :param needs: capabilities, of those in :mod:`moorage.rpc.interface`.
    :raises ConfigError: it cannot, or there is none (PluginLoadError: the plugin cannot be used).
    """
    loaded = TRANSPORTS.load(plugin_name(url))
    missing = sorted(needs - loaded.plugin.capabilities)
    if missing:
        raise errors.ConfigError(
            f"[rpc] transport_url chooses the transport '{loaded.name}', which is not {' and '.join(missing)}; services that "
            "are processes of their own would not hear each other. Write local:// (one machine) or "
            "rabbit://user:password@host:5672/."
        )
    return loaded


def open_transport(conf: cfg.ConfigOpts, clock: Clock, needs: Set[str] = frozenset()) -> Transport:
    """Returns the transport that the configuration chooses; it connects when it is first used.

    :param needs: capabilities that it must have.
    :raises ConfigError: the URL or an option cannot be used, or the transport cannot do what is needed (PluginLoadError: the
        plugin cannot be used).
    """
    options.register_opts(conf)
    url = conf.rpc.transport_url
    return check_transport(url, needs).build(conf=conf, url=url, clock=clock)


def check(conf: cfg.ConfigOpts) -> None:
    """Refuse messages that roles could not use; connects to nothing.

    :raises ConfigError: see :func:`open_transport`.
    """
    open_transport(conf, SystemClock(), frozenset({CROSS_PROCESS})).close()
