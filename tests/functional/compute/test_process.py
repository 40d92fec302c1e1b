# SPDX-License-Identifier: Apache-2.0
"""The process driver with real sandboxes: the kit of compute drivers, and what is special about it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
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
from moorage_plugins.drivers.guarded.driver import _usage
from moorage_plugins.drivers.guarded.guardian import Guardian
from moorage_plugins.drivers.process import ProcessDriver
from tests.functional.compute import guarded
from tests.functional.compute.guarded import LOGGER, SOON
from tests.functional.compute.sandboxes import guardians_of, pids_of, require_bubblewrap
from tests.servers import wait_until


class KitTests(ComputeDriverTests, unittest.TestCase):
    kills = 12

    def setUp(self) -> None:
        require_bubblewrap(self)

    @override
    def make_driver(self, tools: DriverTools) -> ComputeDriver:
        return ProcessDriver(tools)

    @override
    def list_opts(self) -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
        return options.list_opts()

    @override
    def turn_on_self_fence(self, conf: cfg.ConfigOpts, seconds: float) -> None:
        conf.set_override("self_fence", seconds, group="driver_process")

    @override
    def workload(self, uuid: str) -> Workload:
        command = ("sleep", "100000")
        return Workload(uuid=uuid, project_id="red", resources={"VCPU": 1, "MEMORY_MB": 64}, command=command)

    @override
    def copies(self, host: str, uuid: str) -> Sequence[object]:
        return pids_of(uuid, self.state_dir() / "processes" / host)


class ProcessCase(guarded.GuardedCase):
    kind = ProcessDriver

    @override
    def require(self) -> None:
        require_bubblewrap(self)

    @override
    def copies(self) -> Sequence[int]:
        return pids_of(self.uuid, self.state_dir)


class ProcessTests(ProcessCase, guarded.GuardedLaws):
    """What is special about it."""

    killed = "kill -KILL $$"

    # -- the sandbox ----------------------------------------------------------------------------------------------

    def test_a_workload_sees_no_network_no_files_of_the_host_and_no_other_process(self) -> None:
        secret = self.state_dir / "secret"
        secret.write_text("a password")
        secret.chmod(0o644)
        said = self.output(
            f"echo uid $(id -u); echo host $(hostname); echo pids $(ls /proc | grep -c '^[0-9]');"
            f"echo net $(tail -n +3 /proc/net/dev | cut -d: -f1);"
            f"ls {self.state_dir} /root /home /var /etc/shadow /sys; touch /usr/x; touch /x; echo made > /tmp/x && cat /tmp/x;"
            "echo said > /dev/stdout; echo caps $(grep CapEff /proc/self/status)"
        )
        lines = said.splitlines()
        uid = int(next(line for line in lines if line.startswith("uid ")).split()[1])
        self.assertNotEqual(0, uid)
        self.assertIn(f"host i-{self.uuid}", lines)
        self.assertIn("net lo", lines)
        # bubblewrap, the shell, and what the shell runs.
        self.assertLessEqual(int(next(line for line in lines if line.startswith("pids ")).split()[1]), 6)
        self.assertEqual(6, said.count("No such file or directory"), said)
        self.assertEqual(2, said.count("Read-only file system"), said)
        self.assertLessEqual({"made", "said", "caps CapEff: 0000000000000000"}, set(lines))

    def test_a_workload_writes_to_memory_within_its_limit_alone(self) -> None:
        """Neither in what is mounted for it, nor in what it could mount in a user namespace of its own."""
        small = self.driver(tmp_size=1)
        fill = "head -c 3000000 /dev/zero > {0} 2>/dev/null; stat -c '%n %s' {0}"
        script = f"{fill.format('/tmp/x')}; {fill.format('/dev/shm/x')}; touch /dev/y; unshare -Urm true && echo mounts"
        self.spawn("sh", "-c", script, driver=small)
        self.ended()
        said = small.console(self.uuid, 100)
        sizes = {
            name: int(size) for name, _, size in (line.partition(" ") for line in said.splitlines()) if size.isdigit()
        }
        self.assertEqual({"/tmp/x", "/dev/shm/x"}, sizes.keys(), said)
        self.assertLessEqual(max(sizes.values()), 2**20)
        self.assertIn("/dev/y", said)
        self.assertIn("Read-only file system", said)
        self.assertNotIn("mounts", said.split())

    @unittest.skipUnless(os.getuid() == 0, "only root gives projects users of their own")
    def test_each_project_has_a_user_of_its_own_that_no_user_of_the_host_is(self) -> None:
        self.spawn("sleep", "100000")
        (pid,) = self.pids()
        uid = os.stat(f"/proc/{pid}").st_uid
        self.assertLessEqual(700_000, uid)
        other = self.drv._uid("blue")
        self.assertNotEqual(uid, other)

    def test_environment_and_files_of_the_agent_do_not_reach_the_workload(self) -> None:
        with mock.patch.dict(os.environ, {"OS_PASSWORD": "a password"}):
            said = self.output("env; ls -l /proc/self/fd | grep -c '[012] ->'; ls /proc/self/fd | wc -l")
        self.assertNotIn("a password", said)
        # Its three, and that of the folder which ls reads.
        self.assertEqual(["3", "4"], said.split()[-2:], said)

    # -- its end --------------------------------------------------------------------------------------------------

    def test_a_workload_that_is_killed_by_hand(self) -> None:
        self.spawn("sleep", "100000")
        (pid,) = self.pids()
        os.kill(pid, signal.SIGKILL)
        self.assertEqual((WorkloadState.FAILED, True), ((seen := self.ended()).state, "signal 9" in seen.detail), seen)

    def test_what_ignores_its_end_is_killed(self) -> None:
        driver = self.driver(stop_timeout=0.1)
        self.spawn("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done", driver=driver)
        wait_until(lambda: "ready" in driver.console(self.uuid, 1), "the workload", SOON)
        driver.destroy(self.uuid, 1)
        self.assertEqual([], self.pids())

    def test_a_workload_ends_itself_in_order_when_it_is_asked_to(self) -> None:
        self.spawn("sh", "-c", "trap 'echo in order; exit 0' TERM; echo ready; while :; do sleep 0.1; done")
        wait_until(lambda: "ready" in self.drv.console(self.uuid, 1), "the workload", SOON)
        self.drv.stop(self.uuid, 1, 1)
        self.assertEqual("in order\n", self.drv.console(self.uuid, 1))

    def test_a_guardian_that_stands_still_is_ended_too(self) -> None:
        driver = self.driver(stop_timeout=0.1)
        self.spawn("sleep", "100000", driver=driver)
        (guardian,) = guardians_of(self.uuid)
        os.kill(guardian, signal.SIGSTOP)
        driver.destroy(self.uuid, 1)
        self.assertEqual(([], {}), (self.pids(), driver.inspect()))

    # -- power calls that cross -----------------------------------------------------------------------------------

    def test_a_restart_that_has_begun_does_not_undo_a_stop(self) -> None:
        """Its guardian is on its way when the stop comes, takes the lock after it, and finds the later order."""
        self.spawn("sh", "-c", "exit 3")
        self.ended()
        begin = subprocess.run

        def stop_first(command: list[str], **how: Any) -> Any:
            with mock.patch.object(subprocess, "run", begin):
                self.drv.stop(self.uuid, 1, 3)
            return begin(command, **how)

        with mock.patch.object(subprocess, "run", stop_first):
            self.drv.start(self.uuid, 1, 2)
        self.assertIn("exit code 3", self.drv.inspect()[self.uuid].detail)
        self.assertEqual([], self.pids())

    def test_a_stop_that_stands_still_ends_nothing_that_was_started_since(self) -> None:
        """It has kept its order, and found that the workload runs; a start comes before it ends the workload."""
        self.spawn("sleep", "100000")
        send, copies = self.drv._signal, []

        def start_first(*given: Any) -> bool:
            self.driver().start(self.uuid, 1, 3)
            copies.append(self.pids())
            return send(*given)

        with mock.patch.object(self.drv, "_signal", start_first):
            self.drv.stop(self.uuid, 1, 2)
        self.assertEqual((1, copies), (len(copies), [self.pids()]))
        self.assertEqual(WorkloadState.RUNNING, self.drv.inspect()[self.uuid].state)

    # -- limits ---------------------------------------------------------------------------------------------------

    def test_more_memory_than_it_has_ends_a_workload(self) -> None:
        self.spawn("tail", "/dev/zero", MEMORY_MB=32)
        self.assertEqual(WorkloadState.FAILED, self.ended().state)

    def test_what_is_kept_of_a_log_is_its_end(self) -> None:
        driver = self.driver(log_size=1)
        self.spawn("sh", "-c", "seq 1 500000; echo the end", driver=driver)
        self.ended()
        kept = [path.stat().st_size for path in (self.state_dir / "processes").rglob("log*")]
        self.assertEqual(2, len(kept))
        self.assertLess(sum(kept), 2**20 + 2**17)
        self.assertEqual("500000\nthe end\n", driver.console(self.uuid, 2))

    def test_usage_has_the_processor_time_of_commands_that_have_ended(self) -> None:
        subprocess.run([sys.executable, "-c", "import os\nwhile os.times().user < 0.5: pass"], check=True)
        self.assertGreaterEqual(_usage([os.getpid()]).cpu_seconds, sum(os.times()[:4]) - 0.1)

    def test_a_stray_file_of_an_operator_is_no_workload(self) -> None:
        self.spawn("sleep", "100000")
        (self.state_dir / "processes/host-1/notes.txt").write_text("by hand")
        self.assertEqual({self.uuid}, self.drv.usage().keys())
        self.assertEqual({self.uuid}, self.drv.inspect().keys())
        with self.assertRaisesRegex(DriverError, "nothing of instance"):
            self.drv.console("notes.txt", 1)

    def test_a_folder_that_cannot_be_read_is_a_fault_of_the_driver(self) -> None:
        shutil.rmtree(self.state_dir / "processes")
        with self.assertLogs(LOGGER, "ERROR"), self.assertRaisesRegex(DriverError, "No such file"):
            self.drv.usage()
        (self.state_dir / "processes/host-1").mkdir(parents=True)
        (self.state_dir / "processes/host-1" / self.uuid).symlink_to(self.uuid)
        with self.assertLogs(LOGGER, "ERROR"), self.assertRaisesRegex(DriverError, "symbolic links"):
            self.drv.console(self.uuid, 1)
        os.unlink(self.state_dir / "processes/host-1" / self.uuid)

    # -- messages for users ---------------------------------------------------------------------------------------

    def test_what_cannot_be_run_is_refused_with_the_reason_and_leaves_nothing(self) -> None:
        for command, settings, text in (
            ((), {}, "has no command"),
            (("no-such-program",), {}, "'no-such-program' is not found in the sandbox"),
        ):
            with self.subTest(text=text), self.assertRaisesRegex(DriverError, text) as raised:
                self.spawn(*command, driver=self.driver(**settings))
            self.assertNotIn("Traceback", str(raised.exception))
            self.assertEqual({}, self.drv.inspect())
        with self.assertRaisesRegex(DriverError, "nothing of instance"):
            self.drv.console(self.uuid, 1)

    def test_paths_of_the_host_are_in_the_log_and_not_in_faults(self) -> None:
        with self.assertLogs(LOGGER, "WARNING") as logs, self.assertRaises(DriverError) as raised:
            self.spawn("true", driver=self.driver(read_only_paths=["/etc/ssl/certs"]))
        self.assertEqual("The sandbox could not be made; the log of the agent says why.", str(raised.exception))
        self.assertRegex("".join(logs.output), f"{self.uuid}/1.*/bin/sh")
        folder = self.state_dir / "processes"
        shutil.rmtree(folder)
        with self.assertLogs(LOGGER, "ERROR") as logs, self.assertRaisesRegex(DriverError, "No such file") as raised:
            self.drv.inspect()
        self.assertNotIn(str(self.state_dir), str(raised.exception))
        self.assertIn(str(folder), "".join(logs.output))

    def test_what_a_guardian_writes_beside_its_answer_is_in_the_log_and_not_in_faults(self) -> None:
        """As the traceback of a disk that is full."""
        with (
            mock.patch.object(self.drv, "_limits", return_value={}),
            self.assertLogs(LOGGER, "WARNING") as logs,
            self.assertRaises(DriverError) as raised,
        ):
            self.spawn("true")
        self.assertEqual(
            "the guardian of the workload ended before it could say whether it runs; the log of the agent has what is known",
            str(raised.exception),
        )
        self.assertIn("KeyError: 'groups'", "".join(logs.output))
        self.assertEqual({}, self.drv.inspect())

    # -- a workload that is replaced ------------------------------------------------------------------------------

    def test_what_ran_before_runs_again_when_its_replacement_cannot_run(self) -> None:
        self.spawn("sh", "-c", "echo begun; exec sleep 100000")
        (first,) = self.pids()
        with self.assertRaisesRegex(DriverError, "not found in the sandbox.*What ran before was started again."):
            self.spawn("no-such-program", token=2)
        seen = self.drv.inspect()[self.uuid]
        self.assertEqual((1, WorkloadState.RUNNING), (seen.token, seen.state), seen)
        (again,) = self.pids()
        self.assertNotEqual(first, again)
        wait_until(lambda: self.drv.console(self.uuid, 10).count("begun") == 2, "it to begin again", SOON)
        self.spawn("sleep", "100000", token=3)
        self.assertEqual(["3"], self.folders())

    def test_what_had_ended_before_is_kept_as_it_was_when_its_replacement_cannot_run(self) -> None:
        self.spawn("sh", "-c", "exit 3")
        before = self.ended()
        with self.assertRaisesRegex(DriverError, "not found") as raised:
            self.spawn("no-such-program", token=2)
        self.assertNotIn("What ran before", str(raised.exception))
        self.assertEqual(before, self.drv.inspect()[self.uuid])

    def test_what_ran_before_is_not_lost_when_its_replacement_was_killed_and_is_done_again(self) -> None:
        """The agent is killed when it has ended what ran; the next one repeats the rebuild, which cannot run."""
        self.spawn("sleep", "100000")
        with mock.patch.object(self.drv, "_guard", side_effect=SystemExit), self.assertRaises(SystemExit):
            self.spawn("no-such-program", token=2)
        self.assertEqual(["1", "2"], self.folders())
        with self.assertRaisesRegex(DriverError, "not found in the sandbox.*What ran before was started again."):
            self.spawn("no-such-program", token=3, driver=self.driver())
        seen = self.drv.inspect()[self.uuid]
        self.assertEqual((1, WorkloadState.RUNNING), (seen.token, seen.state), seen)
        self.assertEqual((["1"], 1), (self.folders(), len(self.pids())))

    def test_what_an_operator_stopped_stays_stopped_when_its_replacement_cannot_run(self) -> None:
        self.spawn("sleep", "100000")
        self.drv.stop(self.uuid, 1, 2)
        for token in (3, 4):
            with self.assertRaisesRegex(DriverError, "not found in the sandbox"):
                self.spawn("no-such-program", token=token)
            seen = self.drv.inspect()[self.uuid]
            self.assertEqual((1, WorkloadState.STOPPED), (seen.token, seen.state), seen)
        self.assertEqual((["1"], []), (self.folders(), self.pids()))

    def test_a_replacement_of_what_cannot_be_ended_leaves_nothing_that_could_be_started(self) -> None:
        self.spawn("sleep", "100000")
        end, copies = self.drv._end, self.pids()

        def stuck(own: Path) -> int | None:
            if own.name == "1":
                raise DriverError("the workload could not be ended")
            return end(own)

        with mock.patch.object(self.drv, "_end", stuck), self.assertRaisesRegex(DriverError, "could not be ended"):
            self.spawn("sleep", "200000", token=2)
        self.assertEqual((["1"], copies), (self.folders(), self.pids()))

    def folders(self) -> list[str]:
        return sorted(each.name for each in (self.state_dir / "processes/host-1" / self.uuid).iterdir())

    # -- what it writes -------------------------------------------------------------------------------------------

    def test_a_guardian_rests_between_two_reads(self) -> None:
        """However much a workload writes, and however small the pieces are."""
        clock = mock.Mock()
        clock.monotonic.return_value = 100.0
        guardian = Guardian(self.state_dir, clock, again=None)
        guardian._spec = {"log_bytes": 2**20}
        output, written = os.pipe()
        os.set_blocking(output, False)
        guardian._out = output
        guardian._register(output, guardian._output)
        log = self.state_dir / "log"

        def wrote(text: bytes) -> bytes:
            os.write(written, text)
            guardian._step()
            return log.read_bytes()

        self.assertEqual(b"a", wrote(b"a"))
        self.assertEqual(b"a", wrote(b"b"))
        self.assertEqual(b"a", wrote(b"c"))
        clock.monotonic.return_value += 1.0
        self.assertEqual(b"abcd", wrote(b"d"))
        # A workload may close what it writes to, and go on.
        clock.monotonic.return_value += 1.0
        os.close(written)
        guardian._step()
        self.assertIsNone(guardian._out)
        clock.monotonic.return_value += 1.0
        # Nothing else would end this step.
        guardian._kill_at = clock.monotonic.return_value + 0.01
        guardian._step()
        self.assertEqual(float("inf"), guardian._read_at)


class MissingTests(unittest.TestCase):
    def test_a_machine_without_bubblewrap(self) -> None:
        conf = defaults(driver_process={"bwrap": "no-such-bwrap"})
        with self.assertRaisesRegex(errors.ConfigError, "no-such-bwrap.*Install the package bubblewrap"):
            ProcessDriver(DriverTools(conf, SystemClock(), "host-1"))
