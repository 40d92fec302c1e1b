# SPDX-License-Identifier: Apache-2.0
"""When a scheduler reads the fleet: how often while it changes, and how it goes on after a failure."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from unittest import mock

from typing_extensions import override

from moorage import errors
from moorage.scheduling.fleet_refresher import FleetRefresher
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import ExcludedTargets, Flavor, FleetChanges, NodeState, RequestSpec
from moorage.testing.clock import ManualClock
from tests.servers import wait_until


class Source:
    """Three nodes; keeps how each reading was asked for."""

    def __init__(self) -> None:
        self.readings: list[str] = []
        self.fails = False
        self.used: dict[str, int] = {}

    def nodes(self) -> list[NodeState]:
        self.readings.append("all")
        return [NodeState(f"u{number}", f"n{number}", "h", {"VCPU": 4.0}, dict(self.used)) for number in range(3)]

    def changes(self, *, compare: bool = False) -> FleetChanges | None:
        self.readings.append("compare" if compare else "changes")
        if self.fails:
            raise errors.StoreUnavailable("the store is away")
        return FleetChanges()

    def unavailable(self) -> ExcludedTargets:
        return ExcludedTargets()


class TellingClock(ManualClock):
    """Lets something happen in each sleep, a number of times."""

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


class FreshnessTests(unittest.TestCase):
    def setUp(self) -> None:
        self.source, self.clock = Source(), TellingClock()
        self.freshness = FleetRefresher(FleetView(), self.source, self.clock)
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

    def test_use_that_no_instance_explains_is_read_again_before_a_refusal(self) -> None:
        """A reading in the midst of a move sees both of its sides; the move may have ended since."""
        for used, expected in (({}, []), ({"VCPU": 4}, ["changes"])):
            source, view = Source(), FleetView()
            source.used = used
            freshness = FleetRefresher(view, source, self.clock)
            freshness.refresh()
            # Use is believed to be nobody's when two readings agree.
            freshness._whole = False
            freshness.refresh()
            source.readings.clear()
            freshness.before_refusal(view.snapshot(), RequestSpec("i1", Flavor("small", {"VCPU": 2}, {})))
            self.assertEqual(expected, source.readings)

    def test_changes_that_the_view_did_not_take_over_have_all_nodes_read(self) -> None:
        with mock.patch.object(FleetView, "change_nodes", side_effect=MemoryError), self.assertRaises(MemoryError):
            self.freshness.refresh()
        self.freshness.refresh()
        self.freshness.refresh()
        self.assertEqual(["changes", "all", "changes"], self.source.readings)
