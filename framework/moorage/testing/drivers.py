# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""The conformance kit of compute drivers.

Mix it into a ``unittest.TestCase`` and say how the driver is made, and how a test sees from outside what really runs::

    class MyDriverTests(ComputeDriverTests, unittest.TestCase):
        def make_driver(self, tools):
            return MyDriver(tools)

        def list_opts(self):
            return my_package.options.list_opts()

        def copies(self, host, uuid):                 # asks the hypervisor, not the driver
            return [each.id for each in my_hypervisor.domains(host) if each.name == uuid]

Tests kill the driver at its steps: a forked process does the call, and ends without any cleaning up before one of the lines of the
driver's package. Then a new driver goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import unittest
import uuid as uuid_module
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

from oslo_config import cfg

from moorage.clock import SystemClock
from moorage.drivers.interface import (
    ComputeDriver,
    Console,
    DriverTools,
    HostResources,
    Observed,
    PowerControl,
    UsageReport,
    Workload,
    WorkloadState,
)

__all__ = ["ComputeDriverTests"]

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object

#: Seconds within which what must happen happens, on a machine that has much else to do.
_SOON = 60.0
_HOST = "host-1"
#: Names that users may choose.
_NAMES = ("web-1", "", "two\nlines", "Grüße ☃", 'quote " and \\ and %s {0} $(true) `true`', "--help", "x" * 255)


class ComputeDriverTests(_Base):
    """What every compute driver must hold to."""

    #: At so many steps of a call, spread evenly over its lines, the driver is killed.
    kills: ClassVar[int] = 40

    # -- what a subclass gives ------------------------------------------------------------------------------------

    def make_driver(self, tools: DriverTools) -> ComputeDriver:
        """A new driver, as an agent that starts has it. What an earlier one of the same host and folder made is still there."""
        raise NotImplementedError

    def copies(self, host: str, uuid: str) -> Sequence[object]:
        """What really runs of an instance on a host, seen without the driver: something that tells one run from another."""
        raise NotImplementedError

    def list_opts(self) -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
        """The options that it reads, as its distribution registers them."""
        return ()

    def configure(self, conf: cfg.ConfigOpts) -> None:
        """Set what the test needs."""

    def workload(self, uuid: str) -> Workload:
        """One that runs until it is destroyed."""
        return Workload(uuid=uuid, name="web-1", project_id="red", resources={"VCPU": 1, "MEMORY_MB": 64})

    # -- helpers --------------------------------------------------------------------------------------------------

    def state_dir(self) -> Path:
        """The state folder of this test. What still runs when the test ends is destroyed."""
        found: Path | None = getattr(self, "_state_dir", None)
        if found is None:
            found = self._state_dir = Path(tempfile.mkdtemp(prefix="moorage-driver-"))
            self._hosts: set[str] = set()
            self.addCleanup(shutil.rmtree, found, ignore_errors=True)
            self.addCleanup(self._destroy_all)
        return found

    def driver(self, host: str = _HOST) -> Any:
        """A new :class:`ComputeDriver` of a host, with its further powers."""
        state_dir = str(self.state_dir())
        conf = cfg.ConfigOpts()
        conf.register_opts([cfg.StrOpt("state_dir")], group="control_plane")
        for group, options in self.list_opts():
            conf.register_opts(options, group=group)
        conf([], project="moorage", default_config_files=[], default_config_dirs=[])
        conf.set_override("state_dir", state_dir, group="control_plane")
        self.configure(conf)
        self._hosts.add(host)
        return self.make_driver(DriverTools(conf, SystemClock(), host))

    def _skip_without(self, driver: object, power: Any) -> None:
        if not isinstance(driver, power):
            self.skipTest(f"the driver has no {power.__name__}")

    def _destroy_all(self) -> None:
        for host in sorted(self._hosts):
            driver = self.driver(host)
            for uuid, seen in driver.inspect().items():
                driver.destroy(uuid, seen.token)

    def await_state(self, driver: ComputeDriver, uuid: str, state: WorkloadState) -> Observed:
        """Waits until the driver sees the workload in this state."""
        end = time.monotonic() + _SOON
        while True:
            seen = driver.inspect().get(uuid)
            if seen is not None and seen.state is state:
                return seen
            self.assertLess(time.monotonic(), end, f"{uuid} is {seen}, not {state}")
            time.sleep(0.02)

    def assert_runs(self, driver: ComputeDriver, uuid: str, token: int) -> object:
        """Checks that exactly one copy runs, under this token; the copy."""
        seen = driver.inspect()[uuid]
        self.assertEqual((token, WorkloadState.RUNNING), (seen.token, seen.state), seen)
        copies = self.copies(_HOST, uuid)
        self.assertEqual(1, len(copies), copies)
        return copies[0]

    def assert_gone(self, driver: ComputeDriver, uuid: str) -> None:
        """Checks that nothing is left of an instance."""
        self.assertNotIn(uuid, driver.inspect())
        self.assertEqual([], list(self.copies(_HOST, uuid)))

    def interrupted(
        self, prepare: Callable[[str], object], call: Callable[[ComputeDriver, str], object]
    ) -> Iterator[str]:
        """Kills the driver at one step after the other of a call; yields an instance's uuid after each kill.

        :param prepare: makes what there is before the call, with a driver that lives.
        """
        uuid = _uuid()
        prepare(uuid)
        steps = self._killed_at(0, lambda: call(self.driver(), uuid))
        self.assertGreater(steps, 0, "no line of the driver's package was run")
        for step in sorted({1 + number * steps // self.kills for number in range(self.kills)}):
            uuid = _uuid()
            prepare(uuid)
            with self.subTest(killed_before_line=step, of=steps):
                self._killed_at(step, lambda uuid=uuid: call(self.driver(), uuid))  # type: ignore[misc]
                self.assertLessEqual(len(self.copies(_HOST, uuid)), 1)
                yield uuid

    def _killed_at(self, step: int, call: Callable[[], object]) -> int:
        """Calls in a forked process that kills itself before a line of the driver's package; 0: never. How many lines ran."""
        folder = os.path.dirname(str(sys.modules[type(self.driver()).__module__].__file__)) + os.sep
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                tracer = _Tracer(folder, step)
                sys.settrace(tracer)
                call()
                sys.settrace(None)
                os.write(writer, str(tracer.lines).encode())
                code = 0
            os._exit(code)
        os.close(writer)
        # Not read until its end: a workload that goes on may hold the other end.
        status = os.waitpid(child, 0)[1]
        os.set_blocking(reader, False)
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = os.read(reader, 100)
        os.close(reader)
        if step and os.WIFSIGNALED(status):
            self.assertEqual(signal.SIGKILL, os.WTERMSIG(status))
            return step
        self.assertEqual(0, status, "the call raised an error")
        return int(said)

    # -- one after the other --------------------------------------------------------------------------------------

    def test_a_workload_runs_until_it_is_destroyed(self) -> None:
        driver, uuid = self.driver(), _uuid()
        driver.spawn(self.workload(uuid), 3)
        self.assert_runs(driver, uuid, 3)
        driver.destroy(uuid, 3)
        self.assert_gone(driver, uuid)

    def test_what_is_seen_is_what_the_interface_says(self) -> None:
        driver, uuid = self.driver(), _uuid()
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
        """Agents enrol their host with the answer at each start: what runs, and a new driver, must not change it."""
        driver, uuid = self.driver(), _uuid()
        before = driver.resources()
        driver.spawn(self.workload(uuid), 3)
        for each in (driver, self.driver()):
            self.assertEqual(before, each.resources())

    def test_any_name_will_do(self) -> None:
        driver = self.driver()
        for name in _NAMES:
            with self.subTest(name=name):
                uuid = _uuid()
                driver.spawn(dataclasses.replace(self.workload(uuid), name=name), 1)
                self.assert_runs(driver, uuid, 1)
                driver.destroy(uuid, 1)

    def test_repeated_with_its_token_it_changes_nothing(self) -> None:
        driver, uuid = self.driver(), _uuid()
        driver.spawn(self.workload(uuid), 3)
        copy = self.assert_runs(driver, uuid, 3)
        for again in (driver, self.driver()):
            again.spawn(self.workload(uuid), 3)
            self.assertEqual(copy, self.assert_runs(again, uuid, 3))

    def test_a_newer_token_replaces_an_older_one(self) -> None:
        driver, uuid = self.driver(), _uuid()
        driver.spawn(self.workload(uuid), 3)
        before = self.assert_runs(driver, uuid, 3)
        driver.spawn(self.workload(uuid), 5)
        self.assertNotEqual(before, self.assert_runs(driver, uuid, 5))

    def test_an_older_token_changes_nothing(self) -> None:
        driver, uuid = self.driver(), _uuid()
        driver.spawn(self.workload(uuid), 5)
        copy = self.assert_runs(driver, uuid, 5)
        driver.spawn(self.workload(uuid), 3)
        self.assertEqual(copy, self.assert_runs(driver, uuid, 5))

    def test_a_destruction_leaves_what_is_newer(self) -> None:
        driver, uuid = self.driver(), _uuid()
        driver.spawn(self.workload(uuid), 5)
        copy = self.assert_runs(driver, uuid, 5)
        driver.destroy(uuid, 4)
        self.assertEqual(copy, self.assert_runs(driver, uuid, 5))
        driver.destroy(uuid, 7)
        self.assert_gone(driver, uuid)

    def test_a_destruction_of_nothing_is_no_error(self) -> None:
        driver, uuid = self.driver(), _uuid()
        driver.destroy(uuid, 1)
        driver.spawn(self.workload(uuid), 1)
        for _ in range(2):
            driver.destroy(uuid, 1)
        self.assert_gone(driver, uuid)

    def test_a_new_driver_finds_what_runs(self) -> None:
        uuid, other = _uuid(), _uuid()
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
        here, there, uuid = self.driver(), self.driver("host-2"), _uuid()
        here.spawn(self.workload(uuid), 3)
        self.assertEqual({}, dict(there.inspect()))
        there.destroy(uuid, 3)
        self.assert_runs(here, uuid, 3)
        there.spawn(self.workload(uuid), 4)
        here.destroy(uuid, 4)
        self.assertEqual(1, len(self.copies("host-2", uuid)))
        self.assertEqual({uuid}, set(there.inspect()))

    # -- killed in the middle -------------------------------------------------------------------------------------

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

    # -- at the same time -----------------------------------------------------------------------------------------

    def test_operations_of_one_instance_may_cross(self) -> None:
        """The newest token wins, whatever older ones do at the same time; what comes late is removed by its token."""
        uuid, tokens = _uuid(), range(1, 7)

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

    # -- further powers -------------------------------------------------------------------------------------------

    def test_what_is_stopped_can_be_started_again(self) -> None:
        driver, uuid = self.driver(), _uuid()
        self._skip_without(driver, PowerControl)
        driver.spawn(self.workload(uuid), 3)
        first = self.assert_runs(driver, uuid, 3)
        driver.start(uuid, 3, 3)
        self.assertEqual(first, self.assert_runs(driver, uuid, 3))
        for order in (4, 5):
            driver.stop(uuid, 3, order)
            self.assertEqual(WorkloadState.STOPPED, driver.inspect()[uuid].state)
            self.assertEqual([], list(self.copies(_HOST, uuid)))
        driver.start(uuid, 3, 6)
        second = self.assert_runs(driver, uuid, 3)
        driver.reboot(uuid, 3, 7)
        third = self.assert_runs(driver, uuid, 3)
        self.assertEqual(3, len({first, second, third}))
        # As a restart of what has ended since, in no operation.
        driver.start(uuid, 3, 7)
        self.assertEqual(third, self.assert_runs(driver, uuid, 3))

    def test_a_power_call_that_comes_late_changes_nothing(self) -> None:
        """Of an agent that stood still, or of a restart: another operation came meanwhile. A new driver knows it too."""
        driver, uuid = self.driver(), _uuid()
        self._skip_without(driver, PowerControl)
        driver.spawn(self.workload(uuid), 3)
        # Twice: the order is kept although there is nothing to stop.
        for order in (5, 7):
            driver.stop(uuid, 3, order)
            for late in (driver, self.driver()):
                late.start(uuid, 3, order - 1)
                late.reboot(uuid, 3, order - 1)
                self.assertEqual(WorkloadState.STOPPED, driver.inspect()[uuid].state)
                self.assertEqual([], list(self.copies(_HOST, uuid)))
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
        self._skip_without(driver, PowerControl)
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
        driver, uuid = self.driver(), _uuid()
        self._skip_without(driver, PowerControl)
        for change in (driver.stop, driver.start, driver.reboot):
            change(uuid, 3, 3)
        self.assert_gone(driver, uuid)
        driver.spawn(self.workload(uuid), 3)
        copy = self.assert_runs(driver, uuid, 3)
        for token in (2, 4):
            driver.stop(uuid, token, 5)
            driver.reboot(uuid, token, 5)
        self.assertEqual(copy, self.assert_runs(driver, uuid, 3))

    def test_a_console_says_few_lines_at_most(self) -> None:
        driver, uuid = self.driver(), _uuid()
        self._skip_without(driver, Console)
        driver.spawn(self.workload(uuid), 3)
        self.assertLessEqual(len(driver.console(uuid, 2).splitlines()), 2)

    def test_usage_is_of_what_runs(self) -> None:
        driver, uuid = self.driver(), _uuid()
        self._skip_without(driver, UsageReport)
        driver.spawn(self.workload(uuid), 3)
        for found, usage in driver.usage().items():
            self.assertEqual(uuid, found)
            self.assertGreaterEqual(usage.cpu_seconds, 0.0)
            self.assertGreater(usage.memory_bytes, 0)


class _Tracer:
    """Counts the lines that are run of files in a folder, and kills the process before one of them."""

    def __init__(self, folder: str, step: int) -> None:
        self._folder = folder
        self._step = step
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._step:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def _uuid() -> str:
    return str(uuid_module.uuid4())
