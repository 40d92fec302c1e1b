# SPDX-License-Identifier: Apache-2.0
"""Streams of the embedded server: event streams and long polls, which keep no other request waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from moorage.http import bridge
from tests.unit.http.server_case import PATIENCE, ServerCase, application

EVENTS = b"GET /events HTTP/1.1\r\nHost: a\r\n\r\n"
POLL = b"GET /poll HTTP/1.1\r\nHost: a\r\n\r\n"


class Waiting:
    """An application whose streams wait for an event that the test sets."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.closed = threading.Semaphore(0)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """WSGI."""
        if environ["PATH_INFO"] == "/events":
            return self.events(start_response)
        if environ["PATH_INFO"] == "/poll":
            return self.poll(start_response)
        if environ["PATH_INFO"] == "/broken":
            return self.broken(start_response)
        return application(environ, start_response)

    def events(self, start_response: Any) -> Iterator[bytes]:
        try:
            start_response("200 OK", [("Content-Type", "text/event-stream")])
            yield b"data: first\n\n"
            while not self.happened.wait(0.2):
                yield b""
            yield b"data: second\n\n"
        finally:
            self.closed.release()

    def poll(self, start_response: Any) -> Iterator[bytes]:
        self.happened.wait(PATIENCE)
        start_response("200 OK", [("Content-Length", "4")])
        yield b"done"

    def broken(self, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"begun"
        raise RuntimeError("a mistake in the stream")


class StreamTests(ServerCase):
    def setUp(self) -> None:
        self.app = Waiting()
        self.addCleanup(self.app.happened.set)
        self.server = self.serve(self.app, drain_seconds=PATIENCE)

    def test_300_event_streams_keep_nobody_waiting(self) -> None:
        with self.crowd(EVENTS, 300) as clients:
            for each in clients:
                self.assertTrue(self.answer(each, b"first\n\n\r\n").endswith(b"data: first\n\n\r\n"))
            self.assert_others_are_answered()
            self.app.happened.set()
            for each in clients:
                self.assertTrue(self.answer(each, b"0\r\n\r\n").endswith(b"data: second\n\n\r\n0\r\n\r\n"))
            # The connections serve other requests afterwards.
            clients[5].sendall(b"GET /after HTTP/1.1\r\nHost: a\r\n\r\n")
            self.assertTrue(self.answer(clients[5], b"/after").endswith(b"/after"))

    def test_300_long_polls_keep_nobody_waiting(self) -> None:
        with self.crowd(POLL, 300) as clients:
            self.assert_others_are_answered()
            self.app.happened.set()
            for each in clients:
                self.assertTrue(self.answer(each, b"done").startswith(b"HTTP/1.1 200 OK"))

    def test_the_application_notices_that_a_client_left(self) -> None:
        client = self.connect()
        client.sendall(EVENTS)
        self.answer(client, b"first\n\n\r\n")
        client.close()
        self.assertTrue(self.app.closed.acquire(timeout=PATIENCE))

    def test_more_streams_than_allowed_are_refused(self) -> None:
        most = bridge.MOST_STREAMS
        self.addCleanup(setattr, bridge, "MOST_STREAMS", most)
        bridge.MOST_STREAMS = 2
        with self.crowd(EVENTS, 2) as clients:
            for each in clients:
                self.answer(each, b"first\n\n\r\n")
            self.assertTrue(self.ask(EVENTS).startswith(b"HTTP/1.1 503 "))
            self.assert_others_are_answered()

    def test_the_end_waits_for_no_stream(self) -> None:
        stream, poll = self.connect(), self.connect()
        stream.sendall(EVENTS)
        self.answer(stream, b"first\n\n\r\n")
        poll.sendall(POLL)
        self.assert_others_are_answered()
        ending = self.stop_in_background(self.server)
        # The stream ends in good order; the poll had no answer yet.
        self.assertTrue(self.answer(stream, b"").endswith(b"0\r\n\r\n"))
        self.assertTrue(self.answer(poll, b"").startswith(b"HTTP/1.1 503 "))
        ending.join(PATIENCE / 2)
        self.assertFalse(ending.is_alive())

    def test_a_stream_that_fails_is_cut_so_that_the_client_notices(self) -> None:
        with self.assertLogs("uvicorn.error", "ERROR") as logged:
            found = self.ask(b"GET /broken HTTP/1.1\r\nHost: a\r\n\r\n")
        self.assertTrue(found.endswith(b"begun\r\n"), found)
        self.assertIn("a mistake in the stream", logged.output[0])
