# SPDX-License-Identifier: Apache-2.0
"""Creates clients of the backend that ``[coordination] periodic_coordination_backend`` names."""

from __future__ import annotations

from collections.abc import Callable

from oslo_config import cfg

from moorage import errors
from moorage.clock import Clock
from moorage.coordination.interface import BACKENDS, BackendTools, CoordinationBackend, ServiceLives

__all__ = ["Factory", "chosen", "client_factory", "factory_from_config"]

#: Schemes that mean the same plugin as another name.
_ALIASES = {"kazoo": "zookeeper"}
#: The plugin for URLs that no plugin is named after.
_ANY_URL = "tooz"

Factory = Callable[[Callable[[], None]], CoordinationBackend]


def chosen(text: str, url: str = "") -> tuple[str, str]:
    """Returns the plugin and the URL that a value of the option means.

    :raises ConfigError: a URL is given twice.
    """
    scheme, separator, _ = text.partition("://")
    if not separator:
        return text, url
    if url and url != text:
        raise errors.ConfigError(
            "[coordination] periodic_coordination_backend is a URL and backend_url is set too; give one of them."
        )
    scheme = _ALIASES.get(scheme, scheme)
    return (scheme if scheme in BACKENDS.installed() else _ANY_URL), text


def client_factory(
    backend: str,
    *,
    clock: Clock,
    url: str = "",
    conf: cfg.ConfigOpts | None = None,
    session_timeout: float = 10.0,
    connect_timeout: float = 10.0,
    call_timeout: float = 3.0,
    database: object = None,
    services: ServiceLives | None = None,
) -> Factory:
    """Returns a function that makes a new client of the backend, given what to call when something may have changed.

    :raises ConfigError: the plugin cannot be loaded, or refuses the URL (a client is made and thrown away to see that).
    """
    name, url = chosen(backend, url)
    loaded = BACKENDS.load(name)

    def make(changed: Callable[[], None]) -> CoordinationBackend:
        return loaded.build(
            BackendTools(
                conf=conf,
                url=url,
                clock=clock,
                session_timeout=session_timeout,
                connect_timeout=connect_timeout,
                call_timeout=call_timeout,
                database=database,
                services=services,
                changed=changed,
            )
        )

    make(lambda: None)
    return make


def factory_from_config(
    conf: cfg.ConfigOpts, clock: Clock, *, database: object, services: ServiceLives | None
) -> Factory:
    """Returns the client factory of the backend in the configuration, which must name one."""
    section = conf.coordination
    return client_factory(
        section.periodic_coordination_backend,
        url=section.backend_url,
        clock=clock,
        conf=conf,
        session_timeout=section.session_timeout,
        connect_timeout=section.connect_timeout,
        call_timeout=section.call_timeout,
        database=database,
        services=services,
    )
