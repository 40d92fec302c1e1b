# SPDX-License-Identifier: Apache-2.0
"""Failing schedules are reduced to what they need, and printed the same way each time."""

from __future__ import annotations

import re
import unittest

from tests.simulation import cases
from tests.simulation.test_simulation import simulate

MUTANT = "claims take without looking at the room"


class SmallerTests(unittest.TestCase):
    def test_keeps_the_items_that_are_needed(self) -> None:
        runs = []

        def holds(items: object) -> bool:
            runs.append(items)
            return {3, 11} <= set(items)  # type: ignore[call-overload]

        self.assertEqual(list(cases.smaller(range(20), holds)), [3, 11])
        self.assertLess(len(runs), 60)

    def test_leaves_nothing_where_nothing_is_needed(self) -> None:
        self.assertEqual(list(cases.smaller(range(5), lambda items: True)), [])

    def test_keeps_all_when_no_part_suffices(self) -> None:
        self.assertEqual(list(cases.smaller(range(3), lambda items: len(items) == 3)), [0, 1, 2])


class ShrinkTests(unittest.TestCase):
    def test_a_failing_seed_is_reduced_and_repeats_its_time_line(self) -> None:
        one, two = (simulate("--mutant", MUTANT, "--workload", "claims", "--seed", "3") for _ in range(2))
        self.assertEqual(one.returncode, 1, one.stdout + one.stderr)
        self.assertEqual(one.stdout, two.stdout)
        sizes = re.search(r"clients (\d+) -> (\d+), .*steps (\d+) -> (\d+)", one.stdout)
        assert sizes is not None, one.stdout
        clients, fewer, steps, shorter = map(int, sizes.groups())
        self.assertLess(fewer, clients)
        self.assertLess(shorter, steps)
        (marked,) = (line for line in one.stdout.splitlines() if line.startswith(">>>"))
        self.assertIn("commit", marked)

    def test_a_schedule_that_holds_is_printed_whole(self) -> None:
        done = simulate("--workload", "claims", "--seed", "3")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("SEED=3: holds", done.stdout)
        self.assertNotIn("reduced in", done.stdout)
