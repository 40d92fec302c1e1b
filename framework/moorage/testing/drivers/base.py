# SPDX-License-Identifier: Apache-2.0
"""The base of the tests of the kit of compute drivers: makes drivers, looks from outside at what runs, and kills drivers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
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
    DriverTools,
    Observed,
    Workload,
    WorkloadState,
)

__all__ = ["HOST", "LONG", "OTHER", "SHORT", "SOON", "DriverTestBase", "new_uuid", "state_of"]

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object

#: Seconds within which what must happen happens, on a machine that has much else to do.
SOON = 60.0
#: Seconds: of a lease that does not end during a test, and of one that a test waits for.
LONG, SHORT = 3600.0, 2.0
HOST, OTHER = "host-1", "host-2"


class DriverTestBase(_Base):
    """Declares what a subclass of the kit implements, and has the helpers of the tests."""

    #: At so many steps of a call, spread evenly over its lines, the driver is killed.
    kills: ClassVar[int] = 40

    # -- what a subclass gives ------------------------------------------------------------------------------------

    def make_driver(self, tools: DriverTools) -> ComputeDriver:
        """Makes a new driver, as an agent does when it starts. Workloads of earlier drivers of the host still exist."""
        raise NotImplementedError

    def copies(self, host: str, uuid: str) -> Sequence[object]:
        """Returns what really runs of an instance on a host, without asking the driver: a different value for each run."""
        raise NotImplementedError

    def list_opts(self) -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
        """Returns the options of the driver by group, as its distribution registers them."""
        return ()

    def configure(self, conf: cfg.ConfigOpts) -> None:
        """Sets the options that the test needs."""

    def turn_on_self_fence(self, conf: cfg.ConfigOpts, seconds: float) -> None:
        """Sets the options that end workloads with a lease of so many seconds. For drivers that have the power SelfFencing."""
        raise NotImplementedError(
            "the driver has the power SelfFencing; override turn_on_self_fence() of the kit, so that its laws are tested"
        )

    def workload(self, uuid: str) -> Workload:
        """Makes the description of a workload that runs until it is destroyed."""
        return Workload(uuid=uuid, name="web-1", project_id="red", resources={"VCPU": 1, "MEMORY_MB": 64})

    # -- helpers --------------------------------------------------------------------------------------------------

    def state_dir(self) -> Path:
        """Returns the state folder of this test. Workloads that still run when the test ends are destroyed."""
        found: Path | None = getattr(self, "_state_dir", None)
        if found is None:
            found = self._state_dir = Path(tempfile.mkdtemp(prefix="moorage-driver-"))
            self._hosts: set[str] = set()
            self.addCleanup(shutil.rmtree, found, ignore_errors=True)
            self.addCleanup(self._destroy_all)
        return found

    def driver(self, host: str = HOST, *, self_fence: bool = False) -> Any:
        """Makes a new :class:`ComputeDriver` of a host, with its further powers.

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
                self.turn_on_self_fence(conf, LONG)
            found[self_fence] = conf
        return found[self_fence]

    def skip_without(self, driver: object, power: Any) -> None:
        """Skips the test if the driver does not implement a protocol of the interface, such as PowerControl."""
        if not isinstance(driver, power):
            self.skipTest(f"the driver has no {power.__name__}")

    def _destroy_all(self) -> None:
        for host in sorted(self._hosts):
            driver = self.driver(host)
            for uuid, seen in driver.inspect().items():
                driver.destroy(uuid, seen.token)

    def await_state(self, driver: ComputeDriver, uuid: str, state: WorkloadState) -> Observed:
        """Waits until the driver sees the workload in this state."""
        end = time.monotonic() + SOON
        while True:
            seen = driver.inspect().get(uuid)
            if seen is not None and seen.state is state:
                return seen
            self.assertLess(time.monotonic(), end, f"{uuid} is {seen}, not {state}")
            time.sleep(0.02)

    def assert_runs(self, driver: ComputeDriver, uuid: str, token: int) -> object:
        """Checks that exactly one copy of an instance runs, under this token, and returns the copy."""
        seen = driver.inspect()[uuid]
        self.assertEqual((token, WorkloadState.RUNNING), (seen.token, seen.state), seen)
        copies = self.copies(HOST, uuid)
        self.assertEqual(1, len(copies), copies)
        return copies[0]

    def assert_gone(self, driver: ComputeDriver, uuid: str) -> None:
        """Checks that the driver knows nothing of an instance, and that no copy runs."""
        self.assertNotIn(uuid, driver.inspect())
        self.assertEqual([], list(self.copies(HOST, uuid)))

    def interrupted(
        self, prepare: Callable[[str], object], call: Callable[[ComputeDriver, str], object]
    ) -> Iterator[str]:
        """Repeats a call with new instances, and kills the driver at a later step each time. Yields the uuid after each kill.

        :param prepare: brings an instance into the state before the call, with a driver that is not killed.
        """
        uuid = new_uuid()
        prepare(uuid)
        steps = self._killed_at(0, lambda: call(self.driver(), uuid))
        self.assertGreater(steps, 0, "no line of the driver's package was run")
        for step in sorted({1 + number * steps // self.kills for number in range(self.kills)}):
            uuid = new_uuid()
            prepare(uuid)
            with self.subTest(killed_before_line=step, of=steps):
                self._killed_at(step, lambda uuid=uuid: call(self.driver(), uuid))  # type: ignore[misc]
                self.assertLessEqual(len(self.copies(HOST, uuid)), 1)
                yield uuid

    def _killed_at(self, step: int, call: Callable[[], object]) -> int:
        """Calls in a forked process that kills itself before a line of the driver's package.

        :param step: the number of the line; 0: no line.
        :returns: how many lines ran.
        """
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


class _Tracer:
    """Counts the lines that run of the files in a folder, and kills the process before one of them."""

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


def state_of(driver: ComputeDriver, uuid: str) -> tuple[int, WorkloadState]:
    """Returns the token and the state of a workload as the driver sees them."""
    seen = driver.inspect()[uuid]
    return seen.token, seen.state


def new_uuid() -> str:
    """Returns a random uuid for an instance."""
    return str(uuid_module.uuid4())
