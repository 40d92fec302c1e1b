# SPDX-License-Identifier: Apache-2.0
"""When a loop of a role calls its function, and that it ends."""

from __future__ import annotations

import threading
import types
import unittest
from collections.abc import Callable
from typing import Any

from moorage.clock import SystemClock
from moorage.control_plane.periodic_loop import PeriodicLoop
from tests.servers import wait_until

#: Seconds that no test waits for.
NEVER = 86_400.0


class PeriodicLoopTests(unittest.TestCase):
    def loop(self, work: Callable[[], object], seconds: float, **more: Any) -> PeriodicLoop:
        platform: Any = types.SimpleNamespace(clock=SystemClock())
        made = PeriodicLoop(platform, "loop", work, seconds, **more)
        self.addCleanup(made.stop, 60)
        return made

    def test_an_event_calls_sooner_each_time_that_it_is_set(self) -> None:
        calls: list[int] = []
        wake = threading.Event()
        self.loop(lambda: calls.append(1), NEVER, wake=wake)
        for number in range(1, 4):
            wake.set()
            wait_until(lambda wanted=number: len(calls) >= wanted, "a call", 60)  # type: ignore[misc]

    def test_an_error_ends_nothing(self) -> None:
        calls: list[int] = []

        def work() -> None:
            calls.append(1)
            raise RuntimeError("of the work")

        with self.assertLogs("moorage.control_plane.periodic_loop", "ERROR"):
            self.loop(work, 0.001)
            wait_until(lambda: len(calls) > 2, "calls", 60)

    def test_ends_at_once_also_while_its_event_is_set(self) -> None:
        for _ in range(200):
            wake = threading.Event()
            loop = self.loop(lambda: None, NEVER, wake=wake)
            wake.set()
            loop.stop(60)
            self.assertFalse(loop._thread.is_alive())
