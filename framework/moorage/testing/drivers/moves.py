# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""Tests of drivers that move workloads between hosts."""

from __future__ import annotations

import dataclasses

from moorage.drivers.interface import (
    DriverError,
    LiveMigration,
    Migration,
    Workload,
    WorkloadState,
)
from moorage.testing.drivers.base import HOST, OTHER, DriverTestBase, new_uuid, state_of

__all__ = ["MoveTests"]


class MoveTests(DriverTestBase):
    """Moves workloads between two hosts, back and forth: at most one copy runs, wherever a call is killed."""

    def _both(self, uuid: str) -> int:
        """Returns the number of copies of an instance that run on the two hosts of a move together."""
        return len(self.copies(HOST, uuid)) + len(self.copies(OTHER, uuid))

    def _moved(self, uuid: str, operation: str = "migrate") -> Workload:
        return dataclasses.replace(self.workload(uuid), operation=operation)

    def test_what_is_prepared_does_not_run_before_it_is_started(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        self.skip_without(driver, Migration)
        for again in (driver, self.driver()):
            self.assertLessEqual(len(again.prepare(self._moved(uuid), 3)), 1000)
            self.assertEqual((3, WorkloadState.STOPPED), state_of(again, uuid))
            self.assertEqual([], list(self.copies(HOST, uuid)))
        driver.start(uuid, 3, 5)
        copy = self.assert_runs(driver, uuid, 3)
        for late in (driver, self.driver()):
            late.prepare(self._moved(uuid), 3)
            late.prepare(self._moved(uuid), 2)
            late.stop(uuid, 3, 4)
            self.assertEqual(copy, self.assert_runs(late, uuid, 3))
        driver.destroy(uuid, 3)
        self.assert_gone(driver, uuid)
        driver.start(uuid, 3, 6)
        self.assert_gone(driver, uuid)

    def test_what_is_prepared_takes_the_place_of_what_an_older_token_left(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        self.skip_without(driver, Migration)
        driver.spawn(self.workload(uuid), 2)
        driver.prepare(self._moved(uuid), 3)
        self.assertEqual((3, WorkloadState.STOPPED), state_of(driver, uuid))
        self.assertEqual([], list(self.copies(HOST, uuid)))
        driver.prepare(self._moved(uuid), 4)
        driver.start(uuid, 3, 9)
        self.assertEqual((4, WorkloadState.STOPPED), state_of(driver, uuid))
        driver.start(uuid, 4, 9)
        self.assert_runs(driver, uuid, 4)

    def test_a_preparation_that_was_killed_is_done_again_and_runs_nothing(self) -> None:
        self.skip_without(self.driver(), Migration)
        for uuid in self.interrupted(lambda uuid: None, lambda driver, uuid: driver.prepare(self._moved(uuid), 3)):  # type: ignore[attr-defined]
            driver = self.driver()
            self.assertEqual([], list(self.copies(HOST, uuid)))
            driver.prepare(self._moved(uuid), 4)
            driver.start(uuid, 4, 5)
            self.assert_runs(driver, uuid, 4)
            driver.destroy(uuid, 4)
            self.assert_gone(driver, uuid)

    def test_a_start_of_what_was_prepared_that_was_killed_is_done_again(self) -> None:
        self.skip_without(self.driver(), Migration)
        for uuid in self.interrupted(
            lambda uuid: self.driver().prepare(self._moved(uuid), 3),
            lambda driver, uuid: driver.start(uuid, 3, 5),  # type: ignore[attr-defined]
        ):
            driver = self.driver()
            driver.start(uuid, 3, 6)
            self.assert_runs(driver, uuid, 3)
            driver.destroy(uuid, 3)
            self.assert_gone(driver, uuid)

    def test_a_cold_move_never_runs_two_and_can_go_back(self) -> None:
        here, there, uuid = self.driver(), self.driver(OTHER), new_uuid()
        self.skip_without(here, Migration)
        here.spawn(self.workload(uuid), 3)
        there.prepare(self._moved(uuid), 5)
        self.assertEqual(1, self._both(uuid))
        here.stop(uuid, 3, 6)
        self.assertEqual(0, self._both(uuid))
        here.start(uuid, 3, 7)
        self.assert_runs(here, uuid, 3)
        # The agent that stopped it stood still since.
        here.stop(uuid, 3, 6)
        self.assert_runs(here, uuid, 3)
        here.stop(uuid, 3, 8)
        there.start(uuid, 5, 9)
        self.assertEqual((1, 0), (len(self.copies(OTHER, uuid)), len(self.copies(HOST, uuid))))
        here.start(uuid, 3, 7)
        self.assertEqual(1, self._both(uuid))
        here.destroy(uuid, 3)
        self.assert_gone(here, uuid)
        self.assertEqual({uuid}, set(there.inspect()))

    def test_a_transfer_ends_with_both_sides_paused(self) -> None:
        here, there, uuid = self.driver(), self.driver(OTHER), new_uuid()
        self.skip_without(here, LiveMigration)
        here.spawn(self.workload(uuid), 3)
        copy = self.assert_runs(here, uuid, 3)
        to = there.prepare(self._moved(uuid, "live_migrate"), 5)
        for order in (6, 7):
            here.transfer(uuid, 3, order, to)
            for driver, token in ((here, 3), (there, 5)):
                self.assertEqual((token, WorkloadState.PAUSED), state_of(driver, uuid))
            self.assertEqual(0, self._both(uuid))
        there.start(uuid, 5, 8)
        self.assertEqual([copy], list(self.copies(OTHER, uuid)), "it runs on with its memory")
        self.assertEqual([], list(self.copies(HOST, uuid)))

    def test_a_transfer_that_is_given_up_lets_the_source_go_on(self) -> None:
        here, there, uuid = self.driver(), self.driver(OTHER), new_uuid()
        self.skip_without(here, LiveMigration)
        here.spawn(self.workload(uuid), 3)
        copy = self.assert_runs(here, uuid, 3)
        to = there.prepare(self._moved(uuid, "live_migrate"), 5)
        here.transfer(uuid, 3, 6, to)
        here.start(uuid, 3, 7)
        self.assertEqual(copy, self.assert_runs(here, uuid, 3))
        # The agent that did it stood still since; and of another token nothing is carried.
        here.transfer(uuid, 3, 6, to)
        here.transfer(uuid, 2, 9, to)
        self.assertEqual(copy, self.assert_runs(here, uuid, 3))
        there.destroy(uuid, 5)
        with self.assertRaises(DriverError):
            here.transfer(uuid, 3, 8, to)
        here.start(uuid, 3, 9)
        self.assertEqual(copy, self.assert_runs(here, uuid, 3))

    def test_a_transfer_that_was_killed_is_done_again_or_given_up(self) -> None:
        there = self.driver(OTHER)
        self.skip_without(there, LiveMigration)
        addresses: dict[str, str] = {}

        def prepare(uuid: str) -> None:
            self.driver().spawn(self.workload(uuid), 3)
            addresses[uuid] = there.prepare(self._moved(uuid, "live_migrate"), 5)

        for number, uuid in enumerate(
            self.interrupted(prepare, lambda driver, uuid: driver.transfer(uuid, 3, 6, addresses[uuid]))  # type: ignore[attr-defined]
        ):
            here = self.driver()
            self.assertEqual([], list(self.copies(OTHER, uuid)))
            if number % 2:
                here.transfer(uuid, 3, 7, addresses[uuid])
                self.assertEqual(0, self._both(uuid))
                there.start(uuid, 5, 8)
            else:
                here.start(uuid, 3, 7)
                self.assert_runs(here, uuid, 3)
            self.assertEqual(1, self._both(uuid))
            for driver in (here, there):
                driver.destroy(uuid, 5)
            self.assertEqual(0, self._both(uuid))
