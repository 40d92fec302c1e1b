# SPDX-License-Identifier: Apache-2.0
"""The simulated network of transport memory."""

from __future__ import annotations

import threading
import unittest

from oslo_config import cfg

from moorage import errors
from moorage.rpc.interface import Message
from moorage.testing.clock import ManualClock
from moorage_plugins.transports.memory import MemoryTransport, MessageHub
from moorage_plugins.transports.memory_network import Fate, Parcel, ScriptedNetwork


class ScriptedNetworkTests(unittest.TestCase):
    def setUp(self) -> None:
        self.clock = ManualClock()
        self.network = ScriptedNetwork(self.clock)
        hub = MessageHub()
        conf = cfg.ConfigOpts()
        conf([], default_config_files=[], default_config_dirs=[])
        self.a, self.b = (
            MemoryTransport(conf=conf, url="memory://", clock=self.clock, hub=hub, network=self.network, name=name)
            for name in "ab"
        )
        self.seen: list[str] = []
        self.subscription = self.b.serve("t", "b", self.handle)

    def handle(self, message: Message) -> str:
        self.seen.append(message.method)
        return message.method

    def send(self, *methods: str) -> None:
        for method in methods:
            self.a.fanout("t", Message(method))

    def test_nothing_arrives_before_it_is_told_to(self) -> None:
        self.send("1", "2")
        self.assertEqual([], self.seen)
        self.assertEqual(2, self.network.deliver_all())
        self.assertEqual(["1", "2"], self.seen)

    def test_messages_can_be_lost_repeated_and_reordered(self) -> None:
        self.send("1", "2", "3")
        self.network.drop(0)
        self.network.duplicate(0)
        self.network.reorder(0, 2)
        self.network.deliver_all()
        self.assertEqual(["3", "2", "2"], self.seen)

    def test_a_cut_loses_messages_and_calls_until_it_heals(self) -> None:
        self.network.cut("a", "b")
        self.send("1")
        self.assertFalse(self.network.deliver())
        with self.assertRaises(errors.CallTimeout):
            self.a.call("t", Message("2"), timeout=5)
        self.assertEqual(5.0, self.clock.now)
        self.network.heal()
        self.assertEqual("3", self.a.call("t", Message("3"), timeout=5))
        self.assertEqual(["3"], self.seen)

    def test_a_call_can_be_lost_before_and_after_it_is_handled(self) -> None:
        expected = {
            Fate.LOSE_REQUEST: (errors.CallTimeout, []),
            Fate.LOSE_REPLY: (errors.CallTimeout, ["x"]),
            Fate.BREAK: (errors.PeerLost, ["x"]),
        }
        for fate, (error, handled) in expected.items():
            with self.subTest(fate):
                self.seen.clear()
                self.network.fate = lambda parcel, fate=fate: fate
                with self.assertRaises(error):
                    self.a.call("t", Message("x"), timeout=5)
                self.assertEqual(handled, self.seen)

    def test_what_is_under_way_to_a_stopped_listener_is_lost(self) -> None:
        self.send("1")
        self.subscription.stop(0)
        self.assertFalse(self.network.deliver())
        self.assertEqual([], self.seen)

    def test_a_simulation_starts_no_threads(self) -> None:
        before = set(threading.enumerate())
        self.send("1")
        self.network.deliver_all()
        self.a.call("t", Message("x"), timeout=5)
        # Threads that earlier tests left may end meanwhile.
        self.assertLessEqual(set(threading.enumerate()), before)

    def test_endless_conversations_are_noticed(self) -> None:
        self.b.serve("loop", "b", lambda message: self.b.fanout("loop", message))
        self.a.fanout("loop", Message("x"))
        with self.assertRaises(RuntimeError):
            self.network.deliver_all(most=10)

    def test_a_test_can_look_at_what_is_under_way(self) -> None:
        self.send("1")
        parcel: Parcel = self.network.pending[0]
        self.assertEqual(("a", "t", "b"), (parcel.source, parcel.topic, parcel.target.server))
