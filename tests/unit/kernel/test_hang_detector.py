# SPDX-License-Identifier: Apache-2.0
"""When a step counts as hung."""

from __future__ import annotations

import unittest

from typing_extensions import override

from moorage.clock import SystemClock
from moorage.hang_detector import HangDetector


class _Manual(SystemClock):
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    @override
    def monotonic(self) -> float:
        return self.now


class HangDetectorTests(unittest.TestCase):
    def test_a_step_hangs_after_ten_looks_spread_over_its_limit(self) -> None:
        clock = _Manual()
        detector = HangDetector(clock, 10.0)
        found = []
        for _ in range(12):
            found.append(detector.look(("step", 0.0)))
            clock.now += detector.pause
        self.assertEqual(found, [False] * 11 + [True])

    def test_a_process_that_was_stopped_for_an_hour_has_no_step_that_hangs(self) -> None:
        clock = _Manual()
        detector = HangDetector(clock, 10.0)
        self.assertFalse(detector.look(("step", 0.0)))
        clock.now = 3600.0
        for _ in range(100):
            self.assertFalse(detector.look(("step", 0.0)))

    def test_another_step_begins_again(self) -> None:
        clock = _Manual()
        detector = HangDetector(clock, 10.0)
        for number in range(100):
            clock.now += 1.0
            self.assertFalse(detector.look((number // 5, 0.0)))
        for _ in range(100):
            clock.now += 1.0
            self.assertFalse(detector.look(None))
