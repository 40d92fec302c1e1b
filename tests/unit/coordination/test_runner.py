# SPDX-License-Identifier: Apache-2.0
"""The runner over a real store: what is swept when, what a handler may do to it, what operators may ask."""

from __future__ import annotations

import tempfile
import threading
import unittest
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.coordination import tables
from moorage.coordination.interface import PeriodicTask, TaskLease, TaskTools
from moorage.coordination.ring_manager import InFlight, RingSnapshot
from moorage.coordination.runner import Runner, Settings, TaskRunner
from moorage.coordination.task_run import (
    PARTS,
    Backoff,
    Ownership,
    OwnsAll,
    RingOwnership,
    TaskRun,
    TickContext,
)
from moorage.coordination.task_store import Run, TaskStore
from moorage.coordination.tick_leases import SqlTickLeases, TickLease
from moorage.db import Database
from moorage.ring import Ring, position_of
from moorage.testing.coordination import wait_for
from tests.unit.coordination.store_tests import create_tables

SECOND = 1_000_000


class Recorder(PeriodicTask):
    """Handles as it is told to."""

    api_version = (1, 0)

    def __init__(self, objects: Sequence[str], handler: Callable[[str, TaskLease], object]) -> None:
        super().__init__(TaskTools(None, SystemClock(), None, None, None, None))  # type: ignore[arg-type]
        self.objects = objects
        self.handler = handler

    @override
    def list_objects(self) -> Sequence[str]:
        return self.objects

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        return self.handler(object_id, lease)


class SwitchedShare(OwnsAll):
    """A share that can end."""

    def __init__(self) -> None:
        super().__init__("me", 1)
        self.held = True

    @override
    def holds(self) -> bool:
        return self.held


class RunnerCase(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.database = Database(f"sqlite:///{folder.name}/test.sqlite", lock_timeout=30)
        self.addCleanup(self.database.close)
        create_tables(self.database)
        self.store = TaskStore(self.database)
        self.claims = SqlTickLeases(self.database)
        self.share: Ownership | None = SwitchedShare()
        self.done: list[str] = []

    def task(
        self, handler: Callable[[str, TaskLease], object] | None = None, objects: Sequence[str] = "abc", **settings: Any
    ) -> TaskRunner:
        values: dict[str, Any] = {"spacing": 3600.0, "timeout": 60.0, "concurrency": 1, **settings}

        def note(object_id: str, lease: TaskLease) -> object:
            self.done.append(object_id)
            return True

        return TaskRunner(
            "t", Recorder(objects, handler or note), Settings(**values), self.claims, self.store,
            lambda: self.share, SystemClock(),
        )  # fmt: skip

    def sweep(self, task: TaskRunner, only: str = "") -> Run:
        return self.sweep_at(task, None, only)

    def sweep_at(self, task: TaskRunner, at: int | None, only: str = "") -> Run:
        """At another moment of the database's clock than now."""
        moment, controls = self.store.look()
        ticks = task.due(moment if at is None else at, controls.get("t"))
        assert ticks is not None
        self.assertTrue(task.sweep(ticks, only))
        return self.store.runs("t", limit=1)[0]


class TaskRunnerTests(RunnerCase):
    def test_a_tick_is_swept_once_and_told_of(self) -> None:
        task = self.task()
        run = self.sweep(task)
        self.assertEqual(self.done, list("abc"))
        self.assertEqual((run.owned, run.handled, run.acted, run.failed, run.ended), (3, 3, 3, 0, "complete"))
        moment, controls = self.store.look()
        self.assertIsNone(task.due(moment, controls.get("t")))
        self.assertIsNotNone(task.due(moment + 3600 * SECOND, None))

    def test_another_member_finds_the_tick_claimed(self) -> None:
        self.sweep(self.task())
        self.assertEqual(self.sweep(self.task()).handled, 0)

    def test_ticks_that_were_missed_coalesce(self) -> None:
        task = self.task()
        moment, _ = self.store.look()
        self.sweep_at(task, moment - 10 * 3600 * SECOND)
        self.sweep_at(task, moment)
        self.assertEqual(self.done, list("abcabc"))
        self.assertIsNone(task.due(moment, None))

    def test_a_spread_task_claims_a_part_of_its_objects_at_a_time_and_each_of_them_once_for_a_tick(self) -> None:
        objects = [f"object-{number}" for number in range(400)]
        transactions: list[int] = []
        claim = self.claims.claim

        def counted(asked: TickLease, object_ids: Sequence[str]) -> list[str]:
            transactions.append(len(object_ids))
            return claim(asked, object_ids)

        self.claims.claim = counted  # type: ignore[method-assign, assignment]
        task = self.task(objects=objects, spread=True)
        moment, _ = self.store.look()
        moment -= 3 * 3600 * SECOND
        self.sweep_at(task, moment)
        self.assertEqual((len(transactions), sorted(self.done)), (PARTS, sorted(objects)))
        transactions.clear()
        self.done.clear()
        for part in range(1, PARTS + 1):
            self.assertEqual(self.sweep_at(task, moment + part * 3600 * SECOND // PARTS).lost, 0)
        self.assertEqual((len(transactions), sorted(self.done)), (PARTS, sorted(objects)))

    def test_what_could_not_be_listed_is_swept_with_the_next_part(self) -> None:
        task = self.task(objects=[f"object-{number}" for number in range(40)], spread=True)
        moment, _ = self.store.look()
        self.sweep_at(task, moment - 2 * 3600 * SECOND)
        recorder, task._task = task._task, Recorder([], lambda *_: None)
        task._task.list_objects = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        self.assertEqual(self.sweep_at(task, moment - 3600 * SECOND).ended, "failed")
        task._task = recorder
        self.done.clear()
        self.sweep_at(task, moment - 3600 * SECOND + 3600 * SECOND // PARTS)
        self.assertEqual(len(self.done), 40)

    def test_a_clock_that_is_set_back_stops_no_task_and_no_object_that_was_put_off(self) -> None:
        fails = True

        def handler(object_id: str, lease: TaskLease) -> object:
            self.done.append(object_id)
            if fails and object_id == "b":
                raise LookupError("a mistake")
            return True

        task = self.task(handler, spacing=1.0)
        moment, _ = self.store.look()
        self.sweep_at(task, moment)
        # What was done in the last hour had been done an hour later, by the clock that was ahead.
        later = 3600 * SECOND
        with self.database.write() as tx:
            tx.execute(sa.update(tables.claims).values(tick=tables.claims.c.tick + later))
        failures, until = task._backoff._failed["b"]
        task._backoff._failed["b"] = failures, until + later
        task._last_moment = moment + later
        self.done.clear()
        fails = False
        self.assertEqual(self.sweep_at(task, moment + SECOND).handled, 3)
        self.assertEqual(self.sweep_at(self.task(spacing=1.0), moment + SECOND).lost, 3)

    def test_a_handler_that_raises_stops_nothing_and_puts_its_object_off(self) -> None:
        def handler(object_id: str, lease: TaskLease) -> object:
            self.done.append(object_id)
            if object_id == "b":
                raise LookupError("a mistake of the author")
            return False

        task = self.task(handler)
        moment, _ = self.store.look()
        run = self.sweep_at(task, moment - 2 * 3600 * SECOND)
        self.assertEqual((run.handled, run.acted, run.failed), (2, 0, 1))
        self.assertIn("b: LookupError: a mistake", run.problem)
        self.done.clear()
        self.assertEqual(self.sweep_at(task, moment - 3600 * SECOND).skipped, 1)
        self.assertEqual(self.done, ["a", "c"])
        self.sweep_at(task, moment)
        self.assertEqual(self.done, ["a", "c", "a", "b", "c"])

    def test_a_handler_that_hangs_is_left_alone_and_writes_nothing(self) -> None:
        go_on = threading.Event()
        self.addCleanup(go_on.set)
        late: list[str] = []

        def handler(object_id: str, lease: TaskLease) -> object:
            if object_id == "b":
                go_on.wait(60)
                try:
                    with lease.finish():
                        late.append("written")
                except errors.Fenced as error:
                    late.append(error.message)
            self.done.append(object_id)
            return True

        # What does not hang has that long.
        run = self.sweep(self.task(handler, timeout=2.0))
        self.assertEqual((sorted(self.done), run.failed), (["a", "c"], 1))
        go_on.set()
        wait_for(lambda: late, "the late one")
        self.assertIn("took too long", late[0])

    def test_objects_are_handled_at_the_same_time_when_asked_to(self) -> None:
        barrier = threading.Barrier(3)
        self.sweep(self.task(lambda object_id, lease: barrier.wait(60), concurrency=3))
        self.assertFalse(barrier.broken)

    def test_a_share_that_ends_cuts_the_sweep_short_and_it_is_done_again(self) -> None:
        share = SwitchedShare()
        self.share = share

        def handler(object_id: str, lease: TaskLease) -> object:
            self.done.append(object_id)
            share.held = object_id != "b"
            return True

        task = self.task(handler, batch=1)
        self.assertEqual(self.sweep(task).ended, "stale")
        self.assertEqual(self.done, ["a", "b"])
        self.share = SwitchedShare()
        self.sweep(task)
        self.assertEqual(self.done, ["a", "b", "c"])

    def test_without_a_share_nothing_happens_and_the_tick_stays_due(self) -> None:
        self.share = None
        task = self.task()
        moment, _ = self.store.look()
        ticks = task.due(moment, None)
        assert ticks is not None
        self.assertFalse(task.sweep(ticks))
        self.assertIsNotNone(task.due(moment, None))

    def test_a_task_that_cannot_list_its_objects_has_failed(self) -> None:
        class Broken(Recorder):
            @override
            def list_objects(self) -> Sequence[str]:
                raise LookupError("no table")

        task = self.task()
        task._task = Broken("", lambda *_: None)
        run = self.sweep(task)
        self.assertEqual((run.ended, run.problem), ("failed", "LookupError: no table"))

    def test_a_paused_task_is_swept_on_request_alone_and_for_one_object_when_asked(self) -> None:
        task = self.task()
        self.store.pause("t", "maintenance")
        moment, controls = self.store.look()
        self.assertIsNone(task.due(moment, controls["t"]))
        self.store.request("t", "b")
        self.sweep(task, only="b")
        self.assertEqual(self.done, ["b"])
        moment, controls = self.store.look()
        self.assertIsNone(task.due(moment, controls["t"]))

    def test_a_request_that_the_ring_cut_short_stays_open_and_what_moved_is_swept_by_its_new_owner(self) -> None:
        def handler(object_id: str, lease: TaskLease) -> object:
            self.done.append(object_id)
            if object_id == "a":
                assert isinstance(self.share, SwitchedShare)
                self.share.held = False
            return True

        task, other = self.task(handler, batch=1), self.task()
        self.store.pause("t", "")
        self.store.request("t")
        self.assertEqual(self.sweep(other, only="none of these").handled, 0)
        self.share = SwitchedShare()
        self.assertEqual(self.sweep(task).ended, "stale")
        self.assertEqual(self.done, ["a"])
        # It has heeded the request under the ring before, when this was not its own.
        newer = SwitchedShare()
        newer.token = 2
        self.share = newer
        self.assertEqual(self.sweep(other).handled, 2)
        self.assertEqual(self.sweep(task).handled, 0)
        moment, controls = self.store.look()
        self.assertIsNone(task.due(moment, controls["t"]))
        self.assertIsNone(other.due(moment, controls["t"]))

    def test_a_handling_that_is_given_up_counts_as_ended_and_writes_nothing(self) -> None:
        """A ring that drains would wait for it, for ever, and all engines with it."""
        go_on, ended = threading.Event(), threading.Event()
        self.addCleanup(go_on.set)
        refused: list[str] = []

        def handler(object_id: str, lease: TaskLease) -> object:
            go_on.wait(60)
            try:
                lease.check()
            except errors.Fenced:
                refused.append(object_id)
            ended.set()
            return True

        share = SwitchedShare()
        released: list[bool] = []
        share.working = lambda: InFlight(True, lambda: released.append(ended.is_set()))  # type: ignore[method-assign]
        self.share = share
        run = self.sweep(self.task(handler, objects="a", timeout=0.1))
        self.assertEqual((run.failed, run.problem), (1, "a: not within 0.1 seconds"))
        self.assertEqual(released, [False])
        go_on.set()
        wait_for(lambda: refused, "the handler to go on")
        self.assertEqual((refused, released), (["a"], [False]))

    def test_what_was_given_up_before_its_thread_ran_is_never_begun(self) -> None:
        """Its handler would be waited for by a ring that drains, for as long as it hangs."""
        moment, _ = self.store.look()
        sweep = TaskRun(
            "t", self.task()._task, SwitchedShare(), self.claims, TickContext(moment, SECOND), SystemClock(),
            backoff=Backoff(1.0), timeout=60.0,
        )  # fmt: skip
        sweep.begin()
        (batch,) = sweep.batches()
        first, *others = sweep.claim(*batch)
        sweep.give_up(first, "not in time")
        for each in (first, *others):
            sweep.handle(each)
        self.assertEqual((self.done, sweep.run().failed), (["b", "c"], 1))

    def test_when_all_threads_hang_the_sweep_says_so_and_nothing_is_claimed_for_nothing(self) -> None:
        go_on = threading.Event()
        self.addCleanup(go_on.set)
        task = self.task(lambda object_id, lease: go_on.wait(60), objects=[f"o{n}" for n in range(40)], timeout=0.02)
        run = self.sweep(task)
        self.assertEqual((run.failed, run.ended, run.problem[:11]), (40, "failed", "all threads"))
        self.store.request("t")
        self.assertEqual((self.sweep(task).ended, self.sweep(self.task()).handled), ("failed", 3))

    def test_a_sweep_is_cut_short_when_its_engine_stops(self) -> None:
        def handler(object_id: str, lease: TaskLease) -> object:
            self.done.append(object_id)
            task.end()
            return True

        task = self.task(handler, objects=[f"o{n}" for n in range(40)])
        self.assertEqual((self.sweep(task).ended, len(self.done)), ("stale", 1))

    def test_positions_of_another_hash_function_than_the_rings_are_not_asked_for(self) -> None:
        class Positioned(Recorder):
            @override
            def objects_in(self, ranges: Sequence[tuple[int, int]]) -> Sequence[str]:
                return [each for each in self.objects if any(a <= position_of(each) < b for a, b in ranges)]

        names = [f"object-{number}" for number in range(300)]
        for function in ("md5", "xxh3"):
            ring = Ring([b"moorage.a.1.0.1.1000", b"moorage.b.1.0.1.1000"], 40, function)
            found: list[str] = []
            for me in ring.members:
                snapshot = RingSnapshot("g", 1, me, ring, 0.0)
                found += RingOwnership(None, snapshot).select(Positioned(names, lambda *_: None))  # type: ignore[arg-type]
            self.assertEqual(sorted(found), sorted(names), function)

    def test_a_spread_task_claims_each_object_once_a_tick_though_it_is_swept_in_parts(self) -> None:
        names = [f"object-{number}" for number in range(40)]
        task = self.task(objects=names, spread=True)
        claimed: list[str] = []
        claim = self.claims.claim

        def count(wanted: TickLease, object_ids: Sequence[str]) -> list[str]:
            claimed.extend(object_ids)
            return claim(wanted, object_ids)

        self.claims.claim = count  # type: ignore[method-assign,assignment]
        moment, _ = self.store.look()
        moment -= 3 * 3600 * SECOND
        for part in range(41):
            ticks = task.due(moment + part * 180 * SECOND, None)
            assert ticks is not None
            task.sweep(ticks)
        # The tick that each was at in the beginning, and the two that began since.
        self.assertEqual((sorted(claimed), sorted(self.done)), (sorted(names * 3), sorted(names * 3)))

    def test_a_request_of_long_ago_is_not_heeded(self) -> None:
        task = self.task(spacing=1.0)
        self.store.pause("t", "")
        self.store.request("t")
        moment, controls = self.store.look()
        self.assertIsNone(task.due(moment + 3600 * SECOND, controls["t"]))

    def test_a_ring_that_changed_is_swept_at_once_for_what_came_with_it(self) -> None:
        task = self.task()
        self.sweep(task)
        newer = SwitchedShare()
        newer.token = 2
        self.share = newer
        self.assertEqual(self.sweep(task).handled, 0)

    def test_the_lease_is_fenced_by_the_claim(self) -> None:
        def handler(object_id: str, lease: TaskLease) -> object:
            lease.check()
            self.assertEqual(lease.finish_with(lambda tx: 7), 7)
            with self.assertRaises(errors.Fenced), lease.finish():
                self.fail("finished twice")
            return True

        self.assertEqual(self.sweep(self.task(handler)).handled, 3)


class RunnerTests(RunnerCase):
    def test_it_runs_by_itself_until_it_is_stopped(self) -> None:
        runner = Runner([self.task(spacing=0.05)], self.store, SystemClock(), poll=0.02)
        runner.start()
        wait_for(lambda: len(self.done) >= 9, "three ticks")
        runner.stop()
        before = len(self.done)
        self.assertEqual(len(self.done), before)

    def test_a_request_is_heeded_by_a_runner_that_waits_for_its_next_tick(self) -> None:
        runner = Runner([self.task()], self.store, SystemClock(), poll=0.02)
        runner.start()
        self.addCleanup(runner.stop)
        wait_for(lambda: len(self.done) == 3, "the first tick")
        self.store.request("t", "c")
        wait_for(lambda: len(self.done) == 4, "the request")
        self.assertEqual(self.done[-1], "c")

    def test_a_task_whose_turn_cannot_be_told_does_not_hold_up_another(self) -> None:
        def broken() -> Ownership | None:
            raise LookupError("a mistake")

        tasks = [self.task(), self.task()]
        tasks[0].name, tasks[0]._last_token, tasks[0]._share = "broken", 1, broken
        moment, _ = self.store.look()
        tasks[0]._last_slot = tasks[0]._slot(moment)
        runner = Runner(tasks, self.store, SystemClock(), poll=0.02)
        with self.assertLogs("moorage.coordination.runner", "ERROR"):
            runner._look(moment, {})
        self.addCleanup(runner.stop)
        wait_for(lambda: len(self.done) == 3, "the other task")

    def test_a_task_that_hangs_does_not_hold_up_another(self) -> None:
        go_on = threading.Event()
        self.addCleanup(go_on.set)
        other: list[str] = []
        tasks = [self.task(lambda object_id, lease: go_on.wait(60)), self.task(spacing=0.05)]
        tasks[1].name = "other"
        tasks[1]._task = Recorder("x", lambda object_id, lease: other.append(object_id))
        runner = Runner(tasks, self.store, SystemClock(), poll=0.02)
        runner.start()
        wait_for(lambda: len(other) >= 3, "the other task")
        go_on.set()
        runner.stop()


class TickTests(unittest.TestCase):
    @given(st.integers(0, 10**15), st.integers(1, 10**9), st.text(max_size=9), st.integers(0, 10**9), st.booleans())
    def test_ticks_rise_with_time_and_lie_within_one_spacing_before_now(
        self, moment: int, spacing: int, object_id: str, later: int, spread: bool
    ) -> None:
        one = TickContext(moment, spacing, spread).of(object_id)
        two = TickContext(moment + later, spacing, spread).of(object_id)
        self.assertLessEqual(one, two)
        self.assertTrue(moment - spacing < one <= moment)

    def test_spread_objects_have_phases_and_no_more_of_them_than_sweeps(self) -> None:
        phases = Counter(TickContext(10**9, 10**6, True).of(f"object-{number}") % 10**6 for number in range(4000))
        self.assertEqual(sorted(phases), [10**6 * part // PARTS for part in range(PARTS)])
        self.assertGreater(min(phases.values()), 100)

    @given(st.lists(st.integers(1, 400), max_size=60), st.integers(1, 100), st.booleans(), st.integers(0, 10**6))
    def test_sweeps_that_leave_out_what_was_swept_sweep_each_tick_once(
        self, steps: list[int], spacing: int, spread: bool, moment: int
    ) -> None:
        names = [f"object-{number}" for number in range(9)]
        swept: dict[str, list[int]] = {name: [] for name in names}
        seen: dict[str, set[int]] = {name: set() for name in names}
        since: int | None = None
        for step in (0, *steps):
            moment += step
            ticks = TickContext(moment, spacing, spread)
            for name in names:
                seen[name].add(ticks.of(name))
                if since is None or ticks.of(name) > since:
                    swept[name].append(ticks.of(name))
            since = moment
        self.assertEqual(swept, {name: sorted(of) for name, of in seen.items()})

    def test_backoff_doubles_in_ticks_however_often_they_are_swept_and_is_forgotten_after_a_success(self) -> None:
        for spread in (False, True):
            backoff = Backoff(1.0)
            left_out = []
            moment = 10**9
            for _ in range(3):
                backoff.failed("x", TickContext(moment, 100, spread))
                count = 0
                while "x" not in backoff.due(["x"], TickContext(moment, 100, spread)):
                    moment += 5
                    count += 1
                left_out.append(round(count * 5 / 100))
            # The rest of its own tick, and that many more.
            for found, expected in zip(left_out, (2, 3, 5), strict=True):
                self.assertIn(found, (expected - 1, expected))
            backoff.handled("x")
            self.assertEqual(backoff.due(["x"], TickContext(moment, 100, spread)), ["x"])
