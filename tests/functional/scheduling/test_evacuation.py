# SPDX-License-Identifier: Apache-2.0
"""Evacuations of fenced hosts: from the operator's word through claims and agents to the host that comes back."""

from __future__ import annotations

import threading
import unittest
from typing import ClassVar

from moorage import errors
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.factories import open_workers
from moorage.db.tables import events
from moorage.fleet.interface import uuid_of_name
from moorage.instances.interface import DEPARTURE, departed_consumer
from moorage.services.interface import Service
from tests import servers
from tests.functional.scheduling.operation_tests import OperationTestCase
from tests.functional.scheduling.plane import SOON
from tests.servers import wait_until

_NODE = {host: uuid_of_name(f"{host}-node-0") for host in ("h1", "h2", "h3")}


class _KeyEvacuationTests(OperationTestCase):
    hosts: ClassVar = ("h1", "h2", "h3")

    def agent(self, host: str) -> Service:
        return self.plane.registry.list(binary="agent", host=host)[0]

    def die(self, host: str) -> None:
        """The host's agent is silent, and an operator declares it dead. What its hypervisor runs stays."""
        self.silence(host)
        self.plane.registry.set(self.agent(host).uuid, forced_down=True)

    def fence(self, host: str) -> Service:
        return self.plane.registry.fence(self.agent(host).uuid, "its power cable is in my hand")

    def come_back(self, host: str) -> None:
        self.plane.start(Agent(), host)
        self.plane.registry.set(self.agent(host).uuid, forced_down=False)

    def evacuate(self, uuid: str, request_id: str = "evacuate", **wanted: str) -> None:
        self.move(uuid, "evacuate", f"{request_id}-{uuid}", **wanted)

    def wait_host(self, uuid: str, host: str) -> None:
        wait_until(
            lambda: (found := self.instance(uuid)).host == host and found.status == "active" and not found.pending,
            f"{uuid} runs on {host}",
            SOON,
        )

    def test_nothing_is_evacuated_from_a_host_that_may_run_it(self) -> None:
        uuid = self.on_h1()
        before, held = self.instance(uuid), self.held()
        with self.assertRaisesRegex(errors.Conflict, "host h1 is not fenced: it may run there"):
            self.evacuate(uuid)
        with self.assertRaisesRegex(errors.Conflict, "its agent is not declared dead.*--forced-down"):
            self.fence("h1")
        self.die("h1")
        with self.assertRaisesRegex(errors.Conflict, "host h1 is not fenced"):
            self.evacuate(uuid)
        self.fence("h1")
        # The agent is believed again, so its host is, too.
        self.plane.registry.set(self.agent("h1").uuid, forced_down=False)
        self.assertFalse(self.agent("h1").fenced)
        with self.assertRaisesRegex(errors.Conflict, "host h1 is not fenced"):
            self.evacuate(uuid)
        self.plane.registry.set(self.agent("h1").uuid, forced_down=True)
        self.assertFalse(self.agent("h1").fenced)
        scheduler = self.plane.registry.list(binary="scheduler")[0]
        with self.assertRaisesRegex(errors.Conflict, "is no agent but scheduler"):
            self.plane.registry.fence(scheduler.uuid, "no")
        self.assertEqual((before, held), (self.instance(uuid), self.held()))
        self.assertIsNone(open_workers(self.plane.client, self.plane.conf).get("instance", uuid))

    def test_a_fence_ends_the_agent_once_and_is_in_the_journal(self) -> None:
        epoch = self.agent("h1").epoch
        self.die("h1")
        first, second = self.fence("h1"), self.fence("h1")
        self.assertEqual((epoch + 1, epoch + 1), (first.epoch, second.epoch))
        self.assertTrue(first.fenced)
        with self.plane.database.read() as tx:
            told = [row.state for row in tx.execute(events.select()) if row.kind == "service.fence"]
        self.assertEqual(["its power cable is in my hand"], [each["fence_reason"] for each in told])
        self.assertEqual(("h1", True), (told[0]["host"], told[0]["fenced"]))

    def test_evacuated_instances_run_elsewhere_and_the_host_that_comes_back_removes_them_first(self) -> None:
        uuids = [self.on_h1(), self.on_h1()]
        stays = self.on_h1()
        self.die("h1")
        self.fence("h1")
        for uuid in uuids:
            self.evacuate(uuid, host="h2")
            # A repetition finds the first one.
            self.evacuate(uuid, host="h2")
        for uuid in uuids:
            self.wait_host(uuid, "h2")
        self.assertEqual(2, self.agent("h1").evacuated)
        kept = {(departed_consumer(uuid), _NODE["h1"]): 2 for uuid in uuids}
        self.assertEqual({**{(uuid, _NODE["h2"]): 2 for uuid in uuids}, **kept, (stays, _NODE["h1"]): 2}, self.held())
        self.assertEqual({*uuids, stays}, self.running()["h1"])
        self.come_back("h1")
        # Before it took anything: its start has returned.
        self.assertEqual({stays}, self.running()["h1"])
        with self.assertRaisesRegex(errors.Conflict, "host h1 is not fenced"):
            self.evacuate(stays)
        self.assert_whole()

    def test_an_instance_leaves_a_second_dead_host_although_the_first_never_came_back(self) -> None:
        uuid = self.on_h1()
        for host in ("h1", "h2"):
            self.die(host)
            self.fence(host)
            to = {"h1": "h2", "h2": "h3"}[host]
            self.evacuate(uuid, host, host=to)
            if to == "h3":
                break
            self.wait_host(uuid, to)
        self.wait_host(uuid, "h3")
        # The room on the first host is free by its fence, that on the second waits for its agent.
        self.assertEqual({(uuid, _NODE["h3"]): 2, (departed_consumer(uuid), _NODE["h2"]): 2}, self.held())
        departure = open_workers(self.plane.client, self.plane.conf).get(DEPARTURE, uuid)
        assert departure is not None
        self.assertEqual("h2", departure.target_host)
        self.come_back("h1")
        self.come_back("h2")
        self.assert_whole()

    def test_a_host_that_may_run_what_left_it_before_keeps_an_instance_where_it_is(self) -> None:
        uuid = self.on_h1()
        self.plane.stop("h1")
        self.move(uuid, "live_migrate", "m", host="h2")
        self.wait_host(uuid, "h2")
        self.die("h2")
        self.fence("h2")
        with self.assertRaisesRegex(errors.Conflict, "host h1 is not fenced"):
            self.evacuate(uuid)
        self.come_back("h1")
        wait_until(lambda: self.held() == {(uuid, _NODE["h2"]): 2}, "h1 has let go", SOON)
        self.evacuate(uuid, "again", host="h3")
        self.wait_host(uuid, "h3")
        self.come_back("h2")
        self.assert_whole()

    def test_a_build_that_fails_leaves_the_instance_shelved_and_it_can_come_back(self) -> None:
        uuid = self.on_h1(**{"sim:evacuate_fail": "no image"})
        self.die("h1")
        self.fence("h1")
        self.evacuate(uuid)
        wait_until(lambda: self.instance(uuid).fault == "no image", "it has failed", SOON)
        self.assertEqual(("shelved_offloaded", ""), (self.instance(uuid).status, self.instance(uuid).host))
        self.move(uuid, "unshelve", "back")
        wait_until(lambda: self.instance(uuid).status == "active", "it is back", SOON)
        self.come_back("h1")
        self.assert_whole()

    def test_without_room_elsewhere_it_stays_where_it_is(self) -> None:
        uuid = self.on_h1()
        for host in ("h2", "h3"):
            self.plane.registry.set(self.agent(host).uuid, disabled=True)
        self.die("h1")
        self.fence("h1")
        before, held = self.instance(uuid), self.held()
        with self.assertRaises(errors.NoValidHost):
            self.evacuate(uuid)
        self.assertEqual((before, held), (self.instance(uuid), self.held()))

    def test_evacuations_and_the_return_of_the_host_take_turns(self) -> None:
        """What an agent that starts finds on its host is never evacuated afterwards."""
        uuids = [self.on_h1() for _ in range(7)]
        self.die("h1")
        self.fence("h1")
        refused: list[str] = []
        found: list[str] = []
        begun = threading.Barrier(4)

        def evacuate(mine: list[str]) -> None:
            begun.wait(SOON)
            for uuid in mine:
                try:
                    self.evacuate(uuid)
                except errors.Conflict as error:
                    self.assertIn("host h1 is not fenced", error.message)
                    refused.append(uuid)

        def come_back() -> None:
            begun.wait(SOON)
            wait_until(lambda: self.agent("h1").evacuated >= 2, "some have left", SOON)
            self.plane.registry.enlist("agent", "h1", rpc_version="1.0")
            found.extend(each.uuid for each in self.plane.instances.by_hosts(["h1"]))

        threads = [threading.Thread(target=evacuate, args=(uuids[number::3],)) for number in range(3)]
        threads.append(threading.Thread(target=come_back))
        for each in threads:
            each.start()
        for each in threads:
            each.join(SOON)
        self.assertEqual(sorted(refused), sorted(found))
        self.assertEqual({"h1"}, {self.instance(uuid).host for uuid in refused} | {"h1"})
        self.come_back("h1")
        self.assert_whole()
        self.assertEqual(set(found), self.running()["h1"])


class SqliteEvacuationTests(_KeyEvacuationTests):
    pass


class PostgresqlEvacuationTests(_KeyEvacuationTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbEvacuationTests(_KeyEvacuationTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))


def load_tests(loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """The tests run on each database, not by themselves."""
    suite = unittest.TestSuite()
    for case in (SqliteEvacuationTests, PostgresqlEvacuationTests, MariadbEvacuationTests):
        suite.addTests(loader.loadTestsFromTestCase(case))
    return suite
