# SPDX-License-Identifier: Apache-2.0
"""The driver redfish with an emulator of BMCs: the kit of compute drivers, and what is special about it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
import uuid as uuid_module
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from oslo_config import cfg
from typing_extensions import override

from moorage.clock import SystemClock
from moorage.drivers.interface import ComputeDriver, DriverError, DriverTools, Machine, Workload
from moorage.testing.drivers import ComputeDriverTests
from moorage_plugins.drivers import options
from moorage_plugins.drivers.redfish.bmc import Bmc
from moorage_plugins.drivers.redfish.driver import RedfishDriver
from moorage_plugins.drivers.redfish.records import Records
from tests import servers
from tests.functional.compute.bmcs import Fleet, machine_of, make_driver, set_options, system_of
from tests.servers import wait_until
from tests.servers.kinds import Redfish

ROOT = Path(__file__).resolve().parents[3]
LOGGER = "moorage_plugins.drivers.redfish.driver"
#: A machine that does what it shall, at once.
WHOLE = {"delay": 0.0, "deaf": False, "refuses": False, "mute": False, "refusals": 0, "blinks": 0, "sticks": False}


class KitTests(ComputeDriverTests, unittest.TestCase):
    kills = 8
    server: ClassVar[Redfish]

    @classmethod
    def setUpClass(cls) -> None:
        servers.require("redfish")
        cls.server = cls.enterClassContext(servers.redfish())

    def setUp(self) -> None:
        unused = {"power_state": "Off", "boots": 0, "delay": 0.0}
        for machine, found in self.server.machines().items():
            if not unused.items() <= found.items() or found.get("pending_power"):
                self.server.change(machine, **unused)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.fleet = Fleet(self.server, Path(folder.name))

    @override
    def make_driver(self, tools: DriverTools) -> ComputeDriver:
        return RedfishDriver(dataclasses.replace(tools, machines=lambda: self.fleet.machines(tools.host)))

    @override
    def list_opts(self) -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
        return options.list_opts()

    @override
    def configure(self, conf: cfg.ConfigOpts) -> None:
        set_options(conf)

    @override
    def workload(self, uuid: str) -> Workload:
        return Workload(uuid=uuid, project_id="red", resources={"CUSTOM_METAL": 1}, node=self.fleet.node_of(uuid))

    @override
    def copies(self, host: str, uuid: str) -> Sequence[object]:
        return self.fleet.copies(host, uuid)


class RedfishTests(unittest.TestCase):
    """What is special about it. The instance is built on the node ``self.first``."""

    server: ClassVar[Redfish]

    @classmethod
    def setUpClass(cls) -> None:
        servers.require("redfish")
        cls.server = cls.enterClassContext(servers.redfish())

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.state_dir = folder.name
        self.first, self.second = self.machines = [machine_of(self.server, number) for number in (1, 2)]
        for machine in self.machines:
            self.change(machine, power_state="Off", boots=0, booted=[], boots_once_from=None, **WHOLE)
        self.uuid = str(uuid_module.uuid4())
        self.drv = self.driver()

    def driver(self, **settings: Any) -> RedfishDriver:
        return make_driver(self.state_dir, self.machines, **settings)

    def change(self, machine: Machine, **members: Any) -> None:
        self.server.change(system_of(machine), **members)

    def real(self, machine: Machine, *names: str) -> tuple[Any, ...]:
        found = self.server.machines()[system_of(machine)]
        return tuple(found.get(name) for name in names or ("power_state", "boots"))

    def spawn(
        self, token: int, machine: Machine | None = None, driver: RedfishDriver | None = None, **extra_specs: str
    ) -> None:
        specs = {f"redfish:{name}": value for name, value in extra_specs.items()}
        workload = Workload(uuid=self.uuid, node=(machine or self.first).uuid, extra_specs=specs)
        (driver or self.drv).spawn(workload, token)

    def seen(self, driver: RedfishDriver | None = None) -> tuple[int, str]:
        found = (driver or self.drv).inspect()[self.uuid]
        return found.token, found.state.value

    def process(self, token: int) -> subprocess.Popen[str]:
        """A process that builds the instance."""
        machines = json.dumps([dataclasses.asdict(each) for each in self.machines])
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.functional.compute.redfish_process"),
                *(self.state_dir, machines, self.uuid, self.first.uuid, str(token)),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        )  # fmt: skip
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    # -- boot devices and machines --------------------------------------------------------------------------------

    def test_a_machine_boots_from_what_the_flavor_says_and_from_the_network_otherwise(self) -> None:
        self.spawn(1)
        self.spawn(2, boot_device="cdrom")
        self.spawn(3, driver=self.driver(boot_device="none"))
        self.drv.reboot(self.uuid, 3, 4)
        self.assertEqual(("On", ["Pxe", "Cd", "Hdd", "Hdd"]), self.real(self.first, "power_state", "booted"))

    def test_a_boot_device_that_cannot_be_is_refused_and_ends_nothing(self) -> None:
        self.spawn(1)
        with self.assertRaisesRegex(DriverError, "node-1 cannot boot from usb; its BMC knows .*disk.*, pxe"):
            self.spawn(2, boot_device="usb")
        with self.assertRaisesRegex(DriverError, "'floppy'; it must be one of cdrom, disk"):
            self.spawn(3, boot_device="floppy")
        self.assertEqual(("On", 1), self.real(self.first))
        self.assertEqual((1, "running"), self.seen())

    def test_a_machine_has_one_instance(self) -> None:
        self.spawn(1)
        with self.assertRaisesRegex(DriverError, f"node-1 has instance {self.uuid} still"):
            self.drv.spawn(Workload(uuid=str(uuid_module.uuid4()), node=self.first.uuid), 1)
        self.assertEqual(("On", 1), self.real(self.first))

    def test_a_node_that_is_no_machine_is_refused(self) -> None:
        for machine, said in (
            (dataclasses.replace(self.second, uuid=str(uuid_module.uuid4())), "is no machine of this agent"),
            (dataclasses.replace(self.second, driver="ipmi"), "is no machine of this agent"),
            (dataclasses.replace(self.second, driver_info={}), "node-2 has no redfish_address"),
        ):
            self.machines = [self.first, *([machine] if machine.uuid == self.second.uuid else [])]
            with self.subTest(said=said), self.assertRaisesRegex(DriverError, said):
                self.spawn(1, machine, self.driver())

    def test_a_machine_that_is_on_without_an_instance_is_turned_off_first(self) -> None:
        self.change(self.first, power_state="On")
        self.spawn(1)
        self.assertEqual(("On", 2), self.real(self.first))

    # -- moves between machines of one agent ----------------------------------------------------------------------

    def test_a_newer_token_on_another_machine_ends_the_older_one(self) -> None:
        self.spawn(1)
        self.spawn(3, self.second)
        self.assertEqual((("Off", 1), ("On", 1)), (self.real(self.first), self.real(self.second)))
        self.assertEqual((3, "running"), self.seen())
        with self.assertRaisesRegex(DriverError, "later operation"):
            # Late, and it never was on this machine.
            self.drv.destroy(self.uuid, 4)
            self.spawn(2)
        self.assertEqual({}, self.drv.inspect())

    def test_what_ran_is_turned_on_again_when_its_replacement_cannot_run(self) -> None:
        self.spawn(1)
        for machine in (self.second, self.first):
            self.change(self.second, deaf=machine is self.second)
            driver = self.driver(power_timeout=0.2) if machine is self.second else self.drv
            refused = mock.patch.object(Bmc, "boot_once_from", side_effect=DriverError("no boot device today"))
            with (
                refused if machine is self.first else contextlib.nullcontext(),
                self.assertRaisesRegex(DriverError, r"\. What ran before was turned on again"),
            ):
                self.spawn(5, machine, driver)
            self.assertEqual((1, "running"), self.seen())
        self.assertEqual((("On", 3), ("Off", 0)), (self.real(self.first), self.real(self.second)))
        # Operations before the one that failed come too late.
        self.drv.stop(self.uuid, 1, 4)
        self.assertEqual(("On", 3), self.real(self.first))

    def test_what_ran_does_not_boot_what_its_rebuild_was_to_boot(self) -> None:
        self.spawn(1)
        self.change(self.first, refusals=1)
        with self.assertRaisesRegex(DriverError, r"\. What ran before was turned on again"):
            self.spawn(2)
        self.assertEqual(("On", ["Pxe", "Hdd"]), self.real(self.first, "power_state", "booted"))
        self.assertEqual((1, "running"), self.seen())
        # It comes on after the driver gave up.
        asked = Bmc.turn_on
        hung = iter((True, False))

        def turn_on(bmc: Bmc) -> None:
            if not next(hung):
                return asked(bmc)
            self.change(self.first, power_state="On")
            raise DriverError("the BMC hangs")

        with (
            mock.patch.object(Bmc, "turn_on", turn_on),
            self.assertRaisesRegex(DriverError, r"hangs\. What ran before was turned on again"),
        ):
            self.spawn(3)
        self.assertEqual(("On", ["Pxe", "Hdd", "Pxe", "Hdd"]), self.real(self.first, "power_state", "booted"))

    def test_what_ran_stays_off_when_it_could_boot_what_its_rebuild_was_to_boot(self) -> None:
        self.spawn(1)
        self.change(self.first, refusals=1, sticks=True)
        with self.assertRaisesRegex(
            DriverError, r"is not turned on again, since .* refused or failed; .*Rebuild the instance"
        ):
            self.spawn(2)
        for act in (self.drv.start, self.drv.reboot):
            with self.assertRaisesRegex(DriverError, "no build of the instance has succeeded .*; rebuild the instance"):
                act(self.uuid, 1, 3)
        self.drv.stop(self.uuid, 1, 4)
        with self.assertRaisesRegex(DriverError, "no build of the instance has succeeded"):
            self.drv.start(self.uuid, 1, 5)
        self.assertEqual(("Off", ["Pxe"]), self.real(self.first, "power_state", "booted"))
        self.assertEqual((1, "failed"), self.seen())
        self.spawn(6)
        self.assertEqual(("On", ["Pxe", "Pxe"]), self.real(self.first, "power_state", "booted"))
        self.assertEqual((6, "running"), self.seen())

    def test_a_machine_that_is_free_again_boots_as_it_is_set_up(self) -> None:
        for sticks in (False, True):
            self.change(self.first, refusals=1, sticks=sticks)
            with self.assertRaisesRegex(DriverError, "refused or failed"):
                self.spawn(1 + sticks)
            self.assertEqual(("Pxe",), self.real(self.first, "boots_once_from"))
            self.drv.destroy(self.uuid, 1 + sticks)
            self.assertEqual({}, self.drv.inspect())
            self.assertEqual(
                ("Off", "Pxe" if sticks else None), self.real(self.first, "power_state", "boots_once_from")
            )
        # The same after a move that failed.
        self.spawn(4)
        self.change(self.second, refusals=1)
        with self.assertRaisesRegex(DriverError, r"\. What ran before was turned on again"):
            self.spawn(5, self.second)
        self.assertEqual(("Off", None), self.real(self.second, "power_state", "boots_once_from"))

    # -- what is seen ---------------------------------------------------------------------------------------------

    def test_a_machine_that_says_off_for_a_moment_is_turned_off(self) -> None:
        acts = (
            lambda: self.drv.stop(self.uuid, 1, 2),
            lambda: self.drv.stop(self.uuid, 1, 3),
            lambda: self.drv.destroy(self.uuid, 4),
        )
        self.spawn(1)
        for act in acts:
            self.change(self.first, power_state="On", blinks=2)
            act()
            self.assertEqual(("Off",), self.real(self.first, "power_state"))
        self.assertEqual({}, self.drv.inspect())

    def test_a_move_turns_off_a_machine_that_says_off_for_a_moment(self) -> None:
        self.spawn(1)
        self.change(self.first, blinks=1)
        self.spawn(2, self.second)
        self.assertEqual((("Off", 1), ("On", 1)), (self.real(self.first), self.real(self.second)))

    def test_a_machine_that_is_turned_off_or_on_by_hand_is_seen(self) -> None:
        self.spawn(1)
        self.change(self.first, power_state="Off")
        self.assertEqual((1, "ended"), self.seen())
        self.drv.stop(self.uuid, 1, 2)
        self.assertEqual((1, "ended"), self.seen())
        self.drv.start(self.uuid, 1, 3)
        self.assertEqual((1, "running"), self.seen())
        self.drv.stop(self.uuid, 1, 4)
        self.change(self.first, power_state="On")
        found = self.drv.inspect()[self.uuid]
        self.assertEqual(("running", True), (found.state.value, "outside of Moorage" in found.detail))

    def test_a_bmc_is_asked_no_more_often_than_the_configuration_says(self) -> None:
        driver = self.driver(poll_interval=3600.0)
        self.spawn(1, driver=driver)
        self.change(self.first, power_state="Off")
        self.assertEqual((1, "running"), self.seen(driver))
        # What it does itself it knows.
        driver.stop(self.uuid, 1, 2)
        driver.start(self.uuid, 1, 3)
        driver.stop(self.uuid, 1, 4)
        self.assertEqual((1, "stopped"), self.seen(driver))

    def test_the_machines_of_a_bmc_that_is_away_are_as_they_were_seen_last(self) -> None:
        driver = self.driver(timeout=5.0)
        self.spawn(1)
        self.assertEqual((1, "running"), self.seen(driver))
        self.server.kill()
        try:
            with self.assertLogs(LOGGER, "WARNING") as logs:
                found = [driver.inspect() for _ in range(3)][-1][self.uuid]
            self.assertEqual("running", found.state.value)
            self.assertIn("cannot be seen now", found.detail)
            # Once for each machine, with what a person looks for.
            self.assertEqual(2, len(logs.output), logs.output)
            self.assertTrue(all(f"({self.server.url}) failed" in line for line in logs.output), logs.output)
            with self.assertRaisesRegex(DriverError, "the BMC of node node-1 does not answer"):
                self.spawn(2, driver=driver)
            with self.assertRaisesRegex(DriverError, "does not answer"):
                driver.destroy(self.uuid, 2)
        finally:
            self.server.restart()
        self.assertEqual((1, "running"), self.seen(driver))
        driver.destroy(self.uuid, 2)
        self.assertEqual(("Off", 1), self.real(self.first))

    def test_a_bmc_that_hangs_holds_up_an_answer_for_a_bounded_time(self) -> None:
        driver = self.driver(timeout=0.5)
        self.spawn(1)
        self.server.pause()
        try:
            found = driver.inspect()[self.uuid]
        finally:
            self.server.resume()
        self.assertEqual("running", found.state.value)
        self.assertIn("cannot be seen now", found.detail)

    def test_a_machine_that_does_nothing_is_neither_running_nor_gone(self) -> None:
        driver = self.driver(power_timeout=0.2)
        self.change(self.first, deaf=True)
        with self.assertRaisesRegex(DriverError, "was to be turned on, and its BMC has not said so within 0.2 seconds"):
            self.spawn(1, driver=driver)
        self.assertEqual((1, "failed"), self.seen())
        self.change(self.first, deaf=False, power_state="On")
        self.change(self.first, deaf=True)
        with self.assertRaisesRegex(DriverError, "was to be turned off"):
            driver.destroy(self.uuid, 1)
        self.assertEqual({self.uuid}, set(driver.inspect()))
        self.change(self.first, deaf=False)
        driver.destroy(self.uuid, 1)
        self.assertEqual({}, driver.inspect())

    def test_what_a_bmc_refuses_is_said_without_secrets(self) -> None:
        password = "a password that is wrong"
        self.machines = [machine_of(self.server, 1, redfish_password=password)]
        with self.assertLogs(level="DEBUG") as logs, self.assertRaisesRegex(DriverError, "does not accept") as raised:
            self.spawn(1, driver=self.driver())
        said = f"{raised.exception} {self.machines[0]!r} {logs.output}"
        self.assertNotIn(password, said)
        self.assertNotIn(str(self.server.port), str(raised.exception))
        self.machines = [machine_of(self.server, 1, redfish_system_id="/redfish/v1/Systems/none")]
        with self.assertRaisesRegex(DriverError, "knows no such system"):
            self.spawn(1, driver=self.driver())
        self.machines = [machine_of(self.server, 1, redfish_system_id=None)]
        with self.assertRaisesRegex(DriverError, "has no redfish_system_id"):
            self.spawn(1, driver=self.driver())
        self.machines = [machine_of(self.server, 1, redfish_address=f"http://moorage:{password}@127.0.0.1/")]
        with self.assertRaisesRegex(DriverError, "no URL like") as raised:
            self.spawn(1, driver=self.driver())
        self.assertNotIn(password, str(raised.exception))

    def test_user_name_and_password_may_be_those_of_the_configuration(self) -> None:
        self.machines = [machine_of(self.server, 1, redfish_username=None, redfish_password=None)]
        with self.assertRaisesRegex(DriverError, "does not accept"):
            self.spawn(1, driver=self.driver())
        self.spawn(1, driver=self.driver(username="moorage", password=self.server.password))
        self.assertEqual(("On", 1), self.real(self.first))

    # -- agents that stand still ----------------------------------------------------------------------------------

    def test_a_build_that_stood_still_before_it_had_the_machine_turns_nothing_on(self) -> None:
        records = Records(Path(self.state_dir) / "redfish" / "host-1", SystemClock())
        with records.locked(self.first.uuid, 60.0):
            process = self.process(3)
            wait_until(lambda: not records.announce(self.uuid, 2), "the build has announced its token")
            process.send_signal(signal.SIGSTOP)
        self.drv.destroy(self.uuid, 5)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=120)
        self.assertEqual("a later operation has ended the instance\n", output)
        self.assertEqual(("Off", 0), self.real(self.first))
        self.assertEqual({}, self.drv.inspect())

    def test_a_build_that_stands_still_with_the_machine_keeps_others_off_until_it_is_killed(self) -> None:
        self.change(self.first, delay=3600.0)
        process = self.process(3)
        wait_until(lambda: self.real(self.first, "pending_power")[0], "the machine was asked to be on")
        process.send_signal(signal.SIGSTOP)
        self.assertEqual((3, "running"), self.seen())
        with self.assertRaisesRegex(DriverError, "If an earlier process of the agent stands still, end it"):
            self.driver(power_timeout=0.1, shutdown_timeout=0.0).destroy(self.uuid, 5)
        process.kill()
        process.wait()
        self.assertEqual((3, "failed"), self.seen())
        # What it asked for last comes late, and must not come after the end of the instance.
        self.change(self.first, delay=0.0)
        self.drv.destroy(self.uuid, 5)
        self.assertEqual(("Off", 0, None), self.real(self.first, "power_state", "boots", "pending_power"))

    def test_files_that_a_killed_writer_left_are_removed_when_they_are_old(self) -> None:
        folder = Path(self.state_dir) / "redfish" / "host-1"
        old, young = folder / ".node.1", folder / ".node.2"
        for each in (old, young):
            each.touch()
        os.utime(old, (0, 0))
        self.driver()
        self.assertEqual((False, True), (old.exists(), young.exists()))
