# SPDX-License-Identifier: Apache-2.0
"""How the API finds a scheduler that answers."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Callable
from typing import Any

from moorage import errors
from moorage.clock import SystemClock
from moorage.control_plane.scheduler_client import Schedulers
from moorage.rpc.client import RpcSender
from moorage.rpc.interface import Message
from moorage.scheduling.reporter import TOPIC
from moorage.testing.transport_peer import configuration
from moorage_plugins.transports.memory import MemoryTransport, MessageHub


class SchedulersTests(unittest.TestCase):
    """Two schedulers on one hub; what each of them does is up to the test."""

    def setUp(self) -> None:
        self.hub = MessageHub()
        self.asked: list[str] = []
        self.released = threading.Event()
        self.addCleanup(self.released.set)

    def transport(self) -> MemoryTransport:
        transport = MemoryTransport(conf=configuration({}), url="memory://", clock=SystemClock(), hub=self.hub)
        self.addCleanup(transport.close)
        return transport

    def serve(self, name: str, work: Callable[[], Any]) -> None:
        def handle(message: Message) -> Any:
            self.asked.append(name)
            return work()

        subscription = self.transport().serve(TOPIC, name, handle)
        self.addCleanup(subscription.stop, 5.0)
        self.addCleanup(self.released.set)

    def schedulers(self, attempts: int, timeout: float = 0.3) -> Schedulers:
        return Schedulers(RpcSender(self.transport(), "api", 1), SystemClock(), attempts, timeout)

    def silent(self) -> None:
        self.released.wait(60)

    def test_one_that_is_silent_costs_its_timeout_and_another_is_asked(self) -> None:
        self.serve("silent", self.silent)
        self.serve("well", lambda: "here")
        for _ in range(4):
            self.assertEqual("here", self.schedulers(2).ask("select_destinations", {}))
        self.assertIn("silent", self.asked)

    def test_when_all_are_silent_the_last_error_is_told_after_the_attempts(self) -> None:
        self.serve("first", self.silent)
        self.serve("second", self.silent)
        self.assertRaises(errors.CallTimeout, self.schedulers(3).ask, "select_destinations", {})
        self.assertEqual(3, len(self.asked))

    def test_a_refusal_is_an_answer_and_nobody_else_is_asked(self) -> None:
        def refuse() -> None:
            raise errors.NoValidHost("No node has room.")

        self.serve("first", refuse)
        self.serve("second", refuse)
        self.assertRaises(errors.NoValidHost, self.schedulers(3).create, {}, "one")
        self.assertEqual(1, len(self.asked))

    def test_without_any_scheduler_the_error_says_so(self) -> None:
        self.assertRaises(errors.TransportError, self.schedulers(2).ask, "select_destinations", {})
