# SPDX-License-Identifier: Apache-2.0
"""What tests of drivers with guardians share: a driver with a folder of its own, and the laws of both sandboxes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import unittest
import uuid as uuid_module
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from moorage.clock import SystemClock
from moorage.drivers.interface import DriverTools, Observed, Workload, WorkloadState
from moorage.options import defaults
from moorage_plugins.drivers.guarded.driver import GuardedDriver
from tests.functional.compute.sandboxes import guardians_of
from tests.servers import wait_until

__all__ = ["LOGGER", "SOON", "GuardedCase", "GuardedLaws"]

SOON = 90.0
LOGGER = "moorage_plugins.drivers.guarded.driver"


class GuardedCase(unittest.TestCase):
    """A driver with a folder of its own. Each instance belongs to the project red.

    :cvar kind: the driver that is tested.
    """

    kind: ClassVar[type[GuardedDriver]]

    def setUp(self) -> None:
        self.require()
        self.uuid = str(uuid_module.uuid4())
        self.state_dir = Path(tempfile.mkdtemp(prefix=f"moorage-{self.kind.name}-"))
        self.addCleanup(shutil.rmtree, self.state_dir, ignore_errors=True)
        self.prepare()
        self.drv = self.driver()
        self.addCleanup(self.drv.destroy, self.uuid, 1000)

    def require(self) -> None:
        """Skip the test where the sandbox cannot be made."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Put into the folder what the driver needs."""

    def settings(self) -> dict[str, Any]:
        """Options of the driver that are not the defaults."""
        return {}

    def image(self) -> dict[str, Any]:
        """The image of workloads."""
        return {}

    def copies(self) -> Sequence[int]:
        """The commands that run."""
        raise NotImplementedError

    def driver(self, **settings: Any) -> Any:
        section = {f"driver_{self.kind.name}": {**self.settings(), **settings}}
        conf = defaults(control_plane={"state_dir": str(self.state_dir)}, **section)
        return self.kind(DriverTools(conf, SystemClock(), "host-1"))

    def spawn(
        self,
        *command: str,
        token: int = 1,
        driver: GuardedDriver | None = None,
        image: dict[str, Any] | None = None,
        **resources: int,
    ) -> None:
        workload = Workload(
            uuid=self.uuid,
            name="web",
            project_id="red",
            resources=resources,
            command=command,
            image=self.image() if image is None else image,
        )
        (driver or self.drv).spawn(workload, token)

    def ended(self) -> Observed:
        """What there is when the workload runs no more."""
        wait_until(lambda: self.drv.inspect()[self.uuid].state is not WorkloadState.RUNNING, "the end", SOON)
        found: Observed = self.drv.inspect()[self.uuid]
        return found

    def output(self, script: str) -> str:
        self.spawn("sh", "-c", script)
        self.ended()
        return str(self.drv.console(self.uuid, 10_000))

    def pids(self) -> list[int]:
        return list(self.copies())


class GuardedLaws(GuardedCase):
    """What holds in every sandbox; ``killed`` is a script whose command ends by signal 9."""

    killed: ClassVar[str]

    def test_it_is_said_how_a_workload_ended(self) -> None:
        for token, (command, state, text) in enumerate(
            (
                (("true",), WorkloadState.ENDED, "exit code 0"),
                (("sh", "-c", "exit 3"), WorkloadState.FAILED, "exit code 3"),
                (("sh", "-c", self.killed), WorkloadState.FAILED, "signal 9"),
            ),
            1,
        ):
            with self.subTest(command=command):
                self.spawn(*command, token=token)
                seen = self.ended()
                self.assertEqual((token, state), (seen.token, seen.state), seen)
                self.assertIn(text, seen.detail)
                # Found so by an agent that starts later, and not begun again under its token.
                self.spawn(*command, token=token)
                self.assertEqual(seen, self.driver().inspect()[self.uuid])

    def test_a_workload_dies_with_its_guardian_and_can_be_started_again(self) -> None:
        self.spawn("sleep", "100000")
        (guardian,) = guardians_of(self.uuid)
        os.kill(guardian, signal.SIGKILL)
        self.assertIn("guardian ended", self.ended().detail)
        wait_until(lambda: not self.pids(), "the workload to end", SOON)
        self.drv.start(self.uuid, 1, 1)
        self.assertEqual(1, len(self.pids()))
        self.drv.destroy(self.uuid, 1)
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """Of a workload that was destroyed."""
        self.assertEqual([], self.pids())
