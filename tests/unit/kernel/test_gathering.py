# SPDX-License-Identifier: Apache-2.0
"""Work that threads share: what becomes of errors."""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from dataclasses import dataclass

from moorage.gathering import Gathered, Gathering


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


if __name__ == "__main__":
    unittest.main()
