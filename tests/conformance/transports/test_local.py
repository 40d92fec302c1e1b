# SPDX-License-Identifier: Apache-2.0
"""Transport local on the conformance kit."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

from moorage import errors
from moorage.clock import SystemClock
from moorage.rpc import wire
from moorage.rpc.interface import Message
from moorage.testing.transport import PATIENCE, Recorder, TransportTests, eventually
from moorage.testing.transport_peer import configuration
from moorage_plugins.transports.local import LocalTransport
from moorage_plugins.transports.local_link import Link
from moorage_plugins.transports.local_listener import LocalSubscription


class LocalTransportTests(TransportTests, unittest.TestCase):
    transport_class = LocalTransport

    def setUp(self) -> None:
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        self.url = f"local://{folder}"


class BegunCallTests(unittest.TestCase):
    """Calls that are begun are sent at once where a connection is kept."""

    def setUp(self) -> None:
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        self.recorder = Recorder()
        self.addCleanup(self.recorder.gate.set)
        self.server, self.sender = self.transport(folder), self.transport(folder)
        self.subscription = self.server.serve("topic", "one", self.recorder)
        self.ask(1)

    def transport(self, folder: str) -> LocalTransport:
        made = LocalTransport(conf=configuration({}), url=f"local://{folder}", clock=SystemClock())
        self.addCleanup(made.close)
        return made

    def begin(self, value: int, server: str | None = "one") -> Callable[[], Any]:
        return self.sender.begin_call("topic", Message("echo", {"value": value}), server=server, timeout=PATIENCE)

    def ask(self, value: int) -> None:
        self.assertEqual({"value": value}, self.begin(value)())

    def test_it_is_handled_before_anything_waits_for_it(self) -> None:
        for value, server in ((2, "one"), (3, None)):
            end = self.begin(value, server)
            eventually(lambda value=value: self.recorder.finished == value, "it is handled")  # type: ignore[misc]
            self.assertEqual({"value": value}, end())
        self.assertEqual([1, 2, 3], self.recorder.values())

    def test_the_successor_of_a_listener_that_has_stopped_handles_it_once(self) -> None:
        self.subscription.stop(PATIENCE)
        successor = Recorder()
        self.server.serve("topic", "one", successor)
        self.assertEqual({"value": 2}, self.begin(2)())
        self.assertEqual(([1], [2]), (self.recorder.values(), successor.values()))

    def test_a_full_listener_refuses_it_and_another_one_handles_it(self) -> None:
        with mock.patch.object(LocalSubscription, "_queue", _refuse):
            end = self.begin(2, None)
            self.assertRaises(errors.Busy, end)
        other = Recorder()
        self.server.serve("topic", "two", other)
        with mock.patch.object(LocalSubscription, "_queue", _refuse_of_one):
            self.assertEqual({"value": 3}, self.begin(3, None)())
            self.assertEqual({"value": 4}, self.begin(4, None)())
        self.assertEqual([3, 4], other.values())

    def test_when_the_listener_breaks_the_connection_it_is_not_asked_again(self) -> None:
        self.recorder.gate.clear()
        end = self.begin(2)
        eventually(lambda: len(self.recorder.messages) == 2, "it is being handled")
        for link in list(self.subscription._links):  # type: ignore[attr-defined]
            link.shutdown()
        self.assertRaises(errors.PeerLost, end)
        self.recorder.gate.set()
        eventually(lambda: self.recorder.finished == 2, "it is handled")
        self.assertEqual([1, 2], self.recorder.values())


_QUEUE = LocalSubscription._queue


def _refuse(self: LocalSubscription, link: Link, kind: str, message: Message, size: int) -> None:
    link.send(wire.refusal(self._busy()))


def _refuse_of_one(self: LocalSubscription, link: Link, kind: str, message: Message, size: int) -> None:
    (_refuse if self._server == "one" else _QUEUE)(self, link, kind, message, size)


class LocalTransportInADeepFolderTests(LocalTransportTests):
    """Paths that do not fit into a socket's address."""

    def setUp(self) -> None:
        super().setUp()
        self.url = "/".join([self.url, *["a-long-name-of-a-folder"] * 6])
