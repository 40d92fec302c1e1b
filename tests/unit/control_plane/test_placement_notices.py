# SPDX-License-Identifier: Apache-2.0
"""A thread of its own sends placements to agents and to other schedulers, so that no client waits for an agent."""

from __future__ import annotations

import threading
import types
import unittest
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from moorage import errors
from moorage.clock import SystemClock
from moorage.control_plane import notifications
from moorage.control_plane.notifications import PlacementNotices
from moorage.scheduling.interface import InstanceRecord
from moorage.scheduling.placement import Selection
from moorage.testing.clock import ManualClock
from tests.servers import wait_until


def selection(number: int, host: str, *, repeated: bool = False) -> Selection:
    record = InstanceRecord(f"i{number}", host, f"node-of-{host}", "f", {"VCPU": 1}, "p")
    return Selection(record, "", repeated, 1, shown={"name": str(number)}, token=number)


class Agents:
    """Keeps the messages to agents. The thread that sends one to the agent ``hung`` waits until ``goes_on`` is set."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Sequence[Any]]] = []
        self.goes_on = threading.Event()

    def build_many(self, builds: Mapping[str, Sequence[Any]]) -> None:
        for host, several in builds.items():
            if host == "hung":
                self.goes_on.wait()
            self.told.append((host, several))


class PlacementNoticesTests(unittest.TestCase):
    def setUp(self) -> None:
        self.agents = Agents()
        self.addCleanup(self.agents.goes_on.set)
        self.claims: list[Any] = []
        self.failure: Exception | None = None
        self.clock = SystemClock()

    def notices(self, *, to_schedulers: bool = True) -> PlacementNotices:
        platform: Any = types.SimpleNamespace(clock=self.clock, sender=types.SimpleNamespace(fanout=self.fanout))
        agents: Any = self.agents
        found = PlacementNotices(platform, agents, to_schedulers=to_schedulers)
        self.addCleanup(found.stop)
        self.addCleanup(self.agents.goes_on.set)
        return found

    def fanout(self, topic: str, method: str, args: Mapping[str, Any], *, to_others: bool) -> None:
        self.assertEqual(("scheduler", "claimed_instances", True), (topic, method, to_others))
        self.claims += [each["uuid"] for each in args["instances"]]
        if self.failure is not None:
            raise self.failure

    def test_what_is_placed_at_once_is_told_in_one_message_to_each_agent(self) -> None:
        notices = self.notices()
        notices.add([selection(1, "a"), selection(2, "b"), selection(3, "a", repeated=True)])
        self.await_told(2)
        self.assertEqual(
            [("a", [("i1", 1, {"name": "1"}), ("i3", 3, {"name": "3"})]), ("b", [("i2", 2, {"name": "2"})])],
            self.agents.told,
        )
        self.assertEqual(["i1", "i2"], self.claims)

    def test_the_pause_after_messages_grows_with_what_they_had(self) -> None:
        self.clock = clock = ManualClock()
        notices = self.notices()
        for number, pause in ((1, 0.01), (4, 0.04), (500, 0.1)):
            clock.slept.clear()
            notices.add([selection(each, "a") for each in range(number)])
            wait_until(lambda: len(clock.slept) == 2, "the thread has rested")
            self.assertEqual([notifications._TOGETHER, pause], clock.slept)

    def test_agents_get_their_messages_one_part_after_the_other(self) -> None:
        self.clock = clock = ManualClock()
        at = dict[str, float]()
        build_many = self.agents.build_many

        def build_then(builds: Mapping[str, Sequence[Any]]) -> None:
            at.update(dict.fromkeys(builds, sum(clock.slept)))
            build_many(builds)

        def agents_by_moment(hosts: str, parts: int) -> Counter[int]:
            """How many agents get their messages so many milliseconds after the first one."""
            at.clear()
            clock.slept.clear()
            notices.add([selection(each, host) for host in hosts for each in range(20)])
            wait_until(lambda: len(clock.slept) == 1 + parts, "the thread has rested")
            self.assertAlmostEqual(notifications._TOGETHER + 0.1, sum(clock.slept))
            return Counter(round(1000 * (each - notifications._TOGETHER)) for each in at.values())

        with mock.patch.object(self.agents, "build_many", build_then):
            notices = self.notices()
            self.assertEqual({0: 1, 50: 1}, agents_by_moment("ab", 2))
            self.assertEqual({0: 2, 25: 2, 50: 2, 75: 2}, agents_by_moment("abcdefgh", 4))

    def test_what_is_placed_while_messages_are_sent_waits_for_the_next_ones(self) -> None:
        self.clock = clock = ManualClock()
        notices = self.notices()
        notices.add([selection(0, "hung")])
        wait_until(lambda: not notices._waiting, "the first one is being sent")
        notices.add([selection(number, "a") for number in range(1, 4)])
        self.agents.goes_on.set()
        wait_until(lambda: len(clock.slept) == 4, "the thread has rested twice")
        self.assertEqual([notifications._TOGETHER, 0.01, notifications._TOGETHER, 0.03], clock.slept)

    def test_nobody_waits_for_an_agent_that_hangs(self) -> None:
        notices = self.notices()
        notices.add([selection(1, "hung")])
        for number in range(2, 5):
            notices.add([selection(number, "a")])
        self.assertEqual([], [host for host, _ in self.agents.told if host == "hung"])
        self.agents.goes_on.set()
        wait_until(lambda: sum(len(several) for _, several in self.agents.told) == 4, "all are sent")
        self.assertEqual({"hung", "a"}, {host for host, _ in self.agents.told})
        self.assertEqual(4, len(self.claims))

    def test_a_scheduler_that_ends_sends_what_is_queued(self) -> None:
        notices = self.notices()
        notices.add([selection(1, "a")])
        notices.stop()
        self.assertEqual(["a"], [host for host, _ in self.agents.told])

    def test_a_queue_that_is_full_drops_the_oldest(self) -> None:
        notices = self.notices()
        notices.add([selection(0, "hung")])
        wait_until(lambda: not notices._waiting, "the first one is being told")
        notices.add([selection(number, "a") for number in range(1, notifications._MOST + 11)])
        self.agents.goes_on.set()
        notices.stop()
        told = [uuid for host, several in self.agents.told if host == "a" for uuid, *_ in several]
        self.assertEqual([f"i{number}" for number in range(11, notifications._MOST + 11)], told)

    def await_told(self, number: int) -> None:
        wait_until(lambda: len(self.agents.told) == number, "agents have their messages")

    def test_agents_are_told_although_schedulers_are_not(self) -> None:
        self.notices(to_schedulers=False).add([selection(1, "a")])
        self.await_told(1)
        self.failure = errors.TransportError("away")
        notices = self.notices()
        for number in (2, 3):
            notices.add([selection(number, "a")])
            self.await_told(number)
        wait_until(lambda: len(self.claims) == 2, "schedulers were tried")
        self.assertEqual(["i2", "i3"], self.claims)
