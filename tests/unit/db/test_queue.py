# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is to write. Queues of one process stand for processes: their locks belong to the open file."""

from __future__ import annotations

import functools
import os
import random
import shutil
import tempfile
import threading
import unittest

from hypothesis import given, settings
from hypothesis import strategies as st

from moorage import errors, threads
from moorage.clock import SystemClock
from moorage.db import queue
from moorage.testing.clock import ManualClock
from tests.servers import wait_until


class _Clock(ManualClock):
    """A clock that a wait for an event moves, too."""

    def wait(self, event: threads.Event, seconds: float | None) -> bool:
        """Sleep unless the event is set."""
        if not event.is_set():
            self.sleep(seconds or 0.0)
        return event.is_set()


def _waiting(process: queue.WritersQueue, threads: int) -> bool:
    return len(process._threads._waiting) == threads


class QueueTest(unittest.TestCase):
    """The queue of a file."""

    def setUp(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="moorage-test-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.path = os.path.join(self.folder, "x.lock")

    def _process(self, clock: SystemClock | None = None) -> queue.WritersQueue:
        made = queue.WritersQueue(self.path, clock or SystemClock(), random.Random(1))
        self.addCleanup(made.close)
        return made

    def _tickets(self) -> int:
        with open(self.path, "rb") as file:
            raw = file.read(8)
        return int.from_bytes(raw, "little")

    def _more_than(self, tickets: int) -> bool:
        return self._tickets() > tickets

    def test_turns_are_exclusive_and_in_the_order_of_arrival(self) -> None:
        order: list[int] = []
        inside = 0

        def take(number: int, process: queue.WritersQueue) -> None:
            nonlocal inside
            with process.acquire(60):
                inside += 1
                self.assertEqual(1, inside)
                order.append(number)
                inside -= 1

        threads = []
        with self._process().acquire(60):
            for number in range(12):
                arrived = self._tickets()
                threads.append(threading.Thread(target=take, args=(number, self._process())))
                threads[-1].start()
                wait_until(functools.partial(self._more_than, arrived), "a ticket", 60)
        for thread in threads:
            thread.join(60)
        self.assertEqual(list(range(12)), order)

    def test_threads_of_one_process_take_turns_too(self) -> None:
        process, order, threads = self._process(), [], []

        def take(number: int) -> None:
            with process.acquire(60):
                order.append(number)

        with process.acquire(60):
            for number in range(8):
                threads.append(threading.Thread(target=take, args=(number,)))
                threads[-1].start()
                wait_until(functools.partial(_waiting, process, number + 1), "a waiting thread", 60)
        for thread in threads:
            thread.join(60)
        self.assertEqual(list(range(8)), order)

    def test_a_free_queue_is_entered_without_waiting(self) -> None:
        clock = _Clock(shortest=0.001)
        process = self._process(clock)
        for _ in range(5):
            with process.acquire(1):
                pass
        self.assertEqual([], clock.slept)

    def test_it_knows_the_process_that_writes_now(self) -> None:
        process, other = self._process(), self._process()
        self.assertIsNone(other.writer())
        with process.acquire(60) as ticket:
            self.assertIsNone(other.writer(), "SQLite has not begun its transaction")
            assert ticket is not None
            process.record_writer(ticket)
            self.assertEqual((ticket, os.getpid()), other.writer())
        self.assertIsNone(other.writer())

    def test_the_dead_hold_nobody_up(self) -> None:
        dead, clock = self._process(), _Clock(shortest=0.001)
        dead.acquire(1).__enter__()
        dead.close()  # what the kernel does when a process ends
        with self._process(clock).acquire(1):
            self.assertEqual([], clock.slept)

    def test_waiting_ends_with_an_error_that_names_the_file(self) -> None:
        clock = _Clock(shortest=0.001)
        with self._process().acquire(1), self.assertRaisesRegex(errors.StoreBusy, "x.lock for 1 seconds"):
            self._process(clock).acquire(1).__enter__()
        self.assertLess(clock.now, 1.2)
        with self._process(clock).acquire(1):
            pass

    def test_the_end_of_a_turn_wakes_the_next_writer(self) -> None:
        class Patient(SystemClock):
            """Looks by itself after a minute only."""

            def wait(self, event: threads.Event, seconds: float | None) -> bool:
                waits.set()
                return event.wait(60)

        waits, entered = threading.Event(), threading.Event()

        def take(process: queue.WritersQueue) -> None:
            with process.acquire(600):
                entered.set()

        for _ in range(20):
            waits.clear()
            entered.clear()
            thread = threading.Thread(target=take, args=(self._process(Patient()),))
            with self._process().acquire(1):
                thread.start()
                self.assertTrue(waits.wait(60))
            self.assertTrue(entered.wait(30), "the bell did not ring")
            thread.join(60)

    def test_a_bell_that_is_gone_holds_nobody_up(self) -> None:
        clock = _Clock(shortest=0.001)
        first, second = self._process(), self._process(clock)
        second._hang_up(1)
        assert second._bell is not None
        second._bell.close()
        second._bell = None
        with first.acquire(1):
            pass
        with second.acquire(1), self.assertRaises(errors.StoreBusy):
            first.acquire(0.05).__enter__()
        with first.acquire(1):
            pass

    def test_without_bells_the_queue_is_looked_at_more_often(self) -> None:
        """As in another network namespace, where no name of a bell is known."""
        process, other = self._process(), self._process()
        before = process._pause
        self.addCleanup(setattr, queue._Bell, "ring", queue._Bell.ring)

        def unknown(bell: object, name: bytes) -> None:
            raise ConnectionRefusedError

        queue._Bell.ring = unknown  # type: ignore[method-assign,assignment]
        for _ in range(8):
            turn = other.acquire(1)
            turn.__enter__()
            thread = threading.Thread(target=self._take, args=(process,))
            thread.start()
            wait_until(functools.partial(self._more_than, self._tickets() - 1), "a ticket", 60)
            wait_until(lambda: process._bell is not None, "a bell", 60)
            turn.__exit__(None, None, None)
            thread.join(60)
        self.assertLess(process._pause, before)

    def _take(self, process: queue.WritersQueue) -> None:
        with process.acquire(60):
            pass

    def test_a_ticket_that_does_not_move_is_passed_by_once_and_for_all(self) -> None:
        clock = _Clock(shortest=0.001)
        process = self._process(clock)
        with self._process().acquire(1):
            with process.acquire(60):
                first = clock.now
            for _ in range(10):
                with process.acquire(60):
                    pass
        self.assertGreaterEqual(first, queue.PATIENCE)
        self.assertEqual(first, clock.now)

    def test_the_block_that_raises_gives_its_turn_back(self) -> None:
        process = self._process()
        with self.assertRaises(ZeroDivisionError), process.acquire(1):
            raise ZeroDivisionError
        with self._process(_Clock(shortest=0.001)).acquire(1):
            pass

    def test_a_counter_that_was_lost_gives_no_ticket_twice(self) -> None:
        clock = _Clock(shortest=0.001)
        with self._process().acquire(1):
            os.truncate(self.path, 0)
            late = self._process(clock)
            with self.assertRaises(errors.StoreBusy):
                late.acquire(1).__enter__()

    def test_a_folder_without_access_is_explained(self) -> None:
        missing = queue.WritersQueue("/nonexistent-folder/x.lock", SystemClock(), random.Random(1))
        with self.assertRaisesRegex(errors.StoreUnavailable, "/nonexistent-folder/x.lock.*folder exists"):
            missing.acquire(1).__enter__()

    def test_without_the_kernels_locks_threads_still_take_turns(self) -> None:
        before, queue._SETLK = queue._SETLK, None
        self.addCleanup(setattr, queue, "_SETLK", before)
        process = self._process()
        with process.acquire(1), self.assertRaises(errors.StoreBusy):
            process.acquire(0.01).__enter__()
        self.assertFalse(os.path.exists(self.path))

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(0, 2), max_size=20))
    def test_any_order_of_arriving_and_leaving_keeps_one_inside(self, arrivals: list[int]) -> None:
        """One thread of control: whoever asks while another is inside must be refused, whoever asks a free queue enters."""
        processes = [queue.WritersQueue(self.path, _Clock(shortest=0.001), random.Random(1)) for _ in range(3)]
        inside: tuple[int, object] | None = None
        for number in arrivals:
            turn = processes[number].acquire(0.1)
            if inside is None:
                turn.__enter__()
                inside = (number, turn)
            elif inside[0] == number:
                inside[1].__exit__(None, None, None)  # type: ignore[attr-defined]
                inside = None
            else:
                with self.assertRaises(errors.StoreBusy):
                    turn.__enter__()
        if inside is not None:
            inside[1].__exit__(None, None, None)  # type: ignore[attr-defined]
        for process in processes:
            process.close()
