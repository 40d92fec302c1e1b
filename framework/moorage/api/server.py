# SPDX-License-Identifier: Apache-2.0
"""The embedded server: cheroot in a thread."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

from cheroot import server, wsgi
from oslo_log import log as logging

from moorage import errors
from moorage.api.lobby import Lobby
from moorage.clock import Clock, SystemClock

__all__ = ["Server", "address_of"]

LOG = logging.getLogger(__name__)
_LAST_PORT = 65535
#: A name, an IPv4 address, an IPv6 address in brackets or without, or nothing: every address.
_HOST = re.compile(r"[\w.-]*|\[?[0-9A-Fa-f:.]+(%\w+)?\]?")

#: Seconds for which an idle connection is kept, and for which one that sends a request may be silent.
_IDLE = 60
_SILENCE = 10.0


def address_of(bind: str) -> tuple[str, int]:
    """Host and port of ``[api] bind``.

    :raises ConfigError: it is not of the form HOST:PORT.
    """
    host, colon, port = bind.rpartition(":")
    if not colon or not _HOST.fullmatch(host) or not (port.isascii() and port.isdigit()) or int(port) > _LAST_PORT:
        raise errors.ConfigError(
            f"[api] bind = {bind!r}: write HOST:PORT with a port from 0 to {_LAST_PORT}, for example 127.0.0.1:8780."
        )
    return host.strip("[]"), int(port)


class _Request(server.HTTPRequest):
    """A request of cheroot's."""

    def send_headers(self) -> None:
        """Where the application has not read the body, cheroot does before it answers; but not one that does not come."""
        left = getattr(self.rfile, "remaining", 0)
        if left and not self.chunked_read and not self.server.lobby.has_arrived(self.conn, left):
            self.close_connection = True
        super().send_headers()


class _Connection(server.HTTPConnection):
    """A connection of cheroot's."""

    RequestHandlerClass = _Request


class _Cheroot(wsgi.Server):
    """cheroot's server, whose threads get connections once a request has arrived."""

    ConnectionClass = _Connection
    lobby: Lobby
    silence: float

    def process_conn(self, conn: Any) -> None:
        """Called for new connections, and for kept ones of which something has arrived."""
        # Set after the first request only.
        kept = conn.last_used is not None
        if not kept:
            conn.socket.settimeout(self.silence)
        self.lobby.enter(conn, readable=kept and not conn.rfile.has_data())

    def let_in(self, conn: Any) -> None:
        """Give the connection to a thread."""
        super().process_conn(conn)


class Server:
    """Serves a WSGI application.

    :param bind: ``host:port``; port 0 takes a free one, see :attr:`url`.
    :param silence: seconds that the head of a request may take to arrive, and that a client may be silent within its body.
    :param seats: see :class:`moorage.api.lobby.Lobby`.
    """

    def __init__(
        self,
        bind: str,
        application: Callable[..., Any],
        *,
        threads: int,
        drain_seconds: float,
        clock: Clock | None = None,
        silence: float = _SILENCE,
        seats: int | None = None,
    ) -> None:
        address = address_of(bind)
        self._clock = clock or SystemClock()
        self._seats = seats
        self._server = _Cheroot(
            address,
            application,
            numthreads=threads,
            server_name="moorage",
            shutdown_timeout=round(drain_seconds),
            timeout=_IDLE,
        )
        self._server.silence = silence
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
        self._server.lobby = Lobby(self._server.let_in, self._clock, self._server.silence, seats=self._seats)
        self._thread.start()

    def stop(self) -> None:
        """Take no new connections and answer what is being asked."""
        self._server.lobby.close()
        self._server.stop()
        self._thread.join(5)

    def _serve(self) -> None:
        self._server.serve()

    def _log(self, message: str = "", level: int = 20, traceback: bool = False) -> None:
        LOG.log(level, "%s", message, exc_info=traceback)
