# SPDX-License-Identifier: Apache-2.0
"""Delivery of the journal to followers, on any database: at least once, in order, whatever dies, hangs or is paused."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import sqlalchemy as sa

from moorage import errors
from moorage.clock import SystemClock
from moorage.db import RecordedEvent
from moorage.journal import delivery
from moorage.journal.delivery import DeliveryLoop, Selection
from moorage.journal.purge import purge
from moorage.journal.sequencer import Sequencer
from moorage.journal.subscriptions import FAILING_AFTER, Subscription, SubscriptionStore
from moorage.journal.tables import subscriptions
from moorage.services.interface import ServiceIdentity
from tests.servers import wait_until
from tests.unit.journal.journal_tests import JournalCase, change

NAME = "observer/test"
FIRST = ServiceIdentity("00000000-0000-4000-8000-000000000001", "e1", "engine", None, 1)
SECOND = ServiceIdentity("00000000-0000-4000-8000-000000000002", "e2", "engine", None, 1)


@dataclass
class Receiver:
    """A sink that remembers what it accepted; ``meet`` may raise, hang or do anything else before it accepts."""

    meet: Callable[[Sequence[RecordedEvent]], object] = lambda events: None
    name: str = NAME
    wanted: Selection = field(default_factory=Selection)
    batch: int = 7
    limit: float = 30.0
    seen: list[int] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def deliver(self, events: Sequence[RecordedEvent], missed: int) -> None:
        self.meet(events)
        with self.lock:
            self.seen += [each.number for each in events]
            self.missed.append(missed)


class DeliveryCase(JournalCase):
    def setUp(self) -> None:
        super().setUp()
        self.store = SubscriptionStore(self.database)
        self.sequencer = Sequencer(self.another("scheduler:s2"), lease_seconds=0)

    def numbered(self, count: int, name: str = "one") -> None:
        for _ in range(count):
            self.change(name)
        wait_until(lambda: self.sequencer.number() == 0, "all events have numbers")

    def loop(
        self, *sinks: Any, me: ServiceIdentity = FIRST, start: bool = True, shortest_lease: float = 0.2
    ) -> DeliveryLoop:
        found = DeliveryLoop(
            self.another("engine:e"), SystemClock(), me, lambda: sinks, poll=0.02, shortest_lease=shortest_lease
        )
        self.addCleanup(found.stop, 10)
        if start:
            found.start()
        return found

    def begin(self, name: str = NAME) -> None:
        """A subscription from the beginning of the journal."""
        with self.database.write() as tx:
            self.store.insert(tx, name, 0)

    def row(self, name: str = NAME) -> Subscription:
        return next(each for each in self.store.list()[0] if each.name == name)

    def wait_position(self, position: int, name: str = NAME) -> None:
        wait_until(lambda: self.row(name).position == position, f"{name} has reached {position}")

    def at_once(self, name: str = NAME) -> None:
        """The pause before the next try is over."""
        with self.database.write() as tx:
            tx.execute(sa.update(subscriptions).where(subscriptions.c.name == name).values(retry_at=0))

    def expire(self) -> None:
        """The lease is over, and its owner does not know."""
        with self.database.write() as tx:
            tx.execute(sa.update(subscriptions).values(expires_at=0))

    def assert_delivered(self, seen: Sequence[int], last: int, first: int = 1) -> None:
        """Each event came at least once, and none before an earlier one had come."""
        newest = first - 1
        for number in seen:
            self.assertLessEqual(number, newest + 1, seen)
            newest = max(newest, number)
        self.assertEqual(last, newest)


class DeliveryTests(DeliveryCase):
    def test_in_good_times_every_event_comes_once(self) -> None:
        self.begin()
        self.numbered(50)
        receiver = Receiver()
        self.loop(receiver)
        self.wait_position(50)
        self.numbered(3)
        self.wait_position(53)
        self.assertEqual(list(range(1, 54)), receiver.seen)
        row = self.row()
        self.assertEqual(("active", 0, 0, ""), (row.status, row.failures, row.missed, row.last_error))
        self.assertGreater(row.delivered_at, 0)

    def test_without_anything_to_deliver_a_look_costs_one_statement(self) -> None:
        self.begin()
        self.numbered(3)
        asked: list[int] = []
        receiver = Receiver()
        loop = self.loop(start=False)
        loop._sinks = lambda: asked.append(1) or [receiver]  # type: ignore[func-returns-value]
        loop.look()
        self.wait_position(3)
        wait_until(lambda: not loop._running, "the delivery has ended")
        statements: list[str] = []
        # What threads of other tests send is not counted.
        looking = threading.current_thread()

        def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
            if "FROM" in statement and threading.current_thread() is looking:
                statements.append(statement)

        sa.event.listen(sa.Engine, "before_cursor_execute", note)
        self.addCleanup(sa.event.remove, sa.Engine, "before_cursor_execute", note)
        loop.look()
        self.assertEqual((1, 1), (len(asked), len(statements)), statements)

    def test_more_than_a_page(self) -> None:
        self.begin()
        self.numbered(40)
        receiver = Receiver()
        with mock.patch.object(delivery, "PAGE", 9):
            self.loop(receiver)
            self.wait_position(40)
        self.assertEqual(list(range(1, 41)), receiver.seen)

    def test_a_new_subscription_begins_after_the_newest_event(self) -> None:
        self.numbered(5)
        receiver = Receiver()
        self.loop(receiver)
        wait_until(lambda: self.store.list()[0], "the subscription")
        self.numbered(2)
        self.wait_position(7)
        self.assertEqual([6, 7], receiver.seen)

    def test_a_follower_gets_what_it_wants_and_its_cursor_moves_over_the_rest(self) -> None:
        self.begin()
        for name in ("one", "two", "one"):
            self.numbered(1, name)
        other = Receiver(name="observer/other", wanted=Selection(frozenset({"thing.*"})))
        self.begin(other.name)
        receiver = Receiver(wanted=Selection(frozenset({"instance.*"})))
        self.loop(receiver, other)
        self.wait_position(3)
        self.wait_position(3, other.name)
        self.assertEqual([], receiver.seen)
        self.assertEqual([1, 2, 3], other.seen)

    def test_a_failed_batch_is_tried_again_and_holds_up_no_other_follower(self) -> None:
        self.begin()
        well = Receiver(name="observer/well")
        self.begin(well.name)
        self.numbered(20)
        tries: list[int] = []

        def fail(events: Sequence[RecordedEvent]) -> None:
            if events[0].number > 7:
                tries.append(events[0].number)
                raise ConnectionError("no\nanswer")

        receiver = Receiver(fail)
        self.loop(receiver, well)
        wait_until(lambda: self.row().failures, "a failure")
        self.wait_position(20, well.name)
        row = self.row()
        self.assertEqual(("retrying", 7), (row.status, row.position))
        self.assertEqual(r"ConnectionError: no\nanswer", row.last_error)
        # The database looks at its clock twice.
        self.assertGreater(row.retry_at - row.last_error_at, 900_000)
        for failures in range(2, FAILING_AFTER + 1):
            self.at_once()
            wait_until(lambda failures=failures: self.row().failures >= failures, "one more failure")  # type: ignore[misc]
        failing = self.row()
        self.assertEqual(("failing", row.failing_since), (failing.status, failing.failing_since))
        self.assertLess(failing.retry_at - failing.last_error_at, 301_000_000)
        self.assertEqual({8}, set(tries))
        receiver.meet = lambda events: None
        self.at_once()
        self.wait_position(20)
        row = self.row()
        self.assertEqual(("active", 0, 0), (row.status, row.failing_since, row.retry_at))
        self.assertTrue(row.last_error, "the last error stays to be seen")
        self.assertEqual(list(range(1, 21)), receiver.seen)

    def test_a_look_that_is_late_does_not_shorten_the_pause(self) -> None:
        """The second delivery was begun by a look that had read the row before the first one failed."""
        self.begin()
        self.numbered(3)
        tries: list[int] = []

        def fail(events: Sequence[RecordedEvent]) -> None:
            tries.append(events[0].number)
            raise ConnectionError

        loop, before = self.loop(start=False), self.row()
        for _ in range(2):
            one = delivery._Delivery(Receiver(fail), loop._store, loop._reader, SystemClock(), threading.Event(), 60)
            self.assertFalse(one.run(before if not tries else replace(self.row(), retry_at=0), FIRST))
        self.assertEqual(([1], 1), (tries, self.row().failures))

    def test_no_transaction_is_open_during_a_delivery(self) -> None:
        self.begin()
        self.numbered(8)
        # A transaction inside of another one is refused, and on SQLite a writer would wait for another.
        receiver = Receiver(lambda events: self.database.run(lambda tx: tx.execute(sa.select(1)).scalar_one()))
        self.loop(receiver)
        self.wait_position(8)
        self.assertEqual("", self.row().last_error)

    def test_a_process_that_dies_after_a_delivery_leaves_it_to_the_next_one(self) -> None:
        """The first process delivers batches, and dies before the third one's cursor is written."""
        self.begin()
        self.numbered(30)
        died = threading.Event()
        first = self.loop(Receiver(), start=False)
        wrote = first._store.delivered

        def die(held: Subscription, position: int, seconds: float) -> bool:
            if position > 14:
                died.set()
                raise errors.StoreUnavailable("dead")
            return wrote(held, position, seconds)

        receiver = Receiver()
        first._sinks = lambda: [receiver]
        with mock.patch.object(first._store, "delivered", die):
            first.look()
            wait_until(died.is_set, "the death")
        self.assertEqual(list(range(1, 22)), receiver.seen)
        self.expire()
        self.loop(receiver, me=SECOND)
        self.wait_position(30)
        self.assertEqual([*range(1, 22), *range(15, 31)], receiver.seen)
        self.assertEqual(SECOND.uuid, self.row().owner)

    def test_a_paused_process_cannot_move_the_cursor(self) -> None:
        """The first process sleeps within its second delivery, until the second one has delivered everything."""
        self.begin()
        self.numbered(20)
        asleep, awake = threading.Event(), threading.Event()
        self.addCleanup(awake.set)

        def sleep(events: Sequence[RecordedEvent]) -> None:
            if events[0].number > 7:
                asleep.set()
                awake.wait(60)

        slow, quick = Receiver(sleep), Receiver()
        first = self.loop(slow)
        wait_until(asleep.is_set, "the first process sleeps")
        self.expire()
        self.loop(quick, me=SECOND)
        self.wait_position(20)
        before = self.row()
        awake.set()
        wait_until(lambda: not first._running, "the first process has noticed")
        self.assertEqual(list(range(1, 15)), slow.seen)
        self.assertEqual(list(range(8, 21)), quick.seen)
        after = self.row()
        self.assertEqual((20, before.token, SECOND.uuid), (after.position, after.token, after.owner))
        self.assertEqual(before.token, self.row().token)

    def test_a_loop_after_a_reload_takes_the_lease_anew(self) -> None:
        """A call of the loop before it still runs, in the same process: it can neither move the cursor nor deliver more."""
        self.begin()
        self.numbered(14)
        asleep, awake = threading.Event(), threading.Event()
        self.addCleanup(awake.set)

        def sleep(events: Sequence[RecordedEvent]) -> None:
            asleep.set()
            awake.wait(60)

        slow, quick = Receiver(sleep), Receiver()
        first = self.loop(slow, shortest_lease=600)
        wait_until(asleep.is_set, "the first call has begun")
        before = self.row()
        self.assertEqual({NAME}, first.stop(0))
        second = self.loop(quick, shortest_lease=600)
        self.wait_position(14)
        after = self.row()
        self.assertEqual((FIRST.uuid, before.token + 1), (after.owner, after.token))
        awake.set()
        wait_until(lambda: not first._running, "the first call has returned")
        self.assertEqual((list(range(1, 8)), list(range(1, 15))), (slow.seen, quick.seen))
        self.assertEqual(after, self.row())
        self.numbered(1)
        self.wait_position(15)
        self.assertEqual(after.token, self.row().token, "a loop renews what it holds")
        self.assertEqual(frozenset(), second.stop(60))

    def test_a_lease_of_another_incarnation_is_not_taken_back(self) -> None:
        """The row has changed hands since this caller read it."""
        self.begin()
        mine = self.store.hold(self.row(), FIRST, 600)
        assert mine is not None
        self.expire()
        others = self.store.hold(self.row(), replace(FIRST, epoch=2), 600)
        assert others is not None
        self.assertIsNone(self.store.hold(replace(mine, token=others.token), FIRST, 600), "another epoch has it")
        self.assertIsNone(
            self.store.hold(replace(others, token=mine.token), replace(FIRST, epoch=2), 600), "another token"
        )
        self.assertIsNone(
            self.store.hold(replace(others, owner=SECOND.uuid), replace(SECOND, epoch=2), 600), "not its own"
        )
        self.assertEqual(others, self.row())

    def test_a_process_that_wakes_up_after_its_lease_begins_no_delivery(self) -> None:
        self.begin()
        self.numbered(14)
        loop, receiver, clock = self.loop(start=False), Receiver(), mock.Mock()
        # 40 seconds pass between any two looks at the clock.
        clock.monotonic.side_effect = itertools.count(0, 40)
        late = delivery._Delivery(receiver, loop._store, loop._reader, clock, threading.Event(), 60)
        self.assertFalse(late.run(self.row(), FIRST))
        self.assertEqual(([], 0), (receiver.seen, self.row().position))

    def test_a_process_that_ends_in_good_order_leaves_no_lease(self) -> None:
        self.begin()
        self.numbered(3)
        first = self.loop(Receiver(), shortest_lease=600)
        self.wait_position(3)
        first.stop(60)
        self.assertEqual((None, 0), (self.row().owner, self.row().expires_at))

    def test_a_lease_that_a_late_look_took_is_released_too(self) -> None:
        """The look had read the row before another process noted a failure: the lease is held, and nothing is delivered."""
        self.begin()
        self.numbered(3)
        receiver = Receiver()
        loop, late = self.loop(receiver, start=False, shortest_lease=600), self.row()
        with self.database.write() as tx:
            tx.execute(sa.update(subscriptions).values(retry_at=2**60))
        with mock.patch.object(loop._store, "list", return_value=([late], 3, 1)):
            loop.look()
        wait_until(lambda: not loop._running, "the delivery has ended")
        self.assertEqual((FIRST.uuid, []), (self.row().owner, receiver.seen))
        loop.start()
        self.assertEqual(frozenset(), loop.stop(60))
        self.assertEqual((None, 0), (self.row().owner, self.row().expires_at))

    def test_the_next_incarnation_of_a_killed_process_goes_on_at_once(self) -> None:
        self.begin()
        self.numbered(3)
        killed = self.loop(Receiver(), start=False, shortest_lease=600)
        killed.look()
        self.wait_position(3)
        self.numbered(3)
        other = self.loop(Receiver(), me=SECOND, start=False)
        other.look()
        self.assertEqual({}, other._running)
        self.loop(Receiver(), me=replace(FIRST, epoch=2))
        self.wait_position(6)
        self.assertEqual(2, self.row().epoch)

    def test_a_call_that_hangs_is_given_up_and_another_process_goes_on(self) -> None:
        self.begin()
        self.numbered(3)
        ends = threading.Event()
        self.addCleanup(ends.set)
        calls: list[int] = []

        def hang(events: Sequence[RecordedEvent]) -> None:
            calls.append(events[0].number)
            ends.wait(60)

        hangs, well = Receiver(hang, limit=0.2), Receiver(name="observer/well")
        self.begin(well.name)
        first = self.loop(hangs, well)
        wait_until(lambda: self.row().failures, "the hang is noted")
        self.assertEqual("The delivery has not returned for 0.2 seconds.", self.row().last_error)
        self.wait_position(3, well.name)
        quick = Receiver()
        self.at_once()
        self.loop(quick, me=SECOND)
        self.wait_position(3)
        self.assertEqual([1, 2, 3], quick.seen)
        self.assertEqual([1], calls, "the process begins no second call")
        ends.set()
        wait_until(lambda: not first._running, "the call has returned")
        self.assertEqual(3, self.row().position)

    def test_events_that_were_purged_before_are_counted_and_told(self) -> None:
        self.begin()
        self.numbered(9)
        self.assertEqual(4, purge(self.database, -3600, batch=4))
        receiver = Receiver()
        self.loop(receiver)
        self.wait_position(9)
        row = self.row()
        self.assertEqual(([5, 6, 7, 8, 9], [4]), (receiver.seen, receiver.missed))
        self.assertEqual((4, "The events 1 to 4 were purged before they were delivered."), (row.missed, row.last_error))

    def test_an_operator_moves_the_cursor_while_a_delivery_runs(self) -> None:
        self.begin()
        self.numbered(20)
        asleep, awake = threading.Event(), threading.Event()
        self.addCleanup(awake.set)

        def sleep(events: Sequence[RecordedEvent]) -> None:
            if not awake.is_set():
                asleep.set()
                awake.wait(60)

        receiver = Receiver(sleep)
        self.loop(receiver)
        wait_until(asleep.is_set, "a delivery runs")
        with self.database.write() as tx:
            self.store.reset(tx, NAME, 18)
        awake.set()
        self.wait_position(20)
        self.assertEqual([*range(1, 8), 19, 20], receiver.seen)

    def test_processes_that_fight_lose_nothing_and_keep_the_order(self) -> None:
        """Four processes with leases that are over at once, receivers that fail and accept at random, two writers."""
        self.begin()
        receiver = Receiver(batch=3)
        chance, done = random.Random(7), threading.Event()

        def meet(events: Sequence[RecordedEvent]) -> None:
            with receiver.lock:
                fate = chance.random()
            if fate < 0.1:
                raise ConnectionError("refused")
            if fate < 0.2:
                # It accepts, and the answer is lost.
                with receiver.lock:
                    receiver.seen += [each.number for each in events]
                raise ConnectionError("lost")

        receiver.meet = meet

        def pester() -> None:
            """Leases end early, and pauses too."""
            while not done.is_set():
                with self.pesterer.write() as tx:
                    tx.execute(sa.update(subscriptions).values(retry_at=0, expires_at=0))
                done.wait(0.01)

        self.pesterer = self.another()
        for number in range(4):
            me = replace(FIRST, uuid=f"00000000-0000-4000-8000-00000000001{number}")
            self.loop(receiver, me=me)
        with ThreadPoolExecutor(3) as pool:
            pestering = pool.submit(pester)
            try:
                writers = [pool.submit(self.numbered_by, name) for name in ("one", "two")]
                total = sum(each.result() for each in writers)
                wait_until(lambda: self.sequencer.number() == 0, "all events have numbers")
                self.wait_position(total)
            finally:
                done.set()
            pestering.result()
        with receiver.lock:
            self.assert_delivered(receiver.seen, total)

    def numbered_by(self, name: str) -> int:
        database = self.another()
        sequencer = Sequencer(database, lease_seconds=0)
        found = 0
        for _ in range(40):
            found += database.run(lambda tx: change(tx, name)) > 0
            sequencer.number()
        return found
