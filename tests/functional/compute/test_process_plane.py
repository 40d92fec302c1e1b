# SPDX-License-Identifier: Apache-2.0
"""A control plane on one machine with the process or container driver: ``moorage up``, and processes that ps shows."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

import tests
from moorage import errors
from moorage.cli import main
from tests.commands import in_process
from tests.functional.compute.images import copies_of, make_image, require_runc
from tests.functional.compute.sandboxes import guardians_of, kill_guardians, pids_of, require_bubblewrap
from tests.functional.control_plane.test_slice import Plane, SliceCase, flavor
from tests.servers import wait_until

SOON = 120.0
R = TypeVar("R")


# Not a class of tests by itself.
if TYPE_CHECKING:
    _Base = SliceCase
else:
    _Base = object


class DriverPlaneTests(_Base):
    """What holds for each driver whose workloads have guardians. Subclasses give the driver and what an instance asks for."""

    agents = 1
    driver: str
    #: What else a request has.
    asked: Mapping[str, Any] = {}

    @classmethod
    def setUpClass(cls) -> None:
        cls.extra += (
            f"[agent]\nenrol = false\nsweep_interval = 0.5\n[compute]\ndriver = {cls.driver}\nrestart_delay = 0.1\n"
            f"[driver_{cls.driver}]\nstop_timeout = 2\n"
        )
        super().setUpClass()
        # What a test that failed has left.
        cls.addClassCleanup(kill_guardians, cls.plane.state)

    def made(self, *command: str, restart: str = "never") -> str:
        body: dict[str, Any] = {**flavor(VCPU=1), "command": list(command), **self.asked}
        body["flavor"]["extra_specs"] = {"compute:restart": restart}
        made: dict[str, Any] = self.create(body)
        self.assertEqual(("active", ""), (made["status"], made["fault"]))
        return str(made["uuid"])

    def pids(self, uuid: str) -> list[int]:
        return pids_of(uuid, self.plane.state)

    def test_a_workload_outlives_its_agent_and_is_found_again(self) -> None:
        uuid = self.made("sleep", "100000")
        (pid,) = self.pids(uuid)
        (guardian,) = guardians_of(uuid)
        before = self.plane.processes()["agent-1"]
        os.kill(before["pid"], signal.SIGKILL)
        wait_until(lambda: self.plane.processes()["agent-1"]["restarts"] > before["restarts"], "another agent", SOON)
        self.assertEqual(([pid], [guardian]), (self.pids(uuid), guardians_of(uuid)))
        self.delete(uuid)
        self.assertEqual([], self.pids(uuid))

    def test_a_workload_that_is_killed_by_hand_is_started_again_and_that_is_told(self) -> None:
        uuid = self.made("sleep", "100000", restart="on-failure")
        (pid,) = self.pids(uuid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.api.instance(uuid)["restarts"] == 1, "the restart", SOON)
        wait_until(lambda: self.api.instance(uuid)["actual_state"] == "running", "it to run", SOON)
        (again,) = self.pids(uuid)
        self.assertNotEqual(pid, again)
        self.assertEqual("active", self.api.instance(uuid)["status"])

        def told() -> list[tuple[str, int]]:
            answer = self.api.request("GET", "/events", query={"subject": f"instance/{uuid}", "limit": 1000})
            states = [each["state"] for each in answer["events"] if each["kind"] == "instance.observe"]
            return [(each["actual_state"], each["restarts"]) for each in states]

        wait_until(lambda: told()[-1:] == [("running", 1)], "the events", SOON)
        self.assertEqual([("failed", 0), ("failed", 1), ("running", 1)], told())
        self.delete(uuid)
        self.assertEqual([], self.pids(uuid))


class ProcessPlaneTests(DriverPlaneTests, SliceCase):
    driver = "process"
    SEEN = ("status", "actual_state", "fault", "restarts")

    @classmethod
    def setUpClass(cls) -> None:
        # A class cannot be skipped by the function that skips a test.
        require_bubblewrap(unittest.TestCase())
        super().setUpClass()

    def test_a_workload_that_ends_becomes_stopped_with_the_reason(self) -> None:
        uuid = self.made("sleep", "100000")
        os.kill(self.pids(uuid)[0], signal.SIGTERM)
        wait_until(lambda: self.api.instance(uuid)["status"] == "stopped", "it to be seen", SOON)
        found = self.api.instance(uuid)
        self.assertEqual(
            ("failed", "It ended with exit code 143, as if killed by signal 15."),
            (found["actual_state"], found["fault"]),
        )
        self.delete(uuid)

    def answer(self, ask: Callable[[], R]) -> R:
        """What the agent answers. It answers a few questions of one instance a second, and refuses others."""
        found: list[R] = []

        def asked() -> bool:
            with contextlib.suppress(errors.Unavailable):
                found.append(ask())
            return bool(found)

        wait_until(asked, "an answer of the agent", SOON)
        return found[0]

    def test_console_and_usage_are_shown(self) -> None:
        uuid = self.made("sh", "-c", "seq 1 5; printf '\\033[2Jend\\n'; exec sleep 100000")
        wait_until(lambda: "end" in self.answer(lambda: self.api.instance_console(uuid)), "the output", SOON)
        self.assertEqual("5\n\x1b[2Jend\n", self.answer(lambda: self.api.instance_console(uuid, lines=2)))
        usage = self.answer(lambda: self.api.instance_usage(uuid))
        self.assertGreater(usage["memory_bytes"], 0)
        self.assertGreaterEqual(usage["cpu_seconds"], 0.0)
        self.delete(uuid)

    def test_an_instance_is_stopped_started_and_rebooted(self) -> None:
        uuid = self.made("sleep", "100000", restart="always")

        def after(operation: str, status: str, state: str) -> list[int]:
            self.api.act_on_instance(uuid, operation)
            wait_until(lambda: not self.api.instance(uuid)["pending"], "the end of the operation", SOON)
            found = self.api.instance(uuid)
            self.assertEqual((status, state, "", 0), tuple(found[each] for each in self.SEEN))
            return self.pids(uuid)

        (first,) = self.pids(uuid)
        self.assertEqual([], after("stop", "stopped", "stopped"))
        (second,) = after("start", "active", "running")
        (third,) = after("reboot", "active", "running")
        self.assertEqual(3, len({first, second, third}))
        self.delete(uuid)

    def test_a_live_migration_is_refused_and_runs_nothing_twice(self) -> None:
        uuid = self.made("sleep", "100000")
        before = self.pids(uuid)
        with self.assertRaisesRegex(errors.Conflict, "does not have the power compute.live_migrate"):
            self.api.act_on_instance(uuid, "live_migrate")
        self.assertEqual(before, self.pids(uuid))
        self.api.act_on_instance(uuid, "rebuild")
        wait_until(lambda: self.api.instance(uuid)["status"] == "active", "the rebuild", SOON)
        (again,) = self.pids(uuid)
        self.assertNotIn(again, before)
        self.delete(uuid)

    def test_what_cannot_be_run_says_why(self) -> None:
        found = self.create({**flavor(), "command": ["no-such-program"]})
        self.assertEqual("error", found["status"])
        self.assertIn("'no-such-program' is not found in the sandbox", found["fault"])
        found = self.create(flavor())
        self.assertIn("has no command", found["fault"])


class ProcessMoveTests(SliceCase):
    """Cold moves of real processes between two agents that are killed meanwhile."""

    agents = 2

    @classmethod
    def setUpClass(cls) -> None:
        require_bubblewrap(unittest.TestCase())
        cls.extra += (
            "[agent]\nenrol = false\nsweep_interval = 0.5\n[compute]\ndriver = process\n"
            "[driver_process]\nstop_timeout = 2\n"
        )
        super().setUpClass()
        cls.addClassCleanup(kill_guardians, cls.plane.state)

    def test_one_process_runs_at_most_while_agents_that_move_it_are_killed(self) -> None:
        body = {**flavor(VCPU=1), "command": ["sleep", "100000"]}
        uuid = str(self.create(body)["uuid"])
        (first,) = pids_of(uuid, self.plane.state)
        counts: list[int] = []
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.01):
                counts.append(len(pids_of(uuid, self.plane.state)))

        witness = threading.Thread(target=watch)
        witness.start()
        self.addCleanup(witness.join)
        self.addCleanup(ended.set)
        chance = tests.seeded()
        for number in range(tests.cases(4)):
            host = {"agent-1": "agent-2", "agent-2": "agent-1"}[self.api.instance(uuid)["host"]]
            # Refused until the source of the move before has let go.
            wait_until(lambda host=host: self._begins(uuid, host), "the move to begin", SOON)  # type: ignore[misc]
            if number:
                ended.wait(chance.uniform(0, 0.6))
                victim = self.plane.processes()[chance.choice(("agent-1", "agent-2"))]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim["pid"], signal.SIGKILL)
            wait_until(lambda: not self.api.instance(uuid)["pending"], "the move to end", SOON)
            found = self.api.instance(uuid)
            self.assertEqual(("active", ""), (found["status"], found["fault"]))
            self.assertEqual(host, found["host"])
            self.assertEqual(1, len(pids_of(uuid, self.plane.state)))
        ended.set()
        witness.join()
        self.assertLessEqual(max(counts), 1)
        (last,) = pids_of(uuid, self.plane.state)
        self.assertNotEqual(first, last)
        self.delete(uuid)
        self.assertEqual([], pids_of(uuid, self.plane.state))

    def _begins(self, uuid: str, host: str) -> bool:
        try:
            self.api.act_on_instance(uuid, "migrate", {"host": host})
        except errors.MoorageError as error:
            if not isinstance(error, errors.Conflict | errors.Unavailable | errors.NoValidHost):
                raise
            return False
        return True


class ContainerPlaneTests(DriverPlaneTests, SliceCase):
    driver = "container"
    asked = {"image": {"id": "busybox"}}

    @classmethod
    def setUpClass(cls) -> None:
        require_runc(unittest.TestCase())
        images = Path(tempfile.mkdtemp(prefix="moorage-images-"))
        cls.addClassCleanup(shutil.rmtree, images)
        make_image(images)
        cls.extra = f"[driver_container]\nimages = {images}\n"
        super().setUpClass()

    @override
    def pids(self, uuid: str) -> list[int]:
        return copies_of(uuid, self.plane.state)

    def test_an_image_that_is_missing(self) -> None:
        found = self.create({**flavor(VCPU=1), "image": {"id": "other"}})
        self.assertEqual(
            ("error", "there is no image 'other' on this host; an operator puts images there"),
            (found["status"], found["fault"]),
        )


class EnrolledPlaneTests(unittest.TestCase):
    """``moorage up`` with this driver alone, on an empty folder: its agent enrols the machine."""

    def setUp(self) -> None:
        require_bubblewrap(self)
        folder = tempfile.TemporaryDirectory(prefix="moorage-enrolled-")
        self.addCleanup(folder.cleanup)
        self.plane = Plane(Path(folder.name), "[agent]\nsweep_interval = 0.5\n[compute]\ndriver = process\n")
        self.addCleanup(kill_guardians, self.plane.state)
        self.addCleanup(self.plane.end)
        self.assertIn("ready", self.plane.wait_ready(), self.plane.said())
        self.api = self.plane.connect()

    def test_a_process_runs_on_a_machine_that_nobody_imported(self) -> None:
        (node,) = self.api.nodes()
        self.assertEqual(("agent-1", "agent-1"), (node["name"], node["host"]))
        self.api.change_node("agent-1", disabled=True, disabled_reason="disk")
        wait_until(
            lambda: "every node has an agent that is down, or is disabled" in self.refusal(), "the refusal", SOON
        )
        node = {name: value for name, value in self.api.node("agent-1").items() if name != "instances"}
        before = self.plane.processes()["agent-1"]
        os.kill(before["pid"], signal.SIGKILL)
        wait_until(lambda: self.plane.processes()["agent-1"]["restarts"] > before["restarts"], "another agent", SOON)
        # A list does not count departures.
        (listed,) = self.api.nodes()
        self.assertEqual(node, {**listed, "departures": 0})
        self.api.change_node("agent-1", disabled=False)

        def created() -> bool:
            with contextlib.suppress(errors.MoorageError):
                self.made = self.api.create_instance({**flavor(VCPU=1), "command": ["sleep", "100000"]})["uuid"]
                return True
            return False

        wait_until(created, "a scheduler to see the node", SOON)
        wait_until(lambda: self.api.instance(self.made)["status"] == "active", "it to run", SOON)
        self.assertEqual(1, len(pids_of(self.made, self.plane.state)))

        status, said, told = self.moorage("node", "drain", "agent-1", "--reason", "disks", "-f", "json")
        self.assertEqual((0, 1, True), (status, json.loads(said)["instances"], json.loads(said)["draining"]))
        self.assertIn("Node agent-1 has 1 instance. Draining moves none", told)
        status, said, told = self.moorage("node", "remove", "agent-1")
        self.assertEqual((1, ""), (status, said))
        self.assertIn(f"Node agent-1 is not removed: 1 instance is on it ({self.made}).", told)
        self.api.delete_instance(self.made)
        wait_until(lambda: self.moorage("node", "remove", "agent-1")[0] == 0, "the node to be free", SOON)
        self.assertEqual([], list(self.api.nodes()))

    def refusal(self) -> str:
        with self.assertRaises(errors.NoValidHost) as refused:
            self.api.create_instance({**flavor(VCPU=1), "command": ["sleep", "100000"]})
        return refused.exception.message

    def moorage(self, *words: str) -> tuple[int, str, str]:
        return in_process(main.main, [*words, "--state-dir", str(self.plane.state)])
