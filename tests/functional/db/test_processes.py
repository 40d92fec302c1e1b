# SPDX-License-Identifier: Apache-2.0
"""Several processes on one SQLite file: nobody fails, nobody starves, the dead and the stopped hold nobody up."""

from __future__ import annotations

import os
import resource
import signal
import threading
import unittest
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from moorage import errors, randomness, threads
from moorage.clock import SystemClock
from moorage.db import Database, sqlite
from moorage.db.queue import WritersQueue
from tests.functional.db.databases import FORK, METADATA, ROWS, DatabaseCase, Watch, add_one, poll, sqlite_url

WRITERS = 8
EACH = 25


def _count(url: str, start: Any, turns: Any) -> None:
    """Count row 1 up; put the count and the ticket of each transaction into ``turns``."""
    database = Database(url, lock_timeout=60)
    # A queue does not see the locks of its own file descriptor.
    queue = WritersQueue(f"{sqlite.file(sa.make_url(url))}.lock", SystemClock(), randomness.generator())

    def work(tx: sa.Connection) -> tuple[int, int]:
        add_one(tx)
        writer = queue.writer()
        assert writer is not None and writer[1] == os.getpid()
        return _value(tx), writer[0]

    start.wait()
    for _ in range(EACH):
        turns.put(database.run(work))


def _value(tx: sa.Connection) -> int:
    return int(tx.execute(sa.select(ROWS.c.v).where(ROWS.c.id == 1)).scalar_one())


def _hold(url: str, inside: Any) -> None:
    """Write for ever."""
    with Database(url).write() as tx:
        add_one(tx)
        inside.set()
        signal.pause()


class WritersTest(DatabaseCase, unittest.TestCase):
    """Competing writers."""

    def test_eight_processes_write_without_an_error_and_in_turn(self) -> None:
        start, turns = FORK.Barrier(WRITERS), FORK.Queue()
        writers = [FORK.Process(target=_count, args=(self.url, start, turns)) for _ in range(WRITERS)]
        for writer in writers:
            writer.start()
        seen = [turns.get(timeout=60) for _ in range(WRITERS * EACH)]
        for writer in writers:
            writer.join(60)
        self.assertEqual([0] * WRITERS, [writer.exitcode for writer in writers])
        self.assertEqual(WRITERS * EACH, self.value())
        turn_of = dict(seen)
        self.assertEqual(list(range(1, WRITERS * EACH + 1)), sorted(turn_of))
        # First come, first served. A ticket that does not move for seconds may be passed by, so a few may be out of order.
        tickets = [turn_of[value] for value in sorted(turn_of)]
        places = {ticket: place for place, ticket in enumerate(sorted(tickets))}
        self.assertLess(max(abs(places[ticket] - place) for place, ticket in enumerate(tickets)), WRITERS)

    def test_a_writer_that_dies_in_its_transaction_leaves_no_trace(self) -> None:
        inside = FORK.Event()
        writer = FORK.Process(target=_hold, args=(self.url, inside))
        writer.start()
        self.assertTrue(inside.wait(60))
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join(60)
        # It would wait in vain, and be refused, if the dead one had left a lock.
        self.database.run(add_one, attempts=1)
        self.assertEqual(1, self.value())

    def test_a_parent_that_dies_in_its_transaction_is_not_kept_alive_by_its_child(self) -> None:
        inside, grandchild = FORK.Event(), FORK.Queue()

        def parent() -> None:
            database = Database(self.url)
            with database.write() as tx:
                add_one(tx)
                pid = os.fork()
                if pid == 0:
                    signal.pause()
                    os._exit(0)
                grandchild.put(pid)
                inside.set()
                signal.pause()

        writer = FORK.Process(target=parent)
        writer.start()
        self.assertTrue(inside.wait(60))
        pid = grandchild.get(timeout=60)
        self.addCleanup(os.kill, pid, signal.SIGKILL)
        os.kill(writer.pid or 0, signal.SIGKILL)
        os.waitpid(writer.pid or 0, 0)  # join would wait for the grandchild too
        self.database.run(add_one, deadline=60)
        self.assertEqual(1, self.value())

    def test_a_writer_that_is_stopped_while_it_waits_is_passed_by(self) -> None:
        start, tickets = FORK.Event(), Path(self.url.removeprefix("sqlite:///") + ".lock")
        waiting = FORK.Process(target=_write_once, args=(self.url, start))
        waiting.start()
        with self.database.write() as tx:
            add_one(tx)
            before = tickets.read_bytes()
            start.set()
            poll(lambda: tickets.read_bytes() != before, "a second ticket")
            os.kill(waiting.pid or 0, signal.SIGSTOP)
        try:
            clock = CountingClock()
            writer = self.another(clock=clock)
            writer.run(add_one)
            once = clock.waits
            # Two seconds, in waits of 20 ms at most; a busy machine makes them longer.
            self.assertGreater(once, 20, "it did not wait for the stopped one")
            for _ in range(20):
                writer.run(add_one)
            self.assertEqual(22, self.value())
            self.assertLess(clock.waits, 2 * once, "it waits for the stopped one each time")
        finally:
            os.kill(waiting.pid or 0, signal.SIGCONT)
        waiting.join(60)
        self.assertEqual((0, 23), (waiting.exitcode, self.value()))

    def test_a_child_forked_while_another_thread_writes_is_told_so(self) -> None:
        inside, release = threading.Event(), threading.Event()

        def hold() -> None:
            with self.database.write() as tx:
                add_one(tx)
                inside.set()
                release.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait(60)
        answer = FORK.Queue()
        child = FORK.Process(target=lambda: answer.put(self._told()))
        child.start()
        told = answer.get(timeout=60)
        release.set()
        thread.join(60)
        child.join(60)
        self.assertIn("forked while a transaction", told)
        self.assertEqual(1, self.value())

    def test_a_write_that_begins_while_another_thread_forks_waits_for_no_connection(self) -> None:
        closing, written = threading.Event(), threading.Event()

        def close(*_: Any) -> None:
            closing.set()
            written.wait(60)

        def fork() -> None:
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)

        database = self.another(pool_timeout=1)
        database.run(add_one)
        # A fork closes the idle connections first; this one takes long.
        sa.event.listen(database._writers.engine, "close", close)
        thread = threading.Thread(target=fork)
        thread.start()
        self.addCleanup(thread.join, 60)
        self.addCleanup(written.set)
        self.assertTrue(closing.wait(60))
        database.run(add_one, attempts=1)
        written.set()
        thread.join(60)
        self.assertEqual(2, self.value())

    def _told(self) -> str:
        try:
            Database(self.url).run(add_one)
        except errors.StoreUnavailable as error:
            return error.message
        return "nothing"

    def test_a_writer_that_hangs_makes_others_give_up_with_a_reason(self) -> None:
        inside = FORK.Event()
        writer = FORK.Process(target=_hold, args=(self.url, inside))
        writer.start()
        self.assertTrue(inside.wait(60))
        try:
            with Watch() as watch, self.assertRaises(errors.StoreBusy):
                self.another(lock_timeout=1).run(add_one, attempts=1)
            self.assertLess(watch.seconds, 60)
        finally:
            writer.kill()
            writer.join(60)


class CountingClock(SystemClock):
    """The machine's clock; says how often a thread waited for an event."""

    waits = 0

    def wait(self, event: threads.Event, seconds: float | None) -> bool:
        self.waits += 1
        return super().wait(event, seconds)


def _write_once(url: str, start: Any) -> None:
    start.wait()
    Database(url, lock_timeout=60).run(add_one)


def _create(url: str, start: Any, number: int) -> None:
    database = Database(url, lock_timeout=60)
    start.wait()
    with database.write() as tx:
        METADATA.create_all(tx)
        tx.execute(sa.insert(ROWS), {"id": number, "name": str(number), "v": 0})
    with database.read() as tx:
        assert _exists(tx, number)


def _exists(tx: sa.Connection, number: int) -> bool:
    return tx.execute(sa.select(sa.func.count()).where(ROWS.c.id == number)).scalar_one() == 1


class FirstStartTest(unittest.TestCase):
    """A file that does not exist yet."""

    def test_several_processes_may_create_the_file_at_once(self) -> None:
        url = sqlite_url(type(self))
        start = FORK.Barrier(6)
        makers = [FORK.Process(target=_create, args=(url, start, number)) for number in range(6)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join(60)
        self.assertEqual([0] * 6, [maker.exitcode for maker in makers])

    def test_a_folder_that_is_missing_is_named(self) -> None:
        database = Database("sqlite:////nonexistent-folder/moorage.sqlite")
        with self.assertRaisesRegex(errors.StoreUnavailable, "/nonexistent-folder"), database.read():
            self.fail("it was opened")
        with self.assertRaisesRegex(errors.StoreUnavailable, "/nonexistent-folder"), database.write():
            self.fail("it was opened")


class FullDiskTest(DatabaseCase, unittest.TestCase):
    """No room for another page."""

    def test_a_full_disk_is_said_and_nothing_of_the_transaction_stays(self) -> None:
        child = FORK.Process(target=self._fill)
        child.start()
        child.join(60)
        self.assertEqual(0, child.exitcode)
        self.database.run(add_one)
        with self.database.read() as tx:
            self.assertEqual(2, tx.execute(sa.select(sa.func.count()).select_from(ROWS)).scalar_one())

    def _fill(self) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self.database.run(add_one)
        size = max(path.stat().st_size for path in Path(self.url.removeprefix("sqlite:///")).parent.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4096, resource.RLIM_INFINITY))
        rows = [{"id": number, "name": f"name {number}", "v": 0} for number in range(10, 20000)]
        try:
            self.database.run(lambda tx: tx.execute(sa.insert(ROWS), rows))
        except errors.StoreUnavailable as error:
            os._exit(0 if "disk" in error.message else 3)
        os._exit(4)
