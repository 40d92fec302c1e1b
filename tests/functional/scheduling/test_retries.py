# SPDX-License-Identifier: Apache-2.0
"""Builds that fail are tried on other nodes: real schedulers, agents and stores, on each database."""

from __future__ import annotations

import unittest
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.factories import open_workers
from moorage.control_plane.scheduler_role import SchedulerRole
from moorage.fleet.interface import check_states, uuid_of_name
from moorage.fleet.properties import change_node
from moorage.instances.interface import Instance
from moorage.services.tables import services
from moorage.work.tables import workers as workers_table
from tests import servers
from tests.functional.scheduling.plane import SOON, Plane
from tests.servers import wait_until


class _KeyRetryTests(unittest.TestCase):
    url = ""

    def start(self, *failing: str, hosts: int = 4, vcpus: int = 16, last: int = 16, **overrides: Any) -> Plane:
        """A plane with hosts h1 to hN of that many VCPUs, the last one of ``last``; every build fails on those that are named."""
        plane = Plane(self, url=self.url, **overrides)
        names = [f"h{number}" for number in range(1, hosts + 1)]
        plane.enrol(dict.fromkeys(names[:-1], 1), vcpus=vcpus)
        plane.enrol({names[-1]: 1}, vcpus=last)
        for name in names:
            fault = f"{name} has no disk" if name in failing else ""
            plane.start(Agent(), name, plane.load(compute__fail_builds=fault))
        for number in (1, 2):
            plane.start(SchedulerRole(), f"scheduler-{number}")
        self.plane = plane
        return plane

    def create(self, **more: Any) -> str:
        request = self.plane.request(2, **more)
        made: str = self.plane.ask("create_instance", {"request": request, "request_id": f"req-{request['uuid']}"})[
            "uuid"
        ]
        return made

    def ended(self, uuid: str) -> Instance:
        wait_until(lambda: self.plane.status(uuid) != "building", "the build has ended", SOON)
        return self.plane.instances.get(uuid)

    def held(self) -> dict[tuple[str, str], int]:
        """(consumer, node) -> VCPUs."""
        return {
            (item.consumer, item.provider): item.used
            for item in self.plane.store.allocations()
            if item.resource_class == "VCPU"
        }

    def decisions(self, uuid: str) -> list[dict[str, Any]]:
        found = []
        for scheduler in ("scheduler-1", "scheduler-2"):
            try:
                found.append(self.plane.ask("decision", {"request_id": f"req-{uuid}"}, scheduler=scheduler))
            except errors.NotFound:
                continue
        return found

    def test_a_build_that_fails_is_tried_on_other_nodes_and_the_decision_tells_of_it(self) -> None:
        # Nodes with more room are better, so that h3 is the last choice for each.
        plane = self.start("h1", "h2", hosts=3, vcpus=64, last=12)
        made = [self.create() for _ in range(6)]
        for uuid in made:
            found = self.ended(uuid)
            self.assertEqual(("active", "h3", "", {}), (found.status, found.host, found.fault, found.pending))
        self.assertEqual({(uuid, uuid_of_name("h3-node-0")): 2 for uuid in made}, self.held())
        plane.wait_agreement()
        tried = [
            sorted(each["host"] for each in decision["tried"])
            for uuid in made
            for decision in self.decisions(uuid)
            if decision["host"] == "h3"
        ]
        self.assertEqual([["h1", "h2"]] * 6, tried)
        faults = {each["fault"] for uuid in made for d in self.decisions(uuid) for each in d["tried"]}
        self.assertEqual({"h1 has no disk", "h2 has no disk"}, faults)
        workers = open_workers(plane.client, plane.conf)
        self.assertEqual([None] * 6, [workers.get("instance", uuid) for uuid in made])

    def test_a_late_message_lets_no_agent_build_again_what_it_has_handed_to_the_schedulers(self) -> None:
        plane = self.start("h1", hosts=1)
        plane.stop("h1")
        uuid = self.create()
        self.fail_without_schedulers(uuid)
        workers = open_workers(plane.client, plane.conf)
        before = workers.get("instance", uuid)
        for _ in range(3):
            plane.client.sender.cast("agent", "build_instance", {"instance_uuid": uuid}, server="h1")
        other = plane.instances.get(uuid)
        wait_until(lambda: not any(plane.roles["h1"]._services[0].loop.depth), "the messages are taken", SOON)
        plane.stop("h1")
        self.assertEqual((before, other), (workers.get("instance", uuid), plane.instances.get(uuid)))
        # The messages have raised the fence, which must not keep a scheduler from going on.
        plane.enrol({"h2": 1})
        plane.start(Agent(), "h2")
        plane.start(SchedulerRole(), "scheduler-3")
        self.assertEqual(("active", "h2"), (self.ended(uuid).status, plane.instances.get(uuid).host))

    def test_tries_are_bounded_and_the_last_fault_is_told(self) -> None:
        self.start("h1", "h2", "h3", "h4", scheduling__alternates=2)
        uuid = self.create()
        found = self.ended(uuid)
        self.assertEqual(("error", {}), (found.status, found.pending))
        self.assertRegex(found.fault, "^h[1-4] has no disk$")
        tried = max((d["tried"] for d in self.decisions(uuid)), key=len)
        self.assertEqual(2, len({each["host"] for each in tried}))
        self.assertEqual({}, self.held())

    def test_a_build_that_no_other_node_can_take_ends_in_error_without_a_claim(self) -> None:
        plane = self.start("h1", hosts=1)
        found = self.ended(self.create())
        self.assertEqual(("error", "h1 has no disk"), (found.status, found.fault))
        self.assertEqual({}, self.held())
        self.assertIsNone(open_workers(plane.client, plane.conf).get("instance", found.uuid))
        plane.wait_agreement()

    def test_an_instance_waits_a_few_seconds_for_a_node_that_is_unavailable_for_a_moment(self) -> None:
        plane = self.start("h1", hosts=2)
        second = uuid_of_name("h2-node-0")
        change_node(plane.database, second, {}, check_states({"maintenance": True}))
        uuid = self.create()
        wait_until(lambda: any("refused" in d["outcome"] for d in self.decisions(uuid)), "no node is found", SOON)
        change_node(plane.database, second, {}, check_states({"maintenance": False}))
        found = self.ended(uuid)
        self.assertEqual(("active", "h2"), (found.status, found.host))

    def test_a_request_that_names_its_host_is_tried_nowhere_else(self) -> None:
        self.start("h1", hosts=2)
        for more in ({"requested_host": "h1"}, {"force_hosts": ["h1"]}):
            found = self.ended(self.create(**more))
            self.assertEqual(("error", "h1 has no disk"), (found.status, found.fault))

    def test_a_repeated_request_finds_the_instance_where_it_was_built_at_last(self) -> None:
        self.start("h1", hosts=2)
        repeated = 0
        while not repeated:
            request = self.plane.request(2)
            args = {"request": request, "request_id": "once"}
            repeated = self.plane.ask("create_instance", args)["host"] == "h1"
            found = self.ended(request["uuid"])
            self.assertEqual(("active", "h2"), (found.status, found.host))
            # Of these only the first kind has had its claim moved.
            self.assertEqual("h2", self.plane.ask("create_instance", args)["host"])
        self.assertEqual({uuid_of_name("h2-node-0")}, {node for _, node in self.held()})

    def test_a_build_whose_agent_went_down_before_it_began_is_done_elsewhere(self) -> None:
        plane = self.start(hosts=2)
        plane.stop("h1")
        uuid = ""
        while not uuid or plane.instances.get(uuid).host != "h1":
            uuid = self.create()
        begun = self.create()
        while plane.instances.get(begun).host != "h1":
            begun = self.create()
        # What an earlier release stored does not hinder it.
        plane.store_extra_specs(uuid, {"resources1:CUSTOM_GPU": "1", "group_policy": "x"})
        with plane.database.write() as tx:
            # An agent has begun this one: it may run there.
            tx.execute(sa.update(workers_table).where(workers_table.c.resource_id == begun).values(attempts=1))
            down = services.c.host == "h1"
            tx.execute(sa.update(services).where(down).values(beat_at=services.c.beat_at - 60_000_000))
        plane.wait_status(uuid, "active")
        self.assertEqual("h2", plane.instances.get(uuid).host)
        self.assertEqual(("building", "h1"), (plane.status(begun), plane.instances.get(begun).host))
        plane.start(Agent(), "h1")
        plane.wait_status(begun, "active")
        self.assertEqual({uuid_of_name("h1-node-0")}, {node for each, node in self.held() if each == begun})
        self.assertEqual({uuid_of_name("h2-node-0")}, {node for each, node in self.held() if each == uuid})

    def test_an_instance_that_is_deleted_while_it_waits_for_another_node_goes(self) -> None:
        plane = self.start("h1", hosts=1)
        plane.stop("h1")
        uuid = self.create()
        self.fail_without_schedulers(uuid)
        plane.deleter().delete(uuid, force=True)
        plane.wait_status(uuid, "gone")
        self.assertEqual({}, self.held())

    def fail_without_schedulers(self, uuid: str) -> None:
        """Have host h1, whose agent is stopped, fail to build an instance; no scheduler hears of it."""
        for name in ("scheduler-1", "scheduler-2"):
            self.plane.stop(name)
        self.plane.start(Agent(), "h1", self.plane.load(compute__fail_builds="h1 has no disk"))
        wait_until(lambda: self.handed_over(uuid), "the build has failed", SOON)

    def handed_over(self, uuid: str) -> bool:
        worker = open_workers(self.plane.client, self.plane.conf).get("instance", uuid)
        return worker is not None and worker.target_host.startswith("scheduler")


class RetryTests(_KeyRetryTests):
    """On SQLite."""


class PostgresqlRetryTests(_KeyRetryTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbRetryTests(_KeyRetryTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))


def load_tests(loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """The key tests run on each database, not by themselves."""
    suite = unittest.TestSuite()
    for case in (RetryTests, PostgresqlRetryTests, MariadbRetryTests):
        suite.addTests(loader.loadTestsFromTestCase(case))
    return suite
