# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""Tests of every driver: workloads are made, run, stopped and destroyed."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time

from moorage.drivers.interface import (
    DriverError,
    HostResources,
    Migration,
    Observed,
    PowerControl,
    WorkloadState,
)
from moorage.testing.drivers.base import HOST, DriverTestBase, new_uuid

__all__ = ["LifecycleTests"]

#: Names that users may choose.
_NAMES = ("web-1", "", "two\nlines", "Grüße ☃", 'quote " and \\ and %s {0} $(true) `true`', "--help", "x" * 255)


class LifecycleTests(DriverTestBase):
    """Makes and destroys workloads: one after the other, at the same time, and with calls that are killed in the middle."""

    # -- one after the other -------------------------------------------------------------------------------------------

    def test_a_workload_runs_until_it_is_destroyed(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        driver.spawn(self.workload(uuid), 3)
        self.assert_runs(driver, uuid, 3)
        driver.destroy(uuid, 3)
        self.assert_gone(driver, uuid)

    def test_what_is_seen_is_what_the_interface_says(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        self.assertEqual({}, dict(driver.inspect()))
        driver.spawn(self.workload(uuid), 3)
        (seen,) = driver.inspect().values()
        self.assertIsInstance(seen, Observed)
        self.assertIsInstance(seen.state, WorkloadState)
        self.assertIsInstance(seen.detail, str)
        if seen.since is not None:
            self.assertLess(abs(time.time() - seen.since), 3600.0)

    def test_resources_are_whole_numbers_of_named_classes(self) -> None:
        found = self.driver().resources()
        self.assertIsInstance(found, HostResources)
        for name, units in found.inventory.items():
            self.assertRegex(name, r"\A[A-Z0-9_]{1,255}\Z")
            self.assertGreater(units, 0)
        for trait in found.traits:
            self.assertRegex(trait, r"\A[A-Z0-9_]{1,255}\Z")

    def test_resources_are_what_there_is_and_not_what_is_free(self) -> None:
        """Agents enrol their host with the answer at each start. Neither running workloads nor a new driver may change it."""
        driver, uuid = self.driver(), new_uuid()
        before = driver.resources()
        driver.spawn(self.workload(uuid), 3)
        for each in (driver, self.driver()):
            self.assertEqual(before, each.resources())

    def test_any_name_will_do(self) -> None:
        driver = self.driver()
        for name in _NAMES:
            with self.subTest(name=name):
                uuid = new_uuid()
                driver.spawn(dataclasses.replace(self.workload(uuid), name=name), 1)
                self.assert_runs(driver, uuid, 1)
                driver.destroy(uuid, 1)

    def test_repeated_with_its_token_it_changes_nothing(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        driver.spawn(self.workload(uuid), 3)
        copy = self.assert_runs(driver, uuid, 3)
        for again in (driver, self.driver()):
            again.spawn(self.workload(uuid), 3)
            self.assertEqual(copy, self.assert_runs(again, uuid, 3))

    def test_a_newer_token_replaces_an_older_one(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        driver.spawn(self.workload(uuid), 3)
        before = self.assert_runs(driver, uuid, 3)
        driver.spawn(self.workload(uuid), 5)
        self.assertNotEqual(before, self.assert_runs(driver, uuid, 5))

    def test_an_older_token_changes_nothing(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        driver.spawn(self.workload(uuid), 5)
        copy = self.assert_runs(driver, uuid, 5)
        driver.spawn(self.workload(uuid), 3)
        self.assertEqual(copy, self.assert_runs(driver, uuid, 5))

    def test_a_destruction_leaves_what_is_newer(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        driver.spawn(self.workload(uuid), 5)
        copy = self.assert_runs(driver, uuid, 5)
        driver.destroy(uuid, 4)
        self.assertEqual(copy, self.assert_runs(driver, uuid, 5))
        driver.destroy(uuid, 7)
        self.assert_gone(driver, uuid)

    def test_what_comes_after_its_destruction_makes_nothing(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        driver.spawn(self.workload(uuid), 2)
        driver.destroy(uuid, 3)
        # Also in another process of the agent.
        for late in (driver, self.driver()):
            for token in (1, 2, 3):
                with contextlib.suppress(DriverError):
                    late.spawn(self.workload(uuid), token)
                if isinstance(late, Migration):
                    with contextlib.suppress(DriverError):
                        late.prepare(self.workload(uuid), token)
            self.assert_gone(late, uuid)
        driver.spawn(self.workload(uuid), 4)
        self.assert_runs(driver, uuid, 4)
        driver.destroy(uuid, 2)
        self.assert_runs(driver, uuid, 4)

    def test_a_destruction_of_nothing_is_no_error(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        driver.destroy(uuid, 1)
        driver.spawn(self.workload(uuid), 2)
        for _ in range(2):
            driver.destroy(uuid, 2)
        self.assert_gone(driver, uuid)

    def test_a_new_driver_finds_what_runs(self) -> None:
        uuid, other = new_uuid(), new_uuid()
        driver = self.driver()
        driver.spawn(self.workload(uuid), 3)
        driver.spawn(self.workload(other), 9)
        copy = self.assert_runs(driver, uuid, 3)
        again = self.driver()
        self.assertEqual({uuid: 3, other: 9}, {each: seen.token for each, seen in again.inspect().items()})
        self.assertEqual(copy, self.assert_runs(again, uuid, 3))
        again.destroy(uuid, 3)
        self.assertEqual({other}, set(again.inspect()))

    def test_hosts_of_one_machine_do_not_see_each_other(self) -> None:
        here, there, uuid = self.driver(), self.driver("host-2"), new_uuid()
        here.spawn(self.workload(uuid), 3)
        self.assertEqual({}, dict(there.inspect()))
        there.destroy(uuid, 3)
        self.assert_runs(here, uuid, 3)
        there.spawn(self.workload(uuid), 4)
        here.destroy(uuid, 4)
        self.assertEqual(1, len(self.copies("host-2", uuid)))
        self.assertEqual({uuid}, set(there.inspect()))

    # -- killed in the middle ------------------------------------------------------------------------------------------

    def test_a_build_that_was_killed_is_done_again_under_its_token(self) -> None:
        for uuid in self.interrupted(lambda uuid: None, lambda driver, uuid: driver.spawn(self.workload(uuid), 3)):
            driver = self.driver()
            driver.spawn(self.workload(uuid), 3)
            self.assert_runs(driver, uuid, 3)
            driver.destroy(uuid, 3)
            self.assert_gone(driver, uuid)

    def test_a_build_that_was_killed_is_done_again_under_a_newer_token(self) -> None:
        for uuid in self.interrupted(lambda uuid: None, lambda driver, uuid: driver.spawn(self.workload(uuid), 3)):
            driver = self.driver()
            driver.spawn(self.workload(uuid), 4)
            self.assert_runs(driver, uuid, 4)
            driver.destroy(uuid, 4)
            self.assert_gone(driver, uuid)

    def test_a_build_that_was_killed_is_destroyed(self) -> None:
        for uuid in self.interrupted(lambda uuid: None, lambda driver, uuid: driver.spawn(self.workload(uuid), 3)):
            driver = self.driver()
            driver.destroy(uuid, 3)
            self.assert_gone(driver, uuid)

    def test_a_replacement_that_was_killed_is_done_again(self) -> None:
        for uuid in self.interrupted(
            lambda uuid: self.driver().spawn(self.workload(uuid), 3),
            lambda driver, uuid: driver.spawn(self.workload(uuid), 5),
        ):
            driver = self.driver()
            driver.spawn(self.workload(uuid), 5)
            self.assert_runs(driver, uuid, 5)
            driver.destroy(uuid, 5)
            self.assert_gone(driver, uuid)

    def test_a_destruction_that_was_killed_is_done_again(self) -> None:
        for uuid in self.interrupted(
            lambda uuid: self.driver().spawn(self.workload(uuid), 3), lambda driver, uuid: driver.destroy(uuid, 3)
        ):
            driver = self.driver()
            driver.destroy(uuid, 3)
            self.assert_gone(driver, uuid)
            self.assertEqual({}, dict(driver.inspect()))

    # -- at the same time ----------------------------------------------------------------------------------------------

    def test_operations_of_one_instance_may_cross(self) -> None:
        """The newest token wins over older ones at the same time; a workload that was made late is destroyed with its token."""
        uuid, tokens = new_uuid(), range(1, 7)
        # Made here, so that all threads get one folder.
        self.state_dir()

        def both(token: int) -> None:
            driver = self.driver()
            with contextlib.suppress(Exception):
                driver.spawn(self.workload(uuid), token)
            with contextlib.suppress(Exception):
                driver.destroy(uuid, token)

        threads = [threading.Thread(target=both, args=(token,)) for token in tokens]
        for each in threads:
            each.start()
        driver = self.driver()
        driver.spawn(self.workload(uuid), 10)
        copy = self.assert_runs(driver, uuid, 10)
        for each in threads:
            each.join()
        self.assertEqual(copy, self.assert_runs(driver, uuid, 10))
        driver.destroy(uuid, 10)
        self.assert_gone(driver, uuid)

    # -- further powers ------------------------------------------------------------------------------------------------

    def test_what_is_stopped_can_be_started_again(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        self.skip_without(driver, PowerControl)
        driver.spawn(self.workload(uuid), 3)
        first = self.assert_runs(driver, uuid, 3)
        driver.start(uuid, 3, 3)
        self.assertEqual(first, self.assert_runs(driver, uuid, 3))
        for order in (4, 5):
            driver.stop(uuid, 3, order)
            self.assertEqual(WorkloadState.STOPPED, driver.inspect()[uuid].state)
            self.assertEqual([], list(self.copies(HOST, uuid)))
        driver.start(uuid, 3, 6)
        second = self.assert_runs(driver, uuid, 3)
        driver.reboot(uuid, 3, 7)
        third = self.assert_runs(driver, uuid, 3)
        self.assertEqual(3, len({first, second, third}))
        # As a restart of what has ended since, in no operation.
        driver.start(uuid, 3, 7)
        self.assertEqual(third, self.assert_runs(driver, uuid, 3))

    def test_a_power_call_that_comes_late_changes_nothing(self) -> None:
        """A call of an agent that was paused, or of a restart, after another operation. A new driver refuses it too."""
        driver, uuid = self.driver(), new_uuid()
        self.skip_without(driver, PowerControl)
        driver.spawn(self.workload(uuid), 3)
        # Twice: the order is kept although there is nothing to stop.
        for order in (5, 7):
            driver.stop(uuid, 3, order)
            for late in (driver, self.driver()):
                late.start(uuid, 3, order - 1)
                late.reboot(uuid, 3, order - 1)
                self.assertEqual(WorkloadState.STOPPED, driver.inspect()[uuid].state)
                self.assertEqual([], list(self.copies(HOST, uuid)))
        # Twice: the order is kept although it runs.
        driver.start(uuid, 3, 8)
        copy = self.assert_runs(driver, uuid, 3)
        for order in (8, 10):
            driver.start(uuid, 3, order)
            for late in (driver, self.driver()):
                late.stop(uuid, 3, order - 1)
                late.reboot(uuid, 3, order - 1)
                self.assertEqual(copy, self.assert_runs(driver, uuid, 3))

    def test_a_stop_that_was_killed_does_not_end_what_is_started_after_it(self) -> None:
        driver = self.driver()
        self.skip_without(driver, PowerControl)
        for uuid in self.interrupted(
            lambda uuid: self.driver().spawn(self.workload(uuid), 3),
            lambda driver, uuid: driver.stop(uuid, 3, 4),  # type: ignore[attr-defined]
        ):
            driver = self.driver()
            driver.start(uuid, 3, 5)
            copy = self.assert_runs(driver, uuid, 3)
            driver.stop(uuid, 3, 4)
            self.assertEqual(copy, self.assert_runs(driver, uuid, 3))
            driver.destroy(uuid, 3)
            self.assert_gone(driver, uuid)

    def test_power_is_of_one_token_alone(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        self.skip_without(driver, PowerControl)
        for change in (driver.stop, driver.start, driver.reboot):
            change(uuid, 3, 3)
        self.assert_gone(driver, uuid)
        driver.spawn(self.workload(uuid), 3)
        copy = self.assert_runs(driver, uuid, 3)
        for token in (2, 4):
            driver.stop(uuid, token, 5)
            driver.reboot(uuid, token, 5)
        self.assertEqual(copy, self.assert_runs(driver, uuid, 3))
