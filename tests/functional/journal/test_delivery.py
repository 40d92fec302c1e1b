# SPDX-License-Identifier: Apache-2.0
"""Delivery of the journal on PostgreSQL and MariaDB, and webhooks whose engines are killed, on each database."""

from __future__ import annotations

import itertools
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping

from moorage.journal.webhooks import WebhookStore
from tests.functional.databases import MariadbCase, PostgresqlCase
from tests.receivers import OK, Received, Receiver
from tests.servers import wait_until
from tests.unit.journal import delivery_tests

#: An engine's delivery alone: the URL of the database, and the uuid and epoch of the service.
ENGINE = """
import ipaddress, sys, threading
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.journal.delivery import DeliveryLoop
from moorage.journal.sender import WebhookSink
from moorage.journal.webhooks import WebhookStore
from moorage.services.interface import ServiceIdentity

url, uuid, epoch = sys.argv[1:]
database, clock = Database(url, service="engine:e"), SystemClock()
networks = [ipaddress.ip_network("127.0.0.0/8")]
sinks = lambda: [WebhookSink(each, clock, networks, 5.0) for each in WebhookStore(database).enabled()]
WebhookSink.batch = 5
me = ServiceIdentity(uuid, "e", "engine", None, int(epoch))
DeliveryLoop(database, clock, me, sinks, poll=0.05, shortest_lease=1.0).start()
print("ready", flush=True)
threading.Event().wait()
"""


FATES = ("well", "kill", "pause", "error", "silence")


class Fate:
    """Decides what becomes of the engines while one of them waits for an answer."""

    def __init__(self, engines: Mapping[int, subprocess.Popen[str]]) -> None:
        self.engines = engines
        self.chosen: list[str] = []
        self.chance = random.Random(11)

    def signal(self, what: signal.Signals) -> None:
        for process in list(self.engines.values()):
            process.send_signal(what)

    def answer(self, request: Received) -> bytes:
        fate = self.chance.choice(("well", "well", *FATES))
        if fate == "kill":
            self.signal(signal.SIGKILL)
        elif fate == "pause":
            self.signal(signal.SIGSTOP)
            threading.Timer(0.5, self.signal, (signal.SIGCONT,)).start()
        self.chosen.append(fate)
        return {"error": b"HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n", "silence": b""}.get(fate, OK)


class PostgresqlDeliveryTests(PostgresqlCase, delivery_tests.DeliveryTests):
    pass


class MariadbDeliveryTests(MariadbCase, delivery_tests.DeliveryTests):
    pass


class KilledEngineTests(delivery_tests.DeliveryCase):
    """Subclasses give ``url``."""

    def engine(self, number: int, epoch: int) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", ENGINE, self.url, f"00000000-0000-4000-8000-00000000002{number}", str(epoch)]
        started = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.addCleanup(self.end, started)
        assert started.stdout is not None
        self.assertEqual("ready", started.stdout.readline().strip())
        return started

    @staticmethod
    def end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def numbers(self, receiver: Receiver) -> list[int]:
        return [each["number"] for got in list(receiver.got) for each in json.loads(got.body)["events"]]

    def run_over_kills(self) -> None:
        """Two engines are killed with SIGKILL, or paused, at random requests of theirs."""
        receiver = Receiver()
        self.addCleanup(receiver.close)
        webhook = WebhookStore(self.database).create("w", receiver.url, after="oldest")
        epochs = itertools.count(1)
        engines = {number: self.engine(number, next(epochs)) for number in range(2)}
        fate = Fate(engines)

        def revive() -> bool:
            for number, process in list(engines.items()):
                if process.poll() is not None:
                    self.end(process)
                    engines[number] = self.engine(number, next(epochs))
            self.at_once(webhook.subscription)
            return False

        receiver.answer = fate.answer
        while len(set(fate.chosen)) < len(FATES) or len(fate.chosen) < 15:
            # Before the events: their request may come at once.
            heard = len(fate.chosen)
            self.numbered(5)
            wait_until(lambda heard=heard: revive() or len(fate.chosen) > heard, "a request")  # type: ignore[misc]
        receiver.answer = OK
        last = self.store.list()[1]
        wait_until(lambda: revive() or self.row(webhook.subscription).position == last, "everything is delivered")
        self.assert_delivered(self.numbers(receiver), last)


class SqliteKilledEngineTests(KilledEngineTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{pathlib.Path(folder.name) / 'test.sqlite'}"
        super().setUp()

    def test_webhooks_get_everything_over_kills(self) -> None:
        self.run_over_kills()


class PostgresqlKilledEngineTests(PostgresqlCase, KilledEngineTests):
    def test_webhooks_get_everything_over_kills(self) -> None:
        self.run_over_kills()


class MariadbKilledEngineTests(MariadbCase, KilledEngineTests):
    def test_webhooks_get_everything_over_kills(self) -> None:
        self.run_over_kills()
