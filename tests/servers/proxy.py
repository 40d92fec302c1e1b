# SPDX-License-Identifier: Apache-2.0
"""Small TCP proxies that lose replies, or cut a network: what the kernel of the test machine cannot do for one connection."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

__all__ = ["Proxy", "Valve"]


class Proxy:
    """Passes bytes on between clients and a server, until :attr:`lose` says that a reply shall be lost.

    ``lose`` is asked with every piece that a client sends. When it says True, the piece is passed on, and as soon as the server
    has answered, the connection is cut without passing the answer: the server did it, and the client does not know.
    """

    def __init__(self, host: str, port: int, lose: Callable[[bytes], bool]) -> None:
        self._target = (host, port)
        self.lose = lose
        #: How many replies were lost.
        self.lost = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cut all connections and listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(30)
        with self._lock:
            left = list(self._open)
        for each in left:
            _cut(each)
        for thread in self._threads:
            thread.join(30)

    def turn_to(self, host: str, port: int) -> None:
        """Cut all connections and pass new ones on to another server, as an address that moves does."""
        with self._lock:
            self._target = (host, port)
            left = list(self._open)
        for each in left:
            _cut(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, timeout=30)
        except OSError:
            client.close()
            return
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= {client, server}
        try:
            with contextlib.suppress(OSError):
                self._pass_on(client, server)
        finally:
            with self._lock:
                self._open -= {client, server}
            for each in (client, server):
                each.close()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        losing = False
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in selector.select():
                    piece = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    if not piece:
                        return
                    if key.fileobj is client:
                        losing = losing or self.lose(piece)
                    elif losing:
                        with self._lock:
                            self.lost += 1
                        return
                    key.data.sendall(piece)


class Valve:
    """A network between clients and a server that can be cut, in one direction or in both.

    Nothing is refused and nothing is lost: what was under way arrives when the network is whole again, as with TCP, which sends
    it until then. Neither side learns anything of the cut but by waiting.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        #: Set while that direction is open.
        self._requests, self._replies = threading.Event(), threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.heal()
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def cut(self, *, requests: bool = True, replies: bool = True) -> None:
        """From now on nothing goes through, of what clients send (``requests``) and of what the server sends (``replies``)."""
        for wanted, gate in ((requests, self._requests), (replies, self._replies)):
            if wanted:
                gate.clear()

    def heal(self) -> None:
        """Let everything through, first of all what waited."""
        self._requests.set()
        self._replies.set()

    def close(self) -> None:
        """End all connections and listen no more."""
        with self._lock:
            self._closed = True
            left = [self._listener, *self._open]
        for each in left:
            _cut(each)
            each.close()
        self.heal()
        self._acceptor.join(30)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target, timeout=30)
            except OSError:
                if self._closed:
                    return
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                if self._closed:
                    client.close()
                    server.close()
                    return
                self._open |= {client, server}
            for source, target, gate in ((client, server, self._requests), (server, client, self._replies)):
                threading.Thread(target=self._pump, args=(source, target, gate), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, gate: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                gate.wait()
                target.sendall(piece)
        # The end of a connection is a message too.
        gate.wait()
        _cut(source)
        _cut(target)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
