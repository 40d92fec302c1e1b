# SPDX-License-Identifier: Apache-2.0
"""What the client says of an API that gives no answer, or a part of one."""

from __future__ import annotations

import contextlib
import socket
import threading
import unittest
from collections.abc import Callable, Iterator

from moorage import errors
from moorage.client.client import Client, connect

#: Seconds that the client waits for an answer, and that no test waits for.
SOON, NEVER = 0.3, 60.0
CUT = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"instances": ['


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server on loopback that gives each connection to ``serve`` once a request was read; its URL."""

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = server.accept()
                with connected:
                    connected.recv(65536)
                    serve(connected)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(NEVER)


class OutcomeTests(unittest.TestCase):
    def refused(self, client: Client, kind: type[errors.MoorageError]) -> str:
        """The message of the error of a create, which must be of this class and no other."""
        with self.assertRaises(errors.MoorageError) as caught:
            client.request("POST", "/instances", body={"name": "one"})
        self.assertIs(kind, type(caught.exception))
        return caught.exception.message

    def test_an_answer_that_does_not_come_in_time_leaves_the_outcome_open(self) -> None:
        gate = threading.Event()

        def hold(connected: socket.socket) -> None:
            gate.wait(NEVER)

        with listening(hold) as url:
            self.addCleanup(gate.set)
            try:
                message = self.refused(connect(url, timeout=SOON), errors.CallTimeout)
            finally:
                gate.set()
        self.assertIn(f"{url} has not answered in time", message)
        self.assertIn("is not known", message)

    def test_an_answer_that_is_cut_is_no_answer(self) -> None:
        with listening(lambda connected: connected.sendall(CUT)) as url:
            self.assertIn(url, self.refused(connect(url, timeout=NEVER), errors.TransportError))

    def test_a_connection_that_closes_without_an_answer_is_no_answer(self) -> None:
        with listening(lambda connected: None) as url:
            self.assertIn(url, self.refused(connect(url, timeout=NEVER), errors.TransportError))

    def test_a_server_that_ends_and_a_proxy_of_none_are_away(self) -> None:
        for head, seconds in ((b"503 Service Unavailable\r\nRetry-After: 5", 5), (b"502 Bad Gateway", 1)):
            answer = b"HTTP/1.1 " + head + b"\r\nContent-Length: 0\r\n\r\n"
            with listening(lambda connected, data=answer: connected.sendall(data)) as url:  # type: ignore[misc]
                with self.assertRaisesRegex(errors.Unavailable, "The server answered 50") as caught:
                    connect(url, timeout=NEVER).request("GET", "/nodes")
                self.assertEqual(seconds, caught.exception.retry_after)

    def test_an_error_that_is_not_of_this_api_is_one_of_the_server(self) -> None:
        text = b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops"
        with listening(lambda connected: connected.sendall(text)) as url:
            self.assertIn("500 Oops. oops", self.refused(connect(url, timeout=NEVER), errors.RemoteError))

    def test_a_refused_password_is_told_as_such(self) -> None:
        text = b'{"error": {"message": "The password is wrong.", "code": 401, "title": "Unauthorized"}}'
        head = b"HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text)
        with listening(lambda connected: connected.sendall(head + text)) as url:
            client = connect(
                url, auth_type="password", username="u", password="p", auth_url=f"{url}/v3", project_name="x"
            )
            self.assertIn("The password is wrong.", self.refused(client, errors.Unauthenticated))

    def test_nobody_who_listens_is_told_with_what_to_check(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
        message = self.refused(connect(url, timeout=NEVER), errors.TransportError)
        self.assertIn(f"{url} does not answer", message)
        self.assertIn("Is the control plane running", message)
