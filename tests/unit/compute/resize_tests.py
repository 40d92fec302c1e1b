# SPDX-License-Identifier: Apache-2.0
"""Resizes that are confirmed and reverted, with interruptions at every step, on any database; a mix-in for the tests of each.

A resize and its revert have *points*, as moves have (:mod:`tests.unit.compute.move_tests`). After each interruption all is settled,
and one law must hold: the instance executes where its row says, and holds what its flavor says, and nothing else is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from typing_extensions import override

import tests
from moorage import errors
from moorage.allocation.interface import InventoryItem, ResourceProvider
from moorage.drivers.interface import DriverError, Workload
from moorage.instances.action_kinds import OPERATIONS
from moorage.instances.availability import Availability
from moorage.instances.departures import Departures
from moorage.instances.interface import DEPARTURE, Instance, departed_consumer, holds_of
from moorage.instances.move_claims import MoveClaimer
from moorage.instances.move_reverts import MoveReverts
from moorage.instances.on_node import NodeContents
from moorage.instances.reset_state import Resetter
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.interface import Flavor, RequestSpec
from moorage.services.registry import ServiceRegistry
from moorage_plugins.compute.actual_state import ActualStates
from moorage_plugins.compute.cleanup import InstanceHandler
from moorage_plugins.drivers.simulated import SimulatedDriver
from tests import hypervisors
from tests.ready import ready_node
from tests.unit.compute.agent_tests import HOST, NODE, SOON, NodeNames
from tests.unit.compute.move_tests import MOST_STEPS, OTHER, OTHER_NODE, Killed, TwoHosts, lose

#: Where an instance is resized to: the other host, or its own node.
_PLACES = (OTHER, HOST)
_THIRD, _THIRD_NODE = "host-3", "33333333-1111-4111-8111-111111111111"


class ResizeTests(TwoHosts):
    """Resizes of one instance from 2 units to 3, or from 3 units to 2."""

    @override
    def setUp(self) -> None:
        super().setUp()
        self.confirm_after(-1.0)
        self.resizes = self.fleet.resizes

    def confirm_after(self, seconds: float) -> None:
        self.fleet.conf.set_override("resize_confirm_after", seconds, group="compute")

    def resized(self, to: str = OTHER) -> Instance:
        """An instance whose resize has ended and is not confirmed."""
        self.begin("resize", to)
        self.finish()
        found = self.found()
        self.assertEqual(("resized", to, "large", ""), (found.status, found.host, found.flavorid, found.fault))
        self.assertEqual([to], self.executing())
        return found

    def found(self) -> Instance:
        return self.fleet.instances.get(self.uuid)

    def held(self) -> dict[tuple[str, str], int]:
        """(consumer, provider) -> units."""
        return {
            (item.consumer, item.provider): item.used
            for node in (NODE, OTHER_NODE, _THIRD_NODE)
            for item in self.fleet.store.allocations(providers=[node])
        }

    def copies(self) -> list[str]:
        """The hosts that have anything of the instance."""
        return [each.host for each in hypervisors.found(self.folder, uuid=self.uuid)]

    def revert(self, request: str = "") -> None:
        self.reverts = getattr(self, "reverts", 0) + 1
        self.resizes.revert(self.uuid, request or f"revert-{self.reverts}")

    def assert_settled(self, *, exists: bool = True) -> None:
        """The instance executes where its row says, and holds what its flavor says. Nothing else is held, done or there."""
        self.point = lambda name: None
        self.finish()
        self.remove_strays()
        self.assertEqual(0, self.fleet.rows())
        if not exists:
            self.assertEqual(({}, []), (self.held(), self.copies()))
            return
        found = self.found()
        self.assertEqual(("active", {}), (found.status, found.pending), found.fault)
        self.assertEqual([found.host], self.executing())
        self.assertEqual([found.host], self.copies())
        self.assertEqual({"small": {"VCPU": 2}, "large": {"VCPU": 3}}[found.flavorid], found.resources)
        self.assertEqual({(self.uuid, found.node_uuid): found.resources["VCPU"]}, self.held())

    def settle(self) -> None:
        """Ends all work; confirms or reverts what is left to choose, in turn."""
        self.point = lambda name: None
        self.finish()
        self.settled = getattr(self, "settled", 0) + 1
        if self.found().status == "resized":
            (self.revert if self.settled % 2 else lambda: self.resizes.confirm(self.uuid))()
        self.assert_settled()

    def remove(self) -> None:
        self.point = lambda name: None
        self.fleet.deleter.delete(self.uuid)
        self.assert_settled(exists=False)

    # -- without interruptions --------------------------------------------------------------------------------------

    def test_the_old_place_is_kept_until_the_resize_is_confirmed(self) -> None:
        self.resized()
        kept = {(self.uuid, OTHER_NODE): 3, (departed_consumer(self.uuid), NODE): 2}
        self.assertEqual(kept, self.held())
        # A sweep and a start of the agents leave the copy alone.
        self.remove_strays()
        self.assertEqual([HOST, OTHER], self.copies())
        self.assertIsNone(self.fleet.workers.get(DEPARTURE, self.uuid))
        self.resizes.confirm(self.uuid)
        self.assertEqual("active", self.found().status)
        # The room is the source's to give back.
        self.assertEqual(kept, self.held())
        self.assertEqual(HOST, self.step())
        self.assert_settled()
        self.assertEqual(OTHER, self.found().host)
        with self.assertRaisesRegex(errors.Conflict, "no resize of instance .* to revert: the instance is active"):
            self.revert()

    def test_a_reverted_resize_leaves_the_instance_in_its_old_place_with_its_old_flavor(self) -> None:
        for to in _PLACES:
            with self.subTest(to=to):
                self.resized(to)
                self.revert("once")
                # The same request again.
                self.revert("once")
                self.assert_settled()
                found = self.found()
                self.assertEqual((HOST, NODE, "small"), (found.host, found.node_uuid, found.flavorid))
                self.revert("once")
                self.assertEqual(0, self.fleet.rows())
                with self.assertRaisesRegex(errors.Conflict, "no resize of instance .* to confirm"):
                    self.resizes.confirm(self.uuid)
                self.remove()

    def test_in_its_place_the_instance_holds_the_larger_flavor_until_the_resize_is_confirmed(self) -> None:
        self.resized(HOST)
        self.assertEqual({(self.uuid, NODE): 3}, self.held())
        self.resizes.confirm(self.uuid)
        self.assert_settled()
        # Now to the smaller one.
        self._resize_to("small", 2, {})
        self.assertEqual(("resized", {"VCPU": 2}), (self.found().status, self.found().resources))
        self.assertEqual({(self.uuid, NODE): 3}, self.held())
        self.resizes.confirm(self.uuid)
        self.assertEqual({(self.uuid, NODE): 2}, self.held())
        self.assert_settled()

    def _resize_to(self, name: str, amount: int, extra_specs: dict[str, str]) -> None:
        """Resizes the instance in its place."""
        fleet = self.fleet
        claimer = MoveClaimer(
            fleet.store, fleet.instances, fleet.workers, NodeNames(), GroupStore(fleet.database),
            Availability(fleet.database, 3600.0), ServiceRegistry(fleet.database, fleet.clock), self.found(),
            OPERATIONS["resize"],
        )  # fmt: skip
        claimer.claim(
            RequestSpec(self.uuid, Flavor(name, {"VCPU": amount}, extra_specs)), NODE, HOST, f"to-{name}-{self.uuid}"
        )
        self.finish()

    def test_a_repeated_confirmation_does_nothing(self) -> None:
        for to in _PLACES:
            with self.subTest(to=to):
                self.resized(to)
                self.resizes.confirm(self.uuid, "once")
                self.resizes.confirm(self.uuid, "once")
                self.assert_settled()
                self.resizes.confirm(self.uuid, "once")
                self.assertEqual(0, self.fleet.rows())
                with self.assertRaisesRegex(errors.Conflict, "no resize of instance .* to confirm"):
                    self.resizes.confirm(self.uuid, "twice")
                self.remove()

    def test_other_operations_wait_for_the_confirmation(self) -> None:
        self.resized()
        for name in ("stop", "reboot", "rebuild"):
            with self.assertRaisesRegex(errors.Conflict, "is resized; .* Confirm its resize, or revert it"):
                self.fleet.in_place.begin(self.uuid, name, {})
        with self.assertRaisesRegex(errors.Conflict, "does not move between two hosts"):
            self.fleet.in_place.revert_move(self.uuid, "no")
        self.resizes.confirm(self.uuid)
        self.assert_settled()

    def test_a_deletion_lets_the_source_go(self) -> None:
        for to in _PLACES:
            with self.subTest(to=to):
                self.resized(to)
                self.fleet.deleter.delete(self.uuid)
                self.assertEqual(to, self.step())
                expected = {(departed_consumer(self.uuid), NODE): 2} if to == OTHER else {}
                self.assertEqual(expected, self.held())
                self.assert_settled(exists=False)

    def test_a_reset_of_the_status_lets_the_source_go(self) -> None:
        fleet = self.fleet
        for to in _PLACES:
            with self.subTest(to=to):
                self.resized(to)
                Resetter(fleet.database, fleet.instances, fleet.workers, fleet.store).reset(self.uuid, "active")
                self.assert_settled()
                self.assertEqual("large", self.found().flavorid)
                self.remove()

    def test_resizes_are_confirmed_at_once_unless_the_option_says_otherwise(self) -> None:
        self.confirm_after(0.0)
        for to in _PLACES:
            with self.subTest(to=to):
                self.begin("resize", to)
                self.assert_settled()
                self.remove()

    def test_a_resize_confirms_itself_after_its_time_and_not_before(self) -> None:
        for to in _PLACES:
            with self.subTest(to=to):
                self.confirm_after(3600.0)
                self.resized(to)
                self._compare(to)
                self.assertEqual("resized", self.found().status)
                self.revert()
                self.assert_settled()
                self.remove()
                # The next one is due when its row is looked at.
                self.confirm_after(1e-6)
                self.resized(to)
                self._compare(to)
                self.assertEqual("active", self.found().status)
                self.assert_settled()
                self.assertEqual("large", self.found().flavorid)
                self.remove()

    def _compare(self, host: str) -> None:
        # SQLite's clock has a grain of a millisecond.
        time.sleep(0.002)
        work = self.work(host)
        self.comparison = ActualStates(work._tools, work._driver, lambda call: call())
        self.comparison.compare()

    def test_a_resize_is_not_confirmed_by_time_when_its_instance_does_not_run(self) -> None:
        """The copy that the source keeps is the only good one then."""
        self.confirm_after(1e-6)
        for lost in (
            "the start fails",
            "the prepared copy is gone",
            "the copy is gone",
            "the workload ended",
            "a fault",
        ):
            with self.subTest(lost=lost):
                self._lose(lost)
                with self.assertLogs("moorage_plugins.compute.resize_confirmation", "WARNING") as log:
                    self._compare(OTHER)
                self.assertIn("is not confirmed after its time", str(log.output))
                self.finish()
                self.assertEqual(("resized", OTHER), (self.found().status, self.found().host))
                self.assertIn(HOST, self.copies())
                # The log says it once.
                with self.assertNoLogs("moorage_plugins.compute.resize_confirmation", "WARNING"):
                    self.comparison.compare()
                self.revert()
                self.assert_settled()
                self.assertEqual((HOST, "small"), (self.found().host, self.found().flavorid))
                self.remove()

    def _lose(self, how: str) -> None:
        """A resize that has ended, and whose instance does not run well on its new host."""
        driver: Any = self.work(OTHER)._driver
        if how not in ("the start fails", "the prepared copy is gone"):
            self.resized()
            if how == "the copy is gone":
                lose(driver, self.uuid)
            elif how == "the workload ended":
                driver.stop(self.uuid, driver.inspect()[self.uuid].token, 10**4)
            else:
                # A revert that failed: somebody wanted to go back.
                self.point = self.failing("inspect", lambda name: None)
                self.revert()
                self.step()
                self.point = lambda name: None
                self.assertEqual("running", self.found().actual_state)
            return
        self.begin("resize")
        self.step()
        self.step()
        if how == "the start fails":

            def point(name: str) -> None:
                if name == "before start":
                    raise DriverError("the start fails, for this test")

            self.point = point
        else:
            lose(driver, self.uuid)
        self.step()
        self.point = lambda name: None
        self.assertNotEqual("", self.found().fault)

    def test_nothing_is_confirmed_by_time_while_the_driver_does_not_answer(self) -> None:
        self.confirm_after(1e-6)
        self.resized()

        def point(name: str) -> None:
            raise DriverError("no answer, for this test")

        self.point = point
        self._compare(OTHER)
        self.assertEqual("resized", self.found().status)
        self.point = lambda name: None
        self._compare(OTHER)
        self.assert_settled()
        self.assertEqual(OTHER, self.found().host)

    def test_a_revert_whose_kept_copy_is_gone_leaves_the_instance_where_it_runs(self) -> None:
        for lost in ("gone", "another", "no answer"):
            with self.subTest(lost=lost):
                self.resized()
                held = self.held()
                driver: Any = self.work(HOST)._driver
                if lost == "no answer":
                    self.point = self.failing("inspect", lambda name: None)
                else:
                    lose(driver, self.uuid)
                if lost == "another":
                    driver.prepare(Workload(uuid=self.uuid), 10**6)
                self.revert()
                self.finish()
                self.point = lambda name: None
                found = self.found()
                self.assertEqual(("resized", OTHER, "running"), (found.status, found.host, found.actual_state))
                self.assertIn("the inspect fails" if lost == "no answer" else "confirm the resize", found.fault)
                self.assertEqual(([OTHER], held), (self.executing(), self.held()))
                self.assertEqual([OTHER] if lost == "gone" else [HOST, OTHER], self.copies())
                if lost == "no answer":
                    self.revert()
                else:
                    self.resizes.confirm(self.uuid)
                self.assert_settled()
                self.remove()

    def test_a_revert_waits_for_no_source_that_was_declared_dead(self) -> None:
        self.resized()
        self.revert()
        self.assertEqual("prepare", self.found().pending["phase"])
        registry = ServiceRegistry(self.fleet.database, self.fleet.clock)
        (agent,) = registry.list(binary="agent", host=HOST)
        registry.set(agent.uuid, forced_down=True)
        MoveReverts(self.fleet.in_place, self.fleet.clock).tick()
        self.finish()
        found = self.found()
        self.assertEqual(("resized", OTHER), (found.status, found.host))
        self.assertEqual(([OTHER], [HOST, OTHER]), (self.executing(), self.copies()))
        registry.set(agent.uuid, forced_down=False)
        self.revert()
        self.assert_settled()
        self.assertEqual(HOST, self.found().host)

    def test_a_flavor_without_extra_specs_inherits_none(self) -> None:
        """Neither in a resize to it nor in a revert."""
        for to in _PLACES:
            with self.subTest(to=to):
                made: list[tuple[str, dict[str, str]]] = []

                def note(old: Any, made: list[tuple[str, dict[str, str]]] = made) -> Any:
                    def call(driver: Any, workload: Workload, token: int) -> Any:
                        made.append((workload.operation, dict(workload.extra_specs)))
                        return old(driver, workload, token)

                    return call

                with (
                    mock.patch.object(SimulatedDriver, "spawn", note(SimulatedDriver.spawn)),
                    mock.patch.object(SimulatedDriver, "prepare", note(SimulatedDriver.prepare)),
                ):
                    self.begin("resize", to, {"compute:restart": "always"})
                    self.finish()
                    self.revert()
                    self.finish()
                    self.assertEqual({}, self.found().request["extra_specs"])
                    self._resize_to("large", 3, {"compute:restart": "always"})
                    self.resizes.confirm(self.uuid)
                    self._resize_to("small", 2, {})
                always = {"compute:restart": "always"}
                back: list[tuple[str, dict[str, str]]] = [] if to == OTHER else [("revert_resize", {})]
                self.assertEqual([("build", {}), ("resize", always), *back, ("resize", always), ("resize", {})], made)
                self.resizes.confirm(self.uuid)
                self.assert_settled()
                self.remove()

    def test_a_workload_that_ends_leaves_its_resize_to_be_reverted(self) -> None:
        self.resized()
        driver: Any = self.work(OTHER)._driver
        driver.stop(self.uuid, driver.inspect()[self.uuid].token, 10**4)
        self._compare(OTHER)
        found = self.found()
        self.assertEqual(("resized", "stopped"), (found.status, found.actual_state))
        self._compare(OTHER)
        lose(self.work(OTHER)._driver, self.uuid)
        self._compare(OTHER)
        self.assertEqual(("resized", "gone"), (self.found().status, self.found().actual_state))
        self.revert()
        self.assert_settled()
        self.assertEqual(HOST, self.found().host)

    def test_the_node_of_the_source_is_not_removed(self) -> None:
        self.resized()
        fleet = self.fleet
        registry = ServiceRegistry(fleet.database, fleet.clock)
        contents = NodeContents(
            fleet.database,
            fleet.instances,
            fleet.store,
            Departures(fleet.database, fleet.store, fleet.workers, registry),
        )
        self.assertEqual({"instances": 1, "departures": 0}, contents.counts(NODE))
        message = contents.refusal(NODE).message
        self.assertIn("1 instance was resized away from it without a confirmation", message)
        with fleet.database.read() as tx:
            (record,) = fleet.instances.on_node(NODE, tx)
        self.assertEqual((self.uuid, HOST, "small"), (record.uuid, record.host, record.flavorid))

    def test_a_cleaner_leaves_what_is_kept(self) -> None:
        for action in ("revert", "transfer", "activate", "delete"):
            with self.subTest(action=action):
                if action == "activate":
                    self.begin("resize")
                    self.step()
                    self.step()
                else:
                    self.resized()
                    (self.fleet.deleter.delete if action == "delete" else lambda uuid: self.revert())(self.uuid)
                    if action == "transfer":
                        self.step()
                self._clean()
                self.remove_strays()
                if action == "delete":
                    self.assertEqual({(departed_consumer(self.uuid), NODE): 2}, self.held())
                    self.step()
                    self.assertEqual({}, self.held())
                    self.remove_strays()
                    continue
                found = self.found()
                # The host that had to look for its copy does not touch what runs.
                state = "running" if action == "revert" else "unknown"
                self.assertEqual(("resized", OTHER, state), (found.status, found.host, found.actual_state))
                self.assertEqual([HOST, OTHER], self.copies())
                self.revert()
                self.assert_settled()
                self.assertEqual(HOST, self.found().host)
                self.remove()

    def _clean(self) -> None:
        """Has a cleaner settle the operation of the instance."""
        fleet = self.fleet
        tools = fleet.tools()
        handler = InstanceHandler(tools)
        operation = fleet.workers.get("instance", self.uuid)
        assert operation is not None
        identity = self.work(operation.target_host).identity
        leases = fleet.workers.take_many("instance", [self.uuid], identity)

        def finish(tx: Any) -> None:
            for held in leases.values():
                held.end(tx)
            handler.finish_batch(tx, leases, handler.read(tx, [self.uuid]))

        fleet.database.run(finish)

    def test_an_instance_whose_host_died_leaves_it_and_its_source(self) -> None:
        fleet = self.fleet
        registry = ServiceRegistry(fleet.database, fleet.clock)
        ready_node(fleet.database, _THIRD_NODE, _THIRD)
        fleet.store.ensure_providers(
            [ResourceProvider(_THIRD_NODE, "node-3", inventories=(InventoryItem("VCPU", 1000),))]
        )
        self.epochs[_THIRD] = 1
        for phase in ("resized", "prepare", "transfer", "activate"):
            with self.subTest(phase=phase):
                if phase == "activate":
                    self.begin("resize")
                    self.step()
                    self.step()
                else:
                    self.resized()
                if phase in ("prepare", "transfer"):
                    self.revert()
                if phase == "transfer":
                    self.step()
                (agent,) = registry.list(binary="agent", host=OTHER)
                registry.set(agent.uuid, forced_down=True)
                registry.fence(agent.uuid, "its power is off", down_time=0.0)
                found = self.found()
                claimer = MoveClaimer(
                    fleet.store, fleet.instances, fleet.workers, NodeNames(), GroupStore(fleet.database),
                    Availability(fleet.database, 3600.0), registry, found, OPERATIONS["evacuate"],
                )  # fmt: skip
                spec = RequestSpec(self.uuid, Flavor("large", {"VCPU": 3}, {}))
                claimer.claim(spec, _THIRD_NODE, _THIRD, f"evacuate-{self.uuid}")
                held = holds_of(fleet.store, departed_consumer(self.uuid))
                self.assertEqual({NODE: {"VCPU": 2}}, held)
                # Nothing runs on the fenced host; its copy goes with the start of its agent.
                lose(self.work(OTHER)._driver, self.uuid)
                self.assert_settled()
                self.assertEqual(_THIRD, self.found().host)
                registry.set(agent.uuid, forced_down=False)
                registry.enlist("agent", OTHER, rpc_version="1.0")
                self.remove()

    # -- interruptions ----------------------------------------------------------------------------------------------

    def run_both(self, to: str, fails: str = "") -> None:
        """Resizes and reverts, as far as nothing else has decided."""
        self.finish()
        if self.exists() and self.found().status == "resized":
            try:
                self.revert()
            except errors.Conflict:
                # What interrupts has decided.
                return
            self.finish()

    def exists(self) -> bool:
        try:
            self.found()
        except errors.NotFound:
            return False
        return True

    def each_point(self, number: int) -> Sequence[tuple[str, str, int]]:
        """Places, the call that fails, and points: some of them, of a long run all."""
        found = []
        for to, fails in ((OTHER, ""), (HOST, ""), (OTHER, "stop")):
            passed: list[str] = []
            self.begin("resize", to)
            self.point = self.failing(fails, passed.append)
            self.run_both(to)
            self.settle()
            self.remove()
            found += [(to, fails, each) for each in range(1, len(passed) + 1)]
        return tests.seeded().sample(found, min(tests.cases(number), len(found)))

    def failing(self, call: str, then: Callable[[str], None]) -> Callable[[str], None]:
        """Has a call of a driver fail while the resize is reverted; then passes the point on."""

        def point(name: str) -> None:
            then(name)
            if name == f"before {call}" and self.found().pending.get("operation") == "revert_resize":
                raise DriverError(f"the {call} fails, for this test")

        return point

    def test_an_end_that_is_killed_at_any_point_goes_on_when_it_is_back(self) -> None:
        def kill() -> None:
            raise Killed

        for to, fails, number in self.each_point(12):
            with self.subTest(to=to, fails=fails, point=number):
                self.begin("resize", to)
                self.point = self.failing(fails, self.at(number, kill))
                for _ in range(3):
                    try:
                        self.run_both(to)
                    except Killed:
                        for host in self.epochs:
                            self.epochs[host] += 1
                self.settle()
                self.remove()

    def test_an_end_that_stands_still_at_any_point_does_no_harm_when_it_goes_on(self) -> None:
        for to, fails, number in self.each_point(12):
            # The others do one step meanwhile, or all.
            steps = 1 if number % 2 else MOST_STEPS
            with self.subTest(to=to, fails=fails, point=number, steps=steps):
                self._stand_still(to, fails, number, steps)

    def _stand_still(self, to: str, fails: str, number: int, steps: int) -> None:
        """:param steps: those that others do meanwhile."""
        self.begin("resize", to)
        stands, goes_on = threading.Event(), threading.Event()

        def wait() -> None:
            stands.set()
            assert goes_on.wait(SOON)

        def work() -> None:
            # Until it has stood still.
            try:
                self.run_both(to)
            except BaseException as error:
                problems.append(error)
            stands.set()

        problems: list[BaseException] = []
        late = threading.Thread(target=work)
        self.point = self.failing(fails, self.at(number, wait))
        late.start()
        self.assertTrue(stands.wait(SOON))
        self.point = self.failing(fails, lambda name: None)
        for host in self.epochs:
            self.epochs[host] += 1
        for _ in range(steps):
            if not self.step():
                break
        if steps > 1 and self.found().status == "resized":
            (self.revert if number % 3 else lambda: self.resizes.confirm(self.uuid))()
            self.finish()
        goes_on.set()
        late.join(SOON)
        self.assertEqual([], problems)
        self.settle()
        self.remove()

    def test_a_request_at_any_point_is_done_or_refused_and_harms_nothing(self) -> None:
        fleet = self.fleet
        resetter = Resetter(fleet.database, fleet.instances, fleet.workers, fleet.store)
        requests: dict[str, Callable[[], object]] = {
            "confirm": lambda: self.resizes.confirm(self.uuid),
            "delete": lambda: fleet.deleter.delete(self.uuid, force=True),
            "revert_move": lambda: fleet.in_place.revert_move(self.uuid, "It was reverted."),
            "reset": lambda: resetter.reset(self.uuid, "active"),
            "sweep": self.remove_strays,
        }
        done: set[str] = set()
        for name, request in requests.items():
            for to, fails, number in self.each_point(8):
                with self.subTest(request=name, to=to, fails=fails, point=number):
                    self.begin("resize", to)

                    def interrupt(name: str = name, request: Callable[[], object] = request) -> None:
                        try:
                            request()
                            done.add(name)
                        except errors.Conflict:
                            pass

                    self.point = self.failing(fails, self.at(number, interrupt))
                    self.run_both(to)
                    self.point = lambda name: None
                    self.finish()
                    if not self.exists():
                        self.assertEqual("delete", name)
                        self.assert_settled(exists=False)
                        continue
                    if name == "reset":
                        # The operator has said "active" of a workload that a step may have stopped or replaced.
                        self._compare(self.found().host)
                        found = self.found()
                        if found.status == "stopped":
                            again = "rebuild" if found.actual_state == "gone" else "start"
                            fleet.in_place.begin(self.uuid, again, {})
                    self.settle()
                    self.remove()
        # Confirmations have their moment between the two, where no agent does anything.
        self.assertLessEqual({"delete", "revert_move", "reset", "sweep"}, done)

    def test_of_a_confirmation_and_a_revert_one_wins(self) -> None:
        for to in _PLACES:
            for first in ("confirm", "revert"):
                with self.subTest(to=to, first=first):
                    known = self.resized(to)
                    calls: dict[str, Callable[[], None]] = {
                        "confirm": lambda known=known: self.resizes.confirm(self.uuid, known=known),  # type: ignore[misc]
                        "revert": lambda known=known: self.resizes.revert(self.uuid, "r", known=known),  # type: ignore[misc]
                    }
                    calls.pop(first)()
                    ((_, second),) = calls.items()
                    with self.assertRaises(errors.Conflict):
                        second()
                    self.assert_settled()
                    self.assertEqual("large" if first == "confirm" else "small", self.found().flavorid)
                    self.remove()
