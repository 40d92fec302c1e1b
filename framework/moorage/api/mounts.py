# SPDX-License-Identifier: Apache-2.0
"""Several WSGI applications under one server, each at its prefix."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import prometheus_client
from oslo_log import log as logging
from prometheus_client import multiprocess

from moorage import errors, foreign, threads
from moorage.api.dialect import core_shape
from moorage.bounded_pool import BoundedPool
from moorage.clock import Clock, SystemClock
from moorage.control_plane.interface import Wsgi
from moorage.extensions import Loaded

__all__ = ["Contained", "Dispatcher", "Health", "Metrics", "places"]

LOG = logging.getLogger(__name__)


def places(own: Mapping[str, str], chosen: Mapping[str, str], taken: Collection[str]) -> dict[str, str]:
    """The prefix of each dialect: the empty text for the root.

    :param own: dialect -> the mount it declares; ``chosen`` what ``[api] mounts`` says; ``taken`` prefixes of others.
    :raises ConfigError: a mount is no path, names no enabled dialect, or is taken.
    """
    for name in chosen.keys() - own.keys():
        raise errors.ConfigError(
            f"[api] mounts names {name}, which [api] enabled_apis does not; enabled are: {', '.join(own) or 'none'}."
        )
    found: dict[str, str] = {}
    for name, mount in {**own, **chosen}.items():
        prefix = mount.rstrip("/")
        if not mount.startswith("/") or "//" in mount:
            raise errors.ConfigError(f"The dialect {name} cannot be mounted at {mount!r}: write / or /a/path.")
        if prefix in found.values() or (prefix and prefix in taken):
            raise errors.ConfigError(f"The dialect {name} cannot be mounted at {mount}: something else is there.")
        found[name] = prefix
    return found


class Contained:
    """A plugin's application: what it raises is a 500 that names the plugin, and ends neither a thread nor the server."""

    def __init__(self, application: Wsgi, loaded: Loaded[Any]) -> None:
        self._application = application
        self._who = f"plugin '{loaded.name}' ({loaded.group}, of {loaded.distribution} {loaded.version})"

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """WSGI."""
        try:
            with foreign.isolate_plugin_call(self._who):
                body = self._application(environ, start_response)
        except Exception:
            where = f"{environ.get('REQUEST_METHOD')} {environ.get('SCRIPT_NAME', '')}{environ.get('PATH_INFO', '')}"
            LOG.exception("The %s failed to answer %s.", self._who, where)
            failed = errors.PluginFailed(
                f"The {self._who} failed; the log has it in full. Report it to the plugin's author."
            )
            data = json.dumps(core_shape(failed, 500, "")).encode()
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
            start_response("500 Internal Server Error", headers, sys.exc_info())
            return [data]
        return body if isinstance(body, list | tuple) else self._parts(body)

    def _parts(self, body: Iterable[bytes]) -> Iterator[bytes]:
        """A body that is made while it is sent: there too the plugin's code runs."""
        try:
            parts = iter(body)
            while True:
                with foreign.isolate_plugin_call(self._who):
                    part = next(parts, None)
                if part is None:
                    return
                yield part
        finally:
            close = getattr(body, "close", None)
            if close is not None:
                with foreign.isolate_plugin_call(self._who):
                    close()


class Dispatcher:
    """The longest prefix wins; the rest of the path is what the mounted application sees.

    What is mounted at the root (prefix ``""``) sees the whole path. :meth:`swap` replaces all mounts at once.
    """

    def __init__(self, mounts: Mapping[str, Wsgi]) -> None:
        self._mounts: tuple[tuple[str, Wsgi], ...] = ()
        self.swap(mounts)

    def swap(self, mounts: Mapping[str, Wsgi]) -> None:
        """Other mounts from now on; requests that are being answered keep theirs."""
        ordered = sorted(((prefix.rstrip("/"), app) for prefix, app in mounts.items()), key=lambda pair: -len(pair[0]))
        self._mounts = tuple(ordered)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """WSGI."""
        path = environ.get("PATH_INFO", "")
        for prefix, application in self._mounts:
            if not prefix:
                return application(environ, start_response)
            if path == prefix or path.startswith(prefix + "/"):
                environ["SCRIPT_NAME"] = environ.get("SCRIPT_NAME", "") + prefix
                environ["PATH_INFO"] = path[len(prefix) :]
                return application(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain"), ("Content-Length", "0")])
        return [b""]


class _Check:
    """One asking of one health check."""

    def __init__(self) -> None:
        self.ended = threads.event()
        self.problem = ""


class Health:
    """``/healthcheck``: 200 when no check finds a problem, 503 with the problems otherwise. Needs no authentication.

    A check is a function that returns an empty text, or a problem in words that anybody may read. A check that raises is a problem,
    and the log says why. A check that has not answered within ``patience`` seconds is a problem too; it is not asked again before
    it has answered.
    """

    def __init__(
        self, checks: Mapping[str, Callable[[], str]], patience: float = 3.0, clock: Clock | None = None
    ) -> None:
        self._checks = checks
        self._patience = patience
        self._clock = clock or SystemClock()
        self._pool = BoundedPool("health", self._clock, max(1, len(checks)))
        self._lock = threads.lock()
        self._asked: dict[str, _Check] = {}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """WSGI."""
        until = self._clock.monotonic() + self._patience
        asked = {name: self._ask(name) for name in self._checks}
        found = {name: self._answer(each, until) for name, each in asked.items()}
        wrong = {name: text for name, text in found.items() if text}
        data = json.dumps({"status": "unhealthy" if wrong else "healthy", "problems": wrong}).encode()
        status = "503 Service Unavailable" if wrong else "200 OK"
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(data)))])
        return [data]

    def _ask(self, name: str) -> _Check:
        """Begin the check, unless it is being made for an earlier request."""
        with self._lock:
            asked = self._asked.get(name)
            if asked is None or asked.ended.is_set():
                asked = self._asked[name] = _Check()
                self._pool.start(functools.partial(self._make, name, asked))
            return asked

    def _make(self, name: str, check: _Check) -> None:
        check.problem = "it failed; the log says why"
        try:
            with foreign.isolate_plugin_call(name):
                check.problem = self._checks[name]()
        except Exception as error:  # noqa: BLE001  (whatever is wrong is the answer)
            LOG.warning("The health check of %s failed: %s", name, error)
        finally:
            check.ended.set()

    def _answer(self, check: _Check, until: float) -> str:
        if self._clock.wait(check.ended, max(0.0, until - self._clock.monotonic())):
            return check.problem
        return f"no answer within {self._patience:g} seconds"


class Metrics:
    """``/metrics`` in Prometheus' format.

    Where several processes answer at one address, PROMETHEUS_MULTIPROC_DIR names a folder, empty at the start of the server,
    through which whoever is asked knows the numbers of all.
    """

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        own = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            own = prometheus_client.CollectorRegistry()
            multiprocess.MultiProcessCollector(self.registry)  # type: ignore[no-untyped-call]
        self._requests = prometheus_client.Histogram(
            "moorage_api_request_seconds",
            "Requests by method, route and status",
            ["method", "route", "status"],
            registry=own,
        )
        self._app: Wsgi = prometheus_client.make_wsgi_app(self.registry)

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """One request was answered."""
        self._requests.labels(method, route, str(status)).observe(seconds)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """WSGI."""
        return self._app(environ, start_response)
