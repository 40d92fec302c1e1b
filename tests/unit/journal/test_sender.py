# SPDX-License-Identifier: Apache-2.0
"""Webhooks over HTTP: signatures, addresses, redirects, receivers that fail, drip or hang."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import unittest
from collections.abc import Sequence
from typing import Any
from unittest import mock

from moorage import errors
from moorage.clock import SystemClock
from moorage.db import RecordedEvent
from moorage.journal.sender import WebhookSink, is_allowed
from moorage.journal.webhooks import Webhook, new_secret, read_secret, read_url
from tests.receivers import Receiver

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)


def event(number: int, **more: Any) -> RecordedEvent:
    state = {"status": "active", "host": "h1"}
    return RecordedEvent(
        number, "instance.create", "instance/u", 1, 5, "alice", "api:a", "blue", "req-1", "", {**state, **more}
    )


def webhook(url: str, secret: str = "") -> Webhook:
    return Webhook("u-1", "billing", url, secret or new_secret(), (), (), True, 1, 0, 0)


class AddressTests(unittest.TestCase):
    def test_only_public_addresses_are_allowed(self) -> None:
        for text in (
            "127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
            "224.0.0.1", "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1", "fc00::1", "fd00::1", "ff02::1",
            "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "2002:a00:1::", "64:ff9b::7f00:1", "64:ff9b::a00:1",
            "fec0::2", "64:ff9b:1::a00:1", "::10.0.0.1", "::127.0.0.1", "5f00::1",
        ):  # fmt: skip
            self.assertFalse(is_allowed(ipaddress.ip_address(text), ()), text)
        for text in ("8.8.8.8", "2a00:1450:4001:82b::200e", "::ffff:8.8.8.8", "64:ff9b::808:808"):
            self.assertTrue(is_allowed(ipaddress.ip_address(text), ()), text)

    def test_networks_that_are_allowed(self) -> None:
        networks = tuple(map(ipaddress.ip_network, ("10.1.0.0/16", "fd00::/8")))
        for text in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1", "8.8.8.8"):
            self.assertTrue(is_allowed(ipaddress.ip_address(text), networks), text)
        for text in ("10.2.0.1", "::ffff:10.2.0.1", "fe80::1", "127.0.0.1"):
            self.assertFalse(is_allowed(ipaddress.ip_address(text), networks), text)


class UrlTests(unittest.TestCase):
    def test_what_is_understood(self) -> None:
        self.assertEqual(("https", "a.example", 443, "/"), read_url("https://a.example"))
        self.assertEqual(("http", "::1", 81, "/x?y=1"), read_url("http://[::1]:81/x?y=1"))

    def test_what_is_not_understood_is_refused(self) -> None:
        for url in (
            "", "a.example", "ftp://a.example", "file:///etc/passwd", "https://", "https:///x", "https://a.example:x/",
            "https://a.example:0/", "https://a.example:70000/", "https://me:hunter2@a.example/", "https://me@a.example/",
            "https://a.example/#x", "https://a.example/\r\nHost: b", "https://a.example/ x", "https://ä.example/", "https://[::1",
        ):  # fmt: skip
            with self.assertRaises(errors.InvalidInput, msg=url) as raised:
                read_url(url)
            self.assertNotIn("hunter2", raised.exception.message)

    def test_secrets(self) -> None:
        self.assertEqual(32, len(read_secret(new_secret())))
        self.assertNotEqual(new_secret(), new_secret())
        for text in ("", "whsec_", "whsec_c2hvcnQ=", "c2VjcmV0" * 6, "whsec_" + "?" * 40, "whsec_" + "QUFB" * 40):
            with self.assertRaises(errors.InvalidInput) as raised:
                read_secret(text)
            self.assertTrue(text in {"", "whsec_"} or text not in raised.exception.message, text)
        self.assertNotIn(new_secret()[:6], repr(webhook("https://a.example")))


class SenderTests(unittest.TestCase):
    def setUp(self) -> None:
        self.receiver = Receiver()
        self.addCleanup(self.receiver.close)

    def sink(self, url: str = "", *, networks: Any = LOOPBACK, timeout: float = 60.0, **more: Any) -> WebhookSink:
        self.webhook = webhook(url or self.receiver.url)
        return WebhookSink(self.webhook, SystemClock(), networks, timeout, **more)

    def refused(self, sink: WebhookSink, text: str, kind: type[errors.MoorageError] = errors.Unavailable) -> str:
        with self.assertRaisesRegex(kind, text) as raised:
            sink.deliver([event(1)], 0)
        self.assertNotIn(self.webhook.secret, raised.exception.message)
        self.assertNotIn("token=", raised.exception.message)
        return raised.exception.message

    def test_a_message_and_its_signature(self) -> None:
        """Checked as https://www.standardwebhooks.com says, by other code than that which signs."""
        self.sink(self.receiver.url + "?token=1").deliver([event(5), event(9, status="ä")], 3)
        (got,) = self.receiver.got
        self.assertEqual(("POST", "/hook?token=1"), (got.method, got.path))
        content = json.loads(got.body)
        self.assertEqual(("billing", 3), (content["webhook"], content["missed"]))
        self.assertEqual([5, 9], [each["number"] for each in content["events"]])
        self.assertEqual({"status": "ä", "host": "h1"}, content["events"][1]["state"])
        self.assertEqual("instance.create", content["events"][0]["kind"])
        self.assertEqual("u-1-5-9", got.headers["webhook-id"])
        signed = b".".join((got.headers["webhook-id"].encode(), got.headers["webhook-timestamp"].encode(), got.body))
        key = base64.b64decode(self.webhook.secret.removeprefix("whsec_"))
        expected = "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
        self.assertEqual(expected, got.headers["webhook-signature"])
        self.assertEqual(f"127.0.0.1:{self.receiver.port}", got.headers["host"])
        self.assertEqual("application/json", got.headers["content-type"])

    def test_anything_but_success_is_a_failure(self) -> None:
        for status in (400, 404, 410, 429, 500, 503):
            self.receiver.answer = b"HTTP/1.1 %d x\r\nContent-Length: 0\r\n\r\n" % status
            self.assertIn(f"answered {status}", self.refused(self.sink(), "must answer 2xx"))
        for status in (200, 201, 202, 204):
            self.receiver.answer = b"HTTP/1.1 %d x\r\nContent-Length: 0\r\n\r\n" % status
            self.sink().deliver([event(1)], 0)

    def test_a_redirect_is_not_followed(self) -> None:
        other = Receiver()
        self.addCleanup(other.close)
        for status in (301, 302, 303, 307, 308):
            text = f"HTTP/1.1 {status} x\r\nLocation: {other.url}\r\nContent-Length: 0\r\n\r\n"
            self.receiver.answer = text.encode()
            self.refused(self.sink(), "Redirects are not followed")
        self.assertEqual([], other.got)

    def test_an_address_that_is_not_public_is_refused_before_a_connection(self) -> None:
        message = self.refused(self.sink(networks=()), "127.0.0.1", errors.Forbidden)
        self.assertIn("webhook_allowed_networks", message)
        named = self.receiver.url.replace("127.0.0.1", "localhost")
        self.refused(self.sink(named, networks=()), "localhost has the address", errors.Forbidden)
        for numeric in ("2130706433", "0x7f.1", "0177.0.0.1"):
            url = self.receiver.url.replace("127.0.0.1", numeric)
            with self.assertRaises(errors.MoorageError):
                self.sink(url, networks=()).deliver([event(1)], 0)
        self.assertEqual(0, self.receiver.connections)

    def test_the_address_that_was_checked_is_the_one_that_is_used(self) -> None:
        """A name that gives a public address first and a private one a moment later gets no second question."""
        asked: list[str] = []

        def rebind(host: str, port: int) -> Sequence[Any]:
            asked.append(host)
            address = "127.0.0.1" if len(asked) == 1 else "127.0.0.2"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

        sink = self.sink(f"http://rebind.example:{self.receiver.port}/hook", networks=(LOOPBACK[0],), resolve=rebind)
        sink.deliver([event(1)], 0)
        self.assertEqual((["rebind.example"], 1), (asked, self.receiver.connections))
        self.assertEqual(f"rebind.example:{self.receiver.port}", self.receiver.got[0].headers["host"])

    def test_of_several_addresses_only_those_that_are_allowed_are_tried(self) -> None:
        def both(host: str, port: int) -> Sequence[Any]:
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.1", "127.0.0.2")
            ]

        url = f"http://two.example:{self.receiver.port}/hook"
        # Nothing listens at the second address, and the first one is not allowed.
        self.refused(self.sink(url, networks=(ipaddress.ip_network("127.0.0.2"),), resolve=both), "two.example")
        self.assertEqual(0, self.receiver.connections)
        self.sink(url, resolve=lambda host, port: both(host, port)[::-1]).deliver([event(1)], 0)

    def test_a_receiver_that_is_not_there(self) -> None:
        self.receiver.close()
        self.refused(self.sink(self.receiver.url + "?token=1"), "refused")

        def nowhere(host: str, port: int) -> Sequence[Any]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        self.refused(self.sink("https://nowhere.example/?token=1", resolve=nowhere), "Name or service not known")

    def test_an_answer_that_does_not_come_or_comes_byte_by_byte_ends_in_time(self) -> None:
        for drip in (False, True):
            self.receiver.hold, self.receiver.drip = not drip, drip
            done = threading.Event()

            def deliver(done: threading.Event = done) -> None:
                self.refused(self.sink(timeout=0.5), "within 0.5 seconds|timed out")
                done.set()

            thread = threading.Thread(target=deliver, daemon=True)
            thread.start()
            self.assertTrue(done.wait(60), f"drip={drip}")

    def test_what_is_no_http(self) -> None:
        for answer in (b"SSH-2.0-OpenSSH\r\n", b"", b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 100_000):
            self.receiver.answer = answer
            self.refused(self.sink(), "127.0.0.1")

    def test_tls_with_a_certificate_that_is_trusted_and_one_that_is_not(self) -> None:
        if shutil.which("openssl") is None:
            self.skipTest("openssl makes the certificate")
        with tempfile.TemporaryDirectory() as folder:
            files = ("-keyout", f"{folder}/key", "-out", f"{folder}/cert")
            names = ("-subj", "/CN=hooks.example", "-addext", "subjectAltName=DNS:hooks.example")
            made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1")
            subprocess.run([*made, *files, *names], check=True, capture_output=True)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(f"{folder}/cert", f"{folder}/key")
            receiver = Receiver(context)
            self.addCleanup(receiver.close)

            def here(host: str, port: int) -> Sequence[Any]:
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

            def url(host: str) -> str:
                return f"https://{host}:{receiver.port}/hook"

            self.refused(self.sink(url("hooks.example"), resolve=here), "certificate verify failed")
            with mock.patch.dict(os.environ, SSL_CERT_FILE=f"{folder}/cert"):
                self.sink(url("hooks.example"), resolve=here).deliver([event(1)], 0)
                self.refused(self.sink(url("other.example"), resolve=here), "Hostname mismatch")
        self.assertEqual(1, len(receiver.got))

    def test_a_receiver_without_tls(self) -> None:
        # The receiver waits for the end of a line, and the sender for the answer to its greeting.
        self.refused(self.sink(self.receiver.url.replace("http:", "https:"), timeout=0.5), "127.0.0.1")
        self.assertEqual([], self.receiver.got)
