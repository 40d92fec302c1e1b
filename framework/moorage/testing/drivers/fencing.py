# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""Tests of drivers whose hosts fence themselves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from moorage.clock import SystemClock
from moorage.drivers.interface import (
    Console,
    DriverError,
    PowerControl,
    SelfFencing,
    UsageReport,
    WorkloadState,
)
from moorage.testing.drivers.base import HOST, LONG, SHORT, SOON, DriverTestBase, new_uuid

__all__ = ["SelfFencingTests"]


class SelfFencingTests(DriverTestBase):
    """Ends and renews the lease of a host: its workloads end with the lease, and not before."""

    def _fencing(self, epoch: int = 1, seconds: float = LONG) -> Any:
        """Makes a driver whose workloads end with the lease of the host, and takes a lease for so many seconds."""
        self.skip_without(self.driver(), SelfFencing)
        driver = self.driver(self_fence=True)
        driver.renew(epoch, self._until(seconds))
        return driver

    def _until(self, seconds: float) -> float:
        return SystemClock().boottime() + seconds

    def _await_end(self, uuid: str, until: float) -> None:
        """Waits until no copy of an instance runs, and checks that this is not before the end of the lease."""
        end = time.monotonic() + SOON
        while copies := self.copies(HOST, uuid):
            self.assertLess(time.monotonic(), end, f"the lease is over, and {copies} run")
            time.sleep(0.02)
        self.assertGreaterEqual(SystemClock().boottime(), until, "it ended before the lease")

    def _await_seen_end(self, uuid: str, token: int) -> None:
        """Waits until a new driver reports that an instance does not run, which may be a moment after its last process ended."""
        end = time.monotonic() + SOON
        while (seen := self.driver(self_fence=True).inspect()[uuid]).state is WorkloadState.RUNNING:
            self.assertLess(time.monotonic(), end, f"nothing runs, and the driver sees {seen}")
            time.sleep(0.02)
        self.assertEqual(token, seen.token)

    def test_workloads_go_on_without_a_lease_where_self_fencing_is_off(self) -> None:
        driver, uuid, other = self.driver(), new_uuid(), new_uuid()
        self.skip_without(driver, SelfFencing)
        self.assertEqual(0, driver.self_fence, "it is off unless it is asked for")
        self.assertGreater(self.driver(self_fence=True).self_fence, 0)
        driver.spawn(self.workload(uuid), 3)
        copy = self.assert_runs(driver, uuid, 3)
        driver.renew(1, self._until(-1.0))
        driver.spawn(self.workload(other), 3)
        self.assert_runs(driver, other, 3)
        self.assertEqual(copy, self.assert_runs(driver, uuid, 3))

    def test_a_workload_ends_with_the_lease_although_no_agent_does_anything(self) -> None:
        driver, uuid = self._fencing(), new_uuid()
        driver.spawn(self.workload(uuid), 3)
        self.assert_runs(driver, uuid, 3)
        # Sooner than was said before.
        until = self._until(SHORT)
        driver.renew(1, until)
        del driver
        self._await_end(uuid, until)
        self._await_seen_end(uuid, 3)

    def test_a_workload_runs_as_long_as_its_lease_is_renewed(self) -> None:
        driver = self._fencing()
        self._assert_goes_on(driver, lambda epoch: driver.renew(epoch, self._until(LONG)))

    def _assert_goes_on(self, driver: Any, change: Callable[[int], object]) -> None:
        """Checks that a workload survives the end of a lease if an agent with a higher epoch changed the lease before."""
        uuid = new_uuid()
        for attempt in range(4):
            epoch, token = 2 * attempt + 1, attempt + 1
            until = self._until(SHORT * 4**attempt)
            driver.renew(epoch, until)
            with contextlib.suppress(DriverError):
                driver.spawn(self.workload(uuid), token)
            copies = list(self.copies(HOST, uuid))
            change(epoch + 1)
            # Too late on a machine that has much else to do: then it may end.
            if SystemClock().boottime() < until:
                break
        else:
            self.fail(f"no lease of {SHORT * 4**attempt:g} seconds could be changed before its end")
        self.assertEqual(1, len(copies))
        while SystemClock().boottime() < until + SHORT:
            self.assertEqual(copies, list(self.copies(HOST, uuid)))
            time.sleep(0.1)

    def test_nothing_is_started_when_the_lease_is_over(self) -> None:
        driver, uuid = self._fencing(seconds=0.0), new_uuid()
        with self.assertRaises(DriverError):
            driver.spawn(self.workload(uuid), 3)
        self.assertEqual([], list(self.copies(HOST, uuid)))
        driver.destroy(uuid, 3)
        driver.renew(1, self._until(LONG))
        driver.spawn(self.workload(uuid), 4)
        self.assert_runs(driver, uuid, 4)
        self.skip_without(driver, PowerControl)
        driver.stop(uuid, 4, 5)
        driver.renew(1, self._until(0.0))
        with self.assertRaises(DriverError):
            driver.start(uuid, 4, 6)
        self.assertEqual([], list(self.copies(HOST, uuid)))
        driver.renew(1, self._until(LONG))
        driver.start(uuid, 4, 7)
        self.assert_runs(driver, uuid, 4)

    def test_an_agent_of_a_lower_epoch_changes_no_lease(self) -> None:
        late, uuid = self._fencing(epoch=4), new_uuid()
        driver = self._fencing(epoch=5)
        driver.spawn(self.workload(uuid), 3)
        with self.assertRaises(DriverError):
            late.renew(4, self._until(0.0))
        self.assert_runs(driver, uuid, 3)
        # This one counts, and comes after it.
        until = self._until(SHORT)
        driver.renew(5, until)
        with self.assertRaises(DriverError):
            late.renew(4, self._until(LONG))
        self._await_end(uuid, until)

    def test_a_renewal_that_was_killed_leaves_the_lease_that_was_or_that_is_to_be(self) -> None:
        self.skip_without(self.driver(), SelfFencing)
        for uuid in self.interrupted(
            lambda uuid: self._fencing().spawn(self.workload(uuid), 3),
            lambda driver, uuid: self.driver(self_fence=True).renew(1, self._until(LONG)),
        ):
            driver = self.driver(self_fence=True)
            self.assert_runs(driver, uuid, 3)
            until = self._until(0.0)
            driver.renew(1, until)
            self._await_end(uuid, until)
            driver.destroy(uuid, 3)

    def test_workloads_that_would_not_end_are_named(self) -> None:
        before, uuid, other = self.driver(), new_uuid(), new_uuid()
        self.skip_without(before, SelfFencing)
        before.spawn(self.workload(uuid), 3)
        driver = self._fencing()
        driver.spawn(self.workload(other), 3)
        for each in (driver, self.driver(self_fence=True)):
            self.assertEqual({uuid}, set(each.not_fenced()))
        # From here on it is one that was started under a lease.
        driver.spawn(self.workload(uuid), 4)
        self.assertEqual(set(), set(driver.not_fenced()))
        until = self._until(0.0)
        driver.renew(1, until)
        for each in (uuid, other):
            self._await_end(each, until)

    def test_self_fencing_that_is_turned_off_ends_nothing_any_more(self) -> None:
        driver, off = self._fencing(), self.driver()
        self._assert_goes_on(driver, lambda epoch: off.renew(epoch, self._until(0.0)))

    def test_a_console_says_few_lines_at_most(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        self.skip_without(driver, Console)
        driver.spawn(self.workload(uuid), 3)
        self.assertLessEqual(len(driver.console(uuid, 2).splitlines()), 2)

    def test_usage_is_of_what_runs(self) -> None:
        driver, uuid = self.driver(), new_uuid()
        self.skip_without(driver, UsageReport)
        driver.spawn(self.workload(uuid), 3)
        for found, usage in driver.usage().items():
            self.assertEqual(uuid, found)
            self.assertGreaterEqual(usage.cpu_seconds, 0.0)
            self.assertGreater(usage.memory_bytes, 0)
