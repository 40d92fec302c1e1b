# SPDX-License-Identifier: Apache-2.0
"""What a replay says of control planes that do wrong, and whom ``--kill`` may end."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from moorage import errors
from moorage.cli.kill import kill_one_scheduler
from moorage.client.client import Client
from moorage.client.replay import ReplayReport, replay
from moorage.client.workload import WorkloadRequest
from moorage.testing.clock import ManualClock

NODE = "the-node"


class Plane:
    """A control plane of one large node that keeps its word, unless a test changes a method; it stands for the client."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows: dict[str, str] = {}
        self.stored: set[str] = {"what somebody else has stored"}

    def create_instance(self, body: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.rows[body["uuid"]] = "active"
            self.stored.add(body["uuid"])
        return dict(body)

    def delete_instance(self, uuid: str) -> None:
        with self.lock:
            if uuid not in self.rows:
                raise errors.NotFound("There is no such instance.")
            del self.rows[uuid]
            self.stored.discard(uuid)

    def instances(self, status: str) -> Iterator[dict[str, Any]]:
        return iter([{"uuid": uuid} for uuid, each in self.rows.items() if each == status])

    def usages(self) -> Iterator[dict[str, Any]]:
        inventory = {"resource_class": "VCPU", "total": 10**6, "reserved": 0, "allocation_ratio": 1.0}
        return iter([{"uuid": NODE, "inventories": [inventory]}])

    def allocations(self) -> Iterator[dict[str, Any]]:
        return iter([{"provider": NODE, "consumer": each, "resource_class": "VCPU", "used": 1} for each in self.stored])

    def replay(self, count: int = 10, *, release: bool = True) -> ReplayReport:
        wanted: Sequence[WorkloadRequest] = [
            WorkloadRequest(float(each), 3.0, f"r{each}", {"VCPU": 1}) for each in range(count)
        ]
        return replay([cast(Client, self)] * 2, wanted, ManualClock(shortest=60.0), release=release)


class ReplayTests(unittest.TestCase):
    def test_a_control_plane_that_keeps_its_word_is_good(self) -> None:
        for release, stored in ((True, 1), (False, 11)):
            report = Plane().replay(release=release)
            self.assertTrue(report.good, report)
            self.assertEqual((10, 10 if release else 0), (report.placed, report.released))
            self.assertEqual(stored, report.stored_consumers)

    def test_deletions_that_are_refused_have_failed(self) -> None:
        for refusal in (errors.Forbidden("Not you."), errors.InUse("Always busy."), errors.StoreBusy("Never.")):

            class Refusing(Plane):
                def delete_instance(self, uuid: str, refusal: errors.MoorageError = refusal) -> None:
                    raise refusal

            report = Refusing().replay()
            self.assertEqual((0, 10, 0), (report.released, report.failed, report.lost))
            self.assertFalse(report.good)
            self.assertIn(refusal.message, next(iter(report.failures)))

    def test_claims_of_deleted_instances_that_stay_are_counted(self) -> None:
        class Forgetful(Plane):
            def delete_instance(self, uuid: str) -> None:
                self.rows.pop(uuid)

        report = Forgetful().replay()
        self.assertEqual((10, 10, False), (report.released, report.left_over, report.good))

    def test_claims_that_nobody_was_told_of_are_counted(self) -> None:
        class Silent(Plane):
            def create_instance(self, body: Mapping[str, Any]) -> dict[str, Any]:
                super().create_instance(body)
                raise errors.CallTimeout("No answer.")

        report = Silent().replay(release=False)
        self.assertEqual((10, 10, 0), (report.unanswered, report.left_over, report.lost))

    def test_instances_that_are_gone_before_anybody_deleted_them_are_lost(self) -> None:
        class Losing(Plane):
            def create_instance(self, body: Mapping[str, Any]) -> dict[str, Any]:
                return dict(body)

        for release in (True, False):
            report = Losing().replay(release=release)
            self.assertEqual((0, 10, False), (report.released, report.lost, report.good))

    def test_what_is_never_over_is_counted_and_what_could_not_be_built_is_not_lost(self) -> None:
        class Slow(Plane):
            status = "building"

            def create_instance(self, body: Mapping[str, Any]) -> dict[str, Any]:
                super().create_instance(body)
                self.rows[body["uuid"]] = self.status
                if self.status == "error":
                    self.stored.discard(body["uuid"])
                return dict(body)

        report = Slow().replay(release=False)
        self.assertEqual((10, False), (report.unsettled, report.good))
        broken = Slow()
        broken.status = "error"
        report = broken.replay(release=False)
        self.assertEqual((0, 10, 0, True), (report.unsettled, report.broken, report.lost, report.good))


class KillTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.state = pathlib.Path(folder.name)
        (self.state / "run").mkdir()

    def process(self, *words: str) -> subprocess.Popen[bytes]:
        # It shows these words as its own until it is ended, from the moment when it says something.
        process = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()

        def end() -> None:
            process.kill()
            process.communicate()

        self.addCleanup(end)
        return process

    def table(self, pid: int) -> None:
        row = {"name": "scheduler-1", "role": "scheduler", "pid": pid, "restarts": 0}
        (self.state / "run" / "processes.json").write_text(json.dumps([row]))

    def test_a_process_that_only_has_the_number_of_a_scheduler_is_left_alone(self) -> None:
        for words in ((), ("moorage.cli.roles", "scheduler", "--name", "scheduler-11"), ("moorage.cli.roles", "agent")):
            stranger = self.process(*words)
            self.table(stranger.pid)
            with self.assertRaisesRegex(errors.NotFound, "No scheduler"):
                kill_one_scheduler(self.state)
            self.assertIsNone(stranger.poll())

    def test_a_number_that_no_process_has_is_no_scheduler(self) -> None:
        process = self.process()
        process.communicate(b"\n")
        self.table(process.pid)
        with self.assertRaises(errors.NotFound):
            kill_one_scheduler(self.state)

    def test_the_scheduler_is_ended(self) -> None:
        scheduler = self.process("-m", "moorage.cli.roles", "scheduler", "--name", "scheduler-1", "--state-dir", "x")
        self.table(scheduler.pid)
        self.assertIn("scheduler-1", kill_one_scheduler(self.state))
        self.assertEqual(-9, scheduler.wait(60))
