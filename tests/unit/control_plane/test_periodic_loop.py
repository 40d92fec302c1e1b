# SPDX-License-Identifier: Apache-2.0
"""When a loop of a role calls its function, and that it ends."""

from __future__ import annotations

import pathlib
import tempfile
import threading
import types
import unittest
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.clock import SystemClock
from moorage.control_plane.periodic_loop import Look, PeriodicLoop, SharedLook
from moorage.db import Database
from tests.servers import wait_until

#: Seconds that no test waits for.
NEVER = 86_400.0


class PeriodicLoopTests(unittest.TestCase):
    def loop(self, work: Callable[[], object], seconds: float | None, **more: Any) -> PeriodicLoop:
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

    def test_without_an_interval_it_is_called_when_it_is_woken_only(self) -> None:
        calls: list[int] = []
        wake = threading.Event()
        loop = self.loop(lambda: calls.append(1), None, wake=wake)
        wake.set()
        wait_until(lambda: calls, "a call", 60)
        loop.stop(60)
        self.assertEqual([1], calls)

    def test_a_loop_ends_although_another_one_clears_its_event(self) -> None:
        """Of two loops with one event the first to wake clears it; the other one may be on its way to the next wait."""

        class Cleared(threading.Event):
            """Is cleared once before any thread has seen that it was set."""

            times = 0

            def set(self) -> None:
                self.times += 1
                if self.times > 1:
                    super().set()

        wake = Cleared()
        loop = self.loop(lambda: None, None, wake=wake)
        ended = threading.Thread(target=loop.stop)
        ended.start()
        ended.join(60)
        self.assertFalse(ended.is_alive())
        self.assertGreater(wake.times, 1)

    def test_a_call_that_hangs_is_not_awaited_longer_than_it_is_worth(self) -> None:
        begun, go_on, wake = threading.Event(), threading.Event(), threading.Event()

        def hangs() -> None:
            begun.set()
            go_on.wait(60)

        loop = self.loop(hangs, None, wake=wake)
        self.addCleanup(go_on.set)
        wake.set()
        self.assertTrue(begun.wait(60))
        loop.stop(0.3)
        self.assertTrue(loop._thread.is_alive())


class Time:
    """A clock that a test moves; only the thread of the loop waits, for ever."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        return event.wait(NEVER)

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here sleeps")


class SharedLookTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.database = Database(f"sqlite:///{pathlib.Path(folder.name) / 'store.sqlite'}")
        self.addCleanup(self.database.close)
        self.clock = Time()
        self.done: list[str] = []

    def look(self, looks: Mapping[str, tuple[float, Look]]) -> SharedLook:
        platform: Any = types.SimpleNamespace(clock=self.clock, database=self.database)
        made = SharedLook(platform, looks)
        made.start()
        self.addCleanup(made.stop, 60)
        return made

    def finds(self, name: str) -> Look:
        """A look that reads and finds work."""

        def find(transaction: sa.Connection) -> Callable[[], None]:
            self.assertEqual(1, transaction.execute(sa.text("SELECT 1")).scalar())
            return lambda: self.done.append(name)

        return find

    def test_one_transaction_has_all_looks_that_are_due(self) -> None:
        transactions: list[sa.Connection] = []

        def nothing(transaction: sa.Connection) -> None:
            transactions.append(transaction)

        shared = self.look({"a": (1.0, nothing), "b": (1.0, nothing), "c": (5.0, nothing), "d": (1.0, self.finds("d"))})
        shared.look()
        self.assertEqual(3, len(transactions))
        self.assertEqual(1, len({id(each) for each in transactions}))
        for second in range(1, 6):
            self.clock.now = second - 0.1
            shared.look()
        self.assertEqual(2 * 6 + 2, len(transactions))
        self.assertEqual(["d"] * 6, self.done)

    def test_a_look_that_fails_keeps_no_other_from_looking(self) -> None:
        def fails(transaction: sa.Connection) -> None:
            transaction.execute(sa.text("SELECT nothing FROM nowhere"))

        shared = self.look({"a": (1.0, self.finds("a")), "wrong": (1.0, fails), "b": (1.0, self.finds("b"))})
        with self.assertLogs("moorage.control_plane.periodic_loop", "ERROR") as told:
            shared.look()
        self.assertEqual(["a", "b"], self.done)
        self.assertEqual(1, len(told.output))
        self.assertIn("wrong", told.output[0])

    def test_what_follows_from_a_look_keeps_no_other_from_following(self) -> None:
        def fails() -> None:
            raise RuntimeError("of what follows")

        shared = self.look({"wrong": (1.0, lambda transaction: fails), "b": (1.0, self.finds("b"))})
        with self.assertLogs("moorage.control_plane.periodic_loop", "ERROR"):
            shared.look()
        self.assertEqual(["b"], self.done)

    def test_a_store_that_is_away_is_told_once_each_time(self) -> None:
        def away(transaction: sa.Connection) -> None:
            raise errors.StoreUnavailable("away")

        shared = self.look({"a": (1.0, away), "b": (1.0, self.finds("b"))})
        with self.assertRaises(errors.StoreUnavailable):
            shared.look()
        self.assertEqual([], self.done)

    def test_what_could_not_be_read_is_looked_for_again_at_once(self) -> None:
        asked: list[float] = []

        def slow(transaction: sa.Connection) -> None:
            asked.append(self.clock.now)
            if len(asked) == 1:
                raise errors.StoreUnavailable("away")

        shared = self.look({"slow": (60.0, slow), "b": (1.0, self.finds("b"))})
        with self.assertRaises(errors.StoreUnavailable):
            shared.look()
        for second in range(1, 4):
            self.clock.now = float(second)
            shared.look()
        self.assertEqual([0.0, 1.0], asked)
        self.assertEqual(["b"] * 3, self.done)

    def test_a_look_that_lacks_something_else_than_the_store_holds_up_no_other(self) -> None:
        def lacks(transaction: sa.Connection) -> None:
            raise errors.Unavailable("no such server")

        shared = self.look({"a": (1.0, lacks), "b": (1.0, self.finds("b"))})
        shared.look()
        self.assertEqual(["b"], self.done)

    def test_a_look_knows_a_moment_from_before_its_transaction(self) -> None:
        moments: list[float] = []

        def first(transaction: sa.Connection) -> None:
            transaction.execute(sa.text("SELECT 1"))
            self.clock.now += 5

        shared = self.look({"first": (1.0, first), "second": (1.0, lambda transaction: moments.append(shared.began))})
        shared.look()
        self.assertEqual([0.0], moments)
