# SPDX-License-Identifier: Apache-2.0
"""The embedded server against connections that say nothing, or only half of what they have to say."""

from __future__ import annotations

import contextlib
import socket
import threading
import unittest
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from moorage.api.server import Server

PATIENCE = 60.0
WHOLE = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"


def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    if environ["PATH_INFO"] == "/forbidden":
        start_response("401 Unauthorized", [("Content-Length", "2")])
        return [b"no"]
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    answer: bytes = environ["PATH_INFO"].encode() + body
    start_response("200 OK", [("Content-Length", str(len(answer)))])
    return [answer]


class ServerCase(unittest.TestCase):
    def setUp(self) -> None:
        self.server = self.serve()

    def serve(self, silence: float = 600.0, seats: int | None = None) -> Server:
        server = Server("127.0.0.1:0", application, threads=2, drain_seconds=1, silence=silence, seats=seats)
        server.start()
        self.addCleanup(server.stop)
        return server

    def connect(self, server: Server | None = None) -> socket.socket:
        place = urlsplit((server or self.server).url)
        connection = socket.create_connection((place.hostname, place.port or 0), PATIENCE)
        self.addCleanup(connection.close)
        return connection

    def answer(self, connection: socket.socket, ending: bytes) -> bytes:
        """What comes until the ending has come, or the other side closes."""
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while not found.endswith(ending) or not ending:
                data = connection.recv(4096)
                if not data:
                    break
                found += data
        return found


class HalfRequestTests(ServerCase):
    """The server has two threads; nothing that is sent here ends by itself within the time that an answer may take."""

    @contextlib.contextmanager
    def crowd(self, words: bytes) -> Iterator[list[socket.socket]]:
        connections = [self.connect() for _ in range(10)]
        for each in connections:
            each.sendall(words)
        yield connections

    def test_others_are_answered_while_connections_are_silent_or_send_half_a_head(self) -> None:
        for words in (b"", b"GET /half HTTP/1.1\r\nHo", b"\r\n", WHOLE[:-1]):
            with self.subTest(words=words), self.crowd(words) as waiting:
                other = self.connect()
                other.sendall(WHOLE)
                self.assertTrue(self.answer(other, b"/x").endswith(b"/x"))
                if words[:3] == b"GET":
                    # And those are answered, too, once they have said the rest.
                    waiting[0].sendall(b"st: a\r\n\r\n" if words.endswith(b"Ho") else b"\n")
                    self.assertIn(b"200 OK", self.answer(waiting[0], b"/half" if b"half" in words else b"/x"))

    def test_half_a_head_after_a_whole_request_waits_too(self) -> None:
        with self.crowd(WHOLE + b"GET /second HTTP/1.1\r\n") as waiting:
            for each in waiting:
                self.assertIn(b"200 OK", self.answer(each, b"/x"))
            waiting[3].sendall(b"Host: a\r\n\r\n")
            self.assertIn(b"200 OK", self.answer(waiting[3], b"/second"))

    def test_a_body_that_nobody_wants_to_read_is_not_waited_for(self) -> None:
        for length in (100, 10**9):
            head = b"POST /forbidden HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % length
            with self.subTest(length=length), self.crowd(head + b"x") as strangers:
                other = self.connect()
                other.sendall(WHOLE)
                self.assertTrue(self.answer(other, b"/x").endswith(b"/x"))
                self.assertIn(b"401 Unauthorized", self.answer(strangers[0], b"no"))

    def test_a_body_that_nobody_read_and_that_is_there_does_not_end_the_connection(self) -> None:
        connection = self.connect()
        for _ in range(3):
            connection.sendall(b"POST /forbidden HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbo")
            connection.sendall(b"dy")
            self.assertIn(b"401 Unauthorized", self.answer(connection, b"no"))

    def test_a_head_that_takes_too_long_is_sent_away(self) -> None:
        server = self.serve(silence=0.1)
        for words in (b"", b"GET /"):
            connection = self.connect(server)
            connection.sendall(words)
            self.assertTrue(self.answer(connection, b"").startswith(b"HTTP/1.1 408 "))

    def test_of_too_many_the_ones_that_wait_longest_are_sent_away(self) -> None:
        server = self.serve(seats=3)
        first, *others = (self.connect(server) for _ in range(4))
        self.assertTrue(self.answer(first, b"").startswith(b"HTTP/1.1 408 "))
        others[-1].sendall(WHOLE)
        self.assertIn(b"200 OK", self.answer(others[-1], b"/x"))

    def test_a_head_without_end_is_refused(self) -> None:
        connection = self.connect()
        with contextlib.suppress(OSError):
            connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000)
        self.assertIn(self.answer(connection, b"")[:13], (b"HTTP/1.1 431 ", b""))

    def test_the_end_does_not_wait_for_them(self) -> None:
        with self.crowd(b"GET /half"):
            ended = threading.Thread(target=self.server.stop)
            ended.start()
            ended.join(PATIENCE)
            self.assertFalse(ended.is_alive())


class WholeRequestTests(ServerCase):
    def test_one_after_the_other_and_many_at_once_on_one_connection(self) -> None:
        connection = self.connect()
        for _ in range(3):
            connection.sendall(WHOLE)
            self.assertIn(b"200 OK", self.answer(connection, b"/x"))
        connection.sendall(WHOLE * 5)
        found = b""
        while found.count(b"200 OK") < 5 or not found.endswith(b"/x"):
            found += connection.recv(4096)
        self.assertEqual(5, found.count(b"200 OK"))

    def test_a_body_that_comes_later_is_waited_for(self) -> None:
        connection = self.connect()
        connection.sendall(b"POST /y HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n")
        connection.sendall(b"body")
        self.assertTrue(self.answer(connection, b"/ybody").endswith(b"/ybody"))

    def test_wrong_line_ends_are_refused_at_once(self) -> None:
        connection = self.connect()
        connection.sendall(b"GET / HTTP/1.1\nHost: a\n\n")
        self.assertIn(b"400 Bad Request", self.answer(connection, b"terminators"))
