# SPDX-License-Identifier: Apache-2.0
"""Observers that follow the journal, in the engines of a whole control plane."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Sequence
from typing import ClassVar
from unittest import mock

from typing_extensions import override

from moorage.control_plane import engine_role, observing
from moorage.control_plane.engine_role import Engine
from moorage.db import RecordedEvent
from moorage.extensions import Loaded
from moorage.journal.reader import JournalReader
from moorage.journal.subscriptions import Subscription, SubscriptionStore
from moorage.observers.interface import OBSERVERS, Notice, Observer, ObserverTools
from tests.functional.scheduling.plane import SOON, Plane
from tests.servers import wait_until

NAME = "observer/diary"


class Diary(Observer):
    """Remembers the journal. A test may make it fail."""

    api_version: ClassVar[tuple[int, int]] = (1, 3)
    fails: ClassVar[threading.Event] = threading.Event()
    written: ClassVar[list[int]] = []
    closed: ClassVar[list[str]] = []

    @override
    def observe(self, notice: Notice) -> None:
        raise AssertionError("The observer that follows the journal must get no other calls.")

    @override
    def follow(self, events: Sequence[RecordedEvent], missed: int) -> None:
        if self.fails.is_set():
            raise OSError("no paper")
        self.written.extend(each.number for each in events)

    @override
    def close(self) -> None:
        self.closed.append(self.tools.source.host)


class Deaf(Observer):
    """Follows nothing, so that no engine builds it for the journal."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: ObserverTools) -> None:
        raise AssertionError("It is built for nothing.")

    @override
    def observe(self, notice: Notice) -> None:
        pass


class FollowingTests(unittest.TestCase):
    def setUp(self) -> None:
        Diary.fails.clear()
        Diary.written.clear()
        Diary.closed.clear()
        found = [
            Loaded(name, plugin, "test", "1", OBSERVERS.group) for name, plugin in (("diary", Diary), ("deaf", Deaf))
        ]
        patch = mock.patch.object(observing, "OBSERVERS", mock.Mock(load_all=lambda names: found if names else []))
        patch.start()
        self.addCleanup(patch.stop)
        self.plane = Plane(self, observers__enabled=["diary", "deaf"]).up(("h1",))

    def row(self) -> Subscription | None:
        rows = SubscriptionStore(self.plane.database).list()[0]
        return next((row for row in rows if row.name == NAME), None)

    def position(self) -> int:
        row = self.row()
        return -1 if row is None else row.position

    def create(self) -> None:
        uuid = self.plane.create()["uuid"]
        self.plane.wait_status(uuid, "active")

    def wait_followed(self, first: int) -> None:
        """It gets every event from that number on, and none before an earlier one. Events may come twice."""
        last = JournalReader(self.plane.database).last()
        wait_until(lambda: self.position() >= last, "it has followed to the end", SOON)
        newest = first - 1
        for number in list(Diary.written):
            self.assertLessEqual(number, newest + 1, Diary.written)
            newest = max(newest, number)
        self.assertGreaterEqual(newest, last)

    def test_an_engine_gives_it_every_event_and_the_next_engine_goes_on(self) -> None:
        self.plane.start(Engine(), "engine-1")
        wait_until(self.row, "the subscription", SOON)
        begun = self.position()
        self.create()
        self.wait_followed(begun + 1)
        self.plane.stop("engine-1")
        self.create()
        self.plane.start(Engine(), "engine-2")
        self.wait_followed(begun + 1)

    def test_what_it_refuses_comes_again(self) -> None:
        Diary.fails.set()
        self.plane.start(Engine(), "engine-1")
        wait_until(self.row, "the subscription", SOON)
        begun = self.position()
        self.create()

        def failed() -> bool:
            row = self.row()
            return row is not None and row.failures > 0

        wait_until(failed, "a failure", SOON)
        row = self.row()
        assert row is not None
        self.assertEqual((begun, "OSError: no paper"), (row.position, row.last_error))
        Diary.fails.clear()
        self.wait_followed(begun + 1)

    def test_a_reload_builds_it_anew_and_one_that_is_not_chosen_keeps_its_place(self) -> None:
        engine = self.plane.start(Engine(), "engine-1")
        wait_until(self.row, "the subscription", SOON)
        with mock.patch.object(engine_role, "_LAST_DELIVERIES", SOON):
            engine.reload(self.plane.load(observers__enabled=[]))
        self.assertEqual(["engine-1"], Diary.closed)
        begun = self.position()
        self.create()
        engine.reload(self.plane.conf)
        self.wait_followed(begun + 1)
