# SPDX-License-Identifier: Apache-2.0
"""The middleware before all APIs: a proxy's headers, other origins (CORS), Keystone's tokens."""

from __future__ import annotations

from oslo_config import cfg
from oslo_middleware import cors, http_proxy_to_wsgi

from moorage.http import authentication
from moorage.http.keystone import with_keystone
from moorage.http.routes import Wsgi

__all__ = ["check", "with_middleware"]


def with_middleware(application: Wsgi, conf: cfg.ConfigOpts) -> Wsgi:
    """Put the configured middleware before an application.

    :raises ConfigError: the middleware cannot be used as it is configured.
    """
    if conf.api.auth_strategy == "keystone":
        application = with_keystone(application, conf)
    if conf.cors.allowed_origin:
        # Browsers ask beforehand, without a token.
        application = cors.CORS(application, conf)
    if conf.oslo_middleware.enable_proxy_headers_parsing:
        application = http_proxy_to_wsgi.HTTPProxyToWSGI(application, conf)
    return application


def check(conf: cfg.ConfigOpts) -> None:
    """Checks that the authenticator, and Keystone's filter before it, can be built from the configuration.

    :raises ConfigError: they cannot be used as they are configured.
    """
    with_middleware(lambda environ, start: [], conf)
    # ``moorage up`` creates a file of users that the configuration does not name.
    if conf.api.http_basic_auth_user_file or authentication.users_file(conf).exists():
        authentication.authenticator(conf)
