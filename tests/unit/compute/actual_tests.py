# SPDX-License-Identifier: Apache-2.0
"""What is done about workloads that ended, on any database; a mix-in for the tests of each.

The driver is the simulated one, whose workloads can be ended: the real thing is in tests/functional/compute/test_process_plane.py.
"""

from __future__ import annotations

import dataclasses
import tempfile
import threading
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from typing_extensions import override

from moorage import errors
from moorage.clock import Clock
from moorage.drivers.interface import (
    API_VERSION,
    ComputeDriver,
    DriverError,
    DriverTools,
    Observed,
    Workload,
    WorkloadState,
)
from moorage.journal.reader import EventFilter, JournalReader
from moorage.journal.sequencer import Sequencer
from moorage.testing.clock import ManualClock
from moorage.work.job import Job
from moorage.work.work_loop import WorkLoop
from moorage_plugins.compute.actual_state import LATE, ActualStates
from moorage_plugins.compute.agent import ComputeAgent, InstanceWork
from moorage_plugins.compute.instances import compared
from moorage_plugins.compute.unknown_workloads import UnknownWorkloads
from moorage_plugins.drivers.simulated import SimulatedDriver
from tests.servers import wait_until
from tests.unit.compute.agent_tests import HOST, NODE, SOON, Fleet

RUNNING, ENDED, FAILED, STOPPED = (
    WorkloadState.RUNNING,
    WorkloadState.ENDED,
    WorkloadState.FAILED,
    WorkloadState.STOPPED,
)


class Mortal(SimulatedDriver):
    """Its workloads can be ended, and started again."""

    def __init__(self, tools: DriverTools) -> None:
        super().__init__(tools)
        self.ended: dict[str, tuple[WorkloadState, str]] = {}
        self.started: list[tuple[str, int]] = []
        #: Of the power calls.
        self.orders: list[int] = []
        #: What a start waits for.
        self.gate = threading.Event()
        self.gate.set()
        self.blind = self.broken = False
        #: Whether what is started or rebooted ends at once.
        self.short = False
        #: Tokens that cannot be destroyed, and what a replacement that cannot run leaves: nothing, or the one before.
        self.stuck: set[int] = set()
        self.loses = self.refuses = False

    @override
    def spawn(self, workload: Workload, token: int) -> None:
        if self.loses:
            super().destroy(workload.uuid, token)
        if self.loses or self.refuses:
            raise DriverError("the new one does not run")
        super().spawn(workload, token)

    @override
    def destroy(self, uuid: str, up_to_token: int) -> None:
        if up_to_token in self.stuck:
            raise DriverError("it does not end")
        super().destroy(uuid, up_to_token)

    @override
    def inspect(self) -> Mapping[str, Observed]:
        if self.blind:
            raise DriverError("the hypervisor does not answer")
        return {
            uuid: Observed(seen.token, *((RUNNING, None, "") if uuid not in self.ended else self._end(uuid)))
            for uuid, seen in super().inspect().items()
        }

    def _end(self, uuid: str) -> tuple[WorkloadState, None, str]:
        state, detail = self.ended[uuid]
        return state, None, detail

    def stop(self, uuid: str, token: int, order: int) -> None:
        self.orders.append(order)
        self._check_power(uuid, token)
        self.ended.setdefault(uuid, (STOPPED, "It was stopped."))

    def _check_power(self, uuid: str, token: int) -> None:
        assert super().inspect()[uuid].token == token
        if self.refuses:
            raise DriverError("the new one does not run")

    def start(self, uuid: str, token: int, order: int) -> None:
        self.orders.append(order)
        self.started.append((uuid, token))
        assert self.gate.wait(60)
        if self.broken:
            raise DriverError("it does not start")
        self._run_again(uuid)

    def _run_again(self, uuid: str) -> None:
        self.ended.pop(uuid, None)
        if self.short:
            self.ended[uuid] = (FAILED, "It ended with exit code 3.")

    def reboot(self, uuid: str, token: int, order: int) -> None:
        self.orders.append(order)
        self._check_power(uuid, token)
        self._run_again(uuid)


class Powerless(ComputeDriver):
    """Can do what every driver can, and nothing else."""

    api_version = API_VERSION

    def __init__(self, tools: DriverTools) -> None:
        super().__init__(tools)
        self._real = SimulatedDriver(tools)

    @override
    def spawn(self, workload: Workload, token: int) -> None:
        self._real.spawn(workload, token)

    @override
    def destroy(self, uuid: str, up_to_token: int) -> None:
        self._real.destroy(uuid, up_to_token)

    @override
    def inspect(self) -> Mapping[str, Observed]:
        return self._real.inspect()


class ActualStateTests(unittest.TestCase):
    """Subclasses give ``url``."""

    url: str

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.fleet = Fleet(self.url, folder.name, service="test", restart_delay=0.0, restart_limit=2)
        self.addCleanup(self.fleet.database.close)
        self.fleet.create_tables()
        self.tools = self.fleet.tools()
        self.driver = Mortal(DriverTools(self.fleet.conf, self.fleet.clock, HOST))
        self.work = InstanceWork(self.tools, self.driver)
        self.actual = ActualStates(self.tools, self.driver, lambda work: work())

    def active(self, **extra_specs: str) -> str:
        """An instance that was built."""
        uuid = self.fleet.place({name.replace("_", ":"): value for name, value in extra_specs.items()})
        self.operate(uuid)
        return uuid

    def operate(self, uuid: str) -> None:
        """Does the operation on the instance from beginning to end, in this thread."""
        loop: WorkLoop[Any] = WorkLoop("test", self.work, self.fleet.clock, operations=1)
        for job in self.work.take("instance", [uuid]):
            loop.run(job)

    def die(self, uuid: str, state: WorkloadState = FAILED, detail: str = "It ended with exit code 3.") -> None:
        self.driver.ended[uuid] = (state, detail)

    def row(self, uuid: str) -> tuple[str, str, str, int]:
        found = self.fleet.instances.get(uuid)
        return found.status, found.actual_state, found.fault, found.restarts

    def observed(self, uuid: str) -> list[tuple[str, str, int]]:
        """(status, actual state, restarts) by the journal."""
        Sequencer(self.fleet.database).number()
        events = JournalReader(self.fleet.database).page(None, EventFilter(), 1000).events
        return [
            (each.state["status"], each.state["actual_state"], each.state["restarts"])
            for each in events
            if each.kind == "instance.observe" and each.subject == f"instance/{uuid}"
        ]

    # -- without restarts -----------------------------------------------------------------------------------------

    def test_what_was_just_built_is_known_to_run_and_nothing_is_written(self) -> None:
        uuid = self.active()
        before = self.fleet.instances.get(uuid)
        self.assertEqual(("active", "running", "", 0), self.row(uuid))
        self.assertGreater(before.actual_at, 1_700_000_000_000_000)
        self.actual.compare()
        self.assertEqual((before, []), (self.fleet.instances.get(uuid), self.observed(uuid)))

    def test_what_failed_becomes_stopped_with_the_reason_and_keeps_its_resources(self) -> None:
        uuid, other = self.active(), self.active()
        self.die(uuid)
        self.actual.compare()
        self.assertEqual(("stopped", "failed", "It ended with exit code 3.", 0), self.row(uuid))
        self.assertEqual(("active", "running", "", 0), self.row(other))
        self.assertEqual([("stopped", "failed", 0)], self.observed(uuid))
        self.assertEqual(4, self.fleet.used())
        self.assertEqual({uuid, other}, {each.uuid for each in self.fleet.instances.by_hosts([HOST])})
        self.actual.compare()
        self.assertEqual(1, len(self.observed(uuid)))

    def test_what_ended_without_an_error_has_no_fault(self) -> None:
        uuid = self.active()
        self.die(uuid, ENDED, "It ended with exit code 0.")
        self.actual.compare()
        self.assertEqual(("stopped", "ended", "", 0), self.row(uuid))
        self.assertEqual("It ended with exit code 0.", self.fleet.instances.get(uuid).actual_detail)

    def test_what_is_gone_becomes_stopped(self) -> None:
        uuid = self.active(compute_restart="always")
        self.driver.destroy(uuid, 1000)
        self.actual.compare()
        self.assertEqual(("stopped", "gone"), self.row(uuid)[:2])

    def test_what_runs_again_becomes_active(self) -> None:
        uuid = self.active()
        self.die(uuid)
        self.actual.compare()
        del self.driver.ended[uuid]
        self.actual.compare()
        self.assertEqual(("active", "running", "", 0), self.row(uuid))

    def test_what_nobody_has_seen_yet_is_not_judged_when_it_is_absent(self) -> None:
        """As after an upgrade, or when its node has another agent now."""
        uuid = self.active()
        self.assertEqual(
            1, self.fleet.database.run(lambda tx: self.fleet.instances.reassign(tx, {uuid: HOST}, "host-2"))
        )
        self.fleet.database.run(lambda tx: self.fleet.instances.reassign(tx, {uuid: "host-2"}, HOST))
        self.assertEqual(("active", "unknown", "", 0), self.row(uuid))
        files = Path(self.driver._folder, uuid)
        away = files.rename(files.parents[2] / "away")
        self.actual.compare()
        self.assertEqual(("active", "unknown", "", 0), self.row(uuid))
        away.rename(files)
        self.actual.compare()
        self.assertEqual(("active", "running", "", 0), self.row(uuid))

    def test_when_nothing_can_be_seen_nothing_is_judged(self) -> None:
        uuid = self.active()
        self.die(uuid)
        self.driver.blind = True
        self.actual.compare()
        self.assertEqual(("active", "running", "", 0), self.row(uuid))

    def test_a_stopped_instance_can_be_rebuilt_and_deleted(self) -> None:
        uuid, other = self.active(), self.active()
        for each in (uuid, other):
            self.die(each)
        self.actual.compare()
        self.fleet.in_place.begin(uuid, "rebuild", {"image": {"id": "new"}})
        del self.driver.ended[uuid]
        self.operate(uuid)
        self.assertEqual(("active", "running", "", 0), self.row(uuid))
        self.fleet.deleter.delete(other)
        self.operate(other)
        self.assertEqual((None, 2), (self.fleet.status(other), self.fleet.used()))

    # -- operations that fail -------------------------------------------------------------------------------------

    def power(self, uuid: str, operation: str) -> tuple[str, str, str, int]:
        self.fleet.in_place.begin(uuid, operation, {})
        self.operate(uuid)
        self.assertEqual(0, self.fleet.rows())
        return self.row(uuid)

    def test_an_instance_is_stopped_started_and_rebooted_in_its_place(self) -> None:
        uuid = self.active(compute_restart="always")
        running = self.fleet.running()
        self.assertEqual(("stopped", "stopped", "", 0), self.power(uuid, "stop"))
        self.actual.compare()
        self.assertEqual(("stopped", "stopped", "", 0), self.row(uuid))
        self.assertEqual(("active", "running", "", 0), self.power(uuid, "start"))
        self.assertEqual(("active", "running", "", 0), self.power(uuid, "reboot"))
        self.die(uuid)
        self.driver.broken = True
        for _ in range(6):
            self.actual.compare()
        self.assertEqual(("stopped", "failed", 2), (self.row(uuid)[0], self.row(uuid)[1], self.row(uuid)[3]))
        self.assertEqual(("active", "running", "", 0), self.power(uuid, "reboot"))
        # Each operation's order is its token, which is the row's fence when it has ended; a restart's is the fence before it.
        stop, start, reboot, restart, again, last = self.driver.orders
        self.assertEqual(
            [], [each for each in ((stop, start), (start, reboot), (again, last)) if not each[0] < each[1]]
        )
        self.assertEqual((reboot, reboot), (restart, again))
        self.assertEqual(self.fleet.instances.get(uuid).fence, last)
        # The same workload all the time, with the claim that it has had.
        self.assertEqual((running, 2), (self.fleet.running(), self.fleet.used()))
        with self.assertRaisesRegex(errors.Conflict, "start needs one that is stopped"):
            self.power(uuid, "start")

    def test_what_ends_at_once_when_it_is_started_is_judged_by_the_comparison(self) -> None:
        """As after a build: it gets its fault, or is started again."""
        for operation in ("start", "reboot"):
            with self.subTest(operation=operation):
                uuid, again = self.active(), self.active(compute_restart="always")
                self.driver.short = True
                for each in (uuid, again):
                    if operation == "start":
                        self.power(each, "stop")
                    self.assertEqual(("active", "running", "", 0), self.power(each, operation))
                self.driver.short = False
                self.actual.compare()
                self.assertEqual(("stopped", "failed", "It ended with exit code 3.", 0), self.row(uuid))
                for _ in range(2):
                    self.actual.compare()
                self.assertEqual(("active", "running", "", 1), self.row(again))

    def test_power_that_fails_leaves_what_is_there(self) -> None:
        uuid = self.active()
        self.driver.refuses = True
        self.assertEqual(("active", "running", "the new one does not run", 0), self.power(uuid, "stop"))
        self.driver.refuses = False
        self.power(uuid, "stop")
        self.driver.broken = True
        self.assertEqual(("stopped", "stopped", "it does not start", 0), self.power(uuid, "start"))
        self.driver.destroy(uuid, 1000)
        status, state, fault, _ = self.power(uuid, "start")
        self.assertEqual(("stopped", "gone"), (status, state))
        self.assertIn("there is nothing of the instance on its host; rebuild it", fault)
        simple = Powerless(DriverTools(self.fleet.conf, self.fleet.clock, HOST))
        other = self.active()
        self.work = InstanceWork(self.tools, simple)
        fault = "the compute driver of its host does not have the power compute.power"
        self.assertEqual(("active", "running", fault, 0), self.power(other, "stop"))

    def rebuild(self, uuid: str) -> None:
        self.fleet.in_place.begin(uuid, "rebuild", {"image": {"id": "new"}})
        self.operate(uuid)

    def test_a_rebuild_that_is_refused_leaves_what_ran(self) -> None:
        uuid = self.active()
        self.driver.refuses = True
        self.rebuild(uuid)
        self.assertEqual(("active", "running", "the new one does not run", 0), self.row(uuid))

    def test_a_rebuild_that_fails_for_what_had_ended_leaves_it_stopped(self) -> None:
        uuid = self.active()
        self.die(uuid)
        self.actual.compare()
        self.driver.refuses = True
        self.rebuild(uuid)
        self.assertEqual(("stopped", "failed", "the new one does not run", 0), self.row(uuid))

    def test_a_rebuild_that_lost_what_ran_says_so(self) -> None:
        uuid = self.active()
        self.driver.loses = True
        self.rebuild(uuid)
        fault = "the new one does not run. Nothing is left of what ran before."
        self.assertEqual(("stopped", "gone", fault, 0), self.row(uuid))
        self.actual.compare()
        self.assertEqual(("stopped", "gone", fault, 0), self.row(uuid))
        self.driver.loses = False
        self.rebuild(uuid)
        self.assertEqual(("active", "running", "", 0), self.row(uuid))

    def test_after_a_rebuild_that_failed_unseen_the_next_comparison_says_what_is_there(self) -> None:
        uuid = self.active()
        self.driver.loses = self.driver.blind = True
        self.rebuild(uuid)
        self.assertEqual(("active", "running", "the new one does not run", 0), self.row(uuid))
        self.driver.blind = False
        self.actual.compare()
        self.assertEqual(("stopped", "gone"), self.row(uuid)[:2])
        self.assertIn("Its last operation failed: the new one does not run", self.row(uuid)[2])

    def test_a_live_migration_never_runs_a_workload_where_the_driver_cannot_move_it(self) -> None:
        uuid = self.active()
        before = self.fleet.running()
        to = {"operation": "live_migrate", "host": HOST, "node": "node-1", "node_uuid": NODE, "flavorid": "small"}

        def begin(tx: Any) -> None:
            token = self.fleet.workers.create(tx, "instance", uuid, "live_migrate", "migrating", target_host=HOST)
            values = {"status": "migrating", "pending": {**to, "resources": {"VCPU": 2}}}
            self.assertTrue(self.fleet.instances.change(tx, uuid, token, values))

        self.fleet.database.run(begin)
        self.work = InstanceWork(self.tools, Powerless(DriverTools(self.fleet.conf, self.fleet.clock, HOST)))
        self.operate(uuid)
        fault = "the compute driver of its destination does not have the power compute.live_migrate"
        self.assertEqual(("active", "running", fault, 0), self.row(uuid))
        self.assertEqual((before, 0), (self.fleet.running(), self.fleet.rows()))

    def test_a_failed_build_keeps_its_claim_until_nothing_is_left_of_it(self) -> None:
        self.driver.refuses = True
        uuid = self.fleet.place()
        worker = self.fleet.workers.get("instance", uuid)
        assert worker is not None
        token = worker.token
        SimulatedDriver.spawn(self.driver, Workload(uuid=uuid), token)
        self.driver.stuck = set(range(token, token + 3))
        with self.assertLogs("moorage.work", "WARNING") as logs:
            self.operate(uuid)
        self.assertIn("cannot be destroyed: it does not end", "".join(logs.output))
        self.assertEqual(("building", 2), (self.fleet.status(uuid), self.fleet.used()))
        self.driver.stuck = set()
        self.operate(uuid)
        self.assertEqual(("error", 0, {}), (self.fleet.status(uuid), self.fleet.used(), self.fleet.running()))

    # -- races ----------------------------------------------------------------------------------------------------

    def test_what_is_in_an_operation_is_not_judged(self) -> None:
        """The operation begins before the look, or between the look and its write."""
        uuid = self.active()
        (before,) = map(compared, self.fleet.instances.to_compare(HOST))
        self.die(uuid)
        self.fleet.in_place.begin(uuid, "rebuild", {"image": {"id": "new"}})
        self.actual.compare()
        self.assertFalse(self.observe(before))
        self.assertEqual("rebuilding", self.row(uuid)[0])
        self.assertEqual([], self.observed(uuid))

    def test_a_look_that_comes_late_changes_nothing(self) -> None:
        """Each part of the condition alone: the row has changed since it was read, or it is another host's."""
        uuid = self.active()
        (before,) = map(compared, self.fleet.instances.to_compare(HOST))
        for changed in (
            {"status": "stopped"}, {"fence": before.fence - 1}, {"actual_state": "failed"}, {"actual_at": before.actual_at - 1},
            {"restarts": 1},
        ):  # fmt: skip
            with self.subTest(changed=changed):
                self.assertFalse(self.observe(dataclasses.replace(before, **changed)))
        self.assertFalse(self.observe(before, "host-2"))
        self.assertEqual(("active", "running", "", 0), self.row(uuid))
        self.assertTrue(self.observe(before))
        self.assertFalse(self.observe(before))

    def observe(self, before: Any, host: str = HOST) -> bool:
        store = self.fleet.instances
        return self.fleet.database.run(
            lambda tx: store.observe(tx, host, before, "failed", "late", status="stopped", fault="late", restarts=0)
        )

    def test_a_deleted_instance_does_not_come_back(self) -> None:
        uuid = self.active()
        (before,) = map(compared, self.fleet.instances.to_compare(HOST))
        self.fleet.deleter.delete(uuid)
        jobs: list[Job[Any]] = list(self.work.take("instance", [uuid]))
        self.assertFalse(self.observe(before))
        WorkLoop("test", self.work, self.fleet.clock, operations=1).run(jobs[0])
        self.assertFalse(self.observe(before))
        self.assertIsNone(self.fleet.status(uuid))

    # -- restarts -------------------------------------------------------------------------------------------------

    def test_what_failed_is_started_again_where_the_flavor_says_so(self) -> None:
        uuid = self.active(compute_restart="on-failure")
        token = self.driver.inspect()[uuid].token
        self.die(uuid)
        for _ in range(3):
            self.actual.compare()
        self.assertEqual([(uuid, token)], self.driver.started)
        self.assertEqual(("active", "running", "", 1), self.row(uuid))
        self.assertEqual(
            [("active", "failed", 0), ("active", "failed", 1), ("active", "running", 1)], self.observed(uuid)
        )

    def test_a_start_that_takes_its_time_holds_up_neither_the_agent_nor_the_comparison(self) -> None:
        uuid, other = self.active(compute_restart="always"), self.active()
        agent = ComputeAgent(self.tools)
        agent._actual._driver = self.driver
        self.driver.gate.clear()
        self.die(uuid)
        agent.start()
        self.addCleanup(agent.stop)
        self.addCleanup(self.driver.gate.set)

        def swept(done: Callable[[], object]) -> Callable[[], object]:
            return lambda: (agent.sweep(), done())[1]

        wait_until(swept(lambda: self.driver.started), "the start", SOON)
        self.die(other)
        wait_until(swept(lambda: self.row(other)[0] == "stopped"), "the end of another to be seen", SOON)
        built = self.fleet.place()
        agent.build_instance(built)
        wait_until(lambda: self.fleet.status(built) == "active", "a build", SOON)
        self.assertEqual([uuid], [each for each, _ in self.driver.started])
        self.assertEqual(("active", "failed", "", 1), self.row(uuid))
        self.driver.gate.set()
        wait_until(swept(lambda: self.row(uuid)[1] == "running"), "it to run", SOON)
        with mock.patch.object(agent._actual, "log_late") as looked:
            agent.sweep()
        looked.assert_called_once_with()
        self.assertEqual([uuid], [each for each, _ in self.driver.started])

    def beside(self, work: Callable[[], object]) -> None:
        thread = threading.Thread(target=work)
        self.addCleanup(thread.join, 60)
        # The last first: what waits goes on, and ends.
        self.addCleanup(self.driver.gate.set)
        thread.start()

    def start_that_hangs(self, clock: Clock) -> tuple[str, ActualStates]:
        uuid = self.active(compute_restart="always")
        actual = ActualStates(dataclasses.replace(self.tools, clock=clock), self.driver, self.beside)
        self.driver.gate.clear()
        self.die(uuid)
        for _ in range(2):
            actual.compare()
        wait_until(lambda: self.driver.started, "the start", SOON)
        return uuid, actual

    def test_a_start_that_hangs_does_not_keep_what_replaced_it_from_being_judged(self) -> None:
        uuid, actual = self.start_that_hangs(self.fleet.clock)
        del self.driver.ended[uuid]
        self.rebuild(uuid)
        self.die(uuid)
        actual.compare()
        self.assertEqual(("active", "failed", "", 0), self.row(uuid))

    def test_the_log_says_once_what_does_not_end(self) -> None:
        clock = ManualClock()
        uuid, actual = self.start_that_hangs(clock)
        asked = threading.Event()

        def inspect() -> Mapping[str, Observed]:
            asked.set()
            assert self.driver.gate.wait(60)
            return {}

        with mock.patch.object(self.driver, "inspect", inspect):
            self.beside(actual.compare)
            wait_until(asked.is_set, "the comparison", SOON)
            logger = "moorage_plugins.compute.actual_state"
            with self.assertNoLogs(logger, "WARNING"):
                for _ in range(9):
                    clock.advance(LATE / 10)
                    actual.log_late()
            with self.assertLogs(logger, "WARNING") as logs:
                for _ in range(9):
                    clock.advance(LATE / 10)
                    actual.log_late()
        said = "\n".join(sorted(logs.output))
        self.assertEqual(2, len(logs.output), said)
        self.assertRegex(said, f"(?s)comparison of what runs on host {HOST}.*start of instance {uuid} on host {HOST}")

    def test_after_a_long_comparison_there_is_a_rest(self) -> None:
        clock = ManualClock()
        tools = dataclasses.replace(self.tools, clock=clock)
        seconds = 0.0

        def inspect() -> Mapping[str, Observed]:
            clock.advance(seconds)
            return {}

        self.active()
        with mock.patch.object(self.driver, "inspect", inspect):
            for seconds, rest in ((0.0, 0.0), (0.05, 4.95), (0.5, 49.5), (100.0, 60.0)):
                with self.subTest(seconds=seconds):
                    actual = ActualStates(tools, self.driver, lambda work: work())
                    self.assertTrue(actual.is_due())
                    actual.compare()
                    if rest:
                        clock.advance(rest - 0.1)
                        self.assertFalse(actual.is_due())
                        clock.advance(0.2)
                    self.assertTrue(actual.is_due())

    def test_an_agent_rests_between_long_comparisons(self) -> None:
        agent = ComputeAgent(self.tools)
        agent.start()
        self.addCleanup(agent.stop)
        for due in (False, True):
            with (
                mock.patch.object(agent._actual, "is_due", lambda due=due: due),
                mock.patch.object(agent._actual, "compare") as compare,
            ):
                agent.sweep()
                agent._compared.wait(SOON)
                self.assertEqual(due, compare.called)

    def test_an_agent_removes_what_moved_away_now_and_then(self) -> None:
        agent = ComputeAgent(self.tools)
        agent.start()
        self.addCleanup(agent.stop)
        number, removed = 0, []

        def compare(unknown: UnknownWorkloads | None) -> None:
            if unknown is not None:
                removed.append(number)

        # The start has swept once. No comparison is due in the sweep that would be the first to remove something.
        with (
            mock.patch.object(agent._actual, "compare", compare),
            mock.patch.object(agent._actual, "is_due", lambda: number not in (11, 12)),
        ):
            for number in range(1, 40):  # noqa: B007  (the mocks read it)
                agent.sweep()
                self.assertTrue(agent._compared.wait(SOON))
        self.assertEqual([13, 25, 37], removed)

    def test_a_comparison_removes_what_moved_away_by_one_look_at_the_hypervisor(self) -> None:
        kept, moved, begins = self.active(), self.active(), self.fleet.place()
        self.driver.spawn(Workload(uuid=begins), 1)
        self.fleet.database.run(lambda tx: self.fleet.instances.reassign(tx, {moved: HOST}, "host-2"))
        self.actual.compare()
        self.assertEqual({kept, moved, begins}, self.driver.inspect().keys())
        with mock.patch.object(self.driver, "inspect", wraps=self.driver.inspect) as inspected:
            self.actual.compare(UnknownWorkloads(self.tools, self.driver))
        inspected.assert_called_once_with()
        self.assertEqual({kept, begins}, self.driver.inspect().keys())
        self.assertEqual(("active", "running", "", 0), self.row(kept))

    def test_the_last_that_moved_away_is_removed_from_a_host_without_instances(self) -> None:
        moved = self.active()
        self.fleet.database.run(lambda tx: self.fleet.instances.reassign(tx, {moved: HOST}, "host-2"))
        self.actual.compare(UnknownWorkloads(self.tools, self.driver))
        self.assertEqual({}, self.driver.inspect())

    def test_what_ended_in_order_is_started_again_only_always(self) -> None:
        for policy, state, starts in (
            ("always", ENDED, True), ("on-failure", ENDED, False), ("never", FAILED, False), ("always", STOPPED, False),
        ):  # fmt: skip
            with self.subTest(policy=policy, state=state):
                uuid = self.active(compute_restart=policy)
                self.die(uuid, state)
                for _ in range(3):
                    self.actual.compare()
                self.assertEqual("active" if starts else "stopped", self.row(uuid)[0])

    def test_restarts_have_a_limit(self) -> None:
        uuid = self.active(compute_restart="always")
        self.driver.broken = True
        self.die(uuid)
        for _ in range(6):
            self.actual.compare()
        self.assertEqual(2, len(self.driver.started))
        status, state, fault, restarts = self.row(uuid)
        self.assertEqual(("stopped", "failed", 2), (status, state, restarts))
        self.assertIn("started again 2 times", fault)

    def test_restarts_wait_longer_each_time(self) -> None:
        self.fleet.conf.set_override("restart_delay", 3600.0, group="compute")
        uuid = self.active(compute_restart="always")
        self.die(uuid)
        for _ in range(3):
            self.actual.compare()
        self.assertEqual([], self.driver.started)
        self.assertEqual(("active", "failed", "", 0), self.row(uuid))

    def test_restarts_are_forgotten_when_it_has_run_for_long(self) -> None:
        self.fleet.conf.set_override("restart_window", 0.0, group="compute")
        uuid = self.active(compute_restart="always")
        for _ in range(4):
            self.die(uuid)
            for _ in range(3):
                self.actual.compare()
        self.assertEqual(4, len(self.driver.started))
        self.assertEqual(("active", "running", "", 1), self.row(uuid))

    def test_a_policy_that_is_none_is_refused(self) -> None:
        uuid = self.active(compute_restart="sometimes")
        status, _, fault, _ = self.row(uuid)
        self.assertEqual("error", status)
        self.assertIn(
            "compute:restart of the flavor is 'sometimes'; it must be one of never, on-failure, always", fault
        )
