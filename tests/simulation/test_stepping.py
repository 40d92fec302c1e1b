# SPDX-License-Identifier: Apache-2.0
"""Stepped servers: which statements wait is seen, one seed repeats its steps, and races between writers are found."""

from __future__ import annotations

import re
import unittest

import tests
from tests import servers
from tests.simulation import stepping
from tests.simulation.test_simulation import simulate

SCHEDULES = tests.cases(4)


class RingTests(unittest.TestCase):
    """Deadlocks among connections that wait for each other."""

    def test_finds_a_ring_over_others(self) -> None:
        waits = {1: frozenset({2}), 2: frozenset({3}), 3: frozenset({1}), 4: frozenset({1})}
        self.assertTrue(stepping.in_ring(1, waits))
        self.assertFalse(stepping.in_ring(4, waits))


class SteppedTests(unittest.TestCase):
    """Claims on one kind of server; a class for each."""

    engine = ""

    def setUp(self) -> None:
        servers.require(self.engine)

    def run_claims(self, *arguments: str) -> str:
        done = simulate("--engine", self.engine, "--workload", "claims", *arguments)
        self.assertEqual(done.returncode, 0, f"{done.stdout[-6000:]}{done.stderr[-2000:]}")
        return done.stdout

    def test_claims_keep_every_invariant(self) -> None:
        first = str(tests.seeded().randrange(10**6))
        said = self.run_claims("--seed", first, "--schedules", str(SCHEDULES))
        self.assertIn(f"{SCHEDULES} schedules, 0 violations", said, first)

    def test_one_seed_gives_one_order_of_steps_and_lock_waits(self) -> None:
        one, two = (self.run_claims("--seed", "11") for _ in range(2))
        self.assertTrue(re.search(r" locked *$", one, re.MULTILINE), "no statement waited for a lock")
        self.assertEqual(one, two)


class PostgresqlTests(SteppedTests):
    engine = "postgresql"


class MariadbTests(SteppedTests):
    engine = "mariadb"

    def test_no_operation_is_taken_whose_fence_was_not_raised(self) -> None:
        # Created after the taker had raised fences, and before it looked for operations.
        for seed in ("0", "4"):
            done = simulate("--engine", self.engine, "--workload", "leases", "--seed", seed, "--shrink", "0")
            self.assertIn(f"leases SEED={seed}: holds", done.stdout[-2000:], done.stderr[-2000:])


def load_tests(loader: unittest.TestLoader, found: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """Leave the common class out."""
    return unittest.TestSuite(map(loader.loadTestsFromTestCase, (RingTests, PostgresqlTests, MariadbTests)))
