# SPDX-License-Identifier: Apache-2.0
"""Calls that return in time."""

from __future__ import annotations

import threading
import time
import unittest

from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage_plugins.coordination.bounded import Bounded


class _Jumping(SystemClock):
    """Each look is a minute after the one before."""

    def __init__(self) -> None:
        self._minutes = 0

    @override
    def monotonic(self) -> float:
        self._minutes += 1
        return 60.0 * self._minutes


class BoundedTests(unittest.TestCase):
    def test_waiting_for_its_turn_is_part_of_the_time_that_a_call_has(self) -> None:
        go_on = threading.Event()
        bounded = Bounded("t", _Jumping())
        self.addCleanup(bounded.end, lambda: None)
        self.addCleanup(go_on.set)
        began = time.monotonic()
        with self.assertRaises(errors.Unavailable):
            # Its turn came after a minute, when its time was over.
            bounded.call(lambda: go_on.wait(120), 60.0)
        self.assertLess(time.monotonic() - began, 30)

    def test_what_a_call_raises_is_raised_and_the_next_one_is_made(self) -> None:
        bounded = Bounded("t", SystemClock())
        self.addCleanup(bounded.end, lambda: None)

        def broken() -> None:
            raise LookupError("no")

        with self.assertRaises(LookupError):
            bounded.call(broken, 60)
        self.assertEqual(bounded.call(lambda: 7, 60), 7)
