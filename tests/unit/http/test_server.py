# SPDX-License-Identifier: Apache-2.0
"""The embedded server: how it frames requests, and its limits for clients that send too little, too much or nothing."""

from __future__ import annotations

import contextlib
import errno
import queue
import select
import socket
import threading
import time
import unittest
from concurrent import futures
from typing import Any
from unittest import mock

from moorage import errors
from moorage.http.server import Server
from tests.unit.http.server_case import BIG, LARGEST, PATIENCE, WHOLE, ServerCase, application

HALF_BODY = b"POST /y HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nx"


class HalfRequestTests(ServerCase):
    def test_others_are_answered_while_connections_are_silent_or_send_half_a_head(self) -> None:
        for words in (b"", b"GET /half HTTP/1.1\r\nHo", b"\r\n", WHOLE[:-1]):
            with self.subTest(words=words), self.crowd(words) as waiting:
                self.assert_others_are_answered()
                if words[:3] == b"GET":
                    # Those clients are answered when they have sent the rest.
                    waiting[0].sendall(b"st: a\r\n\r\n" if words.endswith(b"Ho") else b"\n")
                    self.assertIn(b"200 OK", self.answer(waiting[0], b"/half" if b"half" in words else b"/x"))

    def test_half_a_head_after_a_whole_request_waits_too(self) -> None:
        with self.crowd(WHOLE + b"GET /second HTTP/1.1\r\n") as waiting:
            for each in waiting:
                self.assertIn(b"200 OK", self.answer(each, b"/x"))
            waiting[3].sendall(b"Host: a\r\n\r\n")
            self.assertIn(b"200 OK", self.answer(waiting[3], b"/second"))

    def test_a_body_takes_no_thread_before_it_has_arrived(self) -> None:
        chunked = b"POST /y HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"
        for words, rest, body in ((HALF_BODY, b"y" * 99, b"x" + b"y" * 99), (chunked, b"1\r\ny\r\n0\r\n\r\n", b"xy")):
            with self.subTest(words=words), self.crowd(words) as waiting:
                self.assert_others_are_answered()
                waiting[7].sendall(rest)
                self.assertTrue(self.answer(waiting[7], b"/y" + body).endswith(b"/y" + body))

    def test_a_request_whose_body_is_too_large_is_answered_without_it(self) -> None:
        head = b"POST /%s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\nx"
        for path, status in ((b"forbidden", b"401 Unauthorized"), (b"y", b"413 ")):
            with self.subTest(path=path):
                found = self.ask(head % (path, 10**9))
                self.assertIn(status, found)
                self.assertIn(b"connection: close", found)

    def test_a_body_in_chunks_that_grows_too_large_is_refused(self) -> None:
        chunk = b"%x\r\n%s\r\n" % (LARGEST // 2, b"z" * (LARGEST // 2))
        head = b"POST /y HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.assertIn(b"413 ", self.ask(head + chunk * 3))

    def test_a_body_of_the_largest_size_arrives_whole(self) -> None:
        for size in (65_536, 65_537, LARGEST):
            with self.subTest(size=size):
                body = bytes(range(256)) * (size // 256) + b"e" * (size % 256)
                head = b"POST /y HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % size
                self.assertTrue(self.ask(head + body).endswith(b"\r\n\r\n/y" + body))

    def test_a_body_that_the_application_does_not_read_does_not_end_the_connection(self) -> None:
        connection = self.connect()
        for _ in range(3):
            connection.sendall(b"POST /forbidden HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbo")
            connection.sendall(b"dy")
            self.assertIn(b"401 Unauthorized", self.answer(connection, b"no"))

    def test_a_request_that_takes_too_long_gets_408(self) -> None:
        server = self.serve(silence=0.1)
        for words in (b"", b"GET /", HALF_BODY):
            with self.subTest(words=words):
                self.assertTrue(self.ask(words, server=server).startswith(b"HTTP/1.1 408 "))

    def test_a_slow_body_that_keeps_coming_is_waited_for(self) -> None:
        # Longer than the silence in all, and each part long before it would be over.
        connection = self.connect(self.serve(silence=5.0))
        connection.sendall(b"POST /y HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n")
        for letter in (b"b", b"o", b"d", b"y"):
            time.sleep(1.5)
            connection.sendall(letter)
        self.assertTrue(self.answer(connection, b"/ybody").endswith(b"/ybody"))

    def test_an_idle_connection_is_kept_for_longer_than_a_request_may_take(self) -> None:
        connection = self.connect(self.serve(silence=2.0))
        for pause in (3.0, 0.0):
            connection.sendall(WHOLE)
            self.assertTrue(self.answer(connection, b"/x").endswith(b"/x"))
            time.sleep(pause)

    def test_if_too_many_wait_the_oldest_is_closed(self) -> None:
        for words in (b"", b"GET /", HALF_BODY):
            with self.subTest(words=words):
                server = self.serve(most_pending=3)
                first = self.connect(server)
                first.sendall(words)
                others = [self.connect(server) for _ in range(3)]
                self.assertTrue(self.answer(first, b"").startswith(b"HTTP/1.1 408 "))
                others[-1].sendall(WHOLE)
                self.assertIn(b"200 OK", self.answer(others[-1], b"/x"))

    def test_an_idle_connection_gets_no_answer_to_a_request_that_it_did_not_send(self) -> None:
        server = self.serve(most_pending=3)
        first = self.connect(server)
        first.sendall(WHOLE)
        self.assertTrue(self.answer(first, b"/x").endswith(b"/x"))
        for _ in range(3):
            self.connect(server)
        self.assertEqual(b"", self.answer(first, b""))

    def test_a_head_without_end_is_refused(self) -> None:
        for words in (b"GET / HTTP/1.1\r\nX: ", b"GET /", WHOLE + b"GET / HTTP/1.1\r\nX: "):
            with self.subTest(words=words):
                self.assert_is_closed(words, b"x" * 4096, 131_072)

    def test_trailers_without_end_are_refused(self) -> None:
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
        self.assert_is_closed(head, b"X: %s\r\n" % (b"x" * 4096), 1_000_000)

    def assert_is_closed(self, words: bytes, part: bytes, most: int) -> None:
        """The server closes the connection before so many bytes more were sent; those that the system keeps count not."""
        connection = self.connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        connection.settimeout(PATIENCE)
        connection.sendall(words)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 50_000_000:
                sent += connection.send(part)
        self.assertLess(sent, most + 8_000_000)

    def test_the_end_waits_for_no_incomplete_request(self) -> None:
        server = self.serve(drain_seconds=PATIENCE)
        for words, begins in ((b"GET /half", b"HTTP/1.1 503 "), (HALF_BODY, b"HTTP/1.1 503 ")):
            with self.subTest(words=words):
                server = self.serve(drain_seconds=PATIENCE)
                connection = self.connect(server)
                connection.sendall(words)
                # What came later was answered: so the server has read this, too.
                self.assertTrue(self.ask(WHOLE, b"/x", server).endswith(b"/x"))
                ending = self.stop_in_background(server)
                self.assertTrue(self.answer(connection, b"").startswith(begins))
                ending.join(PATIENCE / 2)
                self.assertFalse(ending.is_alive())


class FramingTests(ServerCase):
    def test_two_different_lengths_are_refused_and_the_connection_closed(self) -> None:
        head = b"POST /y HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 5\r\n\r\n"
        found = self.ask(head + b"xxxxx" + WHOLE)
        self.assertTrue(found.startswith(b"HTTP/1.1 400 "), found)
        self.assertEqual(1, found.count(b"HTTP/1.1"))

    def test_a_length_beside_chunks_gets_one_answer_and_the_connection_closed(self) -> None:
        length, chunks = b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"
        for headers in (length + chunks, chunks + length):
            with self.subTest(headers=headers):
                head = b"POST /y HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n0\r\n\r\n"
                found = self.ask(head + b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n")
                self.assertTrue(found.startswith(b"HTTP/1.1 400 "), found)
                self.assertEqual(1, found.count(b"HTTP/1.1"))

    def test_wrong_line_ends_are_refused_at_once(self) -> None:
        self.assertIn(b"400 Bad Request", self.ask(b"GET / HTTP/1.1\nHost: a\n\n"))

    def test_many_requests_on_one_connection_are_answered_in_order(self) -> None:
        connection = self.connect()
        for _ in range(3):
            connection.sendall(WHOLE)
            self.assertIn(b"200 OK", self.answer(connection, b"/x"))
        connection.sendall(b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(5)))
        found = self.answer(connection, b"/4")
        self.assertEqual(5, found.count(b"200 OK"))
        self.assertEqual(
            sorted(found.find(b"\r\n\r\n/%d" % n) for n in range(5)), [found.find(b"\r\n\r\n/%d" % n) for n in range(5)]
        )

    def test_a_body_that_comes_later_is_waited_for(self) -> None:
        connection = self.connect()
        connection.sendall(b"POST /y HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n")
        connection.sendall(b"body")
        self.assertTrue(self.answer(connection, b"/ybody").endswith(b"/ybody"))

    def test_an_answer_does_not_wait_for_the_clients_acknowledgement(self) -> None:
        """Nagle's algorithm would add 40 ms to each answer, but for the first ones of a connection."""
        connection = self.connect()
        took = []
        for _ in range(100):
            began = time.monotonic()
            connection.sendall(WHOLE)
            self.answer(connection, b"/x")
            took.append(time.monotonic() - began)
        # Most answers may be slow on a loaded machine.
        self.assertLess(sorted(took[50:])[5], 0.03)

    def test_an_answer_is_sent_at_once_whether_the_connection_stays_or_not(self) -> None:
        send, sent = socket.socket.send, list[bytes]()

        def noted(connection: socket.socket, data: bytes) -> int:
            sent.append(bytes(data))
            return send(connection, data)

        for words, ending in ((WHOLE, b"/x"), (b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"")):
            sent.clear()
            with mock.patch.object(socket.socket, "send", noted):
                self.assertRegex(self.ask(words, ending), rb"(?s)^HTTP/1.1 200 OK\r\n.*\r\n\r\n/x$")
            # Threads wake the event loop by a byte.
            self.assertEqual(1, sum(len(each) > 1 for each in sent), sent)

    def test_an_offer_to_upgrade_is_passed_over(self) -> None:
        head = b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n\r\n"
        self.assertTrue(self.ask(head, b"/x").endswith(b"/x"))

    def test_a_mistake_of_the_application_is_500_without_details(self) -> None:
        with self.assertLogs("uvicorn.error", "ERROR") as logged:
            found = self.ask(b"GET /fail HTTP/1.1\r\nHost: a\r\n\r\n")
        self.assertTrue(found.startswith(b"HTTP/1.1 500 "), found)
        self.assertNotIn(b"mistake", found)
        self.assertIn("a mistake in the application", logged.output[0])
        self.assert_others_are_answered()


class EnvironmentTests(ServerCase):
    def environ(self, words: bytes) -> dict[str, Any]:
        seen: list[dict[str, Any]] = []

        def look(environ: dict[str, Any], start_response: Any) -> list[bytes]:
            seen.append(environ)
            start_response("204 No Content", [])
            return []

        self.assertIn(b"204 No Content", self.ask(words, server=self.serve(look)))
        return seen[0]

    def test_names_what_the_client_sent(self) -> None:
        found = self.environ(
            b"PUT /a%C3%A9%FF/b?x=1&y=%20 HTTP/1.1\r\nHost: h:1\r\nCookie: a=1\r\nCookie: b=2\r\nX-List: 1\r\nX-List: 2\r\n"
            b"Content-Type: text/plain\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n2\r\nab\r\n0\r\n\r\n"
        )
        expected = {
            **{
                "REQUEST_METHOD": "PUT",
                "PATH_INFO": "/a\xc3\xa9\xff/b",
                "QUERY_STRING": "x=1&y=%20",
                "SCRIPT_NAME": "",
            },
            **{"HTTP_HOST": "h:1", "HTTP_COOKIE": "a=1; b=2", "HTTP_X_LIST": "1,2", "CONTENT_TYPE": "text/plain"},
            **{
                "CONTENT_LENGTH": "2",
                "SERVER_PROTOCOL": "HTTP/1.1",
                "REMOTE_ADDR": "127.0.0.1",
                "wsgi.url_scheme": "http",
            },
        }
        self.assertEqual(expected, {name: found.get(name) for name in expected})
        # The body is whole and has a length: it has no chunks any longer.
        self.assertNotIn("HTTP_TRANSFER_ENCODING", found)

    def test_a_name_with_an_underscore_is_not_taken_for_one_with_a_hyphen(self) -> None:
        found = self.environ(b"GET / HTTP/1.1\r\nHost: a\r\nX_Roles: admin\r\nX-User: u\r\nConnection: close\r\n\r\n")
        self.assertNotIn("HTTP_X_ROLES", found)
        self.assertEqual("u", found["HTTP_X_USER"])

    def test_a_forwarded_header_changes_nothing_by_itself(self) -> None:
        found = self.environ(
            b"GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 1.2.3.4\r\nX-Forwarded-Proto: https\r\nConnection: close\r\n\r\n"
        )
        self.assertEqual(("127.0.0.1", "http"), (found["REMOTE_ADDR"], found["wsgi.url_scheme"]))


class LoadTests(ServerCase):
    def test_no_connection_is_closed_under_a_request_of_64_clients(self) -> None:
        server = self.serve(threads=16)

        def client(number: int) -> int:
            connection = self.connect(server)
            path = b"/%d" % number
            for _ in range(100):
                connection.sendall(b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % path)
                if not self.answer(connection, path).endswith(path):
                    return 1
            return 0

        with futures.ThreadPoolExecutor(64) as clients:
            self.assertEqual(0, sum(clients.map(client, range(100, 164))))


class SlowReaderTests(ServerCase):
    def big(self, silence: float, pause: float, parts: int) -> int:
        """The bytes of a long answer that arrive at a client that pauses before each of the first parts."""
        connection = self.connect(self.serve(silence=silence))
        connection.sendall(b"GET /big HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        found = 0
        with contextlib.suppress(ConnectionResetError):
            for _ in range(parts):
                time.sleep(pause)
                found += len(connection.recv(1_000_000, socket.MSG_WAITALL))
            while data := connection.recv(1_000_000):
                found += len(data)
        return found

    def test_a_client_that_reads_nothing_is_cut_off(self) -> None:
        self.assertLess(self.big(0.5, 3.0, 1), BIG)

    def test_a_client_that_reads_slowly_gets_everything(self) -> None:
        self.assertGreater(self.big(5.0, 0.5, 12), BIG)


class LifeTests(ServerCase):
    def test_an_address_that_is_taken_is_an_error_that_says_what_to_do(self) -> None:
        taken = self.server.url.removeprefix("http://")
        second = Server(taken, application, threads=1, drain_seconds=1)
        with self.assertRaisesRegex(errors.Unavailable, "cannot listen on 127.0.0.1.*Choose another --bind"):
            second.start()

    def test_every_address_means_both_families(self) -> None:
        try:
            server = Server("[::]:0", application, threads=1, drain_seconds=1)
            server.start()
        except errors.Unavailable as error:
            self.assertEqual(errno.EAFNOSUPPORT, getattr(error.__cause__, "errno", None))
            return
        self.addCleanup(server.stop)
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
            connection.sendall(WHOLE)
            self.assertTrue(self.answer(connection, b"/x").endswith(b"/x"))

    def test_requests_in_progress_are_answered_at_the_end_and_new_connections_refused(self) -> None:
        entered, leave = threading.Event(), threading.Event()
        self.addCleanup(leave.set)

        def slow(environ: dict[str, Any], start_response: Any) -> list[bytes]:
            if environ["PATH_INFO"] == "/slow":
                entered.set()
                leave.wait(PATIENCE)
            return application(environ, start_response)

        server = self.serve(slow, drain_seconds=PATIENCE)
        idle, busy = self.connect(server), self.connect(server)
        idle.sendall(WHOLE)
        self.answer(idle, b"/x")
        busy.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        self.assertTrue(entered.wait(PATIENCE))
        ending = self.stop_in_background(server)
        # An idle connection is closed; after that nothing listens.
        self.assertEqual(b"", self.answer(idle, b""))
        with self.assertRaises(ConnectionRefusedError):
            self.connect(server)
        self.assertFalse(select.select([busy], [], [], 0)[0])
        leave.set()
        found = self.answer(busy, b"")
        self.assertTrue(found.startswith(b"HTTP/1.1 200 OK"), found)
        self.assertTrue(found.endswith(b"/slow"), found)
        ending.join(PATIENCE)
        self.assertFalse(ending.is_alive())

    def test_a_request_that_takes_too_long_does_not_hold_up_the_end(self) -> None:
        leave = threading.Event()
        self.addCleanup(leave.set)
        entered = threading.Event()

        def hang(environ: dict[str, Any], start_response: Any) -> list[bytes]:
            entered.set()
            leave.wait(PATIENCE)
            return application(environ, start_response)

        server = self.serve(hang, drain_seconds=1)
        self.connect(server).sendall(WHOLE)
        self.assertTrue(entered.wait(PATIENCE))
        ending = self.stop_in_background(server)
        ending.join(PATIENCE / 2)
        self.assertFalse(ending.is_alive())

    def test_its_threads_end_with_it(self) -> None:
        both, ran = threading.Barrier(2, timeout=PATIENCE), set()

        def together(environ: dict[str, Any], start_response: Any) -> list[bytes]:
            ran.add(threading.current_thread())
            both.wait()
            return application(environ, start_response)

        server = self.serve(together, threads=2)
        connections = [self.connect(server) for _ in range(2)]
        for each in connections:
            each.sendall(WHOLE)
        for each in connections:
            self.assertTrue(self.answer(each, b"/x").endswith(b"/x"))
        server.stop()
        self.assertEqual(2, len(ran))
        for thread in ran:
            thread.join(PATIENCE)
            self.assertFalse(thread.is_alive())

    def test_a_failure_of_the_server_itself_is_fatal(self) -> None:
        reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        with (
            mock.patch("moorage.http.server._Uvicorn.main_loop", side_effect=MemoryError("no more")),
            self.assertLogs(level="ERROR"),
        ):
            self.serve(fatal=reasons.put)
            self.assertEqual("the HTTP server failed: MemoryError: no more", reasons.get(timeout=PATIENCE))

    def test_a_smaller_limit_of_bodies_counts_at_once(self) -> None:
        self.server.limit_bodies(10)
        head = b"POST /y HTTP/1.1\r\nHost: a\r\nContent-Length: 11\r\n\r\n"
        found = self.ask(head + b"x" * 11)
        # The server passes the request on without its body; this application's own limit is larger.
        self.assertTrue(found.endswith(b"\r\n\r\n/y"), found)
        self.assertIn(b"connection: close", found)


if __name__ == "__main__":
    unittest.main()
