# SPDX-License-Identifier: Apache-2.0
"""Messages that RabbitMQ delivers again later, and in another order (H2 of the catalogue of faults).

A client of the broker binds a queue of its own to all exchanges of the control plane, and so gets a copy of each message: calls,
casts and fanouts. It publishes the copies again to the exchange and routing key of the original: some soon, all of them at the end,
when many instances are gone that they ask to create, build or delete. A listener of oslo.messaging refuses the last 16 message ids
that it has seen. A broker may deliver a message again after more than 16 others, so each copy has an id of its own.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import unittest
import uuid as uuid_module
from collections import Counter
from collections.abc import Sequence
from typing import Any

import amqp  # type: ignore[import-untyped]
import sqlalchemy as sa
from typing_extensions import override

from moorage import errors
from moorage.clock import Clock
from moorage.control_plane.factories import open_workers
from moorage.instances.agent_messages import cast_to_agent
from moorage.instances.in_place import InPlace
from moorage.rpc.interface import Handler, Message, Subscription, Transport
from moorage_plugins.compute.tables import instances
from moorage_plugins.stores.tables import allocations, inventories
from moorage_plugins.transports.oslo import OsloTransport
from tests import cases, hypervisors, seeded, servers
from tests.functional.scheduling.plane import SOON, Plane
from tests.servers import wait_until

HOSTS = ("h1", "h2", "h3")
SCHEDULERS = ("scheduler-1", "scheduler-2")
#: Where the messages of the control plane go: the exchange of calls and casts, and those of fanouts.
EXCHANGES = ("moorage", "scheduler.fanout_fanout", "agent.fanout_fanout")
FANOUTS = frozenset(
    {"claimed_instances", "update_instance_info", "delete_instance_info", "sync_instance_info", "sync_instances"}
)
#: What the clients cause at least, and what must be handled again.
METHODS = frozenset(
    {
        "create_instance",
        "build_instance",
        "delete_instance",
        "claimed_instances",
        "update_instance_info",
        "delete_instance_info",
    }
)
#: What has agents compare their instances with views, which would repair what a replay did to a view.
REPAIRS = frozenset({"sync_instances", "report_instances"})
_REPLAYED = "replayed"


def _method(message: Any) -> str:
    return str(json.loads(json.loads(message.body)["oslo.message"])["method"])


class Replayer:
    """Publishes copies of messages again.

    :param soonest, latest: seconds after the message at which the first copy is published. About half of the messages get one.
    """

    def __init__(self, server: Any, chance: random.Random, soonest: float, latest: float) -> None:
        self._chance = chance
        self._delay = soonest, latest
        self._connection = amqp.Connection(
            host=f"127.0.0.1:{server.port}", userid="moorage", password=server.password, connect_timeout=30
        )
        self._connection.connect()
        self._channel = self._connection.channel()
        self._queue = self._channel.queue_declare(exclusive=True).queue
        for name in EXCHANGES:
            self._channel.queue_bind(self._queue, exchange=name, routing_key="#")
        self._channel.basic_consume(self._queue, no_ack=True, callback=self._got)
        self._kept: list[tuple[str, str, Any]] = []
        self._due: list[tuple[float, int]] = []
        #: Messages and copies, by method.
        self._sent: Counter[str] = Counter()
        self._all = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replayer", daemon=True)
        self._thread.start()

    def replay_all(self) -> Counter[str]:
        """Publish all that was ever sent again, in a random order, and end.

        Returns how often each method is to be handled since the replayer began.
        """
        self._all.set()
        if not self._ended.wait(SOON):
            raise AssertionError("the replayer has not ended")
        self._connection.close()
        return Counter(
            {method: count * (len(SCHEDULERS) if method in FANOUTS else 1) for method, count in self._sent.items()}
        )

    def _got(self, message: Any) -> None:
        if _REPLAYED in (message.headers or {}):
            return
        if _method(message) in REPAIRS:
            return
        self._sent[_method(message)] += 1
        info = message.delivery_info
        self._kept.append((info["exchange"], info["routing_key"], message))
        if self._chance.random() < 0.5:
            self._due.append((time.monotonic() + self._chance.uniform(*self._delay), len(self._kept) - 1))

    def _run(self) -> None:
        while not self._all.is_set():
            self._drain(0.02)
            due = [number for moment, number in self._due if moment <= time.monotonic()]
            self._due = [each for each in self._due if each[1] not in due]
            self._chance.shuffle(due)
            self._publish(due)
        self._drain(0.5)
        numbers = list(range(len(self._kept)))
        self._chance.shuffle(numbers)
        self._publish(numbers)
        self._ended.set()

    def _drain(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                self._connection.drain_events(timeout=seconds)

    def _publish(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            exchange, key, message = self._kept[number]
            properties = {name: value for name, value in message.properties.items() if name != "application_headers"}
            self._sent[_method(message)] += 1
            headers = {**(message.headers or {}), _REPLAYED: True}
            envelope = json.loads(message.body)
            content = json.loads(envelope["oslo.message"])
            content["_unique_id"] = f"{self._chance.getrandbits(128):032x}"
            body = json.dumps({**envelope, "oslo.message": json.dumps(content)})
            copy = amqp.Message(body, application_headers=headers, **properties)
            self._channel.basic_publish(copy, exchange=exchange, routing_key=key)


class _Counting(OsloTransport):
    """Counts how often each message is handled. Each listener handles a fanout once."""

    def __init__(self, handled: Counter[Any], **more: Any) -> None:
        super().__init__(**more)
        self._handled = handled

    @override
    def serve(self, topic: str, server: str, handler: Handler, *, threads: int = 8) -> Subscription:
        def counted(message: Message) -> Any:
            try:
                return handler(message)
            finally:
                origin: Any = message.origin
                number = origin.service, origin.epoch, origin.sequence
                self._handled[server if message.method in FANOUTS else "", message.method, number] += 1

        return super().serve(topic, server, counted, threads=threads)


class ReplayedMessagesTests(unittest.TestCase):
    """Real schedulers and agents through a real broker."""

    def setUp(self) -> None:
        self.server = servers.shared("rabbitmq")
        self.handled: Counter[Any] = Counter()

        def opened(conf: Any, clock: Clock, folder: str) -> Transport:
            return _Counting(self.handled, conf=conf, url=self.server.url, clock=clock)

        # No periodic comparison repairs what a replay did to a view.
        self.plane = Plane(self, transport=opened, scheduling__scheduler_instance_sync_interval=-1)
        self.plane.up(HOSTS, schedulers=len(SCHEDULERS))
        self.addCleanup(self.stop_roles)
        self.plane.wait_agreement()
        self.random = seeded()
        self.before = self.by_method()
        self.replayer = Replayer(self.server, random.Random(self.random.random()), 0.05, 2.0)
        self.lock = threading.Lock()
        #: Uuid -> whether it shall exist; what a client could not learn is in neither state.
        self.told: dict[str, bool] = {}
        self.failures: list[str] = []

    def stop_roles(self) -> None:
        """Side by side: the end of a listener takes seconds."""
        ends = [threading.Thread(target=self.plane.stop, args=(name,)) for name in (*HOSTS, *SCHEDULERS)]
        for each in ends:
            each.start()
        for each in ends:
            each.join()

    def client(self, number: int) -> None:
        """Creates, moves and deletes."""
        chance, plane = random.Random(f"{self.random.random()}{number}"), self.plane
        workers = open_workers(plane.client, plane.conf)
        in_place = InPlace(plane.database, plane.instances, workers, cast_to_agent(plane.client.sender))
        deleter = plane.deleter()
        try:
            for _ in range(cases(6)):
                request = plane.request()
                wanted = request["uuid"]
                plane.ask("create_instance", {"request": request, "request_id": wanted})
                self.told[wanted] = True
                plane.wait_status(wanted, "active")
                what = chance.choice(("delete", "delete", "move", "rebuild", "keep"))
                if what == "move":
                    args = {"instance_uuid": wanted, "operation": "live_migrate", "wanted": {}}
                    plane.ask(
                        "move_instance", {**args, "request_id": str(uuid_module.UUID(int=chance.getrandbits(128)))}
                    )
                    plane.wait_status(wanted, "active")
                elif what == "rebuild":
                    in_place.begin(wanted, "rebuild", {})
                    plane.wait_status(wanted, "active")
                if what != "keep" and chance.random() < 0.7:
                    with contextlib.suppress(errors.NotFound):
                        deleter.delete(wanted)
                    plane.wait_status(wanted, "gone")
                    self.told[wanted] = False
        except Exception as error:
            self.failures.append(f"client {number}: {error!r}")

    def by_method(self) -> Counter[str]:
        """How many messages were handled."""
        found: Counter[str] = Counter()
        for key, times in self.handled.copy().items():
            found[key[1]] += times
        return found

    def broken(self) -> list[str]:
        """The laws that do not hold, at rest."""
        plane = self.plane
        with plane.database.read() as tx:
            rows = {row.uuid: row for row in tx.execute(sa.select(instances))}
            held = Counter(tx.execute(sa.select(allocations.c.consumer_id)).scalars())
            counted = tx.execute(
                sa.select(inventories.c.used, sa.func.coalesce(sa.func.sum(allocations.c.used), 0))
                .select_from(
                    inventories.outerjoin(
                        allocations,
                        sa.and_(
                            allocations.c.resource_provider_id == inventories.c.resource_provider_id,
                            allocations.c.resource_class_id == inventories.c.resource_class_id,
                        ),
                    )
                )
                .group_by(inventories.c.resource_provider_id, inventories.c.resource_class_id, inventories.c.used)
            ).all()
        found = [
            f"instance {uuid} was acknowledged and is missing"
            for uuid, there in self.told.items()
            if there and uuid not in rows
        ]
        found += [
            f"instance {uuid} was deleted and exists: {rows[uuid]}"
            for uuid, there in self.told.items()
            if not there and uuid in rows
        ]
        found += [f"instance {uuid} was asked for by nobody" for uuid in rows.keys() - self.told.keys()]
        found += [f"instance {uuid} is {row.status}" for uuid, row in rows.items() if row.status != "active"]
        copies: dict[str, list[str]] = {}
        for each in hypervisors.found(plane.folder):
            copies.setdefault(each.uuid, []).append(each.host)
        for uuid in rows.keys() | copies.keys():
            wanted = [rows[uuid].host] if uuid in rows else []
            if copies.get(uuid, []) != wanted:
                found.append(f"instance {uuid} runs on {copies.get(uuid)}, the store says {wanted}")
        if set(held) != set(rows):
            found.append(f"{set(held) - set(rows)} hold resources and do not exist, {set(rows) - set(held)} hold none")
        found += [f"used is {used}, allocations are {total}" for used, total in counted if used != total]
        return found

    def test_repeated_and_reordered_messages_change_nothing(self) -> None:
        clients = [threading.Thread(target=self.client, args=(number,)) for number in range(3)]
        for each in clients:
            each.start()
        for each in clients:
            each.join(4 * SOON)
        self.assertEqual([], self.failures)
        self.plane.wait_quiet()
        self.plane.wait_agreement()
        sent = self.replayer.replay_all()

        def handled() -> bool:
            now = self.by_method()
            return all(now[method] >= self.before[method] + count for method, count in sent.items())

        wait_until(handled, "the copies are handled", SOON)
        # At once: later a comparison might have repaired it.
        views = {name: self.plane.view(name) for name in SCHEDULERS}
        self.plane.wait_quiet()
        self.assertLessEqual(METHODS, {key[1] for key, times in self.handled.items() if times > 1})
        stored = self.plane.records()
        for name, view in views.items():
            self.assertEqual(
                {key: each.host for key, each in stored.items()}, {key: each.host for key, each in view.items()}, name
            )
        self.assertEqual([], self.broken())
