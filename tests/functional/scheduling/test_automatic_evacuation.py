# SPDX-License-Identifier: Apache-2.0
"""The periodic task evacuate_hosts: which hosts it fences, what its brake holds back, and what becomes of their instances."""

from __future__ import annotations

import threading
import unittest
from concurrent import futures
from typing import ClassVar
from unittest import mock

import sqlalchemy as sa

from moorage import errors
from moorage.control_plane import evacuation_task
from moorage.control_plane.evacuation_task import EvacuateHosts
from moorage.control_plane.factories import open_workers
from moorage.coordination.interface import TaskTools
from moorage.db import MICROSECONDS
from moorage.journal.reader import EventFilter, JournalReader
from moorage.journal.sequencer import Sequencer
from moorage.services.automatic_fences import AutomaticFences
from moorage.services.fence_metrics import FenceCollector
from moorage.services.interface import Service, ServiceIdentity
from moorage.services.liveness import LivenessObserver
from moorage.services.tables import automatic_fences, services
from moorage.testing.clock import ManualClock
from moorage_plugins.compute.tables import instances
from tests import servers
from tests.functional.scheduling import test_evacuation
from tests.functional.scheduling.plane import SOON
from tests.servers import wait_until

LOGGER = evacuation_task.LOG.logger
PERIOD = 3600.0


class _KeyTests(test_evacuation.EvacuationCase):
    hosts: ClassVar[tuple[str, ...]] = ("h1", "h2", "h3", "h4", "h5")

    def setUp(self) -> None:
        super().setUp()
        self.clock = ManualClock()
        self.task = self.made_task()
        self.sequencer = Sequencer(self.plane.database)

    def made_task(self) -> EvacuateHosts:
        plane = self.plane
        workers = open_workers(plane.client, plane.conf)
        context = mock.Mock()
        tools = TaskTools(
            plane.conf, self.clock, plane.database, plane.client.sender, context, workers, services=plane.client
        )
        return EvacuateHosts(tools)

    def tick(self, seen: float = 600.0) -> int:
        """How many evacuations began, when the engine has seen all agents as they are for some seconds."""
        self.task.list_objects()
        self.clock.advance(seen)
        return sum(int(bool(self.task.handle(each, mock.Mock()))) for each in self.task.list_objects())

    def on(self, host: str) -> str:
        request = self.plane.request(2, requested_host=host)
        uuid: str = self.plane.ask("create_instance", {"request": request, "request_id": request["uuid"]})["uuid"]
        self.plane.wait_status(uuid, "active")
        return uuid

    def counted(self) -> tuple[float, float]:
        """Fenced hosts, and those that wait, by the metrics."""
        fenced, waiting = FenceCollector(self.plane.database).collect()
        return fenced.samples[0].value, waiting.samples[0].value

    def test_a_host_that_fenced_itself_is_evacuated_once_and_comes_back(self) -> None:
        uuids, stays = [self.on_h1(), self.on_h1()], self.on_h1()
        self.in_place.begin(stays, "stop", {})
        self.plane.wait_status(stays, "stopped")
        self.assertEqual(0, self.tick())
        self.promising("h1", 60.0, silent=65.0)
        self.assertEqual((0, False), (self.tick(), self.agent("h1").fenced))
        self.promising("h1", 60.0, silent=67.0)
        self.assertEqual((0.0, 1.0), self.counted())
        with self.assertLogs(LOGGER, "WARNING") as logs:
            self.assertEqual(1, self.tick())
        self.assertIn("Host h1 fenced itself; its agent was declared dead", logs.output[0])
        self.assertEqual((1.0, 0.0), self.counted())
        for uuid in uuids:
            wait_until(lambda uuid=uuid: self.instance(uuid).status == "active", "it runs elsewhere", SOON)  # type: ignore[misc]
            self.assertNotEqual("h1", self.instance(uuid).host)
        # What its owner stopped is not started elsewhere.
        self.assertEqual(("stopped", "h1"), (self.instance(stays).status, self.instance(stays).host))
        self.assertEqual(0, self.tick())
        self.come_back("h1")
        self.assertEqual({stays}, self.running()["h1"])

    def test_an_instance_whose_move_has_begun_is_evacuated(self) -> None:
        uuid = self.on_h1()
        # Its destination does nothing.
        self.plane.stop("h2")
        self.move(uuid, "live_migrate", "away", host="h2")
        self.assertEqual(("migrating", "h1"), (self.instance(uuid).status, self.instance(uuid).host))
        self.promising("h1", 10.0, silent=20.0)
        self.assertEqual(1, self.tick())
        wait_until(lambda: self.instance(uuid).status == "active", "it runs elsewhere", SOON)
        self.assertNotIn(self.instance(uuid).host, ("h1", "h2"))

    def test_hosts_that_an_operator_fenced_are_evacuated_without_the_brake(self) -> None:
        uuids = {host: self.on(host) for host in ("h1", "h2")}
        for host in uuids:
            self.die(host)
            self.fence(host)
        self.assertEqual(2, self.tick())
        for host, uuid in uuids.items():
            wait_until(lambda uuid=uuid: self.instance(uuid).status == "active", "it runs elsewhere", SOON)  # type: ignore[misc]
            self.assertNotIn(self.instance(uuid).host, uuids, host)

    def test_the_brake_limits_fences_in_a_period_and_logs_once_what_it_holds_back(self) -> None:
        for host in ("h1", "h2"):
            self.promising(host, 10.0, silent=20.0)
        with self.assertLogs(LOGGER, "WARNING") as logs:
            for _ in range(3):
                self.tick()
        self.assertEqual((1.0, 1.0), self.counted())
        told = [line for line in logs.output if "is not evacuated automatically yet" in line]
        self.assertEqual(1, len(told), logs.output)
        self.assertIn("max_hosts allows (1) were fenced automatically in the last 3600 seconds", told[0])
        # An engine numbers the events for its readers.
        wait_until(self.held_back, "the journal says it", SOON)
        self.assertEqual(1, len(self.held_back()))
        waits, reason = self.held_back()[0]
        self.assertIn(f"Host {waits} is dead", told[0])
        self.assertIn(f"{reason}.", told[0])
        self.pass_time(PERIOD - 60)
        self.tick()
        self.assertEqual((1.0, 1.0), self.counted())
        self.pass_time(61)
        self.tick()
        self.assertEqual((2.0, 0.0), self.counted())

    def held_back(self) -> list[tuple[str, str]]:
        """What the journal says of hosts that are not fenced yet: the host, and why."""
        self.sequencer.number()
        events = JournalReader(self.plane.database).page(None, EventFilter(kind="service.hold_back"), 100).events
        return [(each.state["host"], each.state["held_back"]) for each in events]

    def pass_time(self, seconds: float) -> None:
        """For the brake alone."""
        with self.plane.database.write() as tx:
            at = automatic_fences.c.fenced_at
            tx.execute(sa.update(automatic_fences).values(fenced_at=at - int(seconds * MICROSECONDS)))

    def test_nothing_is_fenced_while_half_of_the_agents_are_silent(self) -> None:
        # A sixth agent: half are three.
        self.plane.registry.enlist("agent", "h6", rpc_version="1.0")
        for host in ("h1", "h2", "h3"):
            self.promising(host, 10.0, silent=100.0)
        with self.assertLogs(LOGGER, "WARNING") as logs:
            self.tick()
        self.assertEqual((0.0, 3.0), self.counted())
        self.assertIn("3 of 6 agents are silent, so the fault may be in the network or the store", logs.output[0])
        with self.plane.database.read() as tx:
            self.assertEqual([], tx.execute(sa.select(automatic_fences)).all())
        # One that stopped in good order is not silent.
        agent = self.agent("h3")
        self.plane.registry.retire(ServiceIdentity(agent.uuid, "h3", "agent", None, agent.epoch))
        self.tick()
        self.assertEqual(1.0, self.counted()[0])

    def test_of_many_engines_at_once_no_more_pass_than_the_brake_allows(self) -> None:
        registry = self.plane.registry
        for number in range(8):
            registry.enlist("agent", f"living-{number}", rpc_version="1.0")
        dead = [self.silent(f"dead-{number}") for number in range(4)]
        brake = self.brake(30.0, 2, seen=dead)
        begun = threading.Barrier(8)

        def fence(agent: Service) -> str:
            begun.wait(SOON)
            return brake.fence(agent)

        with futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(fence, [*dead, *dead]))
        self.assertLessEqual(self.counted()[0], 2)
        # A lost race holds a host back until the next time.
        for each in dead:
            brake.fence(each)
        self.assertEqual((2.0, 2.0), self.counted())
        with self.plane.database.read() as tx:
            slots = tx.execute(sa.select(automatic_fences.c.slot, automatic_fences.c.host)).all()
        self.assertEqual({1, 2}, {row.slot for row in slots})
        self.assertEqual({each.host for each in dead if registry.get(each.uuid).fenced}, {row.host for row in slots})

    def brake(self, down_time: float, most: int, *, seen: list[Service]) -> AutomaticFences:
        """A brake of an engine that has seen some agents as they are for a long time."""
        observer = LivenessObserver(self.clock, down_time)
        observer.observe(seen)
        self.clock.advance(10_000.0)
        return AutomaticFences(self.plane.database, self.plane.registry, observer, down_time, most, PERIOD)

    def silent(self, host: str, lease: float = 1.0, seconds: int = 100) -> Service:
        registry = self.plane.registry
        identity = registry.enlist("agent", host, rpc_version="1.0")
        registry.beat_promising(identity, lease)
        with self.plane.database.write() as tx:
            mine = services.c.uuid == identity.uuid
            tx.execute(sa.update(services).where(mine).values(beat_at=services.c.beat_at - seconds * MICROSECONDS))
        return registry.get(identity.uuid)

    def test_a_jump_of_the_database_clock_and_lost_heartbeats_fence_no_living_host(self) -> None:
        self.tick()
        self.promising("h1", 60.0, silent=1000.0)
        agent = self.agent("h1")
        with self.assertLogs(LOGGER, "WARNING") as logs:
            self.task.list_objects()
            self.clock.advance(66.0)
            self.assertFalse(self.task.handle(agent.uuid, mock.Mock()))
        self.assertIn("seen its agent silent for 66.0 seconds of the 66 that", logs.output[0])
        # A heartbeat, and the loss of the next ones, begin the time again.
        self.promising("h1", 60.0, silent=1000.0)
        self.clock.advance(60.0)
        self.assertFalse(self.task.handle(agent.uuid, mock.Mock()))
        with self.plane.database.write() as tx:
            tx.execute(sa.update(services).where(services.c.uuid == agent.uuid).values(beat=services.c.beat - 1))
        self.clock.advance(60.0)
        self.assertFalse(self.task.handle(agent.uuid, mock.Mock()))
        self.assertFalse(self.agent("h1").fenced)
        self.clock.advance(66.1)
        self.task.handle(agent.uuid, mock.Mock())
        self.assertTrue(self.agent("h1").fenced)

    def test_a_heartbeat_after_the_last_look_prevents_the_fence(self) -> None:
        agent = self.silent("dead", 10.0, 1000)
        brake = self.brake(30.0, 2, seen=[agent])
        identity = ServiceIdentity(agent.uuid, agent.host, "agent", None, agent.epoch)
        self.assertTrue(self.plane.registry.beat_promising(identity, 10.0))
        with self.plane.database.write() as tx:
            # So only the count of heartbeats says that it lives.
            tx.execute(sa.update(services).where(services.c.uuid == agent.uuid).values(beat_at=agent.beat_at))
        with self.assertRaisesRegex(errors.Conflict, "its agent has sent a heartbeat"):
            brake.fence(agent)
        self.assertFalse(self.agent("dead").fenced)

    def test_hosts_with_a_short_lease_count_as_silent_when_it_is_over(self) -> None:
        """Shorter than ``service_down_time``: all agents are silent, and none is for so long."""
        for host in self.hosts:
            self.plane.stop(host)
        dead = [self.silent(host, 30.0, 40) for host in self.hosts]
        brake = self.brake(60.0, 3, seen=dead)
        for agent in dead:
            self.assertIn("5 of 5 agents are silent", brake.fence(agent))
        self.assertEqual((0.0, 5.0), self.counted())

    def test_a_slot_whose_use_is_in_the_future_is_free(self) -> None:
        first, second = self.silent("dead-1"), self.silent("dead-2")
        brake = self.brake(30.0, 1, seen=[first, second])
        self.assertEqual("", brake.fence(first))
        self.assertIn("as many hosts as", brake.fence(second))
        self.pass_time(-PERIOD)
        self.assertEqual("", brake.fence(second))

    def test_what_fits_nowhere_is_logged_once_and_tried_again(self) -> None:
        uuid = self.on_h1()
        others = [self.agent(host).uuid for host in self.hosts if host != "h1"]
        for each in others:
            self.plane.registry.set(each, disabled=True)
        self.promising("h1", 10.0, silent=20.0)
        with self.assertLogs(LOGGER, "WARNING") as logs:
            self.tick()
            for name in ("scheduler-1", "scheduler-2"):
                # The reason of a refusal may be another one before the schedulers know what is disabled and what is fenced.
                self.plane.roles[name]._scheduler.observe()
            for _ in range(3):
                self.tick()
        told = [line for line in logs.output if f"Instance {uuid} of host h1 stays there" in line]
        self.assertEqual(len(told), len(set(told)), logs.output)
        self.assertIn(len(told), (1, 2), logs.output)
        self.plane.registry.set(others[0], disabled=False)
        wait_until(lambda: self.tick() == 1, "a scheduler to see the host", SOON)
        wait_until(lambda: self.instance(uuid).status == "active", "it runs elsewhere", SOON)

    def test_of_resized_instances_those_that_run_go_to_a_third_host(self) -> None:
        self.plane.conf.set_override("resize_confirm_after", -1.0, group="compute")
        self.addCleanup(self.plane.conf.clear_override, "resize_confirm_after", group="compute")
        runs, ended = self.on_h1(), self.on_h1()
        for uuid in (runs, ended):
            flavor = {"flavorid": "other", "resources": {"VCPU": 1}}
            self.move(uuid, "resize", f"resize-{uuid}", host="h2", flavor=flavor)
            wait_until(lambda uuid=uuid: self.instance(uuid).status == "resized", "it is resized", SOON)  # type: ignore[misc]
        others = [self.agent(host).uuid for host in self.hosts if host not in ("h1", "h2")]
        for each in others:
            self.plane.registry.set(each, disabled=True)
        self.promising("h2", 10.0, silent=20.0)
        with self.plane.database.write() as tx:
            tx.execute(sa.update(instances).where(instances.c.uuid == ended).values(actual_state="ended"))
        with self.assertLogs(LOGGER, "WARNING") as logs:
            self.assertEqual(0, self.tick())
        told = "".join(logs.output)
        self.assertIn(f"Host h1 is left out, because it keeps the copy of instance {runs}", told)
        self.assertNotIn(ended, told)
        self.plane.registry.set(others[0], disabled=False)
        wait_until(lambda: self.tick() == 1, "a scheduler to see the host", SOON)
        wait_until(lambda: self.instance(runs).status == "active", "it runs elsewhere", SOON)
        self.assertEqual("h3", self.instance(runs).host)
        self.assertEqual(("resized", "h2"), (self.instance(ended).status, self.instance(ended).host))


class SqliteTests(_KeyTests):
    pass


class PostgresqlTests(_KeyTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbTests(_KeyTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))


def load_tests(loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """The tests run on each database, not by themselves."""
    suite = unittest.TestSuite()
    for case in (SqliteTests, PostgresqlTests, MariadbTests):
        suite.addTests(loader.loadTestsFromTestCase(case))
    return suite
