# SPDX-License-Identifier: Apache-2.0
"""Transport oslo with RabbitMQ: a broker that stops or restarts, other queue types, and services that are not Moorage's."""

from __future__ import annotations

import threading
import time
import unittest
import uuid
from typing import Any

from moorage import errors
from moorage.clock import SystemClock
from moorage.rpc.interface import Message, Origin
from moorage.testing.transport import PATIENCE, Recorder, eventually
from moorage.testing.transport_peer import configuration
from moorage_plugins.transports.oslo import OsloTransport
from tests import servers

# isort: split
import oslo_messaging  # after the transport, which makes it use threads


class Base(unittest.TestCase):
    def setUp(self) -> None:
        self.url = servers.shared("rabbitmq").url
        self.topic = f"topic-{uuid.uuid4().hex[:12]}"

    def transport(self, rabbit: dict[str, Any] | None = None, **options: Any) -> OsloTransport:
        conf = configuration(options)
        transport = OsloTransport(conf=conf, url=self.url, clock=SystemClock())
        self.addCleanup(transport.close)
        if rabbit:
            transport.close()
            # An exchange cannot be of two kinds, and the tests share the broker.
            conf.set_override("control_exchange", self.topic)
            for name, value in rabbit.items():
                conf.set_override(name, value, group="oslo_messaging_rabbit")
            transport = OsloTransport(conf=conf, url=self.url, clock=SystemClock())
            self.addCleanup(transport.close)
        return transport


class QueueTypesTests(Base):
    def test_quorum_queues_with_stream_fanout_carry_everything(self) -> None:
        transport = self.transport(
            {
                "rabbit_quorum_queue": True,
                "rabbit_transient_quorum_queue": True,
                "rabbit_stream_fanout": True,
            }
        )
        recorder = Recorder()
        transport.serve(self.topic, "one", recorder)
        self.assertEqual(
            {"value": 1}, transport.call(self.topic, Message("x", {"value": 1}), server="one", timeout=PATIENCE)
        )
        transport.cast(self.topic, Message("x", {"value": 2}), server="one")
        for value in range(3, 23):
            transport.fanout(self.topic, Message("x", {"value": value}))
        eventually(lambda: recorder.finished == 22, "all handled")
        self.assertEqual(list(range(3, 23)), [value for value in recorder.values() if value > 2])

    def test_queues_of_another_kind_are_explained(self) -> None:
        transport = self.transport({"rabbit_quorum_queue": True})
        transport.serve(self.topic, "one", Recorder())
        classic = self.transport({"rabbit_quorum_queue": False})
        with self.assertRaisesRegex(errors.TransportError, "use a new vhost"):
            classic.serve(self.topic, "two", Recorder())


class ListenersTests(Base):
    def test_a_call_to_a_topic_that_nobody_ever_served_is_refused_by_the_broker(self) -> None:
        started = time.monotonic()
        with self.assertRaises(errors.NoListener):
            self.transport().call(self.topic, Message("x"), server="one", timeout=60)
        self.assertLess(time.monotonic() - started, PATIENCE)

    def test_listeners_are_not_known(self) -> None:
        self.assertIsNone(self.transport().listeners(self.topic))

    def test_the_configuration_needs_nothing_registered_before(self) -> None:
        # [oslo_messaging_metrics] and [oslo_messaging_tracing] are forgotten by oslo.messaging in a private configuration.
        transport = self.transport()
        transport.serve(self.topic, "one", Recorder())
        self.assertEqual({}, transport.call(self.topic, Message("x"), timeout=PATIENCE))


class StrangersTests(Base):
    """Services that use oslo.messaging without Moorage."""

    def foreign(self) -> tuple[Any, Any]:
        conf = self.transport()._conf
        transport = oslo_messaging.get_rpc_transport(conf, self.url)
        self.addCleanup(transport.cleanup)
        return conf, transport

    def test_a_bare_message_has_no_origin_and_gets_a_bare_reply(self) -> None:
        recorder = Recorder()
        self.transport().serve(self.topic, "one", recorder)
        _conf, foreign = self.foreign()
        client = oslo_messaging.get_rpc_client(
            foreign, oslo_messaging.Target(topic=self.topic, version="1.2"), timeout=PATIENCE
        )
        self.assertEqual({"value": 5}, client.call({"user_id": "u"}, "update", value=5))
        got = recorder.messages[0]
        self.assertEqual(
            ("update", {"value": 5}, None, "u", "1.2"),
            (got.method, got.args, got.origin, got.context.get("user_id"), got.version),
        )

    def test_a_foreign_caller_gets_errors_as_oslo_messaging_carries_them(self) -> None:
        def handler(message: Message) -> None:
            raise errors.InUse("Held.") if message.method == "known" else ValueError("secret")

        self.transport().serve(self.topic, "one", handler)
        _conf, foreign = self.foreign()
        client = oslo_messaging.get_rpc_client(foreign, oslo_messaging.Target(topic=self.topic), timeout=PATIENCE)
        with self.assertRaises(oslo_messaging.RemoteError) as caught:
            client.call({}, "known")
        self.assertEqual(("InUse", "Held."), (caught.exception.exc_type, caught.exception.value))
        with self.assertRaises(oslo_messaging.RemoteError) as caught:
            client.call({}, "surprise")
        self.assertNotIn("secret", str(caught.exception))

    def test_a_foreign_server_gets_plain_method_and_arguments(self) -> None:
        seen: list[Any] = []

        class Endpoint:
            def note(self, context: Any, value: int) -> None:
                seen.append((value, context["moorage"]["origin"]))

            def fail(self, context: Any) -> None:
                raise ValueError("no")

        _conf, foreign = self.foreign()
        target = oslo_messaging.Target(topic=self.topic, server="foreign")
        server = oslo_messaging.get_rpc_server(foreign, target, [Endpoint()])
        server.start()
        self.addCleanup(server.wait)
        self.addCleanup(server.stop)
        transport = self.transport()
        transport.cast(self.topic, Message("note", {"value": 3}, Origin("s", 1, 9)))
        eventually(lambda: seen == [(3, ["s", 1, 9])], "the cast arrives")
        with self.assertRaises(errors.RemoteError) as caught:
            transport.call(self.topic, Message("fail"), timeout=PATIENCE)
        self.assertEqual("ValueError", caught.exception.details["remote_code"])
        self.assertEqual("The other side failed: no", str(caught.exception))


class BrokerTests(unittest.TestCase):
    """A broker of its own, because it is stopped."""

    def setUp(self) -> None:
        servers.require("rabbitmq")
        self.broker = servers.KINDS["rabbitmq"]()
        self.broker.start()
        self.addCleanup(self.broker.stop)
        self.conf = configuration({"queue_limit": 30})
        self.transport = OsloTransport(conf=self.conf, url=self.broker.url, clock=SystemClock())
        self.addCleanup(self.transport.close)

    def test_a_broker_that_stands_still_and_restarts_delays_nobody_beyond_a_bound(self) -> None:
        # Other tests of the process may have left threads.
        before = threading.active_count()
        recorder, transport = Recorder(), self.transport
        transport.serve("t", "one", recorder)
        transport.call("t", Message("x", {"value": 0}), timeout=PATIENCE)
        transport.fanout("t", Message("x", {"value": 1}))
        transport.cast("t", Message("x", {"value": 2}), server="one")
        eventually(lambda: recorder.finished == 3, "all handled")

        self.broker.pause()
        started = time.monotonic()
        for value in range(100, 200):
            transport.fanout("t", Message("x", {"value": value}))
        with self.assertRaises(errors.Busy):
            for _ in range(100):
                transport.cast("t", Message("x", {"value": -1}), server="one")
        with self.assertRaises(errors.TransportError):
            transport.call("t", Message("x"), timeout=1.0)
        self.assertLess(time.monotonic() - started, PATIENCE)
        self.broker.resume()
        eventually(lambda: 199 in recorder.values(), "the newest fanout, the oldest were dropped")

        self.broker.restart()
        number = iter(range(1000, 100_000))

        def reached() -> bool:
            value = next(number)
            transport.fanout("t", Message("x", {"value": value}))
            return any(seen is not None and seen >= 1000 for seen in recorder.values())

        eventually(reached, "fanouts arrive again after the restart", 60)
        self.assertLess(threading.active_count() - before, 60)


if __name__ == "__main__":
    unittest.main()
