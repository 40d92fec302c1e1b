# SPDX-License-Identifier: Apache-2.0
"""Checks Keystone's tokens with keystonemiddleware before an application, and reports outages of Keystone as outages.

The middleware only marks the caller; the application refuses, in the shape of its own errors. keystonemiddleware takes an outage of
Keystone for a wrong token (401) and lets a broken catalog escape as an empty 500. Here the application answers both with 503.
"""

from __future__ import annotations

import importlib
from typing import Any

from keystoneauth1 import exceptions as ksa_exceptions
from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors
from moorage.http.authentication import KEYSTONE_FAILURE

__all__ = ["with_keystone"]

LOG = logging.getLogger(__name__)
#: Seconds that one connection to Keystone may take; the middleware's own default waits as long as the system does.
_CONNECT_TIMEOUT = 10
_RETRY_AFTER = 5


def with_keystone(application: Any, conf: cfg.ConfigOpts) -> Any:
    """Put the middleware before an application.

    :raises ConfigError: keystonemiddleware is not installed, or the section [keystone_authtoken] cannot be used.
    """
    try:
        middleware = _middleware()
        opts = importlib.import_module("keystonemiddleware.opts")
    except ImportError as error:
        raise errors.ConfigError(
            "auth_strategy = keystone needs keystonemiddleware. Try: pip install 'moorage[keystone]'"
        ) from error
    for group, options in opts.list_auth_token_opts():
        conf.register_opts(options, group=group)
    conf.set_default("http_connect_timeout", _CONNECT_TIMEOUT, group="keystone_authtoken")
    given = {"oslo_config_config": conf, "delay_auth_decision": True, "oslo_config_project": "moorage"}
    try:
        made = middleware(application, given)
    except Exception as error:
        raise errors.ConfigError(f"[keystone_authtoken] cannot be used: {error}.") from error
    section = conf.keystone_authtoken
    if not section.auth_type and not section.auth_section:
        # Without these options every token would be refused, and no message would say why.
        raise errors.ConfigError(
            "auth_strategy = keystone needs a section [keystone_authtoken] with the way to Keystone: auth_type = password, "
            "auth_url, username, password, project_name and their domains."
        )
    return made


def _middleware() -> type:
    """Returns the middleware's class; made here because keystonemiddleware is optional.

    :raises ImportError: keystonemiddleware is not installed.
    """
    auth_token: Any = importlib.import_module("keystonemiddleware.auth_token")
    #: Failures that the base class turns into InvalidToken while decisions are delayed.
    outages = (
        ksa_exceptions.ConnectFailure,
        ksa_exceptions.DiscoveryFailure,
        ksa_exceptions.RequestTimeout,
        auth_token.ServiceError,
    )
    failures = (ksa_exceptions.ClientException, auth_token.ServiceError, auth_token.ConfigurationError)

    class KeystoneTokens(auth_token.AuthProtocol):  # type: ignore[misc]
        """Checks tokens. When Keystone cannot say whether a token is good, the application gets the error for its answer."""

        def process_request(self, request: Any) -> Any:
            """Mark the caller, or leave :data:`KEYSTONE_FAILURE` in the environment."""
            request.environ.pop(KEYSTONE_FAILURE, None)
            try:
                return super().process_request(request)
            except failures as error:
                request.remove_auth_headers()
                LOG.error("Keystone could not check a token: %s: %s", type(error).__name__, error)
                request.environ[KEYSTONE_FAILURE] = _failure(error)
                return None

        def fetch_token(self, token: str, **kwargs: Any) -> Any:
            """Ask Keystone about a token.

            :raises InvalidToken: Keystone says that the token is not good.
            """
            try:
                return super().fetch_token(token, **kwargs)
            except auth_token.InvalidToken as error:
                if isinstance(error.__context__, outages):
                    raise error.__context__ from error
                raise

        @property
        def www_authenticate_uri(self) -> str:
            """The address that a 401 advertises; without the option it is auth_url, which needs no call to Keystone."""
            return str(self._www_authenticate_uri or getattr(self._auth, "auth_url", ""))

    return KeystoneTokens


def _failure(error: Exception) -> errors.Unavailable:
    if isinstance(error, ksa_exceptions.CatalogException):
        message = (
            f"Keystone's catalog has no usable endpoint of the identity service ({error}), so tokens cannot be checked. An "
            "operator must repair the catalog, or the interface and region_name in [keystone_authtoken]."
        )
    else:
        message = "Keystone does not answer, so tokens cannot be checked. Try again; if it lasts, tell the operator."
    return errors.Unavailable(message, retry_after=_RETRY_AFTER)
