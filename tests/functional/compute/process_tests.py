# SPDX-License-Identifier: Apache-2.0
"""Compute agents as processes that are killed and paused, on any database; a mix-in for the tests of each."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import IO

import sqlalchemy as sa

from moorage.work.tables import workers
from tests import servers
from tests.pausing import pause
from tests.unit.compute import agent_tests
from tests.unit.compute.agent_tests import SOON, Fleet

ROOT = Path(__file__).resolve().parents[3]


class Process:
    """An agent in a process of its own; ``log`` is what it wrote."""

    def __init__(self, test: unittest.TestCase, url: str, state_dir: str, epoch: int, delay: float) -> None:
        self.path = Path(state_dir) / f"agent-{epoch}.log"
        output: IO[bytes] = self.path.open("wb")
        test.addCleanup(output.close)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.functional.compute.agent_process", url, state_dir, str(epoch), str(delay)],
            stdin=subprocess.PIPE, stderr=output, cwd=ROOT,
        )  # fmt: skip
        test.addCleanup(self.kill)

    @property
    def log(self) -> str:
        return self.path.read_text()

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(SOON)
        if self.popen.stdin is not None:
            self.popen.stdin.close()


class ProcessTests(unittest.TestCase):
    """Subclasses give ``url``."""

    url: str

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.state_dir = folder.name
        self.fleet = Fleet(self.url, self.state_dir)
        self.addCleanup(self.fleet.database.close)
        self.fleet.create_tables()

    def owned(self) -> int:
        with self.fleet.database.read() as tx:
            return tx.execute(
                sa.select(sa.func.count()).select_from(workers).where(workers.c.owner.is_not(None))
            ).scalar_one()

    def assert_consistent(self, active: int) -> None:
        agent_tests.AgentTests.assert_consistent(self, active)  # type: ignore[arg-type]

    def process(self, epoch: int, delay: float) -> Process:
        return Process(self, self.url, self.state_dir, epoch, delay)

    def test_what_a_killed_agent_had_taken_is_done_by_its_next_incarnation(self) -> None:
        for _ in range(6):
            self.fleet.place()
        killed = self.process(1, 60)
        servers.wait_until(lambda: self.owned() == 6, "all are taken", SOON)
        killed.kill()
        self.process(2, 0)
        servers.wait_until(lambda: self.fleet.rows() == 0, "all are done", SOON)
        self.assert_consistent(6)

    def test_a_paused_agent_that_goes_on_writes_nothing(self) -> None:
        uuid = self.fleet.place()
        # Its build ends when the test says so, and not before the pause.
        zombie = self.process(1, 77)
        servers.wait_until(lambda: self.owned() == 1, "it is taken", SOON)
        pause(zombie.popen.pid, self.url)
        self.process(2, 0)
        servers.wait_until(lambda: self.fleet.rows() == 0, "the next incarnation has done it", SOON)
        before = self.fleet.instances.get(uuid)
        zombie.popen.send_signal(signal.SIGCONT)
        assert zombie.popen.stdin is not None
        zombie.popen.stdin.write(b"go on\n")
        zombie.popen.stdin.flush()
        servers.wait_until(lambda: "has been taken over" in zombie.log, "the zombie has noticed", SOON)
        zombie.popen.communicate(b"", SOON)
        self.assertEqual(self.fleet.instances.get(uuid), before)
        self.assert_consistent(1)
