# SPDX-License-Identifier: Apache-2.0
"""The embedded server: cheroot in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cheroot import wsgi
from oslo_log import log as logging

from moorage import errors

__all__ = ["Server"]

LOG = logging.getLogger(__name__)


class Server:
    """Serves a WSGI application.

    :param bind: ``host:port``; port 0 takes a free one, see :attr:`url`.
    """

    def __init__(self, bind: str, application: Callable[..., Any], *, threads: int, drain_seconds: float) -> None:
        host, _, port = bind.rpartition(":")
        try:
            address = (host.strip("[]"), int(port))
        except ValueError:
            raise errors.ConfigError(f"[api] bind = {bind}: write HOST:PORT, for example 127.0.0.1:8780.") from None
        self._server = wsgi.Server(
            address,
            application,
            numthreads=threads,
            server_name="moorage",
            shutdown_timeout=round(drain_seconds),
            timeout=60,
        )
        setattr(self._server, "error_log", self._log)  # noqa: B010  (cheroot means it to be replaced)
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens; valid once started."""
        host, port = self._server.bind_addr[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self) -> None:
        """Listen.

        :raises ConfigError: the address cannot be had.
        """
        try:
            self._server.prepare()
        except OSError as error:
            raise errors.ConfigError(
                f"The API cannot listen on {self._server.bind_addr[0]}:{self._server.bind_addr[1]}: {error}. Is another "
                "control plane running? Choose another --bind."
            ) from error
        self._thread.start()

    def stop(self) -> None:
        """Take no new connections and answer what is being asked."""
        self._server.stop()
        self._thread.join(5)

    def _serve(self) -> None:
        self._server.serve()

    def _log(self, message: str = "", level: int = 20, traceback: bool = False) -> None:
        LOG.log(level, "%s", message, exc_info=traceback)
