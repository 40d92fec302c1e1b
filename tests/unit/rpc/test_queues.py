# SPDX-License-Identifier: Apache-2.0
"""The bounded queue behind the transports."""

from __future__ import annotations

import sys
import threading
import unittest
from typing import Any
from unittest import mock

from moorage import threads
from moorage.clock import SystemClock
from moorage.rpc.queues import OfferResult, WorkQueue
from moorage.testing.transport import PATIENCE, eventually


class WorkQueueTests(unittest.TestCase):
    def setUp(self) -> None:
        self.gate = threading.Event()
        self.addCleanup(self.gate.set)
        self.begun: list[Any] = []

    def queue(self, **options: Any) -> WorkQueue[Any]:
        def work(item: Any) -> None:
            self.begun.append(item)
            self.gate.wait(PATIENCE)
            if item == "fail":
                raise ValueError(item)
            if item == "exit":
                sys.exit(5)

        options = {"threads": 1, "limit": 3, "byte_limit": 1000, **options}
        return WorkQueue(work, name="test", clock=SystemClock(), **options)

    def fill(self, queue: WorkQueue[Any], *items: Any, size: int = 1) -> None:
        """One item runs (and waits at the gate), the others wait."""
        self.assertIs(OfferResult.ACCEPTED, queue.offer("running", size))
        eventually(lambda: self.begun, "the first item begins")
        for item in items:
            self.assertIs(OfferResult.ACCEPTED, queue.offer(item, size))

    def test_a_full_queue_refuses(self) -> None:
        queue = self.queue()
        self.fill(queue, 1, 2, 3)
        self.assertIs(OfferResult.FULL, queue.offer(4, 1))
        self.gate.set()
        self.assertEqual((True, []), queue.stop(PATIENCE))
        self.assertEqual(["running", 1, 2, 3], self.begun)

    def test_what_no_thread_can_be_started_for_is_refused_and_does_not_run_later(self) -> None:
        queue = self.queue()
        self.gate.set()
        full = mock.patch.object(threads, "start", side_effect=RuntimeError("can't start new thread"))
        with full, self.assertLogs("moorage.threads", "WARNING"):
            self.assertIs(OfferResult.FULL, queue.offer("refused", 1))
        self.assertEqual(0, queue.waiting)
        self.assertIs(OfferResult.ACCEPTED, queue.offer("later", 1))
        self.assertEqual((True, []), queue.stop(PATIENCE))
        self.assertEqual(["later"], self.begun)

    def test_what_no_second_thread_can_be_started_for_waits_for_the_first(self) -> None:
        queue = self.queue(threads=2)
        self.fill(queue)
        with mock.patch.object(threads, "start", side_effect=RuntimeError("can't start new thread")):
            self.assertIs(OfferResult.ACCEPTED, queue.offer("waits", 1))
        self.gate.set()
        self.assertEqual((True, []), queue.stop(PATIENCE))
        self.assertEqual(["running", "waits"], self.begun)

    def test_bytes_are_bounded_but_one_item_is_always_let_in(self) -> None:
        queue = self.queue()
        self.fill(queue)
        self.assertIs(OfferResult.ACCEPTED, queue.offer("large", 5000))
        self.assertIs(OfferResult.FULL, queue.offer("small", 1))

    def test_the_oldest_are_dropped_counted_and_warned_of(self) -> None:
        queue = self.queue(drop_oldest=True)
        self.fill(queue, 1, 2, 3)
        with self.assertLogs("moorage.rpc.queues", "WARNING") as logs:
            for item in (4, 5, 6, 7, 8):
                self.assertIs(OfferResult.ACCEPTED, queue.offer(item, 1))
        self.assertEqual(5, queue.dropped)
        self.assertEqual(3, len(logs.output), "a warning at 1, 2 and 4 dropped")
        self.gate.set()
        self.assertEqual((True, []), queue.stop(PATIENCE))
        self.assertEqual(["running", 6, 7, 8], self.begun)

    def test_stopping_returns_what_was_not_begun(self) -> None:
        queue = self.queue()
        self.fill(queue, 1, 2)
        self.assertEqual((False, [1, 2]), queue.stop(0.0))
        self.assertIs(OfferResult.STOPPED, queue.offer(3, 1))

    def test_work_that_fails_does_not_end_the_thread(self) -> None:
        self.gate.set()
        queue = self.queue()
        with self.assertLogs("moorage.rpc.queues", "ERROR"):
            queue.offer("fail", 1)
            eventually(lambda: self.begun == ["fail"], "the failure")
            queue.offer("next", 1)
            eventually(lambda: self.begun == ["fail", "next"], "the next item")

    def test_work_that_exits_ends_neither_the_thread_nor_counts_as_running_for_ever(self) -> None:
        self.gate.set()
        queue = self.queue()
        with self.assertLogs("moorage.rpc.queues", "ERROR") as logs:
            queue.offer("exit", 1)
            queue.offer("next", 1)
            eventually(lambda: self.begun == ["exit", "next"], "the next item")
        self.assertIn("SystemExit(5)", logs.output[0])
        self.assertEqual((True, []), queue.stop(PATIENCE))

    def test_no_more_threads_work_than_allowed_and_all_of_them_do(self) -> None:
        queue = self.queue(threads=3, limit=100)
        for item in range(10):
            queue.offer(item, 1)
        eventually(lambda: len(self.begun) == 3, "three at once")
        self.assertEqual(7, queue.waiting)
        self.gate.set()
        self.assertEqual((True, []), queue.stop(PATIENCE))
        self.assertEqual(list(range(10)), sorted(self.begun))

    def test_a_thread_that_offers_works_itself_where_it_may(self) -> None:
        self.gate.set()
        queue = self.queue()
        before = threading.active_count()
        self.assertIs(OfferResult.ACCEPTED, queue.offer("here", 1, here=True))
        self.assertEqual((["here"], before), (self.begun, threading.active_count()))
        self.assertEqual((True, []), queue.stop(PATIENCE))
        self.assertIs(OfferResult.STOPPED, queue.offer("late", 1, here=True))

    def test_threads_that_offer_count_and_leave_what_waits_to_others(self) -> None:
        queue = self.queue(threads=2)
        offering = [threading.Thread(target=queue.offer, args=(each, 1), kwargs={"here": True}) for each in "ab"]
        for each in offering:
            each.start()
        eventually(lambda: len(self.begun) == 2, "both work")
        self.assertIs(OfferResult.ACCEPTED, queue.offer("c", 1, here=True))
        self.assertIs(OfferResult.ACCEPTED, queue.offer("d", 1))
        self.assertEqual((2, ["a", "b"]), (queue.waiting, sorted(self.begun)))
        self.gate.set()
        for each in offering:
            each.join(PATIENCE)
        eventually(lambda: self.begun[2:] == ["c", "d"], "what waited is worked on in order")
        self.assertEqual((True, []), queue.stop(PATIENCE))
