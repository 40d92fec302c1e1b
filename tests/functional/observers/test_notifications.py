# SPDX-License-Identifier: Apache-2.0
"""The observer ``notifications``: over oslo.messaging's driver in memory, and over RabbitMQ."""

from __future__ import annotations

import threading
import unittest
import uuid
from typing import Any

from moorage_plugins.transports import oslo_backend  # noqa: F401  (before oslo_messaging)

# isort: split
import oslo_messaging
from oslo_config import cfg
from typing_extensions import override

from moorage import errors
from moorage.db import RecordedEvent
from moorage.observers.interface import Observer, ObserverTools
from moorage.rpc import options as rpc_options
from moorage.testing.observers import ObserverTests
from moorage_plugins.observers.notifications import NotificationsObserver
from moorage_plugins.observers.options import list_opts
from tests import servers
from tests.servers import free_port, wait_until

EVENT = RecordedEvent(
    7, "instance.delete", "instance/u", 3, 1_767_225_600_000_001, "alice", "agent:h1", "blue", "req-1", "req-0",
    {"status": "deleting", "host": "h1"},
)  # fmt: skip


class Listener:
    """Collects the notifications of a topic."""

    def __init__(self, url: str, topic: str) -> None:
        conf = cfg.ConfigOpts()
        conf([])
        self.got: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()
        self._transport = oslo_messaging.get_notification_transport(conf, url)
        self._listener = oslo_messaging.get_notification_listener(
            self._transport, [oslo_messaging.Target(topic=topic)], [self], executor="threading"
        )
        self._listener.start()

    def info(self, context: Any, publisher_id: str, event_type: str, payload: Any, metadata: Any) -> None:
        with self._lock:
            self.got.append((context, publisher_id, event_type, payload, metadata))

    def close(self) -> None:
        self._listener.stop()
        self._listener.wait()
        self._transport.cleanup()


class NotificationsTests(ObserverTests, unittest.TestCase):
    url = "fake:/"

    def setUp(self) -> None:
        super().setUp()
        self.topic = f"moorage-{uuid.uuid4().hex}"

    @override
    def make_observer(self, tools: ObserverTools) -> Observer:
        made = NotificationsObserver(tools)
        self.addCleanup(made.close)
        return made

    @override
    def list_opts(self):
        return [*list_opts(), *rpc_options.list_opts()]

    @override
    def configure(self, conf: cfg.ConfigOpts) -> None:
        conf.set_override("transport_url", self.url, group="observer_notifications")
        conf.set_override("topics", [self.topic], group="observer_notifications")

    def test_an_event_is_a_notification(self) -> None:
        listener = Listener(self.url, self.topic)
        self.addCleanup(listener.close)
        observer = self.make_observer(self.tools())
        observer.follow([EVENT, RecordedEvent(8, *(getattr(EVENT, name) for name in EVENT.__slots__[1:]))], 2)
        observer.follow([EVENT], 2)
        wait_until(lambda: len(listener.got) == 3, "three notifications")
        # The listener has many threads, and may be done with the second one first.
        found = sorted(listener.got, key=lambda got: got[3]["moorage_object.data"]["number"])
        context, publisher, kind, payload, metadata = found[0]
        self.assertEqual(("moorage-agent:h1", "instance.delete"), (publisher, kind))
        self.assertEqual(("alice", "req-1"), (context["user_id"], context["request_id"]))
        self.assertEqual("2026-01-01 00:00:00.000001", metadata["timestamp"])
        self.assertEqual("EventPayload", payload["moorage_object.name"])
        self.assertEqual("1.0", payload["moorage_object.version"])
        data = payload["moorage_object.data"]
        self.assertEqual({**{name: getattr(EVENT, name) for name in EVENT.__slots__}, "missed": 2}, data)
        first, again, second = (got[4]["message_id"] for got in found)
        self.assertEqual(first, again, "a repetition has the identity of the first one")
        self.assertNotEqual(first, second)

    def test_what_cannot_be_sent_is_refused_so_that_it_comes_again(self) -> None:
        tools = self.tools()
        url = f"rabbit://moorage:hunter2@127.0.0.1:{free_port()}/"
        tools.conf.set_override("transport_url", url, group="observer_notifications")
        with self.assertRaisesRegex(errors.Unavailable, "Event 7 could not be sent to the topic") as raised:
            self.make_observer(tools).follow([EVENT], 0)
        self.assertNotIn("hunter2", raised.exception.message)

    def test_options_that_cannot_be_used(self) -> None:
        for name, value in (("transport_url", "pigeon://me:hunter2@roof/"), ("topics", [])):
            tools = self.tools()
            tools.conf.set_override(name, value, group="observer_notifications")
            with self.assertRaisesRegex(errors.ConfigError, name) as raised:
                self.make_observer(tools)
            self.assertNotIn("hunter2", raised.exception.message)


class RabbitmqNotificationsTests(NotificationsTests):
    @override
    def setUp(self) -> None:
        self.url = servers.shared("rabbitmq").url
        super().setUp()
