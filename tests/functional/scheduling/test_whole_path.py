# SPDX-License-Identifier: Apache-2.0
"""What one request costs from the API to the agent: statements, transactions, fsyncs and messages of each role.

A commit on SQLite is one fsync. Each transaction that changes an instance inserts its events by one statement of its own. The
numbers are limits that were reached: a change that raises one has to say why.
"""

from __future__ import annotations

import functools
import threading
import time
import unittest
from collections.abc import Callable
from typing import Any

import requests

from moorage.control_plane.api_role import ApiRole
from moorage.control_plane.engine_role import Engine
from moorage.services.registry import ServiceRegistry
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
REQUESTS = ("http", "select", "rpc-", "compute-", "notices of placements")
#: Comparisons of views run beside requests, in the same threads: the least of so many runs is without.
RUNS = 5
#: Seconds between two times of work whose statements may be built for each time.
_SELDOM = 30.0


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
                    "statements": 8, "writes": 1, "reads": 0, "messages": ["build_instance", "claimed_instances*"],
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
                    "statements": 10, "writes": 2, "reads": 0, "messages": ["delete_instance_info*"], "built": [],
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


class Minute:
    """A clock that a test moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class IdleTests(unittest.TestCase):
    """What nothing to do costs, at the intervals of production."""

    def setUp(self) -> None:
        self.plane = CountedPlane(
            self,
            agent__sweep_interval=5.0,
            services__report_interval=10.0,
            services__service_down_time=60.0,
            scheduling__refresh_interval=60.0,
            coordination__periodic_coordination_backend="database",
            periodic__initial_delay=0.0,
            api__bind="127.0.0.1:0",
            api__auth_strategy="noauth",
        )
        self.plane.up(("h1",), nodes=50)
        self.plane.start(Engine(), "engine-1")
        self.plane.start(ApiRole(), "api-1")
        self.plane.only = (threading.current_thread().name,)
        self.minutes = 0
        #: Role, what a thread of it does, and the seconds between two times.
        self.works: list[tuple[str, Callable[[], object], float]] = []
        for name, role in self.plane.roles.items():
            loops = [*getattr(role, "_periodic", ()), *([role._beats] if isinstance(role, ApiRole) else ())]
            self.works += [(role.binary, each._work, each._seconds) for each in loops if each._seconds is not None]
            if hasattr(role, "_look"):
                # It looks by the clock of the test from now on.
                role._look.stop()
                self.works.append((role.binary, role._look.look, 1.0))
            heartbeat = self.plane.heartbeats[name]
            registry = ServiceRegistry(self.plane.databases[name], self.plane.clock)
            self.works.append((role.binary, functools.partial(registry.beat, heartbeat._identity), 10.0))
        agent = self.plane.roles["h1"]
        self.works.append(("agent", agent._cleaning.look, agent._cleaning._interval))
        # A sweep has a thread of the agent's own do it.
        compute = next(each for each in agent._services if isinstance(each, ComputeAgent))
        self.works.append(("agent", compute._actual.compare, 5.0))
        worker = self.plane.roles["engine-1"]._work._workers[0]
        self.works.append(("engine", worker.membership.step, worker.membership._timing.interval))

    def minute(self) -> dict[str, Counts]:
        """Everything that the threads of the roles do in a minute."""
        clock, self.minutes = Minute(), self.minutes + 1
        # Later than each moment of the true clock in the minute before.
        began = self.plane.clock.monotonic() + 60 * self.minutes
        for role in self.plane.roles.values():
            if hasattr(role, "_look"):
                role._look._clock, role._look._due = clock, dict.fromkeys(role._look._looks, 0.0)
        self.plane.begin()
        for second in range(60):
            clock.now = began + second
            for _, work, seconds in self.works:
                if second % seconds == 0:
                    work()
        return self.plane.counts()

    def test_an_idle_minute(self) -> None:
        # Of rows that were written a moment ago, no version is remembered.
        time.sleep(0.2)
        # Warms up.
        self.minute()
        self.plane.begin()
        for _, work, seconds in self.works:
            if seconds >= _SELDOM:
                work()
        seldom = {each for found in self.plane.counts().values() for each in found.statements}
        counts = self.minute()
        of_nodes = [each for found in counts.values() for each in found.statements if "nodes.properties" in each]
        self.assertEqual([], of_nodes, "a node was read although none has changed")
        self.assertEqual([], [each for found in counts.values() for each in found.built if each not in seldom])
        self.assertEqual([], [each for found in counts.values() for each in found.messages])
        # Statements, read transactions and write transactions of each role. Six of the writes are heartbeats.
        numbers = {role: [len(each.statements), each.reads, each.writes] for role, each in counts.items()}
        self.assertEqual(
            {"agent": [126, 48, 6], "api": [18, 12, 6], "engine": [366, 60, 6], "scheduler": [275, 66, 8]}, numbers
        )
        # How often threads wake, the heartbeats among them.
        wakes = dict.fromkeys(counts, 0.0)
        for role, _, seconds in self.works:
            wakes[role] += 60 / seconds
        self.assertEqual({"agent": 54.5, "api": 12.0, "engine": 72.0, "scheduler": 69.0}, wakes)
