# SPDX-License-Identifier: Apache-2.0
"""Whatever observers do, nobody who tells is hurt."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
import unittest
from collections.abc import Callable

from typing_extensions import override

from moorage import threads
from moorage.clock import Clock, SystemClock
from moorage.extensions import Loaded
from moorage.observers.hub import ObserverHub, ObserverSettings
from moorage.observers.interface import (
    EVENTS,
    InstanceDeleted,
    Notice,
    Observer,
    ObserverTools,
    ProcessIdentity,
    RingChanged,
)
from moorage.testing.clock import ManualClock
from moorage.testing.observers import event
from tests.servers import wait_until

SOURCE = ProcessIdentity("uuid", "agent", "agent-1", 2)
SOON = 60.0


class Recorder(Observer):
    """Does what the test says with each notice."""

    api_version = (1, 0)

    def __init__(self, act: Callable[[Notice], object] = lambda notice: None, wanted: frozenset[str] | None = None):
        super().__init__(ObserverTools(None, SystemClock(), SOURCE))
        self.kinds = wanted  # type: ignore[misc]
        self.act = act
        self.seen: list[Notice] = []
        self.flushed = self.closed = 0

    @override
    def observe(self, notice: Notice) -> None:
        self.seen.append(notice)
        self.act(notice)

    @override
    def flush(self) -> None:
        self.flushed += 1

    @override
    def close(self) -> None:
        self.closed += 1


class SteppedClock(ManualClock):
    """Time passes, and who waits for some of it goes on, when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        #: Seconds of each step; None: the clock stands.
        self.steps: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._waits = threading.Semaphore(0)
        self._stands = False

    @override
    def wait(self, moment: threads.Event, seconds: float | None) -> bool:
        self._waits.release()
        step = None if self._stands else self.steps.get()
        if step is None:
            self._stands = True
            return moment.wait(SOON)
        self.advance(step)
        return moment.is_set()

    def step(self, seconds: float) -> None:
        """Until who waits has looked at what there is then, and waits again."""
        assert self._waits.acquire(timeout=SOON)
        self.steps.put(seconds)
        assert self._waits.acquire(timeout=SOON)
        self._waits.release()


def raising(error: BaseException) -> Callable[[Notice], object]:
    def act(notice: Notice) -> object:
        raise error

    return act


class HubCase(unittest.TestCase):
    def hub(
        self, *observers: Observer, settings: ObserverSettings | None = None, clock: Clock | None = None
    ) -> ObserverHub:
        made = ObserverHub(SOURCE, clock or SystemClock())
        self.use(made, *observers, settings=settings)
        self.addCleanup(made.close, SOON)
        return made

    @staticmethod
    def use(hub: ObserverHub, *observers: Observer, settings: ObserverSettings | None = None) -> None:
        made = [
            (Loaded(f"one-{number}", type(each), "acme", "1.5", "moorage.observers"), each)
            for number, each in enumerate(observers)
        ]
        hub.use(made, settings)


class HubTests(HubCase):
    def test_everybody_is_told_everything_with_its_source_and_a_number_that_rises(self) -> None:
        observers = Recorder(), Recorder()
        hub = self.hub(*observers)
        told = [event(kind) for kind in EVENTS.values()]
        for each in told:
            hub.tell(each)
        hub.close(SOON)
        for observer in observers:
            self.assertEqual(told, [notice.event for notice in observer.seen])
            self.assertEqual(list(range(1, len(told) + 1)), [notice.sequence for notice in observer.seen])
            self.assertEqual({SOURCE}, {notice.source for notice in observer.seen})
            self.assertEqual(1, observer.closed)

    def test_one_that_wants_some_kinds_is_told_no_others(self) -> None:
        observer = Recorder(wanted=frozenset({"instance.deleted"}))
        hub = self.hub(observer)
        for kind in EVENTS.values():
            hub.tell(event(kind))
        hub.close(SOON)
        self.assertEqual(["instance.deleted"], [notice.event.kind for notice in observer.seen])

    def test_one_that_raises_is_switched_off_by_its_name_and_the_other_goes_on(self) -> None:
        for error in (RuntimeError("no good"), SystemExit(3), AssertionError()):
            with self.subTest(error=error):
                bad, good = Recorder(raising(error)), Recorder()
                hub = self.hub(bad, good, settings=ObserverSettings(max_errors=3))
                with self.assertLogs("moorage.observers.hub", "ERROR") as logs:
                    for _ in range(10):
                        hub.tell(event(InstanceDeleted))
                    wait_until(lambda: hub.counts()["one-1"].told == 10 and bad.closed, "both", SOON)  # noqa: B023
                self.assertEqual(3, len(bad.seen))
                self.assertEqual("raised 3 times in a row", hub.counts()["one-0"].off)
                last = logs.records[-1].getMessage()
                for part in (
                    "'one-0'",
                    "acme 1.5",
                    "moorage.observers",
                    "[observers] enabled",
                    "receives no more events",
                ):
                    self.assertIn(part, last)

    def test_errors_that_are_not_in_a_row_switch_nothing_off(self) -> None:
        def act(notice: Notice) -> None:
            if notice.sequence % 2:
                raise RuntimeError("every other one")

        observer = Recorder(act)
        hub = self.hub(observer, settings=ObserverSettings(max_errors=2))
        for _ in range(20):
            hub.tell(event(InstanceDeleted))
        wait_until(lambda: len(observer.seen) == 20, "all", SOON)
        hub.close(SOON)
        self.assertEqual(20, len(observer.seen))

    def test_one_that_hangs_holds_up_nobody_and_is_named_with_the_place(self) -> None:
        release, began = threading.Event(), threading.Event()

        def hang(notice: Notice) -> None:
            began.set()
            release.wait(SOON)

        clock = SteppedClock()
        self.addCleanup(clock.steps.put, None)
        good = Recorder()
        hub = self.hub(Recorder(hang), good, settings=ObserverSettings(queue=1000, deadline=30), clock=clock)
        self.addCleanup(release.set)
        hub.tell(event(InstanceDeleted))
        self.assertTrue(began.wait(SOON))
        hub.tell(event(InstanceDeleted))
        for _ in range(10):
            clock.step(3)
        self.assertEqual("", hub.counts()["one-0"].off)
        with self.assertLogs("moorage.observers.hub", "ERROR") as logs:
            clock.step(3)
            for _ in range(100):
                hub.tell(event(InstanceDeleted))
        (said,) = (record.getMessage() for record in logs.records)
        for part in ("'one-0'", "acme 1.5", "more than 30 seconds", "in hang", "[observers] enabled"):
            self.assertIn(part, said)
        self.assertEqual((0, 100), (hub.counts()["one-0"].told, hub.counts()["one-0"].dropped))
        wait_until(lambda: len(good.seen) == 102, "the other", SOON)

    def test_a_process_that_was_stopped_for_a_while_takes_nobody_for_hung(self) -> None:
        release, began = threading.Event(), threading.Event()

        def work(notice: Notice) -> None:
            began.set()
            release.wait(SOON)

        clock = SteppedClock()
        self.addCleanup(clock.steps.put, None)
        hub = self.hub(Recorder(work), settings=ObserverSettings(deadline=30), clock=clock)
        self.addCleanup(release.set)
        hub.tell(event(InstanceDeleted))
        self.assertTrue(began.wait(SOON))
        # An hour passes between two looks; the observer needs a little more of the time that really passes.
        for seconds in (3, 3600, 3, 3):
            clock.step(seconds)
            hub.tell(event(InstanceDeleted))
        self.assertEqual("", hub.counts()["one-0"].off)
        release.set()
        wait_until(lambda: hub.counts()["one-0"].told == 5, "it goes on", SOON)

    def test_what_comes_faster_than_it_is_taken_is_dropped_and_counted(self) -> None:
        release, began = threading.Event(), threading.Event()

        def slow(notice: Notice) -> None:
            began.set()
            release.wait(SOON)

        observer = Recorder(slow)
        hub = self.hub(observer, settings=ObserverSettings(queue=5))
        self.addCleanup(release.set)
        hub.tell(event(InstanceDeleted))
        self.assertTrue(began.wait(SOON))
        with self.assertLogs("moorage.observers.hub", "WARNING") as logs:
            for _ in range(1000):
                hub.tell(event(InstanceDeleted))
        self.assertEqual(1, len(logs.records), "it complains once a minute at most")
        self.assertIn("falls behind", logs.records[0].getMessage())
        self.assertEqual(995, hub.counts()["one-0"].dropped)
        release.set()
        wait_until(lambda: hub.counts()["one-0"].told == 6, "what waited", SOON)
        hub.tell(event(InstanceDeleted))
        hub.close(SOON)
        self.assertEqual(
            (1, 995, 1002), (len(observer.seen) - 6, observer.seen[-1].dropped, observer.seen[-1].sequence)
        )

    def test_telling_takes_no_longer_because_of_what_observers_do(self) -> None:
        """Ten thousand events beside one that raises, one that hangs and one that is slow: nothing of it is waited for."""
        release = threading.Event()
        self.addCleanup(release.set)
        observers = (
            Recorder(raising(RuntimeError("always"))),
            Recorder(lambda notice: release.wait(SOON)),
            Recorder(lambda notice: time.sleep(0.01)),
        )
        hub = self.hub(*observers, settings=ObserverSettings(queue=100))
        before = time.thread_time()
        with self.assertLogs("moorage.observers.hub", "WARNING"):
            for number in range(10_000):
                hub.tell(RingChanged("group", number, "member", 3))
        # The processor's time of this thread, and not the machine's: far more than the about 0.1 s that it takes.
        self.assertLess(time.thread_time() - before, 10)
        self.assertGreater(hub.counts()["one-1"].dropped, 9_000)
        release.set()

    def test_when_nothing_comes_any_more_it_may_write_what_it_collected(self) -> None:
        observer = Recorder()
        hub = self.hub(observer)
        hub.tell(event(InstanceDeleted))
        wait_until(lambda: observer.flushed == 1, "the quiet moment", SOON)

    def test_a_reload_ends_the_old_ones_after_what_waits_and_tells_the_new_ones(self) -> None:
        old, new = Recorder(), Recorder()
        hub = self.hub(old)
        hub.tell(event(InstanceDeleted))
        self.use(hub, new)
        hub.tell(event(InstanceDeleted))
        hub.close(SOON)
        self.assertEqual((1, 1, 1), (len(old.seen), old.closed, len(new.seen)))

    def test_the_end_does_not_wait_for_one_that_hangs(self) -> None:
        release, began = threading.Event(), threading.Event()
        self.addCleanup(release.set)

        def hang(notice: Notice) -> None:
            began.set()
            release.wait(SOON)

        hub = self.hub(Recorder(hang), settings=ObserverSettings(queue=1))
        for _ in range(3):
            hub.tell(event(InstanceDeleted))
        self.assertTrue(began.wait(SOON))
        with self.assertLogs("moorage.observers.hub", "WARNING") as logs:
            hub.close(0.05)
        self.assertIn("'one-0'", logs.records[-1].getMessage())
        self.assertIn("left behind", logs.records[-1].getMessage())

    def test_without_observers_there_is_nothing_to_do(self) -> None:
        hub = ObserverHub(SOURCE, SystemClock())
        hub.tell(event(InstanceDeleted))
        self.assertEqual({}, hub.counts())
        hub.close(0)


class EventsTests(unittest.TestCase):
    def test_every_event_has_a_kind_of_its_own_and_plain_fields(self) -> None:
        self.assertEqual(len(EVENTS), len({kind.__name__ for kind in EVENTS.values()}))
        for name, kind in EVENTS.items():
            with self.subTest(kind=name):
                self.assertRegex(name, r"^[a-z]+\.[a-z]+$")
                self.assertTrue(kind.__doc__)
                made = event(kind)
                with self.assertRaises(dataclasses.FrozenInstanceError):
                    setattr(made, dataclasses.fields(kind)[0].name, "other")  # type: ignore[arg-type]
