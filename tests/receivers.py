# SPDX-License-Identifier: Apache-2.0
"""A receiver of webhooks for tests, on a socket of its own: it answers as the test says, or not at all."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Received", "Receiver"]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@dataclass
class Received:
    """One request; the names of headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """Listens at ``url`` until :meth:`close`.

    :param tls: what it serves with; None: plain HTTP.
    :ivar answer: the bytes of the answer, or what makes them of a request.
    :ivar hold: no answer. :ivar drip: headers for ever, byte by byte.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/hook"
        self.answer: bytes | Callable[[Received], bytes] = OK
        self.hold = self.drip = False
        self.got: list[Received] = []
        self.connections = 0
        self._closed = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        # A thread that accepts keeps a closed socket alive.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connected, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._talk, args=(connected,), daemon=True).start()

    def _talk(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if self._tls is not None:
                connected = self._tls.wrap_socket(connected, server_side=True)
            stack.enter_context(connected)
            request = self._read(connected)
            if request is None:
                return
            self.got.append(request)
            if self.hold:
                self._closed.wait(60)
            elif self.drip:
                connected.sendall(b"HTTP/1.1 200 OK\r\nx: ")
                while not self._closed.wait(0.05):
                    connected.sendall(b"y")
            else:
                connected.sendall(self.answer(request) if callable(self.answer) else self.answer)

    @staticmethod
    def _read(connected: socket.socket) -> Received | None:
        with connected.makefile("rb") as source:
            method, _, rest = source.readline().decode("latin-1").partition(" ")
            headers: dict[str, str] = {}
            while (line := source.readline().strip()) != b"":
                name, _, value = line.decode("latin-1").partition(": ")
                headers[name.lower()] = value
            if "content-length" not in headers:
                return None
            return Received(method, rest.split(" ")[0], headers, source.read(int(headers["content-length"])))
