# SPDX-License-Identifier: Apache-2.0
"""What drivers remember of the workloads that they have destroyed."""

from __future__ import annotations

import os
import tempfile
import threading
import unittest

from moorage.drivers.ended_tokens import EndedTokens
from moorage.testing.clock import ManualClock

DAY = 86_400.0


class EndedTokensTests(unittest.TestCase):
    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = f"{holder.name}/ended"
        self.clock = ManualClock()

    def test_the_highest_token_counts_in_each_process(self) -> None:
        one, other = (EndedTokens(self.folder, self.clock) for _ in range(2))
        self.assertEqual(0, one("i"))
        one.note("i", 3)
        other.note("i", 7)
        one.note("i", 5)
        other.note("j", 1)
        for each in (one, other, EndedTokens(self.folder, self.clock)):
            self.assertEqual((7, 1, 0), (each("i"), each("j"), each("k")))

    def test_a_token_is_kept_for_a_day_at_least_and_not_for_ever(self) -> None:
        ended = EndedTokens(self.folder, self.clock)
        for number in range(8):
            ended.note(f"i{number}", 3)
            self.clock.advance(DAY / 4)
        self.assertEqual([3] * 4, [ended(f"i{number}") for number in range(4, 8)])
        self.clock.advance(DAY)
        ended.note("later", 1)
        self.assertEqual([0] * 4, [ended(f"i{number}") for number in range(4)])
        self.assertLessEqual(len(os.listdir(self.folder)), 2)

    def test_of_tokens_that_are_noted_at_once_the_highest_stays(self) -> None:
        tokens = range(1, 33)
        threads = [
            threading.Thread(target=EndedTokens(self.folder, self.clock).note, args=("i", token)) for token in tokens
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        self.assertEqual(max(tokens), EndedTokens(self.folder, self.clock)("i"))

    def test_a_writer_that_was_killed_does_not_stop_the_next_one(self) -> None:
        ended = EndedTokens(self.folder, self.clock)
        ended.note("i", 1)
        (day,) = os.listdir(self.folder)
        os.symlink("2", f"{self.folder}/{day}/i.new")
        ended.note("i", 3)
        self.assertEqual(3, ended("i"))
