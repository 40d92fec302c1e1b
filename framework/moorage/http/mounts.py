# SPDX-License-Identifier: Apache-2.0
"""Mounts several WSGI applications under one server, each at its prefix."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from oslo_log import log as logging

from moorage import errors, plugin_isolation
from moorage.extensions import Loaded
from moorage.http.error_statuses import core_shape
from moorage.http.routes import Wsgi

__all__ = ["MountDispatcher", "IsolatedApp", "resolve_mounts"]

LOG = logging.getLogger(__name__)


def resolve_mounts(own: Mapping[str, str], chosen: Mapping[str, str], taken: Collection[str]) -> dict[str, str]:
    """Returns the prefix of each dialect; it is empty at the root.

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


class IsolatedApp:
    """Wraps a plugin's application. Its errors become a 500 that names the plugin, and end no thread."""

    def __init__(self, application: Wsgi, loaded: Loaded[Any]) -> None:
        self._application = application
        self._name = f"plugin '{loaded.name}' ({loaded.group}, of {loaded.distribution} {loaded.version})"

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """WSGI."""
        try:
            with plugin_isolation.isolate_plugin_call(self._name):
                body = self._application(environ, start_response)
        except Exception:
            where = f"{environ.get('REQUEST_METHOD')} {environ.get('SCRIPT_NAME', '')}{environ.get('PATH_INFO', '')}"
            LOG.exception("The %s failed to answer %s.", self._name, where)
            failed = errors.PluginFailed(
                f"The {self._name} failed; the log has it in full. Report it to the plugin's author."
            )
            data = json.dumps(core_shape(failed, 500, "")).encode()
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
            start_response("500 Internal Server Error", headers, sys.exc_info())
            return [data]
        return body if isinstance(body, list | tuple) else self._parts(body)

    def _parts(self, body: Iterable[bytes]) -> Iterator[bytes]:
        """Returns a body that is made while it is sent: there too the plugin's code runs."""
        try:
            parts = iter(body)
            while True:
                with plugin_isolation.isolate_plugin_call(self._name):
                    part = next(parts, None)
                if part is None:
                    return
                yield part
        finally:
            close = getattr(body, "close", None)
            if close is not None:
                with plugin_isolation.isolate_plugin_call(self._name):
                    close()


class MountDispatcher:
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
