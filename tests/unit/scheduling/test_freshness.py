# SPDX-License-Identifier: Apache-2.0
"""When a scheduler reads the fleet: how often while it changes, and how it goes on after a failure."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Callable, Sequence
from unittest import mock

from typing_extensions import override

from moorage import errors, threads
from moorage.clock import SystemClock
from moorage.scheduling import fleet_refresher
from moorage.scheduling.fleet_refresher import FleetRefresher
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import (
    ExcludedTargets,
    Flavor,
    FleetChanges,
    InstanceRecord,
    NodeState,
    RequestSpec,
)
from moorage.testing.clock import ManualClock
from tests.servers import wait_until


class Source:
    """Three nodes; keeps how each reading was asked for."""

    def __init__(self) -> None:
        self.readings: list[str] = []
        self.fails = False
        self.used: dict[str, int] = {}
        self.happens: Callable[[], object] = lambda: None

    def nodes(self) -> list[NodeState]:
        self.readings.append("all")
        return [NodeState(f"u{number}", f"n{number}", "h", {"VCPU": 4.0}, dict(self.used)) for number in range(3)]

    def changes(self, *, compare: bool = False) -> FleetChanges | None:
        self.readings.append("compare" if compare else "changes")
        self.happens()
        if self.fails:
            raise errors.StoreUnavailable("the store is away")
        return FleetChanges()

    def unavailable(self) -> ExcludedTargets:
        return ExcludedTargets()


class TellingClock(ManualClock):
    """Lets something happen in each sleep, a number of times. A wait is a sleep, since no test sets the event meanwhile."""

    def __init__(self) -> None:
        super().__init__(1000.0)
        self.times = 0
        self.happens: Callable[[], None] = lambda: None

    @override
    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.times:
            self.times -= 1
            self.happens()

    @override
    def wait(self, event: threads.Event, seconds: float | None) -> bool:
        if not event.is_set():
            self.sleep(seconds or 0.0)
        return event.is_set()


class FreshnessTests(unittest.TestCase):
    def setUp(self) -> None:
        self.source, self.clock = Source(), TellingClock()
        self.view = FleetView()
        self.freshness = FleetRefresher(self.view, self.source, self.clock)
        self.clock.happens = self.freshness.changed
        self.freshness.refresh()
        self.source.readings.clear()

    def tell(self, times: int) -> float:
        """So many changes follow on the first one; the seconds until all are read."""
        began, self.clock.times = self.clock.now, times
        self.freshness.changed()
        wait_until(lambda: not self.freshness._catching_up, "the changes are read", 30)
        return self.clock.now - began

    def test_the_pages_of_an_import_are_read_together(self) -> None:
        self.assertLess(self.tell(5), 2.0)
        self.assertEqual(["changes"], self.source.readings)

    def test_a_fleet_that_changes_all_the_time_is_read_after_two_seconds(self) -> None:
        self.assertEqual(2.0, self.tell(100))
        self.assertEqual(["changes"], self.source.readings)

    def test_a_reading_that_takes_long_is_followed_by_a_rest(self) -> None:
        self.source.happens = lambda: self.clock.advance(3.0)
        self.assertLess(self.tell(0), 4.0)
        # The change comes at once, and is read after nine times the three seconds.
        self.assertGreaterEqual(self.tell(0), 27.0)
        self.assertEqual(["changes"] * 2, self.source.readings)
        self.clock.advance(60.0)
        self.assertLess(self.tell(0), 4.0)

    def test_a_rest_is_half_a_minute_at_most(self) -> None:
        self.source.happens = lambda: self.clock.advance(40.0)
        self.tell(0)
        # Half a minute of rest, a reading, and a moment to gather.
        self.assertLess(self.tell(0), 30.0 + 40.0 + 3.0)

    def test_a_change_is_read_after_one_whose_thread_could_not_be_started(self) -> None:
        with mock.patch.object(threads, "start", side_effect=RuntimeError("can't start new thread")):
            self.freshness.changed()
        self.assertEqual([], self.source.readings)
        self.tell(0)
        self.assertEqual(["changes"], self.source.readings)

    def test_nothing_is_read_after_the_end(self) -> None:
        freshness = FleetRefresher(self.view, self.source, SystemClock())
        freshness.changed()
        catching_up = freshness._catching_up
        assert catching_up is not None
        freshness.stop()
        self.assertFalse(catching_up.is_alive())
        freshness.changed()
        self.assertEqual([catching_up], [freshness._catching_up])
        self.assertEqual([], self.source.readings)

    def read_steps(self, seconds: Sequence[float]) -> None:
        """Has readings consist of steps that take so many seconds each."""

        def happens() -> None:
            for number, each in enumerate(seconds):
                if number:
                    self.freshness.rest()
                self.clock.advance(each)

        self.source.happens = happens

    def test_a_gentle_reading_rests_after_each_step_in_proportion_to_it(self) -> None:
        self.read_steps([0.01, 0.02, 10.0, 0.01])
        self.freshness.refresh()
        self.assertEqual([], self.clock.slept)
        self.freshness.refresh(gently=True)
        self.assertEqual([0.03, 0.06, 0.5], [round(each, 6) for each in self.clock.slept])

    def resting(self) -> tuple[FleetRefresher, threading.Thread]:
        """A gentle reading that rests for an hour after its first step."""
        freshness = FleetRefresher(self.view, self.source, SystemClock())
        freshness.refresh()
        rests = threading.Event()

        def happens() -> None:
            freshness._step_began -= 3600.0
            rests.set()
            freshness.rest()

        self.source.happens = happens
        for name in ("_STEP_REST", "_LONGEST_STEP_REST"):
            patched = mock.patch.object(fleet_refresher, name, 3600.0)
            patched.start()
            self.addCleanup(patched.stop)
        reads = threading.Thread(target=lambda: freshness.refresh(gently=True), daemon=True)
        reads.start()
        self.assertTrue(rests.wait(30))
        return freshness, reads

    def test_a_thread_that_waits_for_a_reading_ends_its_rests(self) -> None:
        freshness, reads = self.resting()
        self.source.readings.clear()
        waits = threading.Thread(target=freshness.refresh, daemon=True)
        waits.start()
        for each in (reads, waits):
            each.join(60)
            self.assertFalse(each.is_alive())
        self.assertEqual(["changes"], self.source.readings)

    def test_the_end_ends_the_rests(self) -> None:
        freshness, reads = self.resting()
        freshness.stop()
        reads.join(60)
        self.assertFalse(reads.is_alive())

    def test_the_end_waits_for_the_reading_in_progress(self) -> None:
        reads, may_end = threading.Event(), threading.Event()

        def wait() -> None:
            reads.set()
            may_end.wait(30)

        self.source.happens = wait
        self.freshness.changed()
        self.assertTrue(reads.wait(30))
        stop = threading.Thread(target=self.freshness.stop)
        stop.start()
        stop.join(0.1)
        self.assertTrue(stop.is_alive())
        may_end.set()
        stop.join(30)
        self.assertFalse(stop.is_alive())
        self.assertEqual(["changes"], self.source.readings)

    def test_all_versions_are_compared_every_ten_minutes(self) -> None:
        for seconds in (60, 500, 60, 60):
            self.clock.advance(seconds)
            self.freshness.refresh()
        self.assertEqual(["changes", "changes", "compare", "changes"], self.source.readings)

    def test_a_reading_that_failed_is_repeated(self) -> None:
        self.source.fails = True
        with self.assertRaises(errors.StoreUnavailable):
            self.freshness.refresh()
        self.source.fails = False
        self.freshness.refresh()
        self.assertEqual(["changes", "changes"], self.source.readings)

    def test_no_refusal_comes_from_what_is_older_than_ten_readings_take(self) -> None:
        spec = RequestSpec("i1", Flavor("small", {"VCPU": 2}, {}))
        self.source.happens = lambda: self.clock.advance(0.5)
        self.freshness.refresh()
        self.source.readings.clear()
        for _ in range(20):
            self.freshness.before_refusal(self.view.snapshot(), spec)
            self.clock.advance(0.5)
        # The first one at once, then each after five seconds.
        self.assertEqual(["changes"] * 3, self.source.readings)

    def test_a_refusal_recounts_the_hosts_that_use_less_by_the_store(self) -> None:
        """The message that an instance is gone was lost; its host is read, and a request finds its room."""
        recounted: list[str] = []
        view = FleetView()

        def recount(hosts: Sequence[str]) -> None:
            recounted.extend(hosts)
            view.drop("gone")

        freshness = FleetRefresher(view, self.source, self.clock, recount)
        spec = RequestSpec("i1", Flavor("small", {"VCPU": 2}, {}))
        self.source.used = {"VCPU": 3}
        freshness.refresh()
        view.put(InstanceRecord("there", "h", "n0", "large", {"VCPU": 3}, "p"))
        freshness.before_refusal(view.snapshot(), spec)
        self.assertEqual([], recounted, "the store says the same")
        view.put(InstanceRecord("gone", "h", "n1", "large", {"VCPU": 4}, "p"))
        # A periodic reading in between does not count as one for a refusal.
        freshness.refresh()
        self.assertEqual([], recounted)
        freshness.before_refusal(view.snapshot(), spec)
        self.assertEqual(["h"], recounted)
        freshness.before_refusal(view.snapshot(), spec)
        self.assertEqual(["h"], recounted)

    def test_the_first_reading_of_a_large_fleet_delays_no_reading_for_a_refusal(self) -> None:
        source, view = Source(), FleetView()
        freshness = FleetRefresher(view, source, self.clock)
        nodes = source.nodes

        def slow() -> list[NodeState]:
            self.clock.advance(20.0)
            return nodes()

        with mock.patch.object(source, "nodes", slow):
            freshness.refresh()
        spec = RequestSpec("i1", Flavor("small", {"VCPU": 2}, {}))
        source.happens = lambda: self.clock.advance(0.1)
        for expected in (1, 1, 2, 2, 3):
            freshness.before_refusal(view.snapshot(), spec)
            self.assertEqual(["all"] + ["changes"] * expected, source.readings)
            self.clock.advance(0.5)

    def test_refusals_recount_all_hosts_in_turn_where_there_are_many(self) -> None:
        recounted: list[list[str]] = []
        view, source = FleetView(), Source()
        nodes = [NodeState(f"n{number}", f"n{number}", f"h{number}", {"VCPU": 4}, {}) for number in range(5)]
        freshness = FleetRefresher(view, source, self.clock, lambda hosts: recounted.append([*hosts]))
        with mock.patch.object(source, "nodes", lambda: nodes), mock.patch.object(fleet_refresher, "_RECOUNTED", 2):
            freshness.refresh()
            for node in nodes:
                view.put(InstanceRecord(f"of {node.host}", node.host, node.name, "large", {"VCPU": 4}, "p"))
            for _ in range(3):
                self.clock.advance(1.0)
                freshness.before_refusal(view.snapshot(), RequestSpec("i1", Flavor("small", {"VCPU": 2}, {})))
        self.assertEqual([["h0", "h1"], ["h2", "h3"], ["h4", "h0"]], recounted)

    def test_an_instance_that_a_recount_finds_counts_once(self) -> None:
        """It was foreign use; the instance that had used more of another class on its node is gone."""
        view, source = FleetView(), Source()

        def recount(hosts: Sequence[str]) -> None:
            view.drop("gone")
            view.put(InstanceRecord("found", "h", "n0", "memory", {"VCPU": 1, "MEMORY_MB": 4}, "p"))

        used = {"VCPU": 1, "MEMORY_MB": 4}
        nodes = [NodeState("n0", "n0", "h", {"VCPU": 4, "MEMORY_MB": 8}, used)]
        freshness = FleetRefresher(view, source, self.clock, recount)
        with mock.patch.object(source, "nodes", lambda: nodes):
            freshness.refresh()
        freshness.refresh()
        view.put(InstanceRecord("gone", "h", "n0", "large", {"VCPU": 4, "MEMORY_MB": 0}, "p"))
        freshness.before_refusal(view.snapshot(), RequestSpec("i1", Flavor("small", {"VCPU": 2}, {})))
        fleet = view.snapshot()
        self.assertEqual([3, 4], [fleet.free("VCPU")[0], fleet.free("MEMORY_MB")[0]])

    def test_an_instance_that_two_readings_had_before_its_message_counts_once_at_a_refusal(self) -> None:
        view, source = FleetView(), Source()
        nodes = [NodeState("n0", "n0", "h", {"VCPU": 4}, {"VCPU": 2})]
        freshness = FleetRefresher(view, source, self.clock)
        source.happens = lambda: self.clock.advance(1.0)
        with mock.patch.object(source, "nodes", lambda: nodes):
            freshness.refresh()
        freshness.refresh()
        view.put(InstanceRecord("told late", "h", "n0", "large", {"VCPU": 2}, "p"))
        self.assertEqual(0, view.snapshot().free("VCPU")[0])
        freshness.before_refusal(view.snapshot(), RequestSpec("i1", Flavor("small", {"VCPU": 2}, {})))
        self.assertEqual(2, view.snapshot().free("VCPU")[0])

    def test_changes_that_the_view_did_not_take_over_have_all_nodes_read(self) -> None:
        with mock.patch.object(FleetView, "change_nodes", side_effect=MemoryError), self.assertRaises(MemoryError):
            self.freshness.refresh()
        self.freshness.refresh()
        self.freshness.refresh()
        self.assertEqual(["changes", "all", "changes"], self.source.readings)
