# SPDX-License-Identifier: Apache-2.0
"""What the agent makes of heartbeats for a driver whose host fences itself."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from moorage import errors
from moorage.drivers.interface import DriverError
from moorage.services.heartbeat import HostLease
from moorage.testing.clock import ManualClock
from moorage_plugins.compute import self_fence
from moorage_plugins.compute.self_fence import SelfFence
from tests.servers import wait_until

SOON = 60.0


class _Driver:
    """A driver that keeps the renewals that it gets."""

    def __init__(self, seconds: float) -> None:
        self.self_fence = seconds
        self.renewals: list[tuple[int, float]] = []
        self.left: set[str] = set()
        self.error: Exception | None = None

    def renew(self, epoch: int, until: float) -> None:
        if self.error is not None:
            raise self.error
        self.renewals.append((epoch, until))

    def not_fenced(self) -> set[str]:
        return set(self.left)


class SelfFenceTests(unittest.TestCase):
    def setUp(self) -> None:
        self.clock = ManualClock(1000.0)
        self.leases: list[HostLease] = []

    def made(
        self, driver: _Driver, interval: float = 0.05, renew: Callable[[HostLease], None] | None = None
    ) -> SelfFence:
        conf = SimpleNamespace(services=SimpleNamespace(report_interval=interval))
        identity = SimpleNamespace(host="h1", epoch=7)
        tools: Any = SimpleNamespace(conf=conf, clock=self.clock, identity=identity, renew=renew or self.leases.append)
        made = SelfFence(tools, driver)
        self.addCleanup(made.ended)
        return made

    def test_workloads_end_a_margin_before_the_lease_that_is_promised(self) -> None:
        driver = _Driver(60.0)
        made = self.made(driver)
        made.start()
        self.assertEqual(([(7, 1054.0)], [made]), (driver.renewals, self.leases))
        wait_until(lambda: made.promised() == 60.0, "the promise", SOON)
        made.renewed(2000.0)
        wait_until(lambda: driver.renewals[-1] == (7, 2054.0), "the renewal", SOON)

    def test_nothing_is_promised_while_a_workload_would_go_on(self) -> None:
        driver = _Driver(60.0)
        driver.left = {"an instance"}
        made = self.made(driver)
        with self.assertLogs(self_fence.LOG.logger, "WARNING") as logs:
            made.start()
            made.renewed(1001.0)
            wait_until(lambda: driver.renewals[-1] == (7, 1055.0), "the renewal", SOON)
            wait_until(lambda: bool(logs.output), "the warning", SOON)
        self.assertIn("started without self_fence: an instance. Reboot or rebuild", logs.output[0])
        self.assertIsNone(made.promised())
        driver.left = set()
        wait_until(lambda: made.promised() == 60.0, "the promise", SOON)

    def test_a_lease_that_cannot_be_kept_is_tried_again(self) -> None:
        driver = _Driver(60.0)
        made = self.made(driver)
        made.start()
        driver.error = DriverError("the disk is full")
        with self.assertLogs(self_fence.LOG.logger, "WARNING") as logs:
            made.renewed(1010.0)
            wait_until(lambda: "the disk is full" in "".join(logs.output), "the warning", SOON)
        driver.error = None
        wait_until(lambda: driver.renewals[-1] == (7, 1064.0), "the renewal", SOON)

    def test_a_fault_of_the_driver_does_not_end_the_renewals(self) -> None:
        driver = _Driver(60.0)
        made = self.made(driver)
        made.start()
        driver.error = ValueError("no number")
        with self.assertLogs(self_fence.LOG.logger, "ERROR") as logs:
            made.renewed(1010.0)
            wait_until(lambda: "no number" in "".join(logs.output), "the error", SOON)
        driver.error = None
        made.renewed(1020.0)
        wait_until(lambda: driver.renewals[-1] == (7, 1074.0), "the renewal", SOON)

    def test_an_agent_whose_driver_cannot_begin_the_lease_does_not_start(self) -> None:
        driver = _Driver(60.0)
        driver.error = DriverError("an agent of a later epoch has the lease")
        made = self.made(driver)
        with self.assertRaisesRegex(errors.Unavailable, "host h1 cannot be begun: an agent of a later epoch"):
            made.start()
        self.assertIsNone(made.promised())

    def test_the_first_lease_counts_from_the_last_heartbeat_that_was_confirmed(self) -> None:
        driver = _Driver(60.0)
        made = self.made(driver, renew=lambda lease: lease.renewed(990.0))
        made.start()
        self.assertEqual((7, 1044.0), driver.renewals[0])

    def test_a_lease_that_a_restart_may_outlast_is_warned_of(self) -> None:
        with self.assertLogs(self_fence.LOG.logger, "WARNING") as logs:
            self.made(_Driver(30.0)).start()
        self.assertIn("end 27 seconds after the last heartbeat of its agent. A restart", logs.output[0])

    def test_an_option_that_is_off_promises_nothing_and_has_workloads_go_on(self) -> None:
        driver = _Driver(0.0)
        made = self.made(driver, 10.0)
        made.start()
        self.assertEqual((1, [], None), (len(driver.renewals), self.leases, made.promised()))

    def test_a_lease_of_few_heartbeats_is_refused(self) -> None:
        with self.assertRaisesRegex(errors.ConfigError, "self_fence = 29 .* 3 times .*report_interval = 10"):
            self.made(_Driver(29.0), 10.0)
