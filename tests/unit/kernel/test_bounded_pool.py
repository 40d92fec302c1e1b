# SPDX-License-Identifier: Apache-2.0
"""Calls that may hang: the pool goes on without them, and the number of threads stays bounded."""

from __future__ import annotations

import functools
import gc
import threading
import time
import unittest
import weakref
from unittest import mock

from typing_extensions import override

from moorage import errors, threads
from moorage.bounded_pool import BoundedPool, Overdue
from moorage.clock import SystemClock
from moorage.plugin_isolation import PluginExit
from moorage.testing.coordination import wait_for


class _Jumping(SystemClock):
    """Each look is a minute after the one before."""

    def __init__(self) -> None:
        self._minutes = 0

    @override
    def monotonic(self) -> float:
        self._minutes += 1
        return 60.0 * self._minutes


class CallTests(unittest.TestCase):
    def pool(self, size: int = 1, spare: int = 0) -> BoundedPool:
        made = BoundedPool("t", SystemClock(), size, spare=spare)
        self.addCleanup(made.close)
        return made

    def gate(self) -> threading.Event:
        made = threading.Event()
        self.addCleanup(made.set)
        return made

    def test_returns_what_the_work_returns(self) -> None:
        self.assertEqual(self.pool().call(lambda: 7, 60), 7)
        self.assertEqual(self.pool().call(lambda: 7, None), 7)

    def test_what_a_call_refers_to_is_freed_when_it_has_ended(self) -> None:
        class Owner:
            call: object = None

        collects = gc.isenabled()
        gc.disable()
        try:
            owner, begin = Owner(), self.gate()
            found = weakref.ref(owner)
            owner.call = self.pool(1).start(functools.partial(lambda of, event: event.wait(60), owner, begin))
            del owner
            self.assertIsNotNone(found())
            begin.set()
            wait_for(lambda: found() is None, "the owner is freed without a collection of garbage")
        finally:
            if collects:
                gc.enable()

    def test_raises_what_the_work_raises_and_makes_the_next_call(self) -> None:
        pool = self.pool()

        def broken() -> None:
            raise LookupError("no")

        with self.assertRaises(LookupError):
            pool.call(broken, 60)
        self.assertEqual(pool.call(lambda: 7, 60), 7)

    def test_a_call_for_which_no_thread_can_be_started_is_refused_and_not_made_later(self) -> None:
        pool, calls = self.pool(2), mock.Mock()
        with mock.patch.object(threads, "start", side_effect=RuntimeError("can't start new thread")):
            for refused in (lambda: pool.start(calls), lambda: pool.call(calls, 60)):
                with self.assertRaisesRegex(errors.Unavailable, "No thread can be started for t now"):
                    refused()
            self.assertEqual(pool.for_each([1, 2], calls), [1, 2])
        self.assertEqual(pool.call(lambda: 7, 60), 7)
        self.assertEqual(pool.for_each([1, 2], lambda item: None), [])
        calls.assert_not_called()

    def test_a_call_for_which_no_second_thread_can_be_started_waits_for_the_first(self) -> None:
        pool, gate = self.pool(2), self.gate()
        first = pool.start(lambda: gate.wait(60))
        wait_for(lambda: first.thread != 0, "the first call begins")
        with mock.patch.object(threads, "start", side_effect=RuntimeError("can't start new thread")):
            ended = threads.event()
            second = pool.start(lambda: None, ended)
        gate.set()
        self.assertTrue(ended.wait(60))
        self.assertEqual(first.thread, second.thread)

    def test_a_thread_whose_call_another_one_took_waits_for_the_next(self) -> None:
        pool = self.pool(2)
        begun = mock.Mock(wraps=threads.start)
        with mock.patch.object(threads, "start", begun):
            for _ in range(300):
                # A thread that has just ended the first call may take the second one, for which the other one was woken.
                events = [threads.event(), threads.event()]
                for each in events:
                    pool.start(lambda: None, each)
                for each in events:
                    self.assertTrue(each.wait(60))
        self.assertLessEqual(begun.call_count, 2)

    def test_an_exit_becomes_an_error(self) -> None:
        def leave() -> None:
            raise SystemExit(3)

        with self.assertRaises(PluginExit):
            self.pool().call(leave, 60)

    def test_the_wait_for_a_thread_is_part_of_the_limit(self) -> None:
        pool, go_on, done = self.pool(), self.gate(), []
        with self.assertRaises(Overdue) as hung:
            pool.call(lambda: go_on.wait(60), 0.1)
        self.assertTrue(hung.exception.begun)
        self.assertTrue(pool.stuck)
        began = time.monotonic()
        with self.assertRaises(Overdue) as refused:
            pool.call(lambda: done.append(1), 0.1)
        self.assertLess(time.monotonic() - began, 30)
        self.assertFalse(refused.exception.begun)
        go_on.set()
        wait_for(lambda: not pool.stuck, "the call to return")
        self.assertEqual(pool.call(lambda: 7, 60), 7)
        # The refused call was withdrawn: nothing waited for it.
        self.assertEqual(done, [])

    def test_a_clock_that_jumps_does_not_end_a_call_that_was_seen_once(self) -> None:
        go_on = self.gate()
        pool = BoundedPool("t", _Jumping(), 1)
        self.addCleanup(pool.close)
        looks: list[int] = []

        def work() -> int:
            go_on.wait(60)
            return 7

        def progress(thread: int) -> tuple[str, float]:
            looks.append(thread)
            if len(looks) == 5:
                go_on.set()
            return "step", 0.0

        self.assertEqual(pool.call(work, 0.5, progress), 7)

    def test_a_step_is_timed_by_itself(self) -> None:
        pool, steps = self.pool(), iter(range(1000))

        def work() -> int:
            time.sleep(0.5)
            return 7

        # A new step at each look: none of them is old.
        self.assertEqual(pool.call(work, 0.1, lambda thread: (next(steps), time.monotonic())), 7)

    def test_a_call_is_made_when_a_thread_that_is_too_many_was_woken_for_it(self) -> None:
        pool, both = self.pool(2), threading.Barrier(2)
        callers = [threading.Thread(target=pool.call, args=(both.wait, 60)) for _ in range(2)]
        for each in callers:
            each.start()
        for each in callers:
            each.join(60)
        wait_for(lambda: pool._idle == 2, "both threads wait")
        pool.size = 1
        with mock.patch("moorage.bounded_pool._IDLE", 3600.0):
            self.assertEqual(pool.call(lambda: 7, 9), 7)

    def test_calls_beyond_the_size_wait_for_their_turn(self) -> None:
        pool, most, running, lock = self.pool(3), 0, 0, threading.Lock()
        three = threading.Barrier(3, timeout=60)

        def work() -> None:
            nonlocal most, running
            with lock:
                running += 1
                most = max(most, running)
            three.wait()
            with lock:
                running -= 1

        callers = [threading.Thread(target=pool.call, args=(work, 60)) for _ in range(21)]
        for each in callers:
            each.start()
        for each in callers:
            each.join(60)
        self.assertEqual(most, 3)

    def test_what_is_started_before_the_end_is_done(self) -> None:
        pool, go_on, done = self.pool(), self.gate(), threading.Event()
        with self.assertRaises(Overdue):
            pool.call(lambda: go_on.wait(60), 0.05)
        pool.start(done.set)
        pool.close()
        self.assertFalse(done.is_set())
        go_on.set()
        self.assertTrue(done.wait(60))
        with self.assertRaises(RuntimeError):
            pool.start(done.set)


class EachTests(unittest.TestCase):
    def test_each_is_done_once_by_no_more_than_its_size(self) -> None:
        lock, running, most, done = threading.Lock(), 0, 0, []

        def work(item: int) -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            with lock:
                running -= 1
                done.append(item)

        pool = BoundedPool("t", SystemClock(), 3)
        for _ in range(3):
            self.assertEqual(pool.for_each(range(100), work, 60), [])
        self.assertEqual(sorted(done), sorted(list(range(100)) * 3))
        self.assertLessEqual(most, 3)

    def test_with_too_many_that_hang_nothing_more_is_begun(self) -> None:
        go_on = threading.Event()
        self.addCleanup(go_on.set)
        late: list[int] = []
        pool = BoundedPool("t", SystemClock(), 8, spare=16)

        def hang(item: int) -> None:
            go_on.wait(60)

        self.assertFalse(pool.stuck)
        self.assertEqual(pool.for_each(range(100), hang, 0.05, late.append), list(range(24, 100)))
        self.assertEqual(sorted(late), list(range(24)))
        self.assertTrue(pool.stuck)
        self.assertEqual(pool.for_each(range(5), hang, 0.05, late.append), list(range(5)))
        self.assertEqual(len(late), 24)
        go_on.set()
        wait_for(lambda: not pool.stuck, "the threads to end")
        self.assertEqual(pool.for_each([], hang), [])

    def test_calls_that_hang_from_earlier_leave_the_rest_of_the_threads_and_no_item_waits_for_ever(self) -> None:
        go_on = threading.Event()
        self.addCleanup(go_on.set)
        pool = BoundedPool("t", SystemClock(), 4)
        self.assertEqual(pool.for_each(range(2), lambda item: go_on.wait(60), 0.05), [])
        self.assertEqual(pool.room, 2)
        self.assertEqual(pool.for_each(range(9), lambda item: go_on.wait(60), 0.05), list(range(2, 9)))
        self.assertTrue(pool.stuck)

    def test_what_the_work_raises_is_logged_and_stops_nothing(self) -> None:
        done: list[int] = []

        def work(item: int) -> None:
            if item == 1:
                raise LookupError("no")
            done.append(item)

        with self.assertLogs("moorage.bounded_pool") as logs:
            self.assertEqual(BoundedPool("t", SystemClock(), 2).for_each(range(3), work, 60), [])
        self.assertEqual(sorted(done), [0, 2])
        self.assertEqual(len(logs.records), 1)
