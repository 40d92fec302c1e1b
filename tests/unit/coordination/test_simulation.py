# SPDX-License-Identifier: Apache-2.0
"""Random schedules over production's code, and mutants of it that must be caught."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from typing import Any

from typing_extensions import override

import tests
from moorage.coordination import ring_manager
from moorage.coordination.interface import BackendTools, View
from moorage.coordination.membership import Membership, MembershipState
from moorage.coordination.ring_manager import RingManager
from moorage.coordination.tick_leases import CLAIM, END
from moorage_plugins.coordination.memory import MemoryBackend
from tests.unit.coordination.simulator import SESSION, Simulation, Violation
from tests.unit.coordination.worlds import Member, MemoryClaims, World

#: ``make test`` takes 100,000 steps in all, of which each schedule takes some.
SCHEDULES = tests.cases(10)
STEPS = 10_000
#: How many schedules a mutant may survive.
PATIENCE = 40


class SimulationTests(unittest.TestCase):
    def run_all(self, *, drain: bool) -> list[Simulation]:
        first = tests.seeded().randrange(10**6)
        done = []
        for seed in range(first, first + SCHEDULES // 2):
            simulation = Simulation(seed, drain=drain)
            try:
                simulation.run(STEPS)
            except Violation as violation:
                self.fail(str(violation))
            done.append(simulation)
        return done

    def test_with_immediate_handover_every_law_holds(self) -> None:
        done = self.run_all(drain=False)
        # The schedules are worth something: much was handled, and much was refused, though rings changed all the time.
        self.assertGreater(sum(each.oracle.handled for each in done), 100 * len(done))
        self.assertGreater(sum(each.oracle.fenced for each in done), len(done))
        self.assertGreater(sum(len(each.world.ledger.history) for each in done), 10 * len(done))

    def test_with_drain_no_two_living_members_handle_an_object_at_once_and_every_law_holds(self) -> None:
        self.run_all(drain=True)

    def test_a_schedule_repeats_itself(self) -> None:
        one, two = Simulation(3), Simulation(3)
        for each in (one, two):
            each.run(2000)
        self.assertEqual((one.oracle.handled_at, one.world.ledger.row), (two.oracle.handled_at, two.world.ledger.row))


class MutantTests(unittest.TestCase):
    """Production with one thing left out: some schedule must break a law."""

    def assert_caught(self, make: Callable[[int], Simulation], law: str) -> None:
        for seed in range(PATIENCE):
            try:
                make(seed).run(STEPS // 2)
            except Violation as violation:
                self.assertRegex(str(violation), law)
                return
        self.fail(f"the mutant survived {PATIENCE} schedules")

    def mutant(self, name: str, value: Any, *, of: Any = Membership) -> None:
        original = getattr(of, name)
        self.addCleanup(setattr, of, name, original)
        setattr(of, name, value)

    def test_without_the_guard_of_the_lease(self) -> None:
        def holds(self: Membership, member_id: bytes | None) -> bool:
            return self.state is MembershipState.CONNECTED and self.member_id == member_id

        self.mutant("holds", holds)
        self.assert_caught(Simulation, "while the server had dropped it")

    def test_with_a_lease_that_counts_from_the_end_of_the_renewal(self) -> None:
        renewed = Membership._renewed

        def late(self: Membership, began: float, deadline: float) -> None:
            now = self._clock.monotonic()
            renewed(self, now, now + (deadline - began))

        self.mutant("_renewed", late)
        self.assert_caught(Simulation, "while the server had dropped it")

    def test_with_member_ids_as_text(self) -> None:
        class Text(MemoryBackend):
            @override
            def members(self) -> View:
                found = super().members()
                return View(frozenset(str(member).encode() for member in found.members), found.observed_at)

        self.assert_caught(lambda seed: Simulation(seed, member=member_with(Text)), "not handled within two periods")

    def test_with_the_child_that_an_election_leaves_in_the_group(self) -> None:
        class Unfiltered(MemoryBackend):
            @override
            def members(self) -> View:
                found = super().members()
                return View(found.members | {b"moorage.leader.1.0.1.1000"}, found.observed_at)

        self.assert_caught(lambda seed: Simulation(seed, member=member_with(Unfiltered)), "not handled within two")

    def test_without_joining_again(self) -> None:
        def once(self: Membership) -> None:
            return

        self.mutant("_try_join", once)
        self.assert_caught(Simulation, "not handled within two periods")

    def unguarded(self, seed: int, without: str = "") -> Simulation:
        """Members whose own guards always say yes: what keeps the laws is the guards of the rows."""
        self.mutant("is_current", lambda self, snapshot: True, of=RingManager)
        world = World(SESSION)
        world.claims = MemoryClaims(world.moment, {without})
        return Simulation(seed, world=world, guarded=False)

    def test_the_rows_guards_hold_alone(self) -> None:
        for seed in range(4):
            simulation = self.unguarded(seed)
            try:
                while simulation.steps < STEPS // 2:
                    simulation.step()
            except Violation as violation:
                self.fail(str(violation))
            self.assertGreater(simulation.oracle.handled, 100)

    def test_without_the_rows_guards(self) -> None:
        (later_tick, not_overtaken, begun), (last, _) = CLAIM.guards, END.guards
        for guard, law in (
            (later_tick, "twice at tick|was claimed for tick"),
            (not_overtaken, "was claimed for tick"),
            (begun, "was claimed for tick"),
            (last, "was written for tick"),
        ):
            with self.subTest(without=guard.name):
                self.assert_caught(functools.partial(self.unguarded, without=guard.name), law)

    def test_with_claims_that_do_not_see_that_the_clock_was_set_back(self) -> None:
        def make(seed: int) -> Simulation:
            world = World(SESSION)
            world.claims = MemoryClaims(lambda: 2**62)
            return Simulation(seed, world=world)

        self.assert_caught(make, "not handled within two periods|was claimed for tick")

    def test_without_looking_whether_the_ring_has_changed(self) -> None:
        def is_current(self: RingManager, snapshot: Any) -> bool:
            return self._membership.holds(snapshot.me)

        self.mutant("is_current", is_current, of=RingManager)
        self.assert_caught(Simulation, "began under ring")

    def test_without_waiting_for_others_to_drain(self) -> None:
        self.mutant("_drained", lambda *arguments: True, of=ring_manager)
        self.assert_caught(lambda seed: Simulation(seed, drain=True), "handle .* at once")


def member_with(backend: type[MemoryBackend]) -> type[Member]:
    """A member whose clients are of another class."""

    class Mutant(Member):
        @override
        def make_client(self, tools: BackendTools) -> MemoryBackend:
            return backend(tools, self._world.server, self._fault_now)

    return Mutant
