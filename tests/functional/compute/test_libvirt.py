# SPDX-License-Identifier: Apache-2.0
"""The libvirt driver with real machines whose processor is emulated: the kit of compute drivers, and what is special about it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import unittest
import uuid as uuid_module
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oslo_config import cfg
from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.drivers.interface import ComputeDriver, DriverError, DriverTools, Observed, Workload, WorkloadState
from moorage.options import defaults
from moorage.testing.drivers import ComputeDriverTests
from moorage_plugins.drivers import options
from moorage_plugins.drivers.libvirt.definition import name_of, prefix_of
from moorage_plugins.drivers.libvirt.driver import LibvirtDriver
from tests import servers
from tests.functional.compute.machines import copies_of, make_image, processes_of
from tests.servers.kinds import Libvirt

SOON = 90.0
HOST = "host-1"
LOGGER = "moorage_plugins.drivers.libvirt.driver"


def _libvirt() -> Libvirt:
    server = servers.shared("libvirt")
    assert isinstance(server, Libvirt)
    for name, text, power_off in (("waits", "up\r\n" * 3, False), ("ends", "bye\r\n", True)):
        if not (server.images / f"{name}.raw").exists():
            make_image(server.images / f"{name}.raw", text, power_off=power_off)
    return server


def _settings(server: Libvirt) -> dict[str, Any]:
    return {
        "uri": server.url,
        "virt_type": "qemu",
        "images": str(server.images),
        "consoles": str(server.consoles),
        # A boot sector does not listen.
        "shutdown_timeout": 0.0,
    }


class KitTests(ComputeDriverTests, unittest.TestCase):
    kills = 4

    def setUp(self) -> None:
        self.server = _libvirt()

    @override
    def make_driver(self, tools: DriverTools) -> ComputeDriver:
        return LibvirtDriver(tools)

    @override
    def list_opts(self) -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
        return options.list_opts()

    @override
    def configure(self, conf: cfg.ConfigOpts) -> None:
        for name, value in _settings(self.server).items():
            conf.set_override(name, value, group="driver_libvirt")

    @override
    def workload(self, uuid: str) -> Workload:
        return Workload(uuid=uuid, project_id="red", resources={"VCPU": 1, "MEMORY_MB": 32}, image={"id": "waits"})

    @override
    def copies(self, host: str, uuid: str) -> Sequence[object]:
        return copies_of(host, uuid)


class DriverTests(unittest.TestCase):
    def setUp(self) -> None:
        self.server = _libvirt()
        folder = tempfile.mkdtemp(prefix="moorage-driver-")
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        self.state_dir = Path(folder)
        self.uuid = str(uuid_module.uuid4())
        self.drv = self.driver()
        self.addCleanup(self.drv.destroy, self.uuid, 100)

    def driver(self, **settings: Any) -> LibvirtDriver:
        section = {**_settings(self.server), **settings}
        conf = defaults(control_plane={"state_dir": str(self.state_dir)}, driver_libvirt=section)
        return LibvirtDriver(DriverTools(conf, SystemClock(), HOST))

    def spawn(self, image: str = "waits", token: int = 1, **resources: int) -> None:
        workload = Workload(
            uuid=self.uuid,
            resources={"VCPU": 1, "MEMORY_MB": 32, **resources},
            image={"id": image} if image else {},
        )
        self.drv.spawn(workload, token)

    def seen(self, driver: ComputeDriver | None = None) -> Observed | None:
        return (driver or self.drv).inspect().get(self.uuid)

    def await_state(self, state: WorkloadState) -> Observed:
        def reached() -> bool:
            seen = self.seen()
            return seen is not None and seen.state is state

        servers.wait_until(reached, f"the machine is {state}", SOON)
        found = self.seen()
        assert found is not None
        return found

    def copies(self) -> Sequence[object]:
        return copies_of(HOST, self.uuid)

    def virsh(self, *arguments: str) -> str:
        done = subprocess.run(
            ["virsh", "--quiet", "--connect", self.server.url, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout

    def domain(self, token: int = 1) -> str:
        return name_of(prefix_of(HOST), self.uuid, token)

    # -- what a machine has ---------------------------------------------------------------------------------------

    def test_a_machine_boots_its_image_and_its_console_shows_what_it_says(self) -> None:
        self.spawn()
        servers.wait_until(lambda: self.drv.console(self.uuid, 9).count("up") == 3, "the console", SOON)
        self.assertEqual(["up", "up"], self.driver().console(self.uuid, 2).split())
        self.assertEqual("", self.drv.console(self.uuid, 0))

    def test_a_machine_has_no_network_no_devices_and_an_image_that_it_cannot_write(self) -> None:
        before = (self.server.images / "waits.raw").read_bytes()
        self.spawn(VCPU=2, MEMORY_MB=40)
        (process,) = processes_of(HOST, self.uuid)
        arguments = process.cmdline()
        disks = [each for each in arguments if "waits.raw" in each or '"driver":"raw"' in each]
        self.assertTrue(any('"read-only":true' in each for each in disks), disks)
        for word in ("-netdev", "-nic", "-vnc", "-spice", "-usb", "vfio", "-fsdev", "-virtfs"):
            self.assertFalse([each for each in arguments if word in each], word)
        self.assertIn("elevateprivileges=deny", "".join(arguments))
        definition = self.virsh("dumpxml", self.domain())
        self.assertIn("<vcpu placement='static'>2</vcpu>", definition)
        self.assertIn("<memory unit='KiB'>40960</memory>", definition)
        self.assertNotIn("<interface", definition)
        self.assertEqual(before, (self.server.images / "waits.raw").read_bytes())

    # -- its end --------------------------------------------------------------------------------------------------

    def test_a_machine_that_turns_itself_off_has_ended_and_does_not_begin_again(self) -> None:
        self.spawn("ends")
        seen = self.await_state(WorkloadState.ENDED)
        self.assertEqual((1, "It shut down."), (seen.token, seen.detail))
        self.assertEqual("bye\n", self.drv.console(self.uuid, 9).replace("\r", ""))
        self.spawn("ends")
        self.assertEqual((seen, []), (self.seen(self.driver()), self.copies()))
        # It is no stop: the machine had ended.
        self.drv.stop(self.uuid, 1, 2)
        self.assertEqual(WorkloadState.ENDED, self.await_state(WorkloadState.ENDED).state)
        self.drv.start(self.uuid, 1, 3)
        servers.wait_until(lambda: self.drv.console(self.uuid, 9).count("bye") == 2, "it ran again", SOON)

    def test_a_machine_that_is_killed_has_failed_and_can_be_started_again(self) -> None:
        self.spawn()
        (process,) = processes_of(HOST, self.uuid)
        process.send_signal(signal.SIGKILL)
        seen = self.await_state(WorkloadState.FAILED)
        self.assertIn("killed", seen.detail)
        self.drv.start(self.uuid, 1, 1)
        self.assertEqual(WorkloadState.RUNNING, self.await_state(WorkloadState.RUNNING).state)
        self.assertEqual(1, len(self.copies()))

    def test_what_was_done_by_hand_is_told(self) -> None:
        self.spawn()
        copies = self.copies()
        self.virsh("suspend", self.domain())
        self.assertIn("paused outside of Moorage", self.await_state(WorkloadState.PAUSED).detail)
        self.drv.start(self.uuid, 1, 1)
        self.assertEqual(
            (WorkloadState.RUNNING, copies), (self.await_state(WorkloadState.RUNNING).state, self.copies())
        )
        self.virsh("destroy", self.domain())
        self.assertIn("outside of Moorage", self.await_state(WorkloadState.FAILED).detail)
        self.virsh("undefine", self.domain())
        self.assertIn("libvirt does not know it", self.await_state(WorkloadState.FAILED).detail)
        with self.assertRaisesRegex(DriverError, "rebuild the instance"):
            self.drv.start(self.uuid, 1, 2)
        self.drv.destroy(self.uuid, 1)
        self.assertIsNone(self.seen())

    def test_a_stop_ends_a_machine_that_does_not_listen(self) -> None:
        self.spawn()
        self.driver(shutdown_timeout=0.5).stop(self.uuid, 1, 2)
        self.assertEqual(WorkloadState.STOPPED, self.await_state(WorkloadState.STOPPED).state)
        self.assertEqual([], self.copies())

    def test_nothing_is_left_of_a_machine_that_was_destroyed(self) -> None:
        self.spawn()
        self.drv.destroy(self.uuid, 1)
        self.assertNotIn(self.uuid, self.virsh("list", "--all", "--name"))
        self.assertEqual([], [each for each in self.server.consoles.iterdir() if self.uuid in each.name])
        self.assertEqual([], os.listdir(self.state_dir / "libvirt" / HOST))

    # -- faults ---------------------------------------------------------------------------------------------------

    def test_a_machine_survives_libvirt_and_is_found_again(self) -> None:
        self.spawn()
        copies, daemon = self.copies(), self.server.daemon
        os.kill(daemon, signal.SIGKILL)
        servers.wait_until(lambda: self.server.answers() and self.server.daemon != daemon, "another libvirtd", SOON)
        again = self.driver()
        self.assertEqual(
            (WorkloadState.RUNNING, copies), (self.await_state(WorkloadState.RUNNING).state, self.copies())
        )
        again.stop(self.uuid, 1, 2)
        self.assertEqual([], self.copies())

    def test_a_libvirt_that_is_down_is_told_without_its_address(self) -> None:
        self.spawn()
        down = self.driver(uri=f"qemu+unix:///session?socket={self.state_dir}/none")
        for call in (
            down.inspect,
            down.resources,
            lambda: down.destroy(self.uuid, 1),
            lambda: down.stop(self.uuid, 1, 2),
        ):
            with self.assertLogs(LOGGER, "WARNING") as logs, self.assertRaises(DriverError) as raised:
                call()
            self.assertEqual(
                "the hypervisor of this host does not answer; the log of the agent says more", str(raised.exception)
            )
            self.assertIn(f"{self.state_dir}/none", "".join(logs.output))
        self.assertEqual(1, len(self.copies()))

    def test_a_libvirt_that_stands_still_is_told_after_the_timeout(self) -> None:
        driver = self.driver(timeout=1.0)
        os.kill(self.server.daemon, signal.SIGSTOP)
        try:
            with self.assertRaisesRegex(DriverError, "has not answered within 1 seconds"):
                driver.inspect()
        finally:
            os.kill(self.server.daemon, signal.SIGCONT)
        self.assertIsNone(self.seen())

    def test_what_cannot_be_run_is_refused_with_the_reason_and_leaves_nothing(self) -> None:
        for image, memory, text in (
            ("", 32, "has no image"),
            ("other", 32, "there is no image 'other' on this host"),
            ("../waits", 32, "there is no image '../waits'"),
            ("waits", 0, "claims no MEMORY_MB"),
        ):
            with self.subTest(text=text):
                with self.assertRaisesRegex(DriverError, text) as raised:
                    self.spawn(image, MEMORY_MB=memory)
                self.assertNotIn(str(self.server.images), str(raised.exception))
                self.assertIsNone(self.seen())

    def test_what_ran_before_runs_again_when_its_replacement_cannot_run(self) -> None:
        self.spawn()
        copies = self.copies()
        with self.assertRaisesRegex(DriverError, "there is no image"):
            self.spawn("other", token=2)
        # libvirt defines no machine with so many processors.
        with self.assertRaisesRegex(DriverError, "refused or failed"):
            self.spawn(token=3, VCPU=100_000)
        self.assertEqual(copies, self.copies())
        # qemu does not get so much memory.
        with self.assertRaisesRegex(DriverError, "refused or failed.*What ran before was started again."):
            self.spawn(token=4, MEMORY_MB=10**9)
        seen = self.seen()
        assert seen is not None
        self.assertEqual((1, WorkloadState.RUNNING), (seen.token, seen.state))
        self.assertEqual(1, len(self.copies()))
        # An operation before the one that failed comes too late.
        self.drv.stop(self.uuid, 1, 3)
        self.assertEqual(1, len(self.copies()))

    def test_an_operation_on_an_instance_waits_for_another_one(self) -> None:
        """The lock of the instance is held: what is seen is an operation, and a further one waits for it."""
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with self.drv._records.held(self.uuid, 1.0):
                entered.set()
                leave.wait(SOON)

        holder = threading.Thread(target=hold)
        holder.start()
        entered.wait(SOON)
        try:
            refused = self.assertRaisesRegex(DriverError, "another operation has worked on the machine")
            with refused, self.drv._records.held(self.uuid, 0.0):
                self.fail("two operations hold the instance")
            # It has made nothing yet.
            self.assertIsNone(self.seen())
            threading.Timer(0.3, leave.set).start()
            self.spawn()
        finally:
            leave.set()
            holder.join()
        self.assertEqual(1, len(self.copies()))

    def test_resources_are_those_of_the_host(self) -> None:
        found = self.drv.resources()
        self.assertEqual({"VCPU", "MEMORY_MB"}, set(found.inventory))
        self.assertEqual(os.cpu_count(), found.inventory["VCPU"])
        said = dict(line.split(":", 1) for line in self.virsh("nodeinfo").splitlines() if ":" in line)
        self.assertEqual(int(said["Memory size"].split()[0]) // 1024, found.inventory["MEMORY_MB"])
        self.assertEqual({f"HW_ARCH_{os.uname().machine.upper()}"}, found.traits)


class MissingTests(unittest.TestCase):
    """A machine on which the driver cannot be used."""

    def driver(self, **settings: Any) -> LibvirtDriver:
        conf = defaults(control_plane={"state_dir": "/nonexistent/state"}, driver_libvirt=settings)
        return LibvirtDriver(DriverTools(conf, SystemClock(), HOST))

    def test_a_program_that_is_missing(self) -> None:
        with self.assertRaisesRegex(errors.ConfigError, "no-such-virsh.*Install the package libvirt-clients"):
            self.driver(virsh="no-such-virsh")

    def test_a_folder_of_images_that_is_missing(self) -> None:
        with self.assertRaisesRegex(errors.ConfigError, "/nonexistent/images, which is no folder"):
            self.driver(virsh="sh", images="/nonexistent/images")

    def test_a_folder_that_cannot_be_made(self) -> None:
        with tempfile.NamedTemporaryFile() as file, self.assertRaisesRegex(errors.ConfigError, "cannot be made"):
            self.driver(virsh="sh", images="/", consoles=f"{file.name}/consoles")
