# SPDX-License-Identifier: Apache-2.0
"""Questions to the driver of a host: how many are answered, and how long the answers are."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Mapping
from typing import Any
from unittest import mock

from moorage import errors
from moorage.bounded_pool import Overdue
from moorage.clock import SystemClock
from moorage.drivers.interface import DriverError, Usage
from moorage.testing.clock import ManualClock
from moorage_plugins.compute import questions
from moorage_plugins.compute.questions import Questions
from tests.servers import wait_until

UUID = "11111111-1111-4111-8111-111111111111"


class Talkative:
    """Has consoles, and measures one instance."""

    def __init__(self) -> None:
        self.written = "one\ntwo\n"

    def console(self, uuid: str, lines: int) -> str:
        if uuid != UUID:
            raise DriverError("there is nothing of it")
        return "".join(self.written.splitlines(keepends=True)[-lines:])

    def usage(self) -> Mapping[str, Usage]:
        return {UUID: Usage(1.5, 4096)}


class QuestionTests(unittest.TestCase):
    def setUp(self) -> None:
        self.driver: Any = Talkative()
        self.questions = self.asking(self.driver)

    def asking(self, driver: Any) -> Questions:
        found = Questions(driver, SystemClock())
        self.addCleanup(found.close)
        return found

    def test_the_last_lines_and_the_usage_are_told(self) -> None:
        self.assertEqual("two\n", self.questions.console(UUID, 1))
        self.assertEqual({"cpu_seconds": 1.5, "memory_bytes": 4096}, self.questions.usage(UUID))

    def test_a_console_has_64_kib_at_most_and_is_cut_between_characters(self) -> None:
        self.driver.written = "\u00e9" * 40_000 + "x"
        found = self.questions.console(UUID, 1)
        self.assertEqual("\u00e9" * 32_767 + "x", found)

    def test_what_cannot_be_answered_says_why(self) -> None:
        with self.assertRaisesRegex(errors.Conflict, "cannot answer: there is nothing of it"):
            self.questions.console("another", 1)
        with self.assertRaisesRegex(errors.Conflict, "does not run"):
            self.questions.usage("another")
        for power, call in (("console", lambda of: of.console(UUID, 1)), ("usage", lambda of: of.usage(UUID))):
            with self.assertRaisesRegex(errors.Conflict, f"does not have the power compute.{power}"):
                call(self.asking(object()))

    def counting(self, clock: ManualClock) -> Questions:
        """Questions that are answered in the thread of the test."""
        found = Questions(self.driver, clock)
        pool = mock.patch.object(found, "_pool").start()
        self.addCleanup(mock.patch.stopall)
        pool.call.side_effect = lambda work, limit: work()
        return found

    def test_a_bounded_number_is_answered_each_second(self) -> None:
        clock = ManualClock()
        asked = self.counting(clock)
        self.driver.console = lambda uuid, lines: uuid
        for _ in range(2):
            for number in range(10):
                self.assertEqual(str(number), asked.console(str(number), 1))
            for call in (lambda: asked.console(UUID, 1), lambda: asked.usage(UUID)):
                with self.assertRaisesRegex(errors.Unavailable, "10 questions a second"):
                    call()
            clock.advance(1.0)

    def test_one_instance_leaves_questions_to_the_others(self) -> None:
        clock = ManualClock()
        asked = self.counting(clock)
        self.driver.console = lambda uuid, lines: uuid
        for _ in range(2):
            for _ in range(5):
                asked.console(UUID, 1)
            # What is refused counts for nobody.
            for _ in range(20):
                with self.assertRaisesRegex(errors.Unavailable, "5 questions of one instance a second"):
                    asked.console(UUID, 1)
            for number in range(5):
                self.assertEqual(str(number), asked.console(str(number), 1))
            clock.advance(1.0)

    def test_the_usage_of_all_instances_is_kept_for_a_second(self) -> None:
        clock = ManualClock()
        asked = self.counting(clock)
        measured = mock.patch.object(self.driver, "usage", wraps=self.driver.usage).start()
        for expected in (1, 2):
            for _ in range(20):
                self.assertEqual({"cpu_seconds": 1.5, "memory_bytes": 4096}, asked.usage(UUID))
            with self.assertRaisesRegex(errors.Conflict, "does not run"):
                asked.usage("another")
            self.assertEqual(expected, measured.call_count)
            clock.advance(1.0)

    def test_a_driver_that_hangs_holds_up_no_caller(self) -> None:
        """Two questions hang, and their callers have gone. The next question is refused without a wait."""
        gate, begun = threading.Event(), list[str]()
        self.addCleanup(gate.set)

        def hang(uuid: str, lines: int) -> str:
            begun.append(uuid)
            gate.wait(600)
            return ""

        def hangs() -> bool:
            with self.assertRaises(errors.Unavailable):
                self.questions.console(UUID, 1)
            return len(begun) == 2

        self.driver.console = hang
        with mock.patch.multiple(questions, _PER_SECOND=10**6, _OF_INSTANCE=10**6):
            with mock.patch.object(questions, "_LIMIT", 0.05):
                with self.assertRaisesRegex(errors.Unavailable, "has not answered within"):
                    self.questions.console(UUID, 1)
                wait_until(hangs, "both questions hang")
            # A question that waited would run into this limit, which is longer than the test may take.
            with mock.patch.object(questions, "_LIMIT", 3600.0):
                with self.assertRaisesRegex(errors.Unavailable, "2 questions at the same time"):
                    self.questions.usage(UUID)
                gate.set()
                wait_until(self.answers, "the places are free")

    def answers(self) -> bool:
        try:
            return bool(self.questions.usage(UUID))
        except errors.Unavailable:
            return False

    def test_a_question_that_was_never_begun_or_failed_gives_its_place_back(self) -> None:
        with mock.patch.object(self.questions, "_pool") as pool:
            pool.call.side_effect = Overdue("questions", 10.0, begun=False)
            for number in range(4):
                with self.assertRaisesRegex(errors.Unavailable, "has not answered within"):
                    self.questions.console(str(number), 1)
        for number in range(4):
            with self.assertRaisesRegex(errors.Conflict, "there is nothing of it"):
                self.questions.console(f"other {number}", 1)
