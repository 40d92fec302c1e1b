# SPDX-License-Identifier: Apache-2.0
"""Hosts that fence themselves in a control plane of real processes: at no moment run two copies of a workload."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import unittest
from collections import Counter
from pathlib import Path
from typing import ClassVar

import tests
from moorage.client.client import Client
from tests import servers
from tests.functional.compute.sandboxes import guardians_of, kill_guardians, pids_of, require_bubblewrap
from tests.functional.compute.self_fence_trials import MODES, TWO_COPIES, run_round, witnessed
from tests.functional.control_plane.test_slice import Plane, flavor
from tests.pausing import pause
from tests.servers import wait_until

SOON = 120.0
#: Rounds of trials, one of each mode; all databases together make more than 100.
ROUNDS = 34 if tests.SOAK else 1
LEASE = 6.0
_CONF = """
[agent]
enrol = false
sweep_interval = 0.5
[compute]
driver = process
[driver_process]
self_fence = {lease}
stop_timeout = 2
read_only_paths = /usr, /bin, /sbin, /lib, /lib32, /lib64, {shared}
[control_plane]
stopped_timeout = 0
[services]
service_down_time = 3
[periodic]
enabled_tasks = reconcile, evacuate_hosts
spacing = evacuate_hosts:1
poll = 0.5
initial_delay = 0
{more}
"""


class _PlaneCase(unittest.TestCase):
    agents: ClassVar[int] = 6
    url: ClassVar[str] = ""
    shared: Path
    plane: Plane
    api: Client

    @classmethod
    def setUpClass(cls) -> None:
        # A class cannot be skipped by the function that skips a test.
        require_bubblewrap(unittest.TestCase())
        folder = tempfile.TemporaryDirectory(prefix="moorage-self-fence-")
        cls.addClassCleanup(folder.cleanup)
        # Neither in /tmp nor in /dev/shm: sandboxes have their own. Users of projects read there.
        shared = tempfile.TemporaryDirectory(prefix="moorage-witness-", dir="/var/tmp")
        cls.addClassCleanup(shared.cleanup)
        cls.shared = Path(shared.name)
        cls.shared.chmod(0o755)
        more = f"[database]\nconnection = {cls.url}\n" if cls.url else ""
        text = _CONF.format(lease=LEASE, shared=cls.shared, more=more)
        cls.plane = Plane(Path(folder.name), text, agents=cls.agents)
        cls.addClassCleanup(kill_guardians, cls.plane.state)
        cls.addClassCleanup(cls.plane.end)
        ready = cls.plane.wait_ready()
        assert "ready" in ready, (ready, cls.plane.end())
        cls.api = cls.plane.connect()
        cls.api.pause_periodic_task("evacuate_hosts", reason="the test is the operator")
        hosts = [f"agent-{number}" for number in range(1, cls.agents + 1)]
        cls.api.import_nodes([{"name": host, "host": host, "inventories": {"VCPU": 16}} for host in hosts])
        wait_until(lambda: sum(host["up"] for host in cls.api.hosts()) == cls.agents, "the hosts", SOON)
        wait_until(cls.promised, "the promises of all agents", SOON)

    @classmethod
    def promised(cls) -> bool:
        return all(each["self_fence_s"] == LEASE for each in cls.api.services(binary="agent"))

    @property
    def database(self) -> str:
        return self.url or f"sqlite:///{self.plane.state / 'moorage.sqlite'}"


class _KeyTests(_PlaneCase):
    def test_a_witness_sees_never_two_copies(self) -> None:
        outcomes: Counter[str] = Counter()
        seed = tests.seeded()
        for _ in range(ROUNDS):
            run_round(self.plane, self.api, self.database, self.shared, LEASE, seed, outcomes)
        self.assertEqual(len(MODES) * ROUNDS, outcomes.total(), outcomes)
        # The agent goes on all the time.
        self.assertEqual(ROUNDS, outcomes["guardian: ran on"], outcomes)
        sys.stderr.write(f"{type(self).__name__}: {dict(sorted(outcomes.items()))}\n" if tests.SOAK else "")

    def test_a_dead_host_is_evacuated_without_an_operator(self) -> None:
        body = {**flavor(VCPU=1), "command": ["sleep", "100000"], "force_hosts": ["agent-1"]}
        uuid = self.api.create_instance(body)["uuid"]
        wait_until(lambda: self.api.instance(uuid)["actual_state"] == "running", "it to run", SOON)
        pid = self.plane.processes()["agent-1"]["pid"]
        pause(pid, self.database)
        try:
            wait_until(lambda: not pids_of(uuid, self.plane.state), "the end of the workload", SOON)
            self.api.resume_periodic_task("evacuate_hosts")
            wait_until(lambda: self.api.instance(uuid)["host"] != "agent-1", "the evacuation", SOON)
            wait_until(lambda: self.api.instance(uuid)["status"] == "active", "it to run elsewhere", SOON)
        finally:
            self.api.pause_periodic_task("evacuate_hosts")
            os.kill(pid, signal.SIGCONT)
        self.assertEqual(1, len(pids_of(uuid, self.plane.state)))
        self.api.delete_instance(uuid)
        agent = self.api.services(binary="agent", host="agent-1")[0]
        wait_until(lambda: not self.api.service(agent["uuid"])["fenced"], "the host to be back", SOON)
        self.api.set_service(agent["uuid"], forced_down=False)


class SqliteTests(_KeyTests):
    def test_beyond_the_assumptions_only_what_is_fenced_holds(self) -> None:
        """A guardian that stands still for longer than the margin lets its copy go on, which the witness sees."""
        lock = self.shared / "beyond"
        lock.touch()
        body = {**flavor(VCPU=1), "command": witnessed(lock), "force_hosts": ["agent-2"]}
        uuid = self.api.create_instance(body)["uuid"]
        wait_until(lambda: self.api.instance(uuid)["actual_state"] == "running", "it to run", SOON)
        agent = self.api.services(binary="agent", host="agent-2")[0]["uuid"]
        pid = self.plane.processes()["agent-2"]["pid"]
        (guardian,) = guardians_of(uuid)
        pause(pid, self.database)
        os.kill(guardian, signal.SIGSTOP)
        try:
            wait_until(lambda: self.api.service(agent)["self_fenced"], "the end of the lease", SOON)
            self.api.fence_service_by_itself(agent)
            self.api.act_on_instance(uuid, "evacuate")
            ended = f"exit code {TWO_COPIES}"
            wait_until(lambda: ended in self.api.instance(uuid)["fault"], "the second copy to find the first", SOON)
            evacuated = self.api.instance(uuid)
            self.assertEqual(1, len(pids_of(uuid, self.plane.state)))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(guardian, signal.SIGCONT)
        # Within a second of its own time, before the agent is back.
        wait_until(lambda: not pids_of(uuid, self.plane.state), "the end of the first copy", SOON)
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not self.api.service(agent)["fenced"], "the host to be back", SOON)
        # The late agent wrote nothing.
        found = self.api.instance(uuid)
        for name in ("host", "status", "fence", "fault"):
            self.assertEqual(evacuated[name], found[name])
        self.api.set_service(agent, forced_down=False)
        self.api.delete_instance(uuid)


@tests.for_ci("it starts another control plane")
class PostgresqlTests(_KeyTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))
        super().setUpClass()


@tests.for_ci("it starts another control plane")
class MariadbTests(_KeyTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))
        super().setUpClass()


def load_tests(loader: unittest.TestLoader, suite: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """The tests run on each database, not by themselves."""
    found = unittest.TestSuite()
    for case in (SqliteTests, PostgresqlTests, MariadbTests):
        found.addTests(loader.loadTestsFromTestCase(case))
    return found
