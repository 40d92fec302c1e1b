# SPDX-License-Identifier: Apache-2.0
"""The embedded server with a small application, and connections to it."""

from __future__ import annotations

import contextlib
import socket
import threading
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from moorage.http.mounts import MountDispatcher
from moorage.http.server import Server

PATIENCE = 60.0
WHOLE = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
#: The largest body that the server of the tests takes, in bytes.
LARGEST = 1_000_000
#: The length of the answer to ``/big``, in bytes: more than the system keeps for a connection.
BIG = 30_000_000


def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """Answers path and body; ``/forbidden`` refuses without reading the body, ``/fail`` fails, ``/big`` is long."""
    if environ["PATH_INFO"] == "/forbidden":
        start_response("401 Unauthorized", [("Content-Length", "2")])
        return [b"no"]
    if environ["PATH_INFO"] == "/big":
        start_response("200 OK", [("Content-Length", str(BIG))])
        return [b"z" * BIG]
    if environ["PATH_INFO"] == "/fail":
        raise RuntimeError("a mistake in the application")
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if length > LARGEST:
        start_response("413 Content Too Large", [("Content-Length", "5")])
        return [b"large"]
    answer: bytes = environ["PATH_INFO"].encode("latin-1") + environ["wsgi.input"].read(length)
    start_response("200 OK", [("Content-Length", str(len(answer)))])
    return [answer]


class ServerCase(unittest.TestCase):
    """A server with two threads; what clients send never ends by itself within the time that an answer may take."""

    def setUp(self) -> None:
        self.server = self.serve()

    def serve(self, app: Callable[..., Any] = application, **options: Any) -> Server:
        """A started server of an application, mounted as the API mounts its own."""
        given: dict[str, Any] = {"threads": 2, "drain_seconds": 1, "silence": 600.0, "largest_body": LARGEST, **options}
        server = Server("127.0.0.1:0", MountDispatcher({"": app}), **given)
        server.start()
        self.addCleanup(server.stop)
        return server

    def connect(self, server: Server | None = None) -> socket.socket:
        """A connection to a server."""
        place = urlsplit((server or self.server).url)
        connection = socket.create_connection((place.hostname, place.port or 0), PATIENCE)
        self.addCleanup(connection.close)
        return connection

    def answer(self, connection: socket.socket, ending: bytes) -> bytes:
        """What arrives until the ending has arrived; with an empty ending, until the server closes the connection."""
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while not found.endswith(ending) or not ending:
                data = connection.recv(4096)
                if not data:
                    break
                found += data
        return found

    def ask(self, words: bytes, ending: bytes = b"", server: Server | None = None) -> bytes:
        """What a server answers on a connection of its own."""
        connection = self.connect(server)
        with contextlib.suppress(OSError):
            connection.sendall(words)
        return self.answer(connection, ending)

    @contextlib.contextmanager
    def crowd(self, words: bytes, number: int = 60) -> Iterator[list[socket.socket]]:
        """Many connections that have sent some bytes."""
        connections = [self.connect() for _ in range(number)]
        for each in connections:
            each.sendall(words)
        yield connections

    def assert_others_are_answered(self) -> None:
        """Another client gets its answer."""
        self.assertTrue(self.ask(WHOLE, b"/x").endswith(b"/x"))

    def stop_in_background(self, server: Server) -> threading.Thread:
        """Begin to stop a server."""
        ending = threading.Thread(target=server.stop)
        ending.start()
        return ending
