# SPDX-License-Identifier: Apache-2.0
"""Work that threads share: what becomes of errors."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

from moorage import errors
from moorage.gathering import Gathered, Gathering
from tests.servers import wait_until


@dataclass(slots=True, eq=False)
class _Work(Gathered[str]):
    name: str


class ErrorTests(unittest.TestCase):
    def gathering(self, *, done: bool) -> Gathering[_Work]:
        def work(turn: Sequence[_Work]) -> None:
            for each in turn:
                each.outcome = "done" if done else None
            raise ZeroDivisionError

        return Gathering(work, lambda each: (each.name,), lambda: 8, 60.0, 60.0)

    def test_an_error_is_that_of_the_work_that_it_has_left_undone(self) -> None:
        mine = _Work("a")
        self.assertTrue(self.gathering(done=False).join(mine))
        self.assertIsInstance(mine.error, ZeroDivisionError)

    def test_an_error_after_the_work_is_done_is_logged(self) -> None:
        mine = _Work("a")
        with self.assertLogs("moorage.gathering", "ERROR") as logs:
            self.assertTrue(self.gathering(done=True).join(mine))
        self.assertEqual(("done", None), (mine.outcome, mine.error))
        self.assertIn("ZeroDivisionError", logs.output[0])

    def test_the_threads_of_a_turn_go_on_without_a_leader_that_hangs(self) -> None:
        turns: list[Sequence[_Work]] = []
        ends = threading.Event(), threading.Event()
        for each in ends:
            self.addCleanup(each.set)

        def work(turn: Sequence[_Work]) -> None:
            turns.append(turn)
            if len(turns) <= len(ends):
                self.assertTrue(ends[len(turns) - 1].wait(60))
            for each in turn:
                each.outcome = each.name

        gathering = Gathering(work, lambda each: (each.name,), lambda: 8, 60.0, 60.0)
        works = [_Work(name) for name in "abc"]
        joins = [threading.Thread(target=gathering.join, args=(each,)) for each in works]
        for number, join in enumerate(joins):
            join.start()
            wait_until(lambda number=number: len(turns) + len(gathering._waiting) == number + 1, "it waits", 60)  # type: ignore[misc]
        ends[0].set()
        wait_until(lambda: len(turns) == 2, "the second turn", 60)
        gathering.give_up(turns[1], errors.PluginTimeout("it hangs"))
        joins[2].join(60)
        self.assertEqual((False, True), (joins[2].is_alive(), joins[1].is_alive()))
        error = works[2].error
        self.assertIsInstance(error, errors.PluginTimeout)
        ends[1].set()
        joins[1].join(60)
        self.assertEqual((error, None, "b"), (works[2].error, works[1].error, works[1].outcome))
        late = _Work("d")
        self.assertTrue(gathering.join(late))
        self.assertEqual("d", late.outcome, "the leader that returned leads no more")


class TwoPartsTests(unittest.TestCase):
    """Work that is begun by one function, and ended by another one."""

    def setUp(self) -> None:
        self.log: list[str] = []
        self.gates = {name: threading.Event() for name in "abcd"}
        for gate in self.gates.values():
            self.addCleanup(gate.set)
        self.gathering = Gathering(self.begin, lambda each: (each.name,), lambda: 8, 60.0, 60.0)
        self.works: dict[str, _Work] = {}
        self.joins: dict[str, threading.Thread] = {}

    def begin(self, turn: Sequence[_Work]) -> Callable[[], None]:
        name = "".join(each.name for each in turn)
        self.log.append(f"begin {name}")
        if turn[0].name == "b":
            raise ZeroDivisionError

        def end() -> None:
            self.assertTrue(self.gates[turn[0].name].wait(60))
            self.log.append(f"end {name}")
            if turn[0].name == "c":
                raise KeyError
            for each in turn:
                each.outcome = each.name

        return end

    def join(self, name: str) -> None:
        """Have one more thread join, and wait until it has begun its work or waits."""
        mine = self.works[name] = _Work(name)
        waiting = len(self.gathering._waiting)

        def join() -> None:
            self.assertTrue(self.gathering.join(mine))
            self.log.append(f"on {name}")

        self.joins[name] = threading.Thread(target=join)
        begun = len(self.log)
        self.joins[name].start()
        wait_until(lambda: len(self.gathering._waiting) > waiting or len(self.log) > begun, "it has joined", 60)

    def end(self, *names: str) -> None:
        for name in names:
            self.gates[name].set()
        for name in names:
            self.joins[name].join(60)
            self.assertFalse(self.joins[name].is_alive())

    def test_the_next_turn_is_begun_before_a_thread_of_the_last_one_goes_on(self) -> None:
        for name in "acd":
            self.join(name)
        self.gates["a"].set()
        self.joins["a"].join(60)
        self.assertEqual(["begin a", "end a", "begin cd", "on a"], self.log)
        self.assertTrue(self.joins["c"].is_alive() and self.joins["d"].is_alive())
        self.end("c", "d")
        self.assertIsInstance(self.works["c"].error, KeyError)
        self.assertIsInstance(self.works["d"].error, errors.StoreUnavailable)

    def test_a_turn_that_cannot_be_begun_fails_and_the_next_one_is_begun(self) -> None:
        for name in "ab":
            self.join(name)
        self.end("a", "b")
        self.assertIsInstance(self.works["b"].error, ZeroDivisionError)
        late = _Work("d")
        self.gates["d"].set()
        self.assertTrue(self.gathering.join(late))
        self.assertEqual("d", late.outcome)
        self.assertEqual(0, self.gathering._leaders)

    def test_a_thread_that_was_chosen_to_lead_waits_until_its_turn_was_begun(self) -> None:
        for leads, answers, found in ((True, [False, False, True], True), (False, [False, False, False], False)):
            with self.subTest(leads=leads):
                mine, latch = _Work("a"), mock.Mock()
                mine.leads, latch.wait.side_effect = leads, answers
                self.assertEqual(found, self.gathering._wait(mine, latch))
                self.assertEqual(3, latch.wait.call_count)


if __name__ == "__main__":
    unittest.main()
