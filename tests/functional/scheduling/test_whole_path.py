# SPDX-License-Identifier: Apache-2.0
"""What one request costs from the API to the agent: statements, transactions, fsyncs and messages of each role.

A commit on SQLite is one fsync. Each transaction that changes an instance inserts its events by one statement of its own. The
numbers are limits that were reached: a change that raises one has to say why.
"""

from __future__ import annotations

import threading
import time
import unittest
from collections.abc import Callable
from typing import Any

import requests

from moorage.control_plane.api_role import ApiRole
from moorage_plugins.compute.agent import ComputeAgent
from tests.functional.scheduling.plane import SOON
from tests.functional.scheduling.statements import CountedPlane, Counts

FLAVOR = {"flavorid": "small", "resources": {"VCPU": 1, "MEMORY_MB": 64}}
LARGER = {"flavorid": "larger", "resources": {"VCPU": 2, "MEMORY_MB": 64}}
#: Periodic work stays away while requests are counted.
QUIET: dict[str, Any] = {
    "agent__sweep_interval": 3600,
    "cleanup__lease_seconds": 3600,
    "services__report_interval": 600,
    "services__service_down_time": 3000,
    "scheduling__refresh_interval": 3600,
    "scheduling__scheduler_instance_sync_interval": 3600,
}
#: Threads that work on requests.
REQUESTS = ("http", "select", "rpc-", "compute-")
#: Comparisons of views run beside requests, in the same threads: the least of so many runs is without.
RUNS = 5


def _size(summary: dict[str, Any]) -> tuple[int, int]:
    # Each agent compiles a statement once, in whatever run it is the first to do the work.
    return summary["statements"], len(summary["built"])


class WholePathTests(unittest.TestCase):
    def setUp(self) -> None:
        self.plane = CountedPlane(self, api__bind="127.0.0.1:0", api__auth_strategy="noauth", **QUIET)
        self.plane.up(("h1", "h2"))
        self.url = self.plane.start(ApiRole(), "api-live").url
        self.session = requests.Session()
        self.addCleanup(self.session.close)
        self.session.headers["X-Auth-Token"] = "admin"

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.session.request(method, f"{self.url}/scheduling/v1{path}", json=body, timeout=SOON)
        self.assertLess(answer.status_code, 300, answer.text)
        return answer.json() if answer.text else None

    def settled(self, uuid: str, status: str) -> None:
        self.plane.wait_status(uuid, status)
        # What follows the last commit: messages, and the end of a departure.
        before: Any = None
        while before != (now := {role: each.summary() for role, each in self.plane.counts().items()}):
            before = now
            time.sleep(0.2)

    def least(self, begin: Callable[[], Callable[[], object]]) -> dict[str, dict[str, Any]]:
        """What each role does, in the run in which it does least; the first runs warm up.

        :param begin: prepares a run and returns what is counted.
        """
        found: dict[str, dict[str, Any]] = {}
        self.plane.only = REQUESTS
        for number in range(RUNS):
            run = begin()
            self.plane.begin()
            run()
            if number == 0:
                continue
            for role, each in self.plane.counts().items():
                found[role] = min(found.get(role, each.summary()), each.summary(), key=_size)
        return found

    def create(self, flavor: Any = FLAVOR) -> str:
        uuid: str = self.ask("POST", "/instances", {"flavor": flavor})["uuid"]
        self.settled(uuid, "active")
        return uuid

    def delete(self, uuid: str) -> None:
        self.ask("DELETE", f"/instances/{uuid}")
        self.settled(uuid, "gone")

    def test_a_create(self) -> None:
        self.assertEqual(
            {
                "api": {"statements": 0, "writes": 0, "reads": 0, "messages": ["create_instance"], "built": []},
                "scheduler": {
                    "statements": 8, "writes": 1, "reads": 0, "messages": ["build_instance", "claimed_instance*"],
                    "built": [],
                },
                "agent": {
                    "statements": 4, "writes": 2, "reads": 0, "messages": ["update_instance_info*"], "built": [],
                },
            },
            self.least(lambda: self.create),
        )  # fmt: skip

    def test_a_create_by_flavorid_reads_the_catalogue_once(self) -> None:
        self.ask("POST", "/flavors", FLAVOR)
        counts = self.least(lambda: lambda: self.create({"flavorid": FLAVOR["flavorid"]}))
        numbers = {role: (each["statements"], each["writes"], each["reads"]) for role, each in counts.items()}
        self.assertEqual({"api": (1, 0, 1), "scheduler": (8, 1, 0), "agent": (4, 2, 0)}, numbers)
        self.assertEqual([], [statement for each in counts.values() for statement in each["built"]])

    def test_a_delete(self) -> None:
        def begin() -> Callable[[], None]:
            uuid = self.create()
            return lambda: self.delete(uuid)

        self.assertEqual(
            {
                "api": {"statements": 5, "writes": 1, "reads": 1, "messages": ["delete_instance"], "built": []},
                "agent": {
                    "statements": 11, "writes": 2, "reads": 0, "messages": ["delete_instance_info*"], "built": [],
                },
            },
            self.least(begin),
        )  # fmt: skip

    def test_a_live_migration(self) -> None:
        uuid = self.create()

        def run() -> None:
            self.ask("POST", f"/instances/{uuid}/action", {"live_migrate": {}})
            self.settled(uuid, "active")

        self.assertEqual(
            {
                "api": {"statements": 1, "writes": 0, "reads": 1, "messages": ["move_instance"], "built": []},
                "scheduler": {"statements": 14, "writes": 1, "reads": 6, "messages": ["operate_instance"], "built": []},
                "agent": {
                    "statements": 50, "writes": 8, "reads": 2,
                    "messages": [
                        "delete_instance_info*", "let_go_instance", "operate_instance", "operate_instance",
                        "update_instance_info*",
                    ],
                    "built": [],
                },
            },
            self.least(lambda: run),
        )  # fmt: skip


class IdleTests(unittest.TestCase):
    """What nothing to do costs, at the intervals of production."""

    def test_an_idle_minute(self) -> None:
        plane = CountedPlane(
            self,
            agent__sweep_interval=5.0,
            services__report_interval=10.0,
            services__service_down_time=60.0,
            scheduling__refresh_interval=60.0,
        )
        plane.up(("h1",), nodes=50)
        plane.only = (threading.current_thread().name,)
        works = [(role.binary, each._work, each._seconds) for role in plane.roles.values() for each in role._periodic]
        cleaning = plane.roles["h1"]._cleaning
        works.append(("agent", cleaning.look, cleaning._interval))
        # A sweep has a thread of the agent's own do it.
        compute = next(each for each in plane.roles["h1"]._services if isinstance(each, ComputeAgent))
        works.append(("agent", compute._actual.compare, 5.0))
        # Of rows that were written less than a second ago, no version is remembered.
        time.sleep(1.2)
        for last in (False, True):
            # The first round warms up.
            found = {binary: [0.0, 0.0, 0.0] for binary, _, _ in works}
            built: list[str] = []
            for binary, work, seconds in works:
                plane.begin()
                work()
                counts = plane.counts().get(binary, Counts())
                for place, number in enumerate((len(counts.statements), counts.reads, counts.writes)):
                    found[binary][place] += number * 60 / seconds
                of_nodes = [each for each in counts.statements if "nodes.properties" in each]
                self.assertEqual([], of_nodes if last else [], "a node was read although none has changed")
                built += counts.built if seconds < 30 else []
        self.assertEqual([], built)
        # Statements, read transactions and write transactions of each role; 60 of them look for events to number, and 12 of the
        # agent's read what should run on its host.
        self.assertEqual({"scheduler": [269, 204, 2], "agent": [120, 120, 0]}, found)
