# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of the API role, as ``moorage up`` starts it, against slow, wrong and many clients."""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import time
from concurrent import futures
from urllib.parse import urlsplit

import requests

from tests.api.live import LiveDialect
from tests.functional.control_plane.test_slice import SliceCase

PATIENCE = 60.0
#: What a load balancer says of the client.
FORWARDED = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "api.example.org"}


class HttpTests(SliceCase):
    extra = """
[oslo_middleware]
enable_proxy_headers_parsing = true
"""

    def setUp(self) -> None:
        place = urlsplit(self.plane.data["url"])
        self.place = (str(place.hostname), int(place.port or 0))
        words = f"{self.plane.data['username']}:{self.plane.data['password']}"
        self.authorization = f"Basic {base64.b64encode(words.encode()).decode()}"

    def connect(self, words: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.place, PATIENCE)
        self.addCleanup(connection.close)
        connection.sendall(words)
        return connection

    def until_closed(self, connection: socket.socket) -> bytes:
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(4096):
                found += data
        return found

    def head(self, *lines: str) -> bytes:
        named = ("POST /scheduling/v1/instances HTTP/1.1", "Host: a", f"Authorization: {self.authorization}", *lines)
        return "\r\n".join((*named, "Content-Type: application/json", "", "")).encode()

    def test_60_slow_bodies_of_authenticated_clients_do_not_stall_the_health_check(self) -> None:
        slow = [self.connect(self.head("Content-Length: 1000") + b"{") for _ in range(60)]
        began = time.monotonic()
        healthy = requests.get(f"{self.plane.data['url']}/healthcheck", timeout=PATIENCE)
        # They may be silent for 10 seconds, for which they would hold up the check.
        self.assertLess(time.monotonic() - began, 9.0)
        self.assertEqual(200, healthy.status_code, healthy.text)
        slow[0].sendall(b" " * 998 + b"}")
        self.assertTrue(slow[0].recv(4096).startswith(b"HTTP/1.1 400 "))

    def test_ambiguous_requests_get_one_answer_and_the_connection_closed(self) -> None:
        second = b"GET /scheduling/v1/hosts HTTP/1.1\r\nHost: a\r\n\r\n"
        for lines in (
            ("Content-Length: 2", "Content-Length: 5"),
            ("Content-Length: 5", "Transfer-Encoding: chunked"),
            ("Transfer-Encoding: chunked", "Content-Length: 5"),
        ):
            with self.subTest(lines=lines):
                found = self.until_closed(self.connect(self.head(*lines) + b"0\r\n\r\n" + second))
                self.assertTrue(found.startswith(b"HTTP/1.1 400 "), found)
                self.assertEqual(1, found.count(b"HTTP/1.1 "), found)

    def test_no_connection_is_closed_under_a_request_of_64_clients(self) -> None:
        def client(_: int) -> list[int]:
            connection = http.client.HTTPConnection(*self.place, timeout=PATIENCE)
            found = []
            for _ in range(30):
                # Never connects twice: a connection that was closed under a request raises here.
                connection.request("GET", "/scheduling/v1/openapi.json", headers={"Authorization": self.authorization})
                connection.auto_open = 0
                answer = connection.getresponse()
                answer.read()
                found.append(answer.status)
            connection.close()
            return found

        with futures.ThreadPoolExecutor(64) as clients:
            self.assertEqual([[200] * 30] * 64, list(clients.map(client, range(64))))

    def test_links_name_the_address_that_the_proxy_names_if_the_configuration_says_so(self) -> None:
        headers = {"Authorization": self.authorization, **FORWARDED}
        found = requests.get(f"{self.plane.data['url']}/baremetal/v1/nodes", headers=headers, timeout=PATIENCE).json()
        link = found["nodes"][0]["links"][0]["href"]
        self.assertTrue(link.startswith("https://api.example.org/baremetal/"), link)

    def test_links_take_nothing_from_a_proxys_headers_by_default(self) -> None:
        dialect = LiveDialect("baremetal")
        self.addCleanup(dialect.close)
        found = requests.get(f"{dialect.url}/v1", headers={"X-Auth-Token": "admin", **FORWARDED}, timeout=PATIENCE)
        self.assertIn(dialect.url, found.text)
        self.assertNotIn("example.org", found.text)
