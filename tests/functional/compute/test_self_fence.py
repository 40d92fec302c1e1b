# SPDX-License-Identifier: Apache-2.0
"""Guardians of the process driver that end their workloads when the lease of the host is over."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from unittest import mock

from moorage.drivers.interface import DriverError, SelfFencing, WorkloadState
from moorage.testing.clock import ManualClock
from moorage_plugins.drivers.guarded import lease
from moorage_plugins.drivers.guarded.guardian import Guardian
from moorage_plugins.drivers.process import ProcessDriver
from tests.functional.compute import test_process
from tests.functional.compute.guarded import LOGGER, SOON
from tests.functional.compute.sandboxes import guardians_of
from tests.servers import wait_until

HOUR = 3600.0


class SelfFenceTests(test_process.ProcessCase):
    def fencing(self, epoch: int = 1, seconds: float = HOUR) -> ProcessDriver:
        """A driver of a host that fences itself, with a lease for so many seconds from now on."""
        driver = self.driver(self_fence=HOUR)
        self.renew(driver, epoch, seconds)
        return driver

    def renew(self, driver: ProcessDriver, epoch: int = 1, seconds: float = HOUR) -> None:
        driver.renew(epoch, driver._clock.boottime() + seconds)

    def test_a_workload_ends_with_the_lease_and_not_before(self) -> None:
        driver = self.fencing()
        self.assertIsInstance(driver, SelfFencing)
        self.spawn("sleep", "100000", driver=driver)
        self.assertEqual(set(), driver.not_fenced())
        (pid,) = self.pids()
        # Shorter than before: guardians see that too.
        self.renew(driver, seconds=2.5)
        until = lease.lease_until(self.state_dir / "processes/host-1")
        assert until is not None
        seen = self.ended()
        self.assertGreaterEqual(driver._clock.boottime(), until)
        self.assertEqual(WorkloadState.FAILED, seen.state)
        self.assertIn("the host fenced itself", seen.detail)
        self.assertEqual([], self.pids())
        # The agent is back, and the restart policy has it start again.
        self.renew(driver)
        driver.start(self.uuid, 1, 2)
        (again,) = self.pids()
        self.assertNotEqual(pid, again)

    def test_nothing_starts_without_a_lease(self) -> None:
        driver = self.fencing(seconds=0.0)
        with self.assertRaisesRegex(DriverError, "The lease of its host was over"):
            self.spawn("sleep", "100000", driver=driver)
        self.assertEqual(([], {}), (self.pids(), driver.inspect()))
        self.renew(driver)
        self.spawn("sleep", "100000", driver=driver)
        self.assertEqual(1, len(self.pids()))

    def test_a_lease_from_before_the_machine_started_again_is_over(self) -> None:
        with mock.patch.object(lease, "_BOOT_ID", Path(__file__)), mock.patch.object(lease, "_boot_id", lambda: "old"):
            driver = self.fencing()
        with self.assertRaisesRegex(DriverError, "The lease of its host was over"):
            self.spawn("sleep", "100000", driver=driver)

    def test_what_an_earlier_agent_says_late_has_no_effect(self) -> None:
        early, late = self.fencing(epoch=4), self.fencing(epoch=5)
        with self.assertLogs(LOGGER, "ERROR"), self.assertRaisesRegex(DriverError, "later epoch"):
            self.renew(early, 4, 0.0)
        # One that has looked before, and writes now.
        held = self.state_dir / "processes/host-1/lease"
        (held / "4.json").write_text('{"boot": "?", "until": 0}')
        self.spawn("sleep", "100000", driver=late)
        self.renew(late, 5)
        self.assertEqual(["5.json"], os.listdir(held))
        self.assertEqual(1, len(self.pids()))

    def test_workloads_from_before_the_lease_are_named_until_they_were_started_again(self) -> None:
        self.spawn("sleep", "100000")
        driver = self.fencing()
        self.assertEqual({self.uuid}, driver.not_fenced())
        driver.reboot(self.uuid, 1, 2)
        self.assertEqual(set(), driver.not_fenced())
        # The end of a lease that is turned off ends nothing.
        off = self.driver()
        self.renew(off, 2, 0.0)
        self.assertEqual(lease.NEVER, lease.lease_until(self.state_dir / "processes/host-1"))
        (pid,) = self.pids()
        again = self.fencing(epoch=3)
        self.assertEqual((set(), [pid]), (again.not_fenced(), self.pids()))
        self.renew(again, 3, 0.0)
        self.ended()

    def test_a_guardian_that_begins_when_the_lease_begins_is_seen(self) -> None:
        """Its workload has the lock and has not been seen running."""
        self.spawn("sleep", "100000")
        (guardian,) = guardians_of(self.uuid)
        os.kill(guardian, signal.SIGSTOP)
        self.addCleanup(os.kill, guardian, signal.SIGCONT)
        (self.state_dir / "processes/host-1" / self.uuid / "1/state.json").unlink()
        self.assertEqual({self.uuid}, self.fencing().not_fenced())


class LeaseTests(test_process.ProcessCase):
    def test_a_store_that_was_restored_from_a_copy_ends_no_workload(self) -> None:
        driver = self.driver(self_fence=HOUR)
        driver.renew(6, driver._clock.boottime() + HOUR)
        self.spawn("sleep", "100000", driver=driver)
        pids = self.pids()
        held = self.state_dir / "processes/host-1/lease"
        for again in (driver, self.driver()):
            with (
                self.assertLogs(LOGGER, "ERROR") as logs,
                self.assertRaisesRegex(DriverError, "later epoch.*rename the file 6.json .* to 0.json"),
            ):
                again.renew(4, driver._clock.boottime() + HOUR)
            self.assertIn(str(held), logs.output[0])
        (held / "6.json").rename(held / "0.json")
        driver.renew(4, driver._clock.boottime() + HOUR)
        self.assertEqual((["4.json"], pids), (os.listdir(held), self.pids()))

    def test_agents_that_turn_the_lease_off_agree_whatever_their_epochs(self) -> None:
        self.driver(self_fence=HOUR).renew(5, HOUR)
        self.drv.renew(6, 0.0)
        self.drv.renew(4, 0.0)
        self.assertEqual(lease.NEVER, lease.lease_until(self.state_dir / "processes/host-1"))

    def test_a_full_disk_does_not_end_a_lease(self) -> None:
        driver = self.driver(self_fence=HOUR)
        driver.renew(1, HOUR)
        full = OSError(errno.ENOSPC, "No space left on device")
        with mock.patch.object(lease, "write_json", side_effect=full):
            for until in (sys.float_info.max, 0.1, lease.NEVER, 12.5):
                lease.keep_lease(self.state_dir / "processes/host-1", 1, until)
                self.assertEqual(until, lease.lease_until(self.state_dir / "processes/host-1"))
            # Of another epoch there is no file to overwrite.
            with self.assertRaisesRegex(DriverError, "No space left"), self.assertLogs(LOGGER, "ERROR"):
                driver.renew(2, HOUR)

    def test_a_guardian_that_cannot_read_the_lease_keeps_the_one_that_it_knows(self) -> None:
        driver, clock = self.driver(self_fence=HOUR), ManualClock(100.0)
        driver.renew(1, 130.0)
        host = self.state_dir / "processes/host-1"
        guardian = Guardian(host / self.uuid / "1", clock, again=None)
        guardian._until = guardian._lease()
        guardian._look_at = 0.0
        half_written = (host / "lease/1.json").read_text().replace("1.3", "9.3", 1)
        for number in (errno.ENFILE, errno.EMFILE, errno.EIO):
            with mock.patch.object(os, "listdir", side_effect=OSError(number, "not now")):
                guardian._check_lease()
            self.assertEqual((False, 101.0), (guardian._fenced, guardian._look_at))
        (host / "lease/1.json").write_text(half_written)
        clock.advance(29.0)
        guardian._check_lease()
        self.assertEqual((False, 130.0), (guardian._fenced, guardian._look_at))
        clock.advance(1.0)
        guardian._check_lease()
        self.assertTrue(guardian._fenced)

    def test_a_damaged_or_removed_lease_is_over_for_those_who_look_at_it(self) -> None:
        driver = self.driver(self_fence=HOUR)
        driver.renew(1, sys.float_info.max)
        self.spawn("sleep", "100000", driver=driver)
        (self.state_dir / "processes/host-1/lease/1.json").write_text("{")
        self.assertIn("the host fenced itself", self.ended().detail)
        driver.renew(1, sys.float_info.max)
        driver.start(self.uuid, 1, 2)
        (self.state_dir / "processes/host-1/lease/1.json").unlink()
        wait_until(lambda: not self.pids(), "the end of the workload", SOON)

    def test_a_driver_without_lease_keeps_no_file(self) -> None:
        self.drv.renew(1, 0.0)
        self.assertFalse((self.state_dir / "processes/host-1/lease").exists())
        self.assertEqual({}, self.drv.inspect())
