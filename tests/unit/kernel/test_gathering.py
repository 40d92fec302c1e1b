# SPDX-License-Identifier: Apache-2.0
"""Work that threads share: what becomes of errors."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Sequence
from dataclasses import dataclass

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


if __name__ == "__main__":
    unittest.main()
