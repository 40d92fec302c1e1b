# SPDX-License-Identifier: Apache-2.0
"""Moves whose ends are killed, stand still and are reverted at every step, on any database; a mix-in for the tests of each.

Store, claims, operations and hypervisors are the real ones. A move has *points*: before and after each call of a driver and each
commit. A test interrupts it at one point after the other, and looks after every call how many copies execute.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
import unittest
import uuid as uuid_module
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

import tests
from moorage import errors
from moorage.allocation.interface import InventoryItem, ResourceProvider
from moorage.drivers.interface import DriverError, DriverTools
from moorage.instances.action_kinds import OPERATIONS
from moorage.instances.availability import Availability
from moorage.instances.interface import DEPARTURE, Instance
from moorage.instances.move_claims import MoveClaimer
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.interface import Flavor, RequestSpec
from moorage.scheduling.reporter import Reporter
from moorage.services.interface import ServiceIdentity
from moorage.services.registry import ServiceRegistry
from moorage.work.job import Job
from moorage.work.work_loop import WorkLoop
from moorage_plugins.compute.agent import InstanceWork
from moorage_plugins.compute.unknown_workloads import UnknownWorkloads
from moorage_plugins.drivers.simulated import SimulatedDriver
from tests import hypervisors
from tests.ready import ready_node
from tests.unit.compute.agent_tests import HOST, NODE, SOON, Fleet, NodeNames

OTHER, OTHER_NODE = "host-2", "22222222-1111-4111-8111-111111111111"
#: More steps than a move has.
MOST_STEPS = 30


def lose(driver: Any, uuid: str) -> None:
    """What there is of an instance disappears, and its driver does not know of it."""
    os.unlink(driver._path(uuid))


class Killed(BaseException):
    """The process ends here."""


class Watched(SimulatedDriver):
    """Calls ``point`` before and after each call."""

    point: Callable[[str], None] = staticmethod(lambda name: None)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("prepare", "transfer", "stop", "start", "destroy", "inspect", "spawn"):
            return found

        def call(*arguments: Any) -> Any:
            self.point(f"before {name}")
            result = found(*arguments)
            self.point(f"after {name}")
            return result

        return call


class WatchedWork(InstanceWork):
    """Calls ``point`` before and after each commit."""

    point: Callable[[str], None] = staticmethod(lambda name: None)

    @override
    def commit(self, batch: Any, write: Callable[[Any], None]) -> None:
        self.point("before commit")
        super().commit(batch, write)
        self.point("after commit")


class TwoHosts(unittest.TestCase):
    """Two hosts whose agents do one step after the other. Subclasses give ``url``."""

    url: str

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.fleet = fleet = Fleet(self.url, folder.name)
        self.addCleanup(fleet.database.close)
        fleet.create_tables()
        ready_node(fleet.database, OTHER_NODE, OTHER)
        provider = ResourceProvider(OTHER_NODE, "node-2", inventories=(InventoryItem("VCPU", 1000),))
        fleet.store.ensure_providers([provider])
        #: The incarnation of each host's agent.
        self.epochs = {HOST: 1, OTHER: 1}
        self.point: Callable[[str], None] = lambda name: None
        self.uuid = ""

    # -- the two hosts --------------------------------------------------------------------------------------------

    def work(self, host: str) -> InstanceWork:
        """What the present incarnation of a host's agent does."""
        fleet = self.fleet
        uuid = str(uuid_module.uuid5(uuid_module.NAMESPACE_DNS, host))
        tools = dataclasses.replace(
            fleet.tools(), identity=ServiceIdentity(uuid, host, "agent", None, self.epochs[host]),
            reporter=Reporter(fleet.told, host),
        )  # fmt: skip
        driver = Watched(DriverTools(fleet.conf, fleet.clock, host))
        found = WatchedWork(tools, driver)
        for each in (driver, found):
            each.point = self._pass
        return found

    def _pass(self, name: str) -> None:
        self.check_copies()
        self.point(name)
        self.check_copies()

    def check_copies(self) -> None:
        self.assertLessEqual(len(self.executing()), 1, "more than one copy executes")

    def executing(self) -> list[str]:
        """The hosts that execute the instance."""
        return hypervisors.executing(self.folder, self.uuid)

    def step(self) -> str:
        """Does the next operation of the instance, or of its departure; the host that did it, empty when there is none."""
        for kind in (DEPARTURE, "instance"):
            waiting = self.fleet.workers.get(kind, self.uuid)
            if waiting is not None:
                work = self.work(waiting.target_host)
                for job in work.take(kind, [self.uuid]):
                    self.run_job(work, job)
                return waiting.target_host
        return ""

    def run_job(self, work: InstanceWork, job: Job[Any]) -> None:
        loop: WorkLoop[Any] = WorkLoop("test", work, self.fleet.clock, operations=1)
        loop.run(job)

    def finish(self) -> None:
        """Does all that there is to do."""
        for _ in range(MOST_STEPS):
            if not self.step():
                return
        self.fail(f"the move does not end: {self.fleet.workers.get('instance', self.uuid)}")

    def remove_strays(self) -> None:
        """What a sweep of the agents does."""
        for host in self.epochs:
            work = self.work(host)
            UnknownWorkloads(work._tools, work._driver).remove_all(
                {each.uuid for each in self.fleet.instances.by_hosts([host])}
            )

    def begin(self, operation: str, to: str = OTHER, extra_specs: Mapping[str, str] | None = None) -> Instance:
        """An instance that runs on the first host and begins to move, to the other one unless said otherwise.

        :param extra_specs: of the flavor to which it is resized.
        """
        fleet = self.fleet
        self.uuid = fleet.place()
        self.finish()
        instance = fleet.instances.get(self.uuid)
        flavor = (
            Flavor("large", {"VCPU": 3}, extra_specs or {})
            if operation == "resize"
            else Flavor("small", {"VCPU": 2}, {})
        )
        spec = RequestSpec(self.uuid, flavor)
        claimer = MoveClaimer(
            fleet.store, fleet.instances, fleet.workers, NodeNames(), GroupStore(fleet.database),
            Availability(fleet.database, 3600.0), ServiceRegistry(fleet.database, fleet.clock), instance,
            OPERATIONS[operation],
        )  # fmt: skip
        claimer.claim(spec, OTHER_NODE if to == OTHER else NODE, to, f"move-{self.uuid}")
        return instance

    # -- points ---------------------------------------------------------------------------------------------------

    def at(self, number: int, interrupt: Callable[[], None]) -> Callable[[str], None]:
        """Interrupts at a point, once."""
        passed = [0]

        def point(name: str) -> None:
            passed[0] += 1
            if passed[0] == number:
                interrupt()

        return point


class MoveTests(TwoHosts):
    """Moves from the first host to the other one."""

    def points(self, operation: str, fails: str = "") -> int:
        """How many points a move has when nothing interrupts it."""
        passed: list[str] = []
        self.begin(operation)
        self.point = self.failing(fails, passed.append)
        self.finish()
        self.remove()
        return len(passed)

    def remove(self) -> None:
        """Deletes the instance."""
        self.point = lambda name: None
        self.fleet.deleter.delete(self.uuid)
        self.finish()

    def failing(self, call: str, then: Callable[[str], None]) -> Callable[[str], None]:
        """Has a call of a driver fail; then passes the point on."""

        def point(name: str) -> None:
            then(name)
            if name == f"before {call}":
                raise DriverError(f"the {call} fails, for this test")

        return point

    def each_point(self) -> Sequence[tuple[str, str, int]]:
        """Kinds of moves, with the call that fails, and their points: some of them, of a long run all."""
        found = [
            (operation, fails, number)
            for operation, fails in (("live_migrate", ""), ("resize", ""), ("live_migrate", "transfer"))
            for number in range(1, self.points(operation, fails) + 1)
        ]
        return tests.seeded().sample(found, min(tests.cases(9), len(found)))

    def assert_ended(self, before: Instance) -> None:
        """The move has one end: the instance executes where its row says, and nothing is held or done beside it."""
        self.point = lambda name: None
        self.finish()
        self.remove_strays()
        found = self.fleet.instances.get(self.uuid)
        self.assertEqual("active", found.status, found.fault)
        self.assertEqual([found.host], self.executing())
        self.assertEqual({}, found.pending)
        held = [
            (item.consumer, item.provider, item.used)
            for node in (NODE, OTHER_NODE)
            for item in self.fleet.store.allocations(providers=[node])
        ]
        self.assertEqual([(self.uuid, found.node_uuid, found.resources["VCPU"])], held)
        there = [each.host for each in hypervisors.found(self.folder, uuid=self.uuid)]
        self.assertEqual([found.host], there)
        self.assertEqual(0, self.fleet.rows())
        self.assertEqual(found.host == HOST, bool(found.fault))
        self.remove()

    # -- tests ----------------------------------------------------------------------------------------------------

    def test_an_end_that_is_killed_at_any_point_goes_on_when_it_is_back(self) -> None:
        def kill() -> None:
            raise Killed

        for operation, fails, number in self.each_point():
            with self.subTest(operation=operation, fails=fails, point=number):
                before = self.begin(operation)
                self.point = self.failing(fails, self.at(number, kill))
                for _ in range(MOST_STEPS):
                    try:
                        if not self.step():
                            break
                    except Killed:
                        for host in self.epochs:
                            self.epochs[host] += 1
                self.assert_ended(before)

    def test_an_end_that_stands_still_at_any_point_does_no_harm_when_it_goes_on(self) -> None:
        for operation, fails, number in self.each_point():
            # The others do one step meanwhile, or all.
            steps = 1 if operation == "resize" else MOST_STEPS
            with self.subTest(operation=operation, fails=fails, point=number, steps=steps):
                self._stand_still(operation, fails, number, steps)

    def _stand_still(self, operation: str, fails: str, number: int, steps: int) -> None:
        """:param steps: those that others do meanwhile."""
        before = self.begin(operation)
        stands, goes_on = threading.Event(), threading.Event()

        def wait() -> None:
            stands.set()
            assert goes_on.wait(SOON)

        late = threading.Thread(target=self._late, args=(stands,))
        self.point = self.failing(fails, self.at(number, wait))
        late.start()
        self.assertTrue(stands.wait(SOON))
        self.point = self.failing(fails, lambda name: None)
        for host in self.epochs:
            self.epochs[host] += 1
        for _ in range(steps):
            if not self.step():
                break
        goes_on.set()
        late.join(SOON)
        self.assertEqual([], self.problems)
        self.assert_ended(before)

    def _late(self, stands: threading.Event) -> None:
        """Does one step after the other until it has stood still."""
        self.problems: list[BaseException] = []
        try:
            while not stands.is_set() and self.step():
                pass
        except BaseException as error:
            self.problems.append(error)
        stands.set()

    def test_a_move_is_reverted_at_any_point_before_its_commit_and_at_none_after_it(self) -> None:
        for operation, fails, number in self.each_point():
            with self.subTest(operation=operation, fails=fails, point=number):
                before = self.begin(operation)
                outcomes: list[str] = []

                def revert(outcomes: list[str] = outcomes) -> None:
                    committed = self.fleet.instances.get(self.uuid).host == OTHER
                    try:
                        self.fleet.in_place.revert_move(self.uuid, "It was reverted.")
                        outcomes.append("reverted")
                        self.assertFalse(committed)
                    except errors.Conflict as error:
                        outcomes.append(error.message)

                self.point = self.failing(fails, self.at(number, revert))
                self.finish()
                if outcomes == ["reverted"]:
                    self.assertEqual(HOST, self.fleet.instances.get(self.uuid).host)
                self.assert_ended(before)

    def test_a_destination_that_is_declared_dead_keeps_no_move_from_ending(self) -> None:
        registry = ServiceRegistry(self.fleet.database, self.fleet.clock)
        for operation in ("live_migrate", "migrate"):
            before = self.begin(operation)
            (agent,) = registry.list(binary="agent", host=OTHER)
            self.step()
            self.assertEqual("transfer", self.fleet.instances.get(self.uuid).pending["phase"])
            registry.set(agent.uuid, forced_down=True)
            self.step()
            self.assertEqual(("revert", HOST), self._stands())
            self.step()
            found = self.fleet.instances.get(self.uuid)
            self.assertEqual(("active", HOST), (found.status, found.host))
            self.assertIn("The move cannot be committed: The host", found.fault)
            registry.set(agent.uuid, forced_down=False)
            self.assert_ended(before)

    def _stands(self) -> tuple[str, str]:
        """The phase of the move, and the host that has to act."""
        operation = self.fleet.workers.get("instance", self.uuid)
        assert operation is not None
        return self.fleet.instances.get(self.uuid).pending["phase"], operation.target_host

    def test_what_is_gone_at_the_destination_leaves_the_instance_there_with_its_fault(self) -> None:
        self.begin("migrate")
        self.step()
        self.step()
        self.assertEqual(("activate", OTHER), self._stands())
        lose(self.work(OTHER)._driver, self.uuid)
        self.finish()
        found = self.fleet.instances.get(self.uuid)
        self.assertEqual(("stopped", OTHER, "gone"), (found.status, found.host, found.actual_state))
        self.assertIn("what its destination had prepared is gone", found.fault)
        self.fleet.in_place.begin(self.uuid, "rebuild", {})
        self.finish()
        self.assertEqual([OTHER], self.executing())

    def test_a_move_of_an_earlier_release_is_refused_and_harms_nothing(self) -> None:
        self.uuid = self.fleet.place()
        self.finish()
        to = {
            "operation": "live_migrate",
            "host": OTHER,
            "node": "node-2",
            "node_uuid": OTHER_NODE,
            "flavorid": "small",
        }

        def old(tx: Any) -> None:
            token = self.fleet.workers.create(tx, "instance", self.uuid, "live_migrate", "migrating", target_host=OTHER)
            values = {"status": "migrating", "pending": {**to, "resources": {"VCPU": 2}}}
            self.assertTrue(self.fleet.instances.change(tx, self.uuid, token, values))

        self.fleet.database.run(old)
        self.finish()
        found = self.fleet.instances.get(self.uuid)
        self.assertEqual(("active", HOST, [HOST]), (found.status, found.host, self.executing()))
        self.assertIn("ask for it again", found.fault)
