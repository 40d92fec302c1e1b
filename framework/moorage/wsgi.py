# SPDX-License-Identifier: Apache-2.0
"""The API as a WSGI application for gunicorn, uWSGI or mod_wsgi: all of it, or one dialect at the root.

::

    gunicorn moorage.wsgi:application
    gunicorn moorage_plugins.api.placement.wsgi:application

A dialect's plugin offers ``application = DialectCallable("its name")`` in a module ``wsgi``. Both are configured by the environment
variables MOORAGE_CONFIG_FILES (separated by colons; unset: /etc/moorage/moorage.conf where it exists) and MOORAGE_STATE_DIR.

The processes of such a server are no services. They own no work, send no heartbeats and are not in ``moorage service list``.
Observers get the events of these processes like those of any other; the scheduler reports what it does for a request (claims,
cleanup). The server's own reload makes new processes, which read the configuration again.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors, threads
from moorage.clock import SystemClock
from moorage.control_plane import config, logs
from moorage.control_plane.api_assembly import ApiAssembly
from moorage.control_plane.periodic_loop import PeriodicLoop
from moorage.control_plane.process import Platform, anonymous_platform, exempt_from_collection
from moorage.http.mounts import MountDispatcher
from moorage.http.routes import Wsgi

__all__ = ["DialectCallable", "application", "build"]

LOG = logging.getLogger(__name__)
FILES = "MOORAGE_CONFIG_FILES"
STATE_DIR = "MOORAGE_STATE_DIR"


def build(name: str) -> Wsgi:
    """Builds the application of a dialect, configured by the environment. The caller limits the access to it.

    :raises ConfigError: the configuration, plugin or database cannot be used.
    """
    conf = _configuration(name)
    with _platform(name, conf) as platform:
        return ApiAssembly(platform, conf).dialect(name, conf)


def _alone(name: str) -> Wsgi:
    _refuse_noauth(_configuration(name))
    return build(name)


def _whole() -> Wsgi:
    conf = _configuration("all")
    _refuse_noauth(conf)
    with _platform("all", conf) as platform:
        assembly = ApiAssembly(platform, conf)
        mounted = MountDispatcher(assembly.mounts(conf))
        PeriodicLoop(platform, "watch over heartbeats", assembly.watch, conf.services.report_interval)
        return mounted


def _configuration(name: str) -> cfg.ConfigOpts:
    files = [file for file in os.environ.get(FILES, "").split(":") if file]
    conf = config.load(files=files, state_dir=os.environ.get(STATE_DIR))
    logs.setup(conf, f"moorage-api-{name}")
    return conf


@contextlib.contextmanager
def _platform(name: str, conf: cfg.ConfigOpts) -> Iterator[Platform]:
    """What it opens ends with the process; or at once, where the block cannot build on it: the next request tries again."""
    with contextlib.ExitStack() as opened:
        yield anonymous_platform(f"api-{name}", conf, SystemClock(), opened)
        atexit.register(opened.pop_all().close)


def _refuse_noauth(conf: cfg.ConfigOpts) -> None:
    """:raises ConfigError: everybody would be an administrator."""
    if conf.api.auth_strategy == "noauth":
        raise errors.ConfigError(
            "auth_strategy = noauth makes everybody an administrator, and where a WSGI server listens is not known here; use "
            "http_basic or keystone."
        )


class _Built:
    """A WSGI callable that is built by the first request, in the worker process that serves it.

    A database that cannot be used, or any other mistake of the configuration, answers 503 and is logged; the next
    request tries again.
    """

    def __init__(self, what: str, build: Callable[[], Wsgi]) -> None:
        self._what = what
        self._build = build
        self._lock = threads.lock()
        self._application: Wsgi | None = None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """WSGI."""
        application = self._application
        if application is None:
            try:
                with self._lock:
                    if self._application is None:
                        _refuse_without_threads()
                        self._application = self._build()
                        exempt_from_collection()
                    application = self._application
            except errors.MoorageError as error:
                LOG.error("%s cannot be served: %s", self._what, error.message)
                start_response("503 Service Unavailable", [("Content-Length", "0"), ("Retry-After", "5")])
                return []
        return application(environ, start_response)


class DialectCallable(_Built):
    """A dialect alone, at the root that the server gives it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The dialect {name}", functools.partial(_alone, name))


def _refuse_without_threads() -> None:
    """Refuse uWSGI without Python's threads: messages need them.

    :raises ConfigError: uWSGI was started without threads.
    """
    try:
        options = importlib.import_module("uwsgi").opt  # there only inside of uWSGI
    except (ImportError, AttributeError):
        return
    if not {"enable-threads", "threads"} & {str(name) for name in options}:
        raise errors.ConfigError("uWSGI runs without Python's threads; start it with --enable-threads.")


#: All of it: the core under /scheduling/v1, the dialects where ``[api] mounts`` has them, /healthcheck and /metrics.
application = _Built("The API", _whole)
