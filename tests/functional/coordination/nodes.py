# SPDX-License-Identifier: Apache-2.0
"""Members over real servers: in threads of the test, and as processes that can be killed and paused."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
import types
import unittest
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from moorage.clock import SystemClock
from moorage.control_plane import periodic
from moorage.control_plane.periodic_loop import PeriodicLoop, SharedLook
from moorage.coordination.loading import client_factory
from moorage.coordination.membership import MemberId, Membership, Timing
from moorage.coordination.ring_ledger import SqlRingLedger
from moorage.coordination.ring_manager import RingManager, RingSettings
from moorage.db import Database
from moorage.services.interface import ServiceIdentity
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import ServiceRegistry
from moorage.services.tables import services
from moorage.testing.coordination import SOON
from moorage_plugins.coordination.tables import members
from tests.unit.coordination import store_tests

__all__ = ["GROUP", "KEYS", "SESSION", "Lives", "MemberProcess", "Node", "create_tables"]

ROOT = Path(__file__).resolve().parents[3]
GROUP = "faults"
#: Seconds. Heartbeats are eight times as frequent, which a busy machine can keep.
SESSION = 4.0
KEYS = [f"object-{number}" for number in range(100)]


def create_tables(database: Database) -> None:
    """Rings, and what the backend 'database' needs."""
    store_tests.create_tables(database)
    with database.write() as tx:
        services.metadata.create_all(tx, tables=[services])
        members.metadata.create_all(tx, tables=[members])


class Lives:
    """A service that beats when its member renews, so that each member of a test is a service of its own."""

    def __init__(self, registry: ServiceRegistry, identity: ServiceIdentity, down_time: float) -> None:
        self._registry = registry
        self.identity = identity
        self._down_time = down_time
        self._observer = LivenessObserver(SystemClock(), down_time)
        self._good_from = time.monotonic()

    @classmethod
    def of(cls, database: Database, down_time: float) -> Self:
        """A new service in that database."""
        registry = ServiceRegistry(database, SystemClock())
        return cls(registry, registry.enlist("engine", uuid.uuid4().hex, rpc_version="1.0"), down_time)

    @property
    def uuid(self) -> str:
        return self.identity.uuid

    @property
    def epoch(self) -> int:
        return self.identity.epoch

    def valid_until(self) -> float:
        began = time.monotonic()
        if self._registry.beat(self.identity):
            self._good_from = began
        return self._good_from + 0.9 * self._down_time

    def living(self, transaction: Any = None) -> frozenset[tuple[str, int]]:
        rows = self._registry.list(transaction=transaction)
        up = self._observer.observe(rows)
        return frozenset((row.uuid, row.epoch) for row in rows if up[row.uuid])


class BeatingLives(Lives):
    """A service whose heartbeats are sent by :meth:`beat` alone, as in production; :meth:`valid_until` writes nothing."""

    def beat(self) -> None:
        """Beats, and counts a beat that the store has taken."""
        super().valid_until()

    @override
    def valid_until(self) -> float:
        return self._good_from + 0.9 * self._down_time


class Node:
    """A member with its ring, running in threads, as an engine has it.

    :param url: of the backend's server; ``database``: the members are in the database too.
    """

    def __init__(
        self, test: unittest.TestCase, url: str, database: Database, name: str = "", *, drain: bool = False
    ) -> None:
        clock = SystemClock()
        lives = BeatingLives.of(database, SESSION) if url == "database" else None
        factory = client_factory(
            url, clock=clock, session_timeout=SESSION, call_timeout=1.5, connect_timeout=5, database=database,
            services=lives,
        )  # fmt: skip
        # With members in the database, each read of the ring renews the membership.
        timing = Timing(interval=SESSION / 8 if lives is None else SESSION, margin=0.5, reset_after=SESSION)
        member = MemberId(lives.uuid, lives.epoch) if lives else MemberId(name or uuid.uuid4().hex, 1)
        self.membership = Membership(factory, GROUP, member, clock, timing)
        settings = RingSettings(settle=0.3, poll_interval=0.2, drain=drain)
        self.keeper = RingManager(self.membership, SqlRingLedger(database), GROUP, clock, settings)
        self._loops: list[PeriodicLoop | SharedLook] = []
        test.addCleanup(self.stop)
        self.membership.begin()
        self.membership.start()
        if lives is None:
            self.keeper.start()
            return
        platform: Any = types.SimpleNamespace(database=database, clock=clock)
        self._loops.append(PeriodicLoop(platform, "beats", lives.beat, SESSION / 8))
        look_at_ring = functools.partial(periodic._look, self.membership, self.keeper, self._began)
        self._look = SharedLook(platform, {"look at the ring": (0.2, look_at_ring)}, first=0.0)
        self._loops.append(self._look)
        self._look.start()

    def _began(self) -> float:
        return self._look.began

    def stop(self) -> None:
        self.keeper.stop()
        self.membership.stop()
        for each in self._loops:
            each.stop()

    def owned(self) -> list[str]:
        snapshot = self.keeper.current()
        return [] if snapshot is None else snapshot.subset(KEYS)


class MemberProcess:
    """A member in a process of its own, which answers when it is asked.

    :param variables: more of its environment.
    """

    def __init__(
        self, test: unittest.TestCase, url: str, database_url: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.functional.coordination.member_process", url, database_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})},
        )
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
