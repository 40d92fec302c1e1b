# SPDX-License-Identifier: Apache-2.0
"""Members over real servers: in threads of the test, and as processes that can be killed and paused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import unittest
import uuid
from pathlib import Path
from typing import Any

from moorage.clock import SystemClock
from moorage.coordination.keeper import Keeper, RingSettings
from moorage.coordination.ledger import SqlLedger
from moorage.coordination.loading import client_factory
from moorage.coordination.membership import MemberId, Membership, Timing
from moorage.db import Database
from moorage.testing.coordination import SOON

__all__ = ["GROUP", "KEYS", "SESSION", "MemberProcess", "Node"]

ROOT = Path(__file__).resolve().parents[3]
GROUP = "faults"
#: Seconds. Heartbeats are eight times as frequent, which a busy machine can keep.
SESSION = 4.0
KEYS = [f"object-{number}" for number in range(100)]


class Node:
    """A member with its ring, running in threads, as an engine has it."""

    def __init__(self, test: unittest.TestCase, url: str, database: Database, name: str = "") -> None:
        clock = SystemClock()
        factory = client_factory(url, clock=clock, session_timeout=SESSION, call_timeout=1.5, connect_timeout=5)
        timing = Timing(interval=SESSION / 8, margin=0.5, reset_after=SESSION)
        self.membership = Membership(factory, GROUP, MemberId(name or uuid.uuid4().hex, 1), clock, timing)
        settings = RingSettings(settle=0.3, poll_interval=0.2)
        self.keeper = Keeper(self.membership, SqlLedger(database), GROUP, clock, settings)
        test.addCleanup(self.stop)
        self.membership.begin()
        self.membership.start()
        self.keeper.start()

    def stop(self) -> None:
        self.keeper.stop()
        self.membership.stop()

    def owned(self) -> list[str]:
        snapshot = self.keeper.current()
        return [] if snapshot is None else snapshot.subset(KEYS)


class MemberProcess:
    """A member in a process of its own; :meth:`owned` is what it said last."""

    def __init__(self, test: unittest.TestCase, url: str, database_url: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.functional.coordination.member_process", url, database_url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        test.addCleanup(self.end)

    def ask(self) -> dict[str, Any]:
        """What it knows of itself; waits for the answer."""
        assert self.popen.stdin is not None and self.popen.stdout is not None
        self.popen.stdin.write("?\n")
        self.popen.stdin.flush()
        answer: dict[str, Any] = json.loads(self.popen.stdout.readline())
        return answer

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(SOON)
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                stream.close()
