# SPDX-License-Identifier: Apache-2.0
"""The simulated hypervisor."""

from __future__ import annotations

import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moorage.testing.clock import ManualClock
from moorage_plugins.compute.driver import DriverError, SimulatedDriver


class DriverTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name) / "hypervisor"
        self.clock = ManualClock()
        self.driver = self.make()

    def make(self, fail_builds: str = "") -> SimulatedDriver:
        return SimulatedDriver(self.folder, self.clock, build_delay=1.5, destroy_delay=0.5, fail_builds=fail_builds)

    def test_what_runs_survives_the_process(self) -> None:
        self.driver.build("a", 1, {})
        self.driver.build("b", 2, {})
        self.driver.destroy("b")
        self.driver.destroy("never built")
        self.assertEqual(self.make().running(), {"a": 1})

    def test_the_newest_token_is_the_instance_whoever_comes_last(self) -> None:
        for tokens in ((1, 2), (2, 1)):
            for token in tokens:
                self.driver.build("a", token, {})
            self.assertEqual([path.name for path in (self.folder / "a").iterdir()], ["2"])
            self.driver.destroy("a")

    def test_a_try_is_discarded_alone(self) -> None:
        self.driver.build("a", 2, {})
        self.driver.discard("a", 1)
        self.assertEqual(self.driver.running(), {"a": 2})
        self.driver.discard("a", 2)
        self.assertEqual((self.driver.running(), list(self.folder.iterdir())), ({}, []))

    def test_delays_are_those_of_the_flavor_else_of_the_configuration(self) -> None:
        self.driver.build("a", 1, {})
        self.driver.build("b", 1, {"sim:delay_ms": "250"})
        self.driver.destroy("a")
        self.assertEqual(self.clock.slept, [1.5, 0.25, 0.5])

    def test_failures_are_those_of_the_flavor_else_of_the_configuration(self) -> None:
        for driver, specs, text in (
            (self.driver, {"sim:fail": "no image"}, "no image"),
            (self.make("all fail"), {}, "all fail"),
            (self.make("all fail"), {"sim:fail": "no image"}, "no image"),
        ):
            with self.assertRaisesRegex(DriverError, text):
                driver.build("a", 1, specs)
        self.assertEqual(self.driver.running(), {})

    def test_a_delay_that_is_none_is_refused_with_the_value(self) -> None:
        for text in ("soon", "-1", "nan", "inf", "1e12", ""):
            with self.subTest(text), self.assertRaisesRegex(DriverError, f"sim:delay_ms of the flavor is '{text}'"):
                self.driver.build("a", 1, {"sim:delay_ms": text})

    def test_a_folder_that_fails_is_a_fault_of_the_driver(self) -> None:
        self.driver.build("a", 1, {})
        (self.folder / "b").touch()  # where a folder should be
        with self.assertRaisesRegex(DriverError, "hypervisor's folder"):
            self.driver.build("b", 1, {})

    def test_builds_and_destructions_of_one_instance_may_cross(self) -> None:
        with ThreadPoolExecutor(4) as pool:
            for token in range(200):
                pool.submit(self.driver.build, "a", token, {})
                pool.submit(self.driver.destroy, "a")
        self.driver.build("a", 1000, {})
        self.assertEqual(self.driver.running(), {"a": 1000})
