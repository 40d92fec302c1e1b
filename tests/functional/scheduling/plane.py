# SPDX-License-Identifier: Apache-2.0
"""Schedulers and agents of a whole control plane in one process: the real roles, on a real database, over any transport."""

from __future__ import annotations

import dataclasses
import random as random_module
import tempfile
import threading
import unittest
import uuid as uuid_module
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors
from moorage.clock import Clock, SystemClock
from moorage.control_plane import config
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.factories import open_store, open_workers
from moorage.control_plane.process import Platform
from moorage.control_plane.scheduler_role import SchedulerRole
from moorage.db import Database
from moorage.db.schema import core_metadata
from moorage.db.tables import events
from moorage.fleet.interface import InventoryItem, NodeSpec, uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.instances.agent_messages import AgentMessages, cast_to_agent
from moorage.instances.availability import Availability
from moorage.instances.delete import Deleter
from moorage.rpc.client import RpcSender
from moorage.rpc.interface import API_VERSION, Handler, Message, Subscription, Transport
from moorage.scheduling.interface import InstanceRecord, WantedClaim
from moorage.services.heartbeat import Heartbeat
from moorage.services.registry import ServiceRegistry
from moorage.testing.database import empty_tables
from moorage.work.tables import workers
from moorage_plugins.compute.agent import ComputeAgent
from moorage_plugins.compute.instances import ComputeInstances
from moorage_plugins.compute.tables import instances
from moorage_plugins.migrations import MIGRATIONS
from moorage_plugins.schema import plugins_metadata
from moorage_plugins.transports.memory import MemoryTransport, MessageHub
from tests.servers import wait_until

# So that the metadata has all tables.
MIGRATIONS.import_tables()
SOON = 60.0


class Weather:
    """What becomes of fanouts on their way: of ten two are lost, one comes twice and two come late, after others."""

    def __init__(self, random: random_module.Random) -> None:
        self._random = random
        self._lock = threading.Lock()
        self._late: list[Callable[[], None]] = []
        self._bad = True
        self.counts: Counter[str] = Counter()

    def carry(self, send: Callable[[], None]) -> None:
        """Send it as often as it is meant to arrive, now or later."""
        with self._lock:
            fate = self._random.random() if self._bad else 1.0
            what = "lost" if fate < 0.2 else "double" if fate < 0.3 else "late" if fate < 0.5 else "good"
            self.counts[what] += 1
            due = [send] * {"double": 2, "good": 1}.get(what, 0)
            if what == "late":
                self._late.append(send)
            while len(self._late) > 4:
                due.append(self._late.pop(self._random.randrange(len(self._late))))
        for each in due:
            each()

    def end(self) -> None:
        """What is late arrives now; from here on everything does as it should."""
        with self._lock:
            self._bad = False
            late, self._late = self._late, []
        for each in late:
            each()


class CountingTransport(Transport):
    """Remembers what was sent through another one; a test may lose some of it."""

    api_version = API_VERSION

    def __init__(self, plane: Plane, real: Transport) -> None:
        self.plane = plane
        self.real = real

    @override
    def serve(self, topic: str, server: str, handler: Handler, *, threads: int = 8) -> Subscription:
        return self.real.serve(topic, server, handler, threads=threads)

    @override
    def call(self, topic: str, message: Message, *, server: str | None = None, timeout: float) -> Any:
        answer = self.real.call(topic, message, server=server, timeout=timeout)
        if self.plane.lose_answer(message.method):
            raise errors.CallTimeout(f"The answer to {message.method} was lost.")
        return answer

    @override
    def fanout(self, topic: str, message: Message) -> None:
        self.plane.fanouts.append((topic, message.method))
        if not self.plane.lose(message.method):
            self.plane.carry(lambda: self.real.fanout(topic, message))

    @override
    def cast(self, topic: str, message: Message, *, server: str | None = None) -> None:
        self.plane.casts.append((topic, message.method, server))
        self.real.cast(topic, message, server=server)

    @override
    def listeners(self, topic: str) -> Sequence[str] | None:
        return self.real.listeners(topic)

    @override
    def close(self) -> None:
        self.real.close()


class OneByOne:
    """A claimer whose subclass says how one claim goes; those of a set go so, too."""

    def claim(self, *arguments: Any) -> Any:
        """One claim."""
        raise NotImplementedError

    def claim_many(self, wanted: Sequence[WantedClaim]) -> list[Any]:
        """One by one."""
        found: list[Any] = []
        for each in wanted:
            try:
                found.append(self.claim(each.spec, each.node_uuid, each.host, each.request_id))
            except Exception as error:
                found.append(error)
        return found


def carry_at_once(send: Callable[[], None]) -> None:
    send()


class Plane:
    """Starts roles on one database. Ended by the test's cleanup.

    :param url: of the database; empty: an SQLite file.
    :param transport: opens a real transport (of a configuration, a clock and a folder); None: transport memory.
    """

    #: Lets fanouts arrive; replaced by tests.
    carry: Callable[[Callable[[], None]], None] = staticmethod(carry_at_once)

    def __init__(
        self,
        test: unittest.TestCase,
        *,
        url: str = "",
        transport: Callable[[Any, Clock, str], Transport] | None = None,
        **overrides: Any,
    ) -> None:
        self.test = test
        folder = tempfile.TemporaryDirectory()
        test.addCleanup(folder.cleanup)
        self.folder = folder.name
        settings: dict[tuple[str, str], Any] = {
            ("agent", "sweep_interval"): 0.1,
            ("services", "report_interval"): 0.5,
            ("services", "service_down_time"): 30,
            ("scheduling", "refresh_interval"): 0.5,
        }
        settings |= {tuple(name.split("__")): value for name, value in overrides.items()}  # type: ignore[misc]
        if url:
            settings["database", "connection"] = url
        self.settings = settings
        self.conf = self.load()
        self.clock = SystemClock()
        self.database = Database.from_config(self.conf, clock=self.clock, service="plane")
        test.addCleanup(self.database.close)
        with self.database.write() as tx:
            empty_tables(tx, core_metadata, plugins_metadata)
        self.hub = MessageHub()
        self._open = transport or (
            lambda conf, clock, _: MemoryTransport(conf=conf, url="memory://", clock=clock, hub=self.hub)
        )
        self.heartbeats: dict[str, Heartbeat] = {}
        self.lost: list[str] = []
        self.fanouts: list[tuple[str, str]] = []
        self.casts: list[tuple[str, str, str | None]] = []
        self.registry = ServiceRegistry(self.database, self.clock)
        self.instances = ComputeInstances(conf=self.conf, database=self.database, clock=self.clock)
        self.client = self.platform("api", "api-1")
        self.store = open_store(self.client, self.conf)
        self.roles: dict[str, Any] = {}

    def lose(self, method: str) -> bool:
        """Whether a fanout is lost; replaced by tests."""
        return False

    def lose_answer(self, method: str) -> bool:
        """Whether the answer to a call is lost; replaced by tests."""
        return False

    def load(self, **overrides: Any) -> Any:
        changed = {tuple(name.split("__")): value for name, value in overrides.items()}
        return config.load(files=["/dev/null"], state_dir=self.folder, overrides={**self.settings, **changed})  # type: ignore[dict-item]

    def start_scheduler(self, name: str, url: str = "") -> SchedulerRole:
        """A scheduler, perhaps on another server of the same cluster of databases."""
        conf = self.load(database__connection=url) if url else self.conf
        database = self.database
        if url:
            database = Database.from_config(conf, clock=self.clock, service="plane")
            self.test.addCleanup(database.close)
        role = SchedulerRole()
        role.start(dataclasses.replace(self.platform(role.binary, name), database=database), conf)
        self.roles[name] = role
        self.test.addCleanup(self.stop, name)
        return role

    def platform(self, binary: str, name: str) -> Platform:
        transport = CountingTransport(self, self._open(self.conf, self.clock, self.folder))
        self.test.addCleanup(transport.close)
        cluster = (self.conf.agent.cluster or None) if binary == "agent" else None
        offers = None
        if binary == "agent":
            # No driver here runs commands; agents of early releases do not say so.
            powers = [*ComputeAgent.powers(self.conf), "compute.commands"]
            offers = ["compute", "block_storage", "data_processing", *powers]
        identity = self.registry.enlist(binary, name, cluster=cluster, rpc_version="1.0", offers=offers)
        heartbeat = Heartbeat(
            self.registry, identity, self.clock, interval=0.5, service_down_time=30.0, on_lost=self.lost.append
        )
        heartbeat.start()
        self.heartbeats[name] = heartbeat
        self.test.addCleanup(heartbeat.stop)
        sender = RpcSender(transport, identity.uuid, identity.epoch, timeout=SOON)
        fatal: list[str] = []
        return Platform(name, self.clock, self.database, self.registry, identity, transport, sender, fatal.append)

    def start(self, role: Any, name: str, conf: Any = None) -> Any:
        role.start(self.platform(role.binary, name), conf or self.conf)
        self.roles[name] = role
        self.test.addCleanup(self.stop, name)
        return role

    def stop(self, name: str) -> None:
        role = self.roles.pop(name, None)
        if role is not None:
            role.stop(5.0)
            self.heartbeats[name].stop()

    def enrol(self, hosts: Mapping[str, int], *, vcpus: int = 16) -> None:
        """Nodes of hosts: host -> how many."""
        nodes = [
            NodeSpec(
                uuid_of_name(f"{host}-node-{number}"), f"{host}-node-{number}", host,
                inventories=(InventoryItem("VCPU", vcpus), InventoryItem("MEMORY_MB", 4096 * vcpus)),
            )
            for host, count in hosts.items()
            for number in range(count)
        ]  # fmt: skip
        Enrolment(self.database, NodeStore(self.database), self.store, self.registry, lambda: None).enrol(nodes)

    def up(self, hosts: Sequence[str] = ("h1", "h2"), *, schedulers: int = 1, nodes: int = 1) -> Plane:
        """Agents of hosts with nodes, then schedulers."""
        self.enrol(dict.fromkeys(hosts, nodes))
        for host in hosts:
            self.start(Agent(), host)
        for number in range(1, schedulers + 1):
            self.start(SchedulerRole(), f"scheduler-{number}")
        return self

    def request(self, vcpus: int = 1, **more: Any) -> dict[str, Any]:
        return {
            "uuid": str(uuid_module.uuid4()),
            "flavor": {"flavorid": f"f{vcpus}", "resources": {"VCPU": vcpus, "MEMORY_MB": 64 * vcpus}},
            **more,
        }

    def ask(self, method: str, args: Mapping[str, Any], *, scheduler: str | None = None) -> Any:
        for _ in range(5):
            try:
                return self.client.sender.call("scheduler", method, args, server=scheduler)
            except errors.StoreBusy:
                # On a machine that is very busy with other tests; who asks again names the same claim.
                continue
        return self.client.sender.call("scheduler", method, args, server=scheduler)

    def create(self, vcpus: int = 1, *, scheduler: str | None = None, **more: Any) -> dict[str, Any]:
        request = self.request(vcpus, **more)
        found: dict[str, Any] = self.ask(
            "create_instance", {"request": request, "request_id": request["uuid"]}, scheduler=scheduler
        )
        return found

    def deleter(self) -> Deleter:
        workers = open_workers(self.client, self.conf)
        lacking = Availability(self.database, self.conf.services.service_down_time).lacking
        messages = AgentMessages(cast_to_agent(self.client.sender), lacking, self.clock)
        return Deleter(self.database, self.instances, workers, messages.delete)

    def status(self, uuid: str) -> str:
        found = [each.status for each in self.instances.list() if each.uuid == uuid]
        return found[0] if found else "gone"

    def store_extra_specs(self, uuid: str, extra_specs: Mapping[str, str]) -> None:
        """As if a release that did not check extra specs had stored these with an instance."""
        with self.database.write() as tx:
            mine = instances.c.uuid == uuid
            request = tx.execute(sa.select(instances.c.request).where(mine)).scalar_one()
            changed = {**request, "extra_specs": dict(extra_specs)}
            tx.execute(sa.update(instances).where(mine).values(request=changed))

    def wait_status(self, uuid: str, status: str) -> None:
        wait_until(lambda: self.status(uuid) == status, f"{uuid} is {status}", SOON)

    def wait_quiet(self) -> None:
        """No operation is in progress and every event has its number: a scheduler numbers events some time after they are there."""

        def quiet() -> bool:
            with self.database.read() as tx:
                working = tx.execute(sa.select(sa.func.count()).select_from(workers)).scalar_one()
                unnumbered = tx.execute(sa.select(sa.func.count()).where(events.c.number.is_(None))).scalar_one()
            return not working and not unnumbered

        wait_until(quiet, "the last operations and the numbers of all events", SOON)

    def view(self, scheduler: str = "scheduler-1") -> dict[str, InstanceRecord]:
        """What a scheduler knows."""
        fleet = self.roles[scheduler]._scheduler.view.snapshot()
        return {uuid: each for row in range(fleet.size) for uuid, each in fleet.instances_on(row).items()}

    def records(self) -> dict[str, InstanceRecord]:
        """What the store knows."""
        return {each.uuid: each for each in self.instances.all(limit=100_000)}

    def wait_agreement(self) -> None:
        """Every scheduler knows what the store knows."""

        def agree() -> bool:
            stored = {u: (r.host, r.node, r.flavorid) for u, r in self.records().items()}
            return all(
                {u: (r.host, r.node, r.flavorid) for u, r in self.view(name).items()} == stored
                for name in self.roles
                if name.startswith("scheduler")
            )

        wait_until(agree, "views and store agree", SOON)
