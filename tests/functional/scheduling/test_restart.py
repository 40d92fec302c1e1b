# SPDX-License-Identifier: Apache-2.0
"""Schedulers that start over a large fleet, and that take new configurations while they answer."""

from __future__ import annotations

import threading
import unittest
import uuid
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.scheduler_role import SchedulerRole
from moorage.fleet.interface import uuid_of_name
from moorage_plugins.compute.tables import instances
from tests import SOAK
from tests.functional.scheduling.plane import SOON, Plane
from tests.servers import wait_until

#: In ``make soak`` as many as a large fleet has.
MANY = 100_000 if SOAK else 10_000


class RestartTests(unittest.TestCase):
    def test_a_scheduler_that_starts_anew_knows_a_large_fleet_and_answers_right(self) -> None:
        plane = Plane(self)
        plane.enrol(dict.fromkeys([f"h{number}" for number in range(100)], 1), vcpus=2 * MANY)
        plane.start(Agent(), "h0")
        rows = [
            {
                "uuid": str(uuid.UUID(int=number)), "name": "", "status": "active", "host": f"h{number % 99 + 1}",
                "node": f"h{number % 99 + 1}-node-0", "node_uuid": uuid_of_name(f"h{number % 99 + 1}-node-0"),
                "flavorid": "f1", "resources": {"VCPU": 1}, "project_id": "", "user_id": "u", "fault": "", "fence": 1,
                "created_at": 0, "updated_at": 0, "request": {},
            }
            for number in range(MANY)
        ]  # fmt: skip
        with plane.database.write() as tx:
            for start in range(0, MANY, 1000):
                tx.execute(sa.insert(instances), rows[start : start + 1000])
        for _ in range(2):
            plane.start(SchedulerRole(), "scheduler-1")
            self.assertEqual(len(plane.view()), MANY)
            there = str(uuid.UUID(int=5))
            hosts = plane.ask("select", {"request": plane.request(hints={"same_host": [there]}), "count": 1})
            # Its agent is down: nothing can go there; and it is known to be there.
            self.assertEqual(hosts["removed"]["same_host"], 99)
            plane.stop("scheduler-1")


class ReloadTests(unittest.TestCase):
    def test_every_request_is_answered_by_wholly_the_old_or_wholly_the_new_configuration(self) -> None:
        plane = Plane(self).up(("h1", "h2"))
        old = plane.load(scheduling__enabled_filters=["compute", "capacity"], scheduling__alternates=0)
        new = plane.load(
            scheduling__enabled_filters=["compute", "same_host", "num_instances"], scheduling__alternates=1
        )
        wrong = plane.load(scheduling__enabled_filters=["compute", "no_such_filter"])
        role = plane.roles["scheduler-1"]
        role.reload(old)
        kinds: set[tuple[Any, ...]] = set()
        faults: list[str] = []
        ended = threading.Event()

        def ask() -> None:
            while not ended.is_set():
                request = plane.request(hints={"same_host": ["nobody"]})
                found = plane.ask("select", {"request": request, "count": 1, "explain": True})
                kinds.add(
                    (tuple(sorted(found["removed"])), tuple(len(each["alternates"]) for each in found["selections"]))
                )

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for each in threads:
            each.start()
        for number in range(30):
            role.reload(new if number % 2 else old)
            with self.assertRaises(errors.PluginLoadError) as caught:
                role.reload(wrong)
            if "no_such_filter" not in caught.exception.message:
                faults.append(caught.exception.message)
        wait_until(lambda: len(kinds) >= 2, "both have answered", SOON)
        ended.set()
        for each in threads:
            each.join()
        self.assertEqual(faults, [])
        # The old one finds a place and tells no other; by the new one's hint nobody is anywhere.
        self.assertEqual(kinds, {(("capacity", "compute"), (0,)), (("same_host",), ())})
