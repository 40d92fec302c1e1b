# SPDX-License-Identifier: Apache-2.0
"""A message's epoch is believed only as far as the table of services confirms it."""

from __future__ import annotations

import unittest

from moorage import errors
from moorage.rpc.interface import Origin
from moorage.scheduling.epochs import ConfirmedEpochs
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.instance_tracker import InstanceTracker
from moorage.scheduling.interface import InstanceRecord
from moorage.testing.clock import ManualClock


def record(uuid: str) -> InstanceRecord:
    return InstanceRecord(uuid, "h", "n", "small", {"VCPU": 1}, "p")


class EpochTests(unittest.TestCase):
    def setUp(self) -> None:
        self.clock = ManualClock()
        self.table = {"agent": 3}
        self.reads = 0
        self.took = 0.0
        self.away = False
        self.view = FleetView()
        self.tracker = InstanceTracker(self.view, self.clock, ConfirmedEpochs(self.read, self.clock))

    def read(self) -> dict[str, int]:
        self.reads += 1
        self.clock.advance(self.took)
        if self.away:
            raise errors.StoreUnavailable("the store is away")
        return dict(self.table)

    def say(self, uuid: str, epoch: int, sequence: int, service: str = "agent") -> None:
        self.tracker.update("h", [record(uuid)], Origin(service, epoch, sequence))

    def known(self) -> set[str]:
        return set(self.view.of_host("h"))

    def test_a_forged_epoch_does_not_displace_the_real_service(self) -> None:
        self.say("one", 3, 1)
        for sequence in range(1, 200):
            self.say("forged", 2**62, sequence)
            self.tracker.delete("h", "one", Origin("agent", 2**62, sequence))
            self.tracker.sync("h", [], None, Origin("agent", 2**62, sequence))
        self.say("two", 3, 2)
        self.assertEqual({"one", "two"}, self.known())
        self.assertEqual({}, self.tracker.stale())

    def test_forged_messages_cost_one_reading_a_second(self) -> None:
        for second in range(5):
            for number in range(100):
                self.say("forged", 2**62, number, service=f"forged-{number}")
            self.assertEqual(second + 1, self.reads)
            self.clock.advance(1.0)

    def test_a_restarted_service_is_believed_at_once(self) -> None:
        self.say("one", 3, 1)
        self.clock.advance(1.0)
        self.table["agent"] = 4
        self.say("two", 4, 1)
        self.assertEqual({"one", "two"}, self.known())
        self.say("late", 3, 2)
        self.assertEqual({"one", "two"}, self.known())

    def test_services_that_start_together_are_believed_while_that_takes_a_tenth_of_the_time(self) -> None:
        for epoch in (3, 4, 5):
            self.table["agent"] = epoch
            self.say(f"of {epoch}", epoch, 1)
        self.assertEqual({"of 3", "of 4", "of 5"}, self.known())
        self.took = 0.02
        self.table["agent"] = 6
        self.say("of 6", 6, 1)
        self.table["agent"] = 7
        self.say("of 7", 7, 1)
        self.assertNotIn("of 7", self.known())
        self.clock.advance(0.2)
        self.say("of 7", 7, 2)
        self.assertEqual({"of 3", "of 4", "of 5", "of 6", "of 7"}, self.known())
        self.assertEqual(5, self.reads)

    def test_a_host_is_asked_at_once_when_another_service_had_the_table_read(self) -> None:
        self.say("one", 9, 1)
        self.table = {"agent": 9, "other": 1}
        self.clock.advance(1.0)
        self.took = 5.0
        self.tracker.update("o", [], Origin("other", 1, 1))
        self.assertEqual(["h"], self.tracker.take_missed(2.0))
        self.assertEqual(2, self.reads)

    def test_a_host_whose_message_was_refused_too_early_is_asked(self) -> None:
        self.say("one", 3, 1)
        self.say("two", 4, 1)
        self.table["agent"] = 4
        self.say("two", 4, 1)
        self.assertEqual({"one"}, self.known(), "the table was read less than a second ago, and did not have the epoch")
        self.assertEqual([], self.tracker.take_missed(0.0))
        self.clock.advance(1.0)
        self.assertEqual(["h"], self.tracker.take_missed(2.0))
        self.say("two", 4, 2)
        self.assertEqual({"one", "two"}, self.known())

    def test_while_the_store_is_away_only_known_epochs_are_believed(self) -> None:
        self.say("one", 3, 1)
        self.away = True
        self.clock.advance(1.0)
        self.say("two", 3, 2)
        self.say("three", 4, 1)
        self.assertEqual({"one", "two"}, self.known())
