# SPDX-License-Identifier: Apache-2.0
"""The sending side, over transport memory."""

from __future__ import annotations

import threading
import unittest

from oslo_config import cfg

from moorage import context as request_context
from moorage import errors
from moorage.context import RequestContext
from moorage.rpc.client import RpcSender
from moorage.rpc.interface import Message
from moorage.rpc.server import RpcDispatcher
from moorage.testing.clock import ManualClock
from moorage_plugins.transports.memory import MemoryTransport, MessageHub
from moorage_plugins.transports.memory_network import ScriptedNetwork


class SenderTests(unittest.TestCase):
    def setUp(self) -> None:
        conf = cfg.ConfigOpts()
        conf([], default_config_files=[], default_config_dirs=[])
        self.clock = ManualClock()
        self.network = ScriptedNetwork(self.clock)
        self.transport = MemoryTransport(
            conf=conf, url="memory://", clock=self.clock, hub=MessageHub(), network=self.network
        )
        self.got: list[Message] = []
        self.transport.serve("t", "one", self.got.append)
        self.sender = RpcSender(self.transport, "service-uuid", 4, timeout=11.0)

    def test_messages_are_numbered_over_all_kinds_and_topics(self) -> None:
        self.transport.serve("u", "one", self.got.append)
        self.sender.call("t", "a")
        self.sender.cast("u", "b", server="one")
        self.sender.fanout("t", "c")
        self.network.deliver_all()
        origins = [message.origin for message in self.got]
        self.assertEqual(
            [("service-uuid", 4, 1), ("service-uuid", 4, 2), ("service-uuid", 4, 3)],
            [(origin.service, origin.epoch, origin.sequence) for origin in origins if origin],
        )

    def test_threads_never_share_a_number_and_fanouts_leave_in_order(self) -> None:
        def send() -> None:
            for _ in range(200):
                self.sender.fanout("t", "x")

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.network.deliver_all()
        self.assertEqual(list(range(1, 801)), [message.origin.sequence for message in self.got if message.origin])

    def test_the_given_context_goes_before_the_current_one(self) -> None:
        current = RequestContext(user_id="current")
        self.addCleanup(RequestContext(overwrite=False).update_store)
        self.sender.call("t", "a")
        self.sender.call("t", "a", context=RequestContext(user_id="given", overwrite=False))
        received = [request_context.from_dict(message.context) for message in self.got]
        self.assertEqual(["current", "given"], [context.user_id for context in received])
        self.assertEqual(current.request_id, received[0].request_id)

    def test_a_call_waits_as_configured_or_as_told(self) -> None:
        self.sender.call("t", "a")
        self.sender.call("t", "a", timeout=2.5)
        self.assertEqual([11.0, 2.5], [message.timeout for message in self.got])

    def test_a_nested_call_waits_no_longer_than_its_caller(self) -> None:
        def relay(spend: float) -> None:
            self.clock.now += spend
            self.sender.call("t", "a", timeout=60)

        self.transport.serve("front", "one", RpcDispatcher({"relay": relay}, clock=self.clock))
        self.sender.call("front", "relay", {"spend": 3.0}, timeout=10)
        self.assertEqual(7.0, self.got[0].timeout)
        with self.assertRaises(errors.TransportError):
            self.sender.call("front", "relay", {"spend": 11.0}, timeout=10)
        self.assertEqual(1, len(self.got))
