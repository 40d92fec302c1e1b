# SPDX-License-Identifier: Apache-2.0
"""Messages on instances that are lost, doubled, late and out of order: after one period of comparisons the view is the store."""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moorage.scheduling.digest import instance_digest
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.instance_tracker import InstanceTracker
from moorage.scheduling.interface import InstanceRecord
from moorage.scheduling.reporter import Reporter
from moorage.testing.clock import ManualClock
from tests import cases, seeded
from tests.unit.scheduling.simulation import SIZES, Simulation


class LostMessageTests(unittest.TestCase):
    def assert_agrees(self, simulation: Simulation) -> None:
        for scheduler in simulation.schedulers:
            self.assertEqual(scheduler.known(), simulation.truth())
            self.assertEqual(scheduler.used(), simulation.used())
            self.assertEqual(scheduler.tracker.stale(), {})

    def test_with_a_fifth_of_the_messages_lost_one_period_repairs_everything(self) -> None:
        random = seeded()
        for _ in range(cases(10)):
            simulation = Simulation([f"h{number}" for number in range(8)], schedulers=2)
            simulation.network.deliver_all()
            lost = 0
            for number in range(400):
                agent = random.choice(simulation.agents)
                mine = [record.uuid for record in agent.records()]
                action = random.random()
                if action < 0.5 or not mine:
                    agent.create(f"i{number}", random.choice(sorted(SIZES)))
                elif action < 0.65:
                    agent.delete(random.choice(mine))
                elif action < 0.8:
                    agent.resize(random.choice(mine), random.choice(sorted(SIZES)))
                elif action < 0.95:
                    agent.migrate(random.choice(mine), random.choice(simulation.agents))
                else:
                    agent.restart()
                while len(simulation.network.pending) > 10:
                    fate = random.random()
                    index = random.randrange(len(simulation.network.pending))
                    if fate < 0.2:
                        simulation.network.drop(index)
                        lost += 1
                    elif fate < 0.3:
                        simulation.network.duplicate(index)
                        simulation.network.deliver(index)
                    else:
                        simulation.network.deliver(index)
            self.assertGreater(lost, 50)
            simulation.sync_period()
            self.assert_agrees(simulation)

    def test_without_loss_nothing_is_asked(self) -> None:
        simulation = Simulation(["h1", "h2"])
        first, second = simulation.agents
        first.create("a")
        first.create("b")
        first.migrate("a", second)
        second.resize("a", "large")
        first.delete("b")
        simulation.sync_period()
        self.assert_agrees(simulation)
        self.assertEqual(simulation.store.queries, [])

    def test_a_missing_message_is_noticed_by_the_next_one(self) -> None:
        simulation = Simulation(["h1"])
        (agent,) = simulation.agents
        simulation.sync_period()
        agent.create("a")
        simulation.network.drop()
        agent.create("b")
        simulation.network.deliver_all()
        self.assertNotIn("a", simulation.schedulers[0].known())
        simulation.pass_time(10)
        self.assert_agrees(simulation)

    def test_a_host_that_does_not_answer_is_read_from_the_store(self) -> None:
        simulation = Simulation(["h1", "h2", "h3"])
        simulation.network.deliver_all()
        for agent in simulation.agents:
            agent.create(f"i-{agent.host}")
        simulation.network.pending.clear()
        for agent in simulation.agents:
            agent.sync_instances()
        simulation.network.deliver_all()
        (scheduler,) = simulation.schedulers
        self.assertEqual(set(scheduler.tracker.stale()), {"h1", "h2", "h3"})
        self.assertEqual(scheduler.tracker.stale_since("h1"), simulation.clock.now)
        simulation.network.cut(["scheduler-0"], ["h1", "h2"])
        simulation.pass_time(20)
        # One query for all of them; the one that answers is not read.
        self.assertEqual(simulation.store.queries, [["h1", "h2"]])
        self.assert_agrees(simulation)

    def test_a_reading_keeps_what_is_being_claimed_at_that_moment_only(self) -> None:
        view = FleetView()
        clock = ManualClock()
        tracker = InstanceTracker(view, clock, claiming=lambda: {"claiming"})
        for uuid in ("claiming", "deleted", "other"):
            tracker.reserve(InstanceRecord(uuid, "h", "n", "small", {"VCPU": 1}, "p"))

        class Instances:
            """Another scheduler's claim is heard of while the instances are read."""

            def by_hosts(self, hosts: Sequence[str]) -> list[InstanceRecord]:
                tracker.claimed([InstanceRecord("new", "h", "n", "small", {"VCPU": 1}, "p")])
                return [InstanceRecord("other", "h", "n", "small", {"VCPU": 1}, "p")]

        # However long the claim takes: the process may have stood still.
        clock.advance(60.0)
        tracker.reload_hosts(Instances(), ["h"])  # type: ignore[arg-type]
        self.assertEqual({"claiming", "other", "new"}, set(view.of_host("h")))
        tracker.update("h", [], None, replace=True)
        self.assertEqual({"claiming", "new"}, set(view.of_host("h")))

    @given(
        st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(("small", "large"))),
        st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(("small", "large"))),
        st.integers(1, 4),
    )
    def test_a_comparison_in_parts_finds_what_one_of_the_whole_finds(
        self, known: dict[str, str], held: dict[str, str], most: int
    ) -> None:
        whole = InstanceTracker(FleetView(), ManualClock())
        parts = InstanceTracker(FleetView(), ManualClock())

        def compare(tracker: InstanceTracker, largest: int) -> list[bool]:
            """Returns whether each message of a comparison agrees with the view."""
            agrees = []

            class Wire:
                def fanout(self, topic: str, method: str, args: dict[str, Any]) -> None:
                    between = args.get("between", ("", None))
                    agrees.append(tracker.sync("h", args["instance_uuids"], args["digest"], None, tuple(between)))

            Reporter(Wire(), "h", largest=largest).sync([record(*each) for each in held.items()])
            return agrees

        def record(uuid: str, flavorid: str) -> InstanceRecord:
            return InstanceRecord(uuid, "h", "n", flavorid, {"VCPU": 1}, "p")

        for tracker in (whole, parts):
            tracker.update("h", [record(*each) for each in known.items()], None, replace=True)
        self.assertEqual([known == held], compare(whole, 64 * 8))
        self.assertEqual(known == held, all(compare(parts, 64 * most)))
        self.assertEqual(whole.stale().keys(), parts.stale().keys())

    def test_a_comparison_in_parts_keeps_what_earlier_parts_lacked(self) -> None:
        view, clock = FleetView(), ManualClock()
        tracker = InstanceTracker(view, clock)
        tracker.update("h", [], None, replace=True)
        tracker.claimed([InstanceRecord(uuid, "h", "n", "small", {"VCPU": 1}, "p") for uuid in ("a", "y")])
        for between in (("", "m"), ("m", "s"), ("s", None)):
            self.assertTrue(tracker.sync("h", [], instance_digest([]), None, between))
        # The agent reports the last one, and nothing more of the first one.
        tracker.update("h", [InstanceRecord("y", "h", "n", "small", {"VCPU": 1}, "p")], None)
        clock.advance(60.0)
        self.assertEqual(["h"], tracker.take_missed(2.0))

    def test_a_comparison_made_before_a_claim_finds_no_fault_with_it(self) -> None:
        view, clock = FleetView(), ManualClock()
        claiming: set[str] = set()
        tracker = InstanceTracker(view, clock, claiming=lambda: claiming)
        clock.advance(60.0)

        def told(*uuids: str, flavorid: str = "small") -> bool:
            digest = instance_digest((uuid, flavorid) for uuid in uuids)
            agrees = tracker.sync("h", uuids, digest, None)
            self.assertEqual(not agrees, "h" in tracker.stale())
            return agrees

        def record(uuid: str) -> InstanceRecord:
            return InstanceRecord(uuid, "h", "n", "small", {"VCPU": 1}, "p")

        tracker.update("h", [record("old")], None, replace=True)
        tracker.claimed([record("heard")])
        tracker.reserve(record("own"))
        self.assertTrue(told("old"))
        self.assertTrue(told("old", "own"))
        self.assertTrue(told("old", "own", "heard"))
        # Another difference counts, beside claims too.
        self.assertFalse(told("old", flavorid="large"))
        self.assertFalse(told())
        self.assertFalse(told("old", "strange"))
        # An old claim is one only while it is being made here.
        clock.advance(60.0)
        self.assertFalse(told("old"))
        claiming |= {"heard", "own"}
        self.assertTrue(told("old"))
