# SPDX-License-Identifier: Apache-2.0
"""What is special about the simulated driver; the kit of drivers pins the rest."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from oslo_config import cfg

from moorage.drivers.interface import DriverError, DriverTools, Workload
from moorage.testing.clock import ManualClock
from moorage_plugins.compute import options
from moorage_plugins.drivers import simulated
from moorage_plugins.drivers.simulated import SimulatedDriver
from tests import hypervisors


def flavor(uuid: str, extra_specs: dict[str, str] | None = None, operation: str = "build") -> Workload:
    return Workload(uuid=uuid, extra_specs=extra_specs or {}, operation=operation)


class Killed(BaseException):
    """The process ends here."""


class DriverTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.state_dir = folder.name
        self.folder = Path(folder.name) / "hypervisors" / "host-1"
        self.clock = ManualClock()
        self.driver = self.make()

    def make(self, fail_builds: str = "") -> SimulatedDriver:
        conf = cfg.ConfigOpts()
        conf.register_opts([cfg.StrOpt("state_dir", default=self.state_dir)], group="control_plane")
        options.register_opts(conf)
        conf([], project="moorage", default_config_files=[])
        for name, value in (("build_delay", 1.5), ("destroy_delay", 0.5), ("fail_builds", fail_builds)):
            conf.set_override(name, value, group="compute")
        return SimulatedDriver(DriverTools(conf, self.clock, "host-1"))

    def test_what_is_replaced_or_destroyed_leaves_no_file(self) -> None:
        for uuid, tokens in (("a", (1, 2)), ("b", (2, 1))):
            for token in tokens:
                self.driver.spawn(flavor(uuid), token)
            self.assertEqual([(uuid, 2)], [(each.uuid, each.token) for each in hypervisors.found(self.state_dir)])
            self.driver.destroy(uuid, 2)
            self.assertEqual([], list(self.folder.iterdir()))

    def test_other_calls_go_on_while_workloads_are_read(self) -> None:
        for uuid in ("a", "b", "c"):
            self.driver.spawn(flavor(uuid), 1)
        read = simulated._read
        begun: list[str] = []

        def read_late(path: str) -> Any:
            """Another agent changes the host between the names and the first workload."""
            if not begun:
                begun.append(path)
                folder = os.open(self.folder, os.O_RDONLY)
                self.addCleanup(os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(folder, fcntl.LOCK_UN)
                self.driver.stop("b", 1, 1)
                self.driver.destroy("c", 1)
                self.driver.spawn(flavor("d"), 1)
            return read(path)

        with mock.patch.object(simulated, "_read", side_effect=read_late):
            found = self.make().inspect()
        self.assertEqual({"a": "running", "b": "stopped"}, {uuid: each.state.value for uuid, each in found.items()})

    def test_delays_are_those_of_the_flavor_else_of_the_configuration(self) -> None:
        self.driver.spawn(flavor("a"), 1)
        self.driver.spawn(flavor("b", {"sim:delay_ms": "250"}), 1)
        self.driver.spawn(flavor("b", {"sim:resize_delay_ms": "125"}, "resize"), 2)
        self.driver.check(flavor("b", {"sim:shelve_offload_delay_ms": "100"}, "shelve_offload"))
        self.driver.destroy("a", 1)
        self.assertEqual(self.clock.slept, [1.5, 0.25, 0.125, 0.1, 0.5])

    def test_failures_are_those_of_the_flavor_else_of_the_configuration(self) -> None:
        for driver, specs, text in (
            (self.driver, {"sim:fail": "no image"}, "no image"),
            (self.make("all fail"), {}, "all fail"),
            (self.make("all fail"), {"sim:fail": "no image"}, "no image"),
        ):
            with self.assertRaisesRegex(DriverError, text):
                driver.spawn(flavor("a", specs), 1)
        with self.assertRaisesRegex(DriverError, "stay"):
            self.driver.check(flavor("a", {"sim:shelve_offload_fail": "stay"}, "shelve_offload"))
        self.assertEqual(self.driver.inspect(), {})

    def test_a_delay_that_is_none_is_refused_with_the_value(self) -> None:
        for text in ("soon", "-1", "nan", "inf", "1e12", ""):
            with self.subTest(text), self.assertRaisesRegex(DriverError, f"sim:delay_ms of the flavor is '{text}'"):
                self.driver.spawn(flavor("a", {"sim:delay_ms": text}), 1)

    def test_a_folder_that_fails_is_a_fault_of_the_driver(self) -> None:
        self.driver.spawn(flavor("a"), 1)
        (self.folder / "b").touch()  # where a link should be
        (self.folder / "c").symlink_to("nonsense")
        for uuid in ("b", "c"):
            with self.assertRaisesRegex(DriverError, "hypervisor's folder"):
                self.driver.spawn(flavor(uuid), 1)

    def test_what_an_earlier_release_left_is_converted_also_after_a_kill_at_any_step(self) -> None:
        left = {"a": {"1": "stopped 00000000000000000007 0123\n"}, "b": {"1": "", "3": ""}, "c": {".2": ""}}
        wanted = {"a": (1, "stopped", "0123"), "b": (3, "running", "-")}
        for steps in range(20):
            with self.subTest(steps=steps):
                shutil.rmtree(self.folder)
                for uuid, files in left.items():
                    (self.folder / uuid).mkdir(parents=True)
                    for name, text in files.items():
                        (self.folder / uuid / name).write_text(text)
                self.convert_and_kill(steps)
                self.make()
                found = {each.uuid: each[2:] for each in hypervisors.found(self.state_dir)}
                self.assertEqual(wanted, found)
                self.assertEqual(sorted(wanted), sorted(each.name for each in self.folder.iterdir()))
        self.make().stop("a", 1, 6)
        self.assertEqual("stopped", hypervisors.found(self.state_dir, uuid="a")[0].state)

    def convert_and_kill(self, steps: int) -> None:
        """Convert, up to this change of the folder."""
        left = iter(range(steps))

        def counted(change: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if next(left, None) is None:
                    raise Killed
                return change(*arguments, **options)

            return call

        with contextlib.ExitStack() as patched:
            for name in ("rename", "symlink", "unlink", "rmdir"):
                patched.enter_context(mock.patch.object(os, name, counted(getattr(os, name))))
            patched.enter_context(contextlib.suppress(Killed))
            self.make()
