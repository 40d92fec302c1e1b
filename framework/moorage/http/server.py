# SPDX-License-Identifier: Apache-2.0
"""The embedded HTTP server: uvicorn in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import socket
from collections.abc import Callable
from email.utils import formatdate

import uvicorn
from oslo_log import log as logging

from moorage import errors
from moorage import threads as threads_module
from moorage.clock import SystemClock
from moorage.http.bridge import Bridge
from moorage.http.connections import PendingConnections
from moorage.http.routes import Wsgi

__all__ = ["Server", "address_of"]

LOG = logging.getLogger(__name__)
_LAST_PORT = 65535
#: A name, an IPv4 address, an IPv6 address in brackets or without, or nothing: every address.
_HOST = re.compile(r"[\w.-]*|\[?[0-9A-Fa-f:.]+(%\w+)?\]?")

#: Seconds for which an idle connection is kept.
_IDLE = 60
#: Seconds that the head of a request may take, and that a client may be silent within a body.
_SILENCE = 10.0
#: Seconds that the server may take to end, beyond those for the requests that it still answers.
_GRACE = 5.0
#: Seconds for which an answer's header Date may be late.
_TICK = 1.0


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


class Server:
    """Serves a WSGI application.

    :param bind: ``host:port``; port 0 takes a free one, see :attr:`url`.
    :param threads: number of requests that are answered at the same time, not counting streams.
    :param drain_seconds: how long :meth:`stop` waits for requests that are being answered.
    :param largest_body: of a request, in bytes.
    :param fatal: called with a reason if the server fails.
    :param silence: seconds that the head of a request may take to arrive, and that a client may be silent within its body.
    :param most_pending: see :class:`moorage.http.connections.PendingConnections`.
    """

    def __init__(
        self,
        bind: str,
        application: Wsgi,
        *,
        threads: int,
        drain_seconds: float,
        largest_body: int = 4 * 1024 * 1024,
        fatal: Callable[[str], None] | None = None,
        silence: float = _SILENCE,
        most_pending: int | None = None,
    ) -> None:
        self._address = address_of(bind)
        self._drain_seconds = drain_seconds
        self._fatal = fatal
        self._pending = PendingConnections(seconds=silence, most=most_pending)
        self._bridge = Bridge(application, threads=threads, largest_body=largest_body)
        self._uvicorn = _Uvicorn(self._pending, self._bridge, drain_seconds)
        #: Where it listens; empty before it is started.
        self.url = ""
        self._thread = threads_module.thread(self._serve, name="http")

    def start(self) -> None:
        """Listen.

        :raises Unavailable: another process has the address, or this machine does not have it yet; time may mend that.
        """
        try:
            self._listener = _listen(*self._address)
        except OSError as error:
            raise errors.Unavailable(
                f"The API cannot listen on {self._address[0]}:{self._address[1]}: {error}. Is another "
                "control plane running? Choose another --bind."
            ) from error
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._thread.start()

    def limit_bodies(self, largest: int) -> None:
        """Refuse larger bodies from now on."""
        self._bridge.largest_body = largest

    def stop(self) -> None:
        """Take no new connections and answer the requests that have arrived."""
        self._uvicorn.end()
        self._thread.join(self._drain_seconds + _GRACE)

    def _serve(self) -> None:
        try:
            self._uvicorn.run(sockets=[self._listener])
        except BaseException as error:
            LOG.exception("The HTTP server failed.")
            if self._fatal is not None:
                self._fatal(f"the HTTP server failed: {type(error).__name__}: {error}")
        finally:
            self._listener.close()
            self._bridge.end_threads()


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which ends pending requests and streams before it waits for the others."""

    def __init__(self, pending: PendingConnections, bridge: Bridge, drain_seconds: float) -> None:
        config = uvicorn.Config(
            bridge,
            http=pending.protocol(),
            ws="none",
            loop="asyncio",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            # http_proxy_to_wsgi reads them, if the configuration says so.
            proxy_headers=False,
            server_header=False,
            headers=[("Server", "moorage")],
            timeout_keep_alive=_IDLE,
            timeout_graceful_shutdown=round(drain_seconds),
        )
        super().__init__(config)
        self._pending = pending
        self._bridge = bridge
        self._wake: Callable[[], object] = lambda: None
        self._clock = SystemClock()
        self._dated_at = float("-inf")
        pending.heard = self._date

    def end(self) -> None:
        """Make :meth:`run` end; for another thread."""
        self.should_exit = True
        # The loop may have ended by itself.
        with contextlib.suppress(RuntimeError):
            self._wake()

    async def main_loop(self) -> None:
        """Wait until the server ends. uvicorn's own loop looks ten times a second, also when there is no request."""
        ending = asyncio.Event()
        self._wake = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, ending.set)
        if not self.should_exit:
            await ending.wait()

    def _date(self) -> None:
        """Bring the header Date of answers up to date."""
        now = self._clock.monotonic()
        if now - self._dated_at >= _TICK:
            self._dated_at = now
            date = formatdate(self._clock.wall(), usegmt=True).encode()
            self.server_state.default_headers = [(b"date", date), *self.config.encoded_headers]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End."""
        self._pending.close()
        self._bridge.end_streams()
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # asyncio turns off Nagle's algorithm for a socket whose protocol is said to be TCP, which create_server() does not say.
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
