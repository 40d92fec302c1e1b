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
    DriverError,
    DriverTools,
    HostResources,
    LiveMigration,
    Migration,
    Observed,
    PowerControl,
    SelfFencing,
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
#: Seconds: of a lease that does not end during a test, and of one that a test waits for.
_LONG, _SHORT = 3600.0, 2.0
_HOST, _OTHER = "host-1", "host-2"
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

    def turn_on_self_fence(self, conf: cfg.ConfigOpts, seconds: float) -> None:
        """Set what has workloads end with a lease of so many seconds. For drivers that have the power SelfFencing."""
        raise NotImplementedError(
            "the driver has the power SelfFencing; override turn_on_self_fence() of the kit, so that its laws are tested"
        )

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

    def driver(self, host: str = _HOST, *, self_fence: bool = False) -> Any:
        """A new :class:`ComputeDriver` of a host, with its further powers.

        :param self_fence: whether its workloads end with the lease of the host.
        """
        conf = self._conf(self_fence)
        self._hosts.add(host)
        return self.make_driver(DriverTools(conf, SystemClock(), host))

    def _conf(self, self_fence: bool) -> cfg.ConfigOpts:
        # Once for all drivers of a test: registering options takes longer than most calls, above all in a process that is traced.
        found: dict[bool, cfg.ConfigOpts] = self.__dict__.setdefault("_confs", {})
        if self_fence not in found:
            state_dir = str(self.state_dir())
            conf = cfg.ConfigOpts()
            conf.register_opts([cfg.StrOpt("state_dir")], group="control_plane")
            for group, options in self.list_opts():
                conf.register_opts(options, group=group)
            conf([], project="moorage", default_config_files=[], default_config_dirs=[])
            conf.set_override("state_dir", state_dir, group="control_plane")
            self.configure(conf)
            if self_fence:
                self.turn_on_self_fence(conf, _LONG)
            found[self_fence] = conf
        return found[self_fence]

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

    def test_what_comes_after_its_destruction_makes_nothing(self) -> None:
        driver, uuid = self.driver(), _uuid()
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
        driver, uuid = self.driver(), _uuid()
        driver.destroy(uuid, 1)
        driver.spawn(self.workload(uuid), 2)
        for _ in range(2):
            driver.destroy(uuid, 2)
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

    # -- moves ----------------------------------------------------------------------------------------------------

    def _both(self, uuid: str) -> int:
        """How many copies of an instance run, on both hosts of a move together."""
        return len(self.copies(_HOST, uuid)) + len(self.copies(_OTHER, uuid))

    def _moved(self, uuid: str, operation: str = "migrate") -> Workload:
        return dataclasses.replace(self.workload(uuid), operation=operation)

    def test_what_is_prepared_does_not_run_before_it_is_started(self) -> None:
        driver, uuid = self.driver(), _uuid()
        self._skip_without(driver, Migration)
        for again in (driver, self.driver()):
            self.assertLessEqual(len(again.prepare(self._moved(uuid), 3)), 1000)
            self.assertEqual((3, WorkloadState.STOPPED), _state(again, uuid))
            self.assertEqual([], list(self.copies(_HOST, uuid)))
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
        driver, uuid = self.driver(), _uuid()
        self._skip_without(driver, Migration)
        driver.spawn(self.workload(uuid), 2)
        driver.prepare(self._moved(uuid), 3)
        self.assertEqual((3, WorkloadState.STOPPED), _state(driver, uuid))
        self.assertEqual([], list(self.copies(_HOST, uuid)))
        driver.prepare(self._moved(uuid), 4)
        driver.start(uuid, 3, 9)
        self.assertEqual((4, WorkloadState.STOPPED), _state(driver, uuid))
        driver.start(uuid, 4, 9)
        self.assert_runs(driver, uuid, 4)

    def test_a_preparation_that_was_killed_is_done_again_and_runs_nothing(self) -> None:
        self._skip_without(self.driver(), Migration)
        for uuid in self.interrupted(lambda uuid: None, lambda driver, uuid: driver.prepare(self._moved(uuid), 3)):  # type: ignore[attr-defined]
            driver = self.driver()
            self.assertEqual([], list(self.copies(_HOST, uuid)))
            driver.prepare(self._moved(uuid), 4)
            driver.start(uuid, 4, 5)
            self.assert_runs(driver, uuid, 4)
            driver.destroy(uuid, 4)
            self.assert_gone(driver, uuid)

    def test_a_start_of_what_was_prepared_that_was_killed_is_done_again(self) -> None:
        self._skip_without(self.driver(), Migration)
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
        here, there, uuid = self.driver(), self.driver(_OTHER), _uuid()
        self._skip_without(here, Migration)
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
        self.assertEqual((1, 0), (len(self.copies(_OTHER, uuid)), len(self.copies(_HOST, uuid))))
        here.start(uuid, 3, 7)
        self.assertEqual(1, self._both(uuid))
        here.destroy(uuid, 3)
        self.assert_gone(here, uuid)
        self.assertEqual({uuid}, set(there.inspect()))

    def test_a_transfer_ends_with_both_sides_paused(self) -> None:
        here, there, uuid = self.driver(), self.driver(_OTHER), _uuid()
        self._skip_without(here, LiveMigration)
        here.spawn(self.workload(uuid), 3)
        copy = self.assert_runs(here, uuid, 3)
        to = there.prepare(self._moved(uuid, "live_migrate"), 5)
        for order in (6, 7):
            here.transfer(uuid, 3, order, to)
            for driver, token in ((here, 3), (there, 5)):
                self.assertEqual((token, WorkloadState.PAUSED), _state(driver, uuid))
            self.assertEqual(0, self._both(uuid))
        there.start(uuid, 5, 8)
        self.assertEqual([copy], list(self.copies(_OTHER, uuid)), "it runs on with its memory")
        self.assertEqual([], list(self.copies(_HOST, uuid)))

    def test_a_transfer_that_is_given_up_lets_the_source_go_on(self) -> None:
        here, there, uuid = self.driver(), self.driver(_OTHER), _uuid()
        self._skip_without(here, LiveMigration)
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
        there = self.driver(_OTHER)
        self._skip_without(there, LiveMigration)
        addresses: dict[str, str] = {}

        def prepare(uuid: str) -> None:
            self.driver().spawn(self.workload(uuid), 3)
            addresses[uuid] = there.prepare(self._moved(uuid, "live_migrate"), 5)

        for number, uuid in enumerate(
            self.interrupted(prepare, lambda driver, uuid: driver.transfer(uuid, 3, 6, addresses[uuid]))  # type: ignore[attr-defined]
        ):
            here = self.driver()
            self.assertEqual([], list(self.copies(_OTHER, uuid)))
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

    # -- hosts that fence themselves ------------------------------------------------------------------------------

    def _fencing(self, epoch: int = 1, seconds: float = _LONG) -> Any:
        """A driver whose workloads end with the lease of the host, and a lease for so many seconds from now on."""
        self._skip_without(self.driver(), SelfFencing)
        driver = self.driver(self_fence=True)
        driver.renew(epoch, self._until(seconds))
        return driver

    def _until(self, seconds: float) -> float:
        return SystemClock().boottime() + seconds

    def _await_end(self, uuid: str, until: float) -> None:
        """Waits until nothing runs of an instance; checks that this is not before the end of the lease."""
        end = time.monotonic() + _SOON
        while copies := self.copies(_HOST, uuid):
            self.assertLess(time.monotonic(), end, f"the lease is over, and {copies} run")
            time.sleep(0.02)
        self.assertGreaterEqual(SystemClock().boottime(), until, "it ended before the lease")

    def _await_seen_end(self, uuid: str, token: int) -> None:
        """Waits until a driver sees that an instance does not run. It may see that a moment after the last process has ended."""
        end = time.monotonic() + _SOON
        while (seen := self.driver(self_fence=True).inspect()[uuid]).state is WorkloadState.RUNNING:
            self.assertLess(time.monotonic(), end, f"nothing runs, and the driver sees {seen}")
            time.sleep(0.02)
        self.assertEqual(token, seen.token)

    def test_workloads_go_on_without_a_lease_where_self_fencing_is_off(self) -> None:
        driver, uuid, other = self.driver(), _uuid(), _uuid()
        self._skip_without(driver, SelfFencing)
        self.assertEqual(0, driver.self_fence, "it is off unless it is asked for")
        self.assertGreater(self.driver(self_fence=True).self_fence, 0)
        driver.spawn(self.workload(uuid), 3)
        copy = self.assert_runs(driver, uuid, 3)
        driver.renew(1, self._until(-1.0))
        driver.spawn(self.workload(other), 3)
        self.assert_runs(driver, other, 3)
        self.assertEqual(copy, self.assert_runs(driver, uuid, 3))

    def test_a_workload_ends_with_the_lease_although_no_agent_does_anything(self) -> None:
        driver, uuid = self._fencing(), _uuid()
        driver.spawn(self.workload(uuid), 3)
        self.assert_runs(driver, uuid, 3)
        # Sooner than was said before.
        until = self._until(_SHORT)
        driver.renew(1, until)
        del driver
        self._await_end(uuid, until)
        self._await_seen_end(uuid, 3)

    def test_a_workload_runs_as_long_as_its_lease_is_renewed(self) -> None:
        driver = self._fencing()
        self._assert_goes_on(driver, lambda epoch: driver.renew(epoch, self._until(_LONG)))

    def _assert_goes_on(self, driver: Any, change: Callable[[int], object]) -> None:
        """Checks that a workload does not end with a lease that an agent of a higher epoch changes before its end."""
        uuid = _uuid()
        for attempt in range(4):
            epoch, token = 2 * attempt + 1, attempt + 1
            until = self._until(_SHORT * 4**attempt)
            driver.renew(epoch, until)
            with contextlib.suppress(DriverError):
                driver.spawn(self.workload(uuid), token)
            copies = list(self.copies(_HOST, uuid))
            change(epoch + 1)
            # Too late on a machine that has much else to do: then it may end.
            if SystemClock().boottime() < until:
                break
        else:
            self.fail(f"no lease of {_SHORT * 4**attempt:g} seconds could be changed before its end")
        self.assertEqual(1, len(copies))
        while SystemClock().boottime() < until + _SHORT:
            self.assertEqual(copies, list(self.copies(_HOST, uuid)))
            time.sleep(0.1)

    def test_nothing_is_started_when_the_lease_is_over(self) -> None:
        driver, uuid = self._fencing(seconds=0.0), _uuid()
        with self.assertRaises(DriverError):
            driver.spawn(self.workload(uuid), 3)
        self.assertEqual([], list(self.copies(_HOST, uuid)))
        driver.destroy(uuid, 3)
        driver.renew(1, self._until(_LONG))
        driver.spawn(self.workload(uuid), 4)
        self.assert_runs(driver, uuid, 4)
        self._skip_without(driver, PowerControl)
        driver.stop(uuid, 4, 5)
        driver.renew(1, self._until(0.0))
        with self.assertRaises(DriverError):
            driver.start(uuid, 4, 6)
        self.assertEqual([], list(self.copies(_HOST, uuid)))
        driver.renew(1, self._until(_LONG))
        driver.start(uuid, 4, 7)
        self.assert_runs(driver, uuid, 4)

    def test_an_agent_of_a_lower_epoch_changes_no_lease(self) -> None:
        late, uuid = self._fencing(epoch=4), _uuid()
        driver = self._fencing(epoch=5)
        driver.spawn(self.workload(uuid), 3)
        with self.assertRaises(DriverError):
            late.renew(4, self._until(0.0))
        self.assert_runs(driver, uuid, 3)
        # This one counts, and comes after it.
        until = self._until(_SHORT)
        driver.renew(5, until)
        with self.assertRaises(DriverError):
            late.renew(4, self._until(_LONG))
        self._await_end(uuid, until)

    def test_a_renewal_that_was_killed_leaves_the_lease_that_was_or_that_is_to_be(self) -> None:
        self._skip_without(self.driver(), SelfFencing)
        for uuid in self.interrupted(
            lambda uuid: self._fencing().spawn(self.workload(uuid), 3),
            lambda driver, uuid: self.driver(self_fence=True).renew(1, self._until(_LONG)),
        ):
            driver = self.driver(self_fence=True)
            self.assert_runs(driver, uuid, 3)
            until = self._until(0.0)
            driver.renew(1, until)
            self._await_end(uuid, until)
            driver.destroy(uuid, 3)

    def test_workloads_that_would_not_end_are_named(self) -> None:
        before, uuid, other = self.driver(), _uuid(), _uuid()
        self._skip_without(before, SelfFencing)
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


def _state(driver: ComputeDriver, uuid: str) -> tuple[int, WorkloadState]:
    seen = driver.inspect()[uuid]
    return seen.token, seen.state


def _uuid() -> str:
    return str(uuid_module.uuid4())
