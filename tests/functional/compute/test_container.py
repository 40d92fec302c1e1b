# SPDX-License-Identifier: Apache-2.0
"""The container driver with real containers: the kit of compute drivers, and what is special about it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from oslo_config import cfg
from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.drivers.interface import ComputeDriver, DriverError, DriverTools, Workload, WorkloadState
from moorage.options import defaults
from moorage.testing.drivers import ComputeDriverTests
from moorage_plugins.drivers import options
from moorage_plugins.drivers.container import ContainerDriver
from moorage_plugins.drivers.guarded.files import try_lock
from tests.functional.compute import guarded
from tests.functional.compute.guarded import LOGGER, SOON
from tests.functional.compute.images import copies_of, make_image, require_runc
from tests.functional.compute.sandboxes import guardians_of
from tests.servers import wait_until


class KitTests(ComputeDriverTests, unittest.TestCase):
    kills = 8
    images: Path

    @classmethod
    def setUpClass(cls) -> None:
        cls.images = Path(tempfile.mkdtemp(prefix="moorage-images-"))
        cls.addClassCleanup(shutil.rmtree, cls.images, ignore_errors=True)

    def setUp(self) -> None:
        require_runc(self)
        if not (self.images / "busybox").exists():
            make_image(self.images)

    @override
    def make_driver(self, tools: DriverTools) -> ComputeDriver:
        return ContainerDriver(tools)

    @override
    def list_opts(self) -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
        return options.list_opts()

    @override
    def configure(self, conf: cfg.ConfigOpts) -> None:
        conf.set_override("images", str(self.images), group="driver_container")
        # The first process of a container does not end at SIGTERM unless it has a handler.
        conf.set_override("stop_timeout", 0.1, group="driver_container")

    @override
    def turn_on_self_fence(self, conf: cfg.ConfigOpts, seconds: float) -> None:
        conf.set_override("self_fence", seconds, group="driver_container")

    @override
    def workload(self, uuid: str) -> Workload:
        return Workload(
            uuid=uuid,
            project_id="red",
            resources={"VCPU": 1, "MEMORY_MB": 64},
            image={"id": "busybox"},
            command=("sleep", "100000"),
        )

    @override
    def copies(self, host: str, uuid: str) -> Sequence[object]:
        return copies_of(uuid, self.state_dir() / "containers" / host)


class ContainerTests(guarded.GuardedLaws):
    """What is special about it."""

    kind = ContainerDriver
    # The shell is the first process of its namespace, which ignores signals of its own.
    killed = "sh -c 'kill -KILL $$'; exit $?"

    @override
    def require(self) -> None:
        require_runc(self)

    @override
    def prepare(self) -> None:
        #: Descriptors of locks that a test holds.
        self.kept: list[int] = []
        self.state_dir.chmod(0o755)
        self.images = self.state_dir / "images"
        make_image(self.images)

    @override
    def settings(self) -> dict[str, Any]:
        return {"images": str(self.images), "stop_timeout": 0.1}

    @override
    def image(self) -> dict[str, Any]:
        return {"id": "busybox"}

    @override
    def copies(self) -> Sequence[int]:
        return copies_of(self.uuid, self.state_dir)

    @override
    def assert_nothing_left(self) -> None:
        self.assertEqual(([], []), (self.pids(), self.left()))

    # -- the container --------------------------------------------------------------------------------------------

    def test_a_container_sees_its_image_and_nothing_of_the_host(self) -> None:
        said = self.output(
            "echo uid $(id -u); echo host $(hostname); echo first $$; echo net $(tail -n +3 /proc/net/dev | cut -d: -f1);"
            "echo root $(ls /); ls /root /home /usr; touch /bin/x; touch /x; echo made > /tmp/x && cat /tmp/x;"
            "echo said > /dev/stdout; echo caps $(grep CapEff /proc/self/status); echo $(grep NoNewPrivs /proc/self/status);"
            "echo fds $(ls -l /proc/self/fd | grep -c ' -> ') $(ls /proc/self/fd | wc -l); env"
        )
        lines = said.splitlines()
        self.assertIn(f"host i-{self.uuid}", lines)
        self.assertLessEqual(
            {"uid 0", "first 1", "net lo", "root bin dev etc proc tmp", "made", "said", "NoNewPrivs: 1"},
            set(lines),
            said,
        )
        self.assertIn("caps CapEff: 0000000000000000", lines)
        self.assertEqual(3, said.count("No such file or directory") - said.count("cannot read link"), said)
        self.assertEqual(2, said.count("Read-only file system"), said)
        # Its three, and that of the folder which ls reads.
        self.assertIn("fds 3 4", lines)
        self.assertIn(f"MOORAGE_INSTANCE={self.uuid}", lines)
        self.assertNotIn("PYTHON", said)

    def test_its_root_is_a_user_of_its_project_on_the_host(self) -> None:
        self.spawn("sleep", "100000")
        (pid,) = self.pids()
        uid = os.stat(f"/proc/{pid}").st_uid
        self.assertLessEqual(700_000, uid)
        self.assertEqual(self.drv._uid("red"), uid)
        self.assertNotEqual(self.drv._uid("blue"), uid)

    def test_it_makes_no_namespaces_and_mounts_nothing(self) -> None:
        said = self.output("unshare -U true; unshare -m true; mount -t tmpfs x /tmp; umount /tmp; echo end")
        self.assertEqual(4, said.count("Operation not permitted") + said.count("ermission denied"), said)
        self.assertIn("end", said.splitlines())

    def test_it_writes_to_memory_within_its_limit_alone(self) -> None:
        small = self.driver(tmp_size=1)
        fill = "head -c 3000000 /dev/zero > {0} 2>/dev/null; echo {0} $(stat -c %s {0})"
        self.spawn("sh", "-c", f"{fill.format('/tmp/x')}; {fill.format('/dev/shm/x')}", driver=small)
        self.ended()
        self.assertEqual(
            {"/tmp/x 1048576", "/dev/shm/x 1048576"}, set(small.console(self.uuid, 10).splitlines()), "1 MiB each"
        )

    def test_an_image_says_what_to_run(self) -> None:
        process = {
            "args": ["sh", "-c", "echo $WORD in $PWD; id -u; grep CapEff /proc/self/status"],
            "env": ["WORD=hello", "PATH=/bin"],
            "cwd": "/etc",
            # None of these is taken.
            "user": {"uid": 17, "gid": 17},
            "noNewPrivileges": False,
            "capabilities": {each: ["CAP_SYS_ADMIN"] for each in ("bounding", "effective", "permitted")},
        }
        make_image(self.images, "greeter", process=process)
        self.spawn(image={"id": "greeter"})
        self.assertEqual(WorkloadState.ENDED, self.ended().state)
        self.assertEqual(
            ["hello in /etc", "0", "CapEff:\t0000000000000000"], self.drv.console(self.uuid, 10).splitlines()
        )
        self.spawn("echo", "another", image={"id": "greeter"}, token=2)
        self.ended()
        self.assertEqual("another\n", self.drv.console(self.uuid, 10))

    # -- its end --------------------------------------------------------------------------------------------------

    def test_more_memory_than_it_has_ends_a_container(self) -> None:
        self.spawn("tail", "/dev/zero", MEMORY_MB=32)
        seen = self.ended()
        self.assertEqual(WorkloadState.FAILED, seen.state)
        self.assertIn("more memory than it has", seen.detail)

    def test_more_processes_than_it_may_have_are_refused(self) -> None:
        # runc itself has about ten threads while it makes a container.
        self.spawn("sh", "-c", "for i in $(seq 100); do sleep 1 & done; wait", driver=self.driver(max_processes=40))
        self.ended()
        self.assertIn("can't fork", self.drv.console(self.uuid, 10))

    def test_limits_are_those_of_its_control_groups(self) -> None:
        """runc makes them, or does not run the container."""
        script = "cat /proc/self/cgroup; sleep 100000"
        self.spawn("sh", "-c", script, VCPU=2, MEMORY_MB=64)
        self.assertEqual("", self.drv.inspect()[self.uuid].detail)
        wanted = {
            **dict.fromkeys(("memory/{}/memory.limit_in_bytes", "{}/memory.max"), str(64 * 2**20)),
            "pids/{}/pids.max": "512",
            "cpu/{}/cpu.cfs_quota_us": "200000",
            "{}/cpu.max": "200000 100000",
        }
        group = f"moorage/{self.uuid}-1"
        found = {
            path: (Path("/sys/fs/cgroup") / path.format(group)).read_text().strip()
            for path in wanted
            if (Path("/sys/fs/cgroup") / path.format(group)).exists()
        }
        self.assertGreaterEqual(len(found), 2)
        self.assertEqual({path: wanted[path] for path in found}, found)

    def test_a_start_beside_a_reader_starts_the_container(self) -> None:
        """A reader holds the lock for a moment, while the guardian was killed and the last state says that it runs."""
        self.spawn("sleep", "100000")
        (guardian,) = guardians_of(self.uuid)
        os.kill(guardian, signal.SIGKILL)
        wait_until(lambda: not self.pids(), "the container to end", SOON)
        own = self.state_dir / "containers/host-1" / self.uuid / "1"

        def held() -> bool:
            lock = try_lock(own, shared=True)
            self.kept.extend([] if lock is None else [lock])
            return lock is not None

        wait_until(held, "the lock", SOON)
        timer = threading.Timer(1.0, lambda: os.close(self.kept.pop()))
        timer.start()
        self.drv.start(self.uuid, 1, 2)
        timer.join()
        self.assertEqual(1, len(self.pids()))

    def test_nothing_is_left_of_a_container_that_was_destroyed(self) -> None:
        self.spawn("sleep", "100000")
        self.assertNotEqual([], self.left())
        self.drv.destroy(self.uuid, 1)
        self.assert_nothing_left()

    def left(self) -> list[str]:
        """Control groups and records of the runtime that belong to the instance."""
        groups = [str(each) for each in Path("/sys/fs/cgroup").glob(f"*/moorage/{self.uuid}-*")]
        groups += [str(each) for each in Path("/sys/fs/cgroup").glob(f"moorage/{self.uuid}-*")]
        return groups + [str(each) for each in (self.state_dir / "containers/host-1/.runc").glob("*")]

    def test_a_container_that_handles_sigterm_ends_in_order(self) -> None:
        driver = self.driver(stop_timeout=30.0)
        self.spawn(
            "sh", "-c", "trap 'echo in order; exit 0' TERM; echo ready; while :; do sleep 0.1; done", driver=driver
        )
        wait_until(lambda: "ready" in driver.console(self.uuid, 1), "the container", SOON)
        driver.stop(self.uuid, 1, 1)
        self.assertIn("in order", driver.console(self.uuid, 10).splitlines())
        self.assertEqual(WorkloadState.STOPPED, driver.inspect()[self.uuid].state)

    def test_what_runs_around_a_container_is_not_in_its_usage(self) -> None:
        self.spawn("sleep", "100000")
        self.assertLess(self.drv.usage()[self.uuid].memory_bytes, 4 * 2**20)

    # -- messages for users ---------------------------------------------------------------------------------------

    def test_what_cannot_be_run_is_refused_with_the_reason_and_leaves_nothing(self) -> None:
        make_image(self.images, "damaged")
        (self.images / "damaged" / "config.json").write_text("{")
        make_image(self.images, "odd", process={"args": ["sh", 3]})
        for image, command, text in (
            ("", ("true",), "has no image"),
            ("other", ("true",), "there is no image 'other' on this host"),
            ("../busybox", ("true",), "there is no image '../busybox'"),
            ("busybox", (), "does not say what to run"),
            ("damaged", ("true",), "no OCI runtime configuration"),
            ("odd", (), "no OCI process"),
            ("busybox", ("no-such-program",), "'no-such-program' is not in the image busybox"),
            ("busybox", ("/etc",), "'/etc' is not in the image busybox, or cannot be run"),
        ):
            with self.subTest(text=text):
                with self.assertRaisesRegex(DriverError, text) as raised:
                    self.spawn(*command, image={"id": image} if image else {})
                self.assertNotIn(str(self.state_dir), str(raised.exception))
                self.assertEqual({}, self.drv.inspect())
        self.assertEqual([], self.left())

    def test_what_ran_before_runs_again_when_its_replacement_cannot_run(self) -> None:
        self.spawn("sleep", "100000")
        with self.assertRaisesRegex(DriverError, "not in the image.*What ran before was started again."):
            self.spawn("no-such-program", token=2)
        seen = self.drv.inspect()[self.uuid]
        self.assertEqual((1, WorkloadState.RUNNING), (seen.token, seen.state), seen)
        copies = self.pids()
        with self.assertRaisesRegex(DriverError, "there is no image"):
            self.spawn("sleep", "100000", image={"id": "other"}, token=3)
        self.assertEqual(copies, self.pids())

    def test_what_runc_says_is_in_the_log_and_not_in_faults(self) -> None:
        (self.images / "busybox" / "rootfs" / "tmp").rmdir()
        (self.images / "busybox" / "rootfs" / "tmp").write_text("no folder")
        with self.assertLogs(LOGGER, "WARNING") as logs, self.assertRaises(DriverError) as raised:
            self.spawn("true")
        self.assertEqual("The sandbox could not be made; the log of the agent says why.", str(raised.exception))
        self.assertRegex("".join(logs.output), "runc run failed")


class MissingTests(unittest.TestCase):
    """A machine on which the driver cannot be used."""

    def driver(self, **settings: Any) -> ContainerDriver:
        return ContainerDriver(DriverTools(defaults(driver_container=settings), SystemClock(), "host-1"))

    def test_an_agent_that_is_not_root(self) -> None:
        with mock.patch.object(os, "getuid", return_value=1000), self.assertRaisesRegex(errors.ConfigError, "is root"):
            self.driver()

    def test_a_program_that_is_missing(self) -> None:
        with (
            mock.patch.object(os, "getuid", return_value=0),
            self.assertRaisesRegex(errors.ConfigError, "no-such-runc.*Install the package runc"),
        ):
            self.driver(runc="no-such-runc")

    def test_a_folder_of_images_that_is_missing_or_that_containers_may_not_enter(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="moorage-images-"))
        self.addCleanup(shutil.rmtree, folder)
        with mock.patch.object(os, "getuid", return_value=0):
            with self.assertRaisesRegex(errors.ConfigError, "which is no folder"):
                self.driver(runc="sh", images=str(folder / "none"))
            with self.assertRaisesRegex(errors.ConfigError, f"chmod o.x {folder}"):
                self.driver(runc="sh", images=str(folder))
