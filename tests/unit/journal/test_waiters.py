# SPDX-License-Identifier: Apache-2.0
"""The limit of requests of one caller that wait for events."""

from __future__ import annotations

import unittest
from collections.abc import Generator, Iterator

from moorage import errors
from moorage.journal.waiting_limit import WaitingLimit


class WaitersTests(unittest.TestCase):
    def setUp(self) -> None:
        self.waiters = WaitingLimit(2)
        self.ended: list[int] = []

    def parts(self, number: int) -> Generator[bytes, None, None]:
        try:
            yield b"one"
            yield b"two"
        finally:
            self.ended.append(number)

    def admit(self, number: int, caller: str = "the project blue") -> Iterator[bytes]:
        return self.waiters.admit(caller, self.parts(number))

    def refused(self) -> bool:
        try:
            self.admit(9)
        except errors.Unavailable:
            return True
        return False

    def test_the_parts_are_passed_on_and_closed(self) -> None:
        found = self.admit(1)
        self.assertEqual([b"one", b"two"], list(found))
        begun = self.admit(2)
        self.assertEqual(b"one", next(begun))
        begun.close()  # type: ignore[attr-defined]
        self.assertEqual([1, 2], self.ended)

    def test_a_caller_has_so_many_and_others_have_their_own(self) -> None:
        kept = [self.admit(1), self.admit(2), self.admit(3, "the project red")]
        with self.assertRaisesRegex(errors.Unavailable, "2 requests of the project blue wait"):
            self.admit(4)
        kept[0].close()  # type: ignore[attr-defined]
        kept[0].close()  # type: ignore[attr-defined]
        kept.append(self.admit(5))
        self.assertTrue(self.refused())

    def test_an_answer_that_was_dropped_before_it_began_leaves_its_place(self) -> None:
        kept = [self.admit(1), self.admit(2)]
        self.assertTrue(self.refused())
        kept.pop()
        self.assertFalse(self.refused())

    def test_callers_that_have_left_are_forgotten(self) -> None:
        self.admit(1).close()  # type: ignore[attr-defined]
        self.assertEqual({}, self.waiters._waiting)
