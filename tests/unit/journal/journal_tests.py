# SPDX-License-Identifier: Apache-2.0
"""What the journal promises, on any database; a mix-in for the tests of each."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import unittest
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import sqlalchemy as sa
from typing_extensions import override

from moorage import context, errors, threads
from moorage.clock import SystemClock
from moorage.db import Database, JournalEvent, RecordedEvent, events, record
from moorage.db.prepared import PreparedConnection
from moorage.db.schema import core_metadata, exact, new_metadata
from moorage.db.tables import event_sequence
from moorage.db.tables import events as event_table
from moorage.journal import reader as reading
from moorage.journal.purge import purge
from moorage.journal.reader import EventFilter, JournalReader
from moorage.journal.sequencer import Sequencer
from moorage.journal.tail import Tail
from moorage.testing.database import empty_tables
from tests.plans import plan_of
from tests.servers import wait_until

METADATA = new_metadata()
#: Subjects with a version.
things = sa.Table(
    "journal_things",
    METADATA,
    sa.Column("name", exact(20), primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
)
_RAISE = (
    sa.update(things)
    .where(things.c.name == sa.bindparam("of_name"), things.c.version == sa.bindparam("seen"))
    .values(version=things.c.version + 1)
)
ALL = EventFilter()
#: Events for watchers.
WRITTEN = 5
NAMES = ("one", "two", "three", "four")


def change(tx: sa.Connection, name: str) -> int:
    """Raise the version of a thing and record that; returns the new version, 0 when another writer was quicker."""
    seen = tx.execute(sa.select(things.c.version).where(things.c.name == name)).scalar_one()
    if tx.execute(_RAISE, {"of_name": name, "seen": seen}).rowcount != 1:
        return 0
    record(tx, JournalEvent("thing.change", f"thing/{name}", seen + 1, {"version": seen + 1}))
    return int(seen) + 1


def everything(database: Database, page: int = 7) -> list[RecordedEvent]:
    """All numbered events, read page by page."""
    reader, found, cursor = JournalReader(database), [], 0  # type: JournalReader, list[RecordedEvent], int
    while True:
        read = reader.page(cursor, ALL, page)
        found += read.events
        if not read.events:
            return found
        cursor = read.cursor


def everything_left(database: Database) -> list[RecordedEvent]:
    """What a purge has left."""
    return list(JournalReader(database).page(None, ALL, 10_000).events)


def write_many(database: Database, chance: random.Random, lock: threading.Lock, written: dict[str, int]) -> None:
    """Change things at random, and roll some changes back; ``written`` gets the last version of each thing."""

    def work(tx: sa.Connection) -> tuple[str, int]:
        name = chance.choice(NAMES)
        version = change(tx, name)
        if version and chance.random() < 0.3:
            raise ZeroDivisionError
        return name, version

    for _ in range(40):
        with contextlib.suppress(ZeroDivisionError):
            name, version = database.run(work)
            with lock:
                written[name] = max(written[name], version)


def number_until(database: Database, done: threading.Event) -> int:
    """Number events without a lease, in small parts."""
    sequencer, found = Sequencer(database, lease_seconds=0, batch=5), 0
    while not done.is_set():
        found += sequencer.number()
    return found


class PausedClock(SystemClock):
    """A wait for an event lasts until the test ends it."""

    def __init__(self) -> None:
        self.waits, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    @override
    def wait(self, event: threads.Event, seconds: float | None) -> bool:
        self.waits.release()
        self.go_on.acquire(timeout=60)
        return event.is_set()


def purge_until(database: Database, done: threading.Event) -> int:
    """Purge in small pieces whatever its age, as several services at once may."""
    found = 0
    while not done.is_set():
        found += purge(database, 0, batch=3)
    return found


def read_purged_until(database: Database, done: threading.Event) -> tuple[list[int], int]:
    """Read pages from what is left of a journal that is being purged; the numbers, and how many events were gone in all."""
    reader, cursor, found, gone = JournalReader(database), 0, [], 0  # type: JournalReader, int, list[int], int
    while not (done.is_set() and cursor == reader.last()):
        try:
            page = reader.page(cursor, ALL, 11)
        except errors.Gone as error:
            oldest = int(error.details["oldest"])
            gone += oldest - 1 - cursor
            cursor = oldest - 1
            continue
        found += [each.number for each in page.events]
        cursor = page.cursor
    return found, gone


def read_until(database: Database, done: threading.Event) -> list[int]:
    """Read pages from the beginning on; the numbers."""
    reader, cursor, found = JournalReader(database), 0, []  # type: JournalReader, int, list[int]
    while not (done.is_set() and cursor == reader.last()):
        page = reader.page(cursor, ALL, 11)
        found += [each.number for each in page.events]
        cursor = page.cursor
    return found


class JournalCase(unittest.TestCase):
    """Subclasses give ``url``."""

    url: str
    #: The nodes of the database.
    urls: Sequence[str] = ()

    def setUp(self) -> None:
        super().setUp()
        self.urls = (self.url,)
        self.database = self.another("scheduler:s1")
        with self.database.write() as tx:
            empty_tables(tx, core_metadata, METADATA)
            tx.execute(sa.insert(things), [{"name": name, "version": 0} for name in NAMES])

    def another(self, service: str = "test", node: int = 0) -> Database:
        """One more client of the database, at one of its nodes."""
        url = self.urls[node % len(self.urls)]
        # Many threads write few rows: at several nodes most commits lose their race.
        database = Database(url, lock_timeout=5, service=service, attempts=500)
        self.addCleanup(database.close)
        return database

    def change(self, name: str = "one") -> int:
        return self.database.run(lambda tx: change(tx, name))

    def assert_ordered(self, found: Sequence[RecordedEvent], written: dict[str, int]) -> None:
        """The numbers have no gap, and each thing has each of its versions once and in order."""
        self.assertEqual(list(range(1, len(found) + 1)), [each.number for each in found])
        versions: dict[str, list[int]] = defaultdict(list)
        for each in found:
            versions[each.subject.removeprefix("thing/")].append(each.version)
        self.assertEqual({name: list(range(1, last + 1)) for name, last in written.items() if last}, dict(versions))


class JournalTests(JournalCase):
    def test_an_event_exists_exactly_if_its_change_does(self) -> None:
        self.change()
        with self.assertRaises(ZeroDivisionError), self.database.write() as tx:
            change(tx, "one")
            raise ZeroDivisionError
        with self.database.write() as tx:
            change(tx, "two")
            point = tx.begin_nested()
            change(tx, "three")
            point.rollback()
            with tx.begin_nested():
                change(tx, "four")
        self.assertEqual(3, Sequencer(self.database).number())
        self.assertEqual(["thing/one", "thing/two", "thing/four"], [each.subject for each in everything(self.database)])

    def test_savepoints_of_later_transactions_undo_what_follows_them_only(self) -> None:
        # A connection may serve many transactions, and SQLAlchemy goes on counting its savepoints.
        for name in NAMES[:3]:
            with self.database.write() as tx:
                change(tx, name)
                point = tx.begin_nested()
                change(tx, NAMES[3])
                point.rollback()
        Sequencer(self.database).number()
        self.assertEqual([f"thing/{name}" for name in NAMES[:3]], [each.subject for each in everything(self.database)])

    def test_nothing_is_recorded_in_a_transaction_that_only_reads(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "Database.write"), self.database.read() as tx:
            record(tx, JournalEvent("thing.change", "thing/one", 1))

    def test_all_events_of_a_transaction_are_one_statement(self) -> None:
        sent: list[str] = []

        def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
            if "INTO events" in statement:
                sent.append(statement)

        sa.event.listen(sa.Engine, "before_cursor_execute", note)
        self.addCleanup(sa.event.remove, sa.Engine, "before_cursor_execute", note)
        with self.database.write() as tx:
            for name in NAMES:
                change(tx, name)
            self.assertEqual([], sent)
        self.assertEqual(1, len(sent))

    def test_an_event_names_the_request_and_the_service(self) -> None:
        # The first context of a thread becomes the thread's own.
        context.anonymous().update_store()
        asker = context.RequestContext(user_id="alice", project_id="p", overwrite=False)
        asker.request_id, asker.global_request_id = "req-1", "req-2"
        with context.acting_for(asker):
            self.change()
        self.change()
        Sequencer(self.database).number()
        found = [
            (each.actor, each.request_id, each.global_request_id, each.service) for each in everything(self.database)
        ]
        self.assertEqual([("alice", "req-1", "req-2", "scheduler:s1"), ("", "", "", "scheduler:s1")], found)

    def test_a_cursor_outside_of_the_journal_is_gone(self) -> None:
        reader = JournalReader(self.database)
        self.assertEqual((), tuple(reader.page(None, ALL, 10).events))
        for _ in range(3):
            self.change()
        Sequencer(self.database).number()
        with self.database.write() as tx:
            tx.execute(sa.update(event_sequence).values(purged=2))
        self.assertEqual([3], [each.number for each in reader.page(None, ALL, 10).events])
        self.assertEqual([3], [each.number for each in reader.page(2, ALL, 10).events])
        for cursor, reason in ((1, "Older events were purged"), (4, "never had a newer one")):
            for read in (lambda of: reader.page(of, ALL, 10), reader.check):
                with self.assertRaisesRegex(errors.Gone, reason) as raised:
                    read(cursor)
                self.assertEqual({"oldest": 3, "newest": 3}, raised.exception.details)
        reader.check(2)

    def test_an_event_is_shown_with_what_was_before_it(self) -> None:
        """Of the event before it of the same subject, though that is on no page; work on the subject does not count."""

        def write(kind: str, subject: str = "thing/one", **state: Any) -> None:
            self.database.run(lambda tx: record(tx, JournalEvent(kind, subject, 1, state)))

        write("thing.create", status="new", host="", port=1)
        write("thing.create", "thing/two", status="new")
        write("operation.end", operation="build")
        write("thing.change", status="active", host="h1", port=1, detail="up")
        write("cleanup.done", operation="move")
        write("thing.set", disabled=True)
        write("thing.delete", status="gone")
        write("thing.create", status="new")
        Sequencer(self.database).number()
        reader = JournalReader(self.database)
        expected = {
            4: {"status": "new", "host": ""},
            6: {},
            7: {"disabled": True},
        }
        self.assertEqual(expected, reader.before(reader.page(None, ALL, 10).events))
        last = reader.page(3, EventFilter(subject="thing/one", kind="thing.change"), 10)
        self.assertEqual({4: expected[4]}, reader.before(last.events))
        self.assertEqual({}, reader.before(reader.page(None, EventFilter(kind="operation.end"), 10).events))
        self.assertEqual({}, reader.before(()))

    def test_a_filter_moves_the_cursor_past_what_it_leaves_out(self) -> None:
        for name in ("one", "two", "one", "two", "two"):
            self.change(name)
        Sequencer(self.database).number()
        page = JournalReader(self.database).page(None, EventFilter(subject="thing/one"), 2)
        self.assertEqual(([1, 3], 3), ([each.number for each in page.events], page.cursor))
        page = JournalReader(self.database).page(3, EventFilter(subject="thing/one", kind="thing.change"), 2)
        self.assertEqual(([], 5), (list(page.events), page.cursor))

    def test_a_page_of_each_filter_is_read_by_an_index(self) -> None:
        """As each database says it: of 20,000 events it reads those that a filter asks for, and not the table."""
        values = {
            "kind": "k",
            "subject": "s",
            "project_id": "p",
            "actor": "a",
            "request_id": "r",
            "global_request_id": "g",
        }
        rows = [
            {name: f"{value}{number % 1000}" for name, value in values.items()}
            | {"number": number, "version": 1, "at": number, "service": "test", "state": {}}
            for number in range(1, 20_001)
        ]
        with self.database.write() as tx:
            tx.execute(sa.insert(event_table), rows)
        if self.database.dialect != "sqlite":
            analyze = "ANALYZE TABLE events" if self.database.dialect == "mysql" else "ANALYZE events"
            with self.database.write() as tx:
                tx.exec_driver_sql(analyze).close()
        chosen: dict[tuple[str, ...], str] = {(name,): f"ix_events_{name}" for name in values}
        chosen |= {("project_id", name): f"ix_events_{name}" for name in ("subject", "request_id", "global_request_id")}
        for names, index in chosen.items():
            given = {f"of_{name}": f"{values[name]}7" for name in names} | {"after": 5000, "page": 100, "since": None}
            self.assertIn(index, self.plan(reading.page_statement(names, False), given), names)

    def plan(self, statement: sa.Select[Any], given: dict[str, Any]) -> str:
        """What the database says of how it reads a page."""
        with self.database.read() as tx:
            return plan_of(tx, statement, given)

    def test_writers_and_sequencers_in_a_race_make_one_order(self) -> None:
        """Four writers roll some changes back, two sequencers without a lease, three readers that page all the time."""
        written: dict[str, int] = dict.fromkeys(NAMES, 0)
        lock, done = threading.Lock(), threading.Event()
        databases = [self.another(node=node) for node in range(3)]

        with ThreadPoolExecutor(9) as pool:
            writers = [
                pool.submit(write_many, databases[seed % 3], random.Random(seed), lock, written) for seed in range(4)
            ]
            sequencers = [pool.submit(number_until, self.another(node=node), done) for node in range(2)]
            readers = [pool.submit(read_until, database, done) for database in databases]
            try:
                for each in writers:
                    each.result()
            finally:
                done.set()
            numbered = sum(each.result() for each in sequencers)
            seen = [each.result() for each in readers]
        numbered += Sequencer(self.another(), lease_seconds=0).number()
        found = everything(self.database)
        self.assert_ordered(found, written)
        self.assertEqual(numbered, len(found))
        for numbers in seen:
            self.assertEqual(list(range(1, len(numbers) + 1)), numbers)

    def test_a_purge_in_a_race_with_readers_hides_no_event_from_them(self) -> None:
        """What a reader does not get, a refused cursor has told it of: numbers read and numbers gone are all there were."""
        written: dict[str, int] = dict.fromkeys(NAMES, 0)
        lock, done, numbered = threading.Lock(), threading.Event(), threading.Event()
        with ThreadPoolExecutor(8) as pool:
            writers = [pool.submit(write_many, self.another(), random.Random(seed), lock, written) for seed in range(2)]
            sequencer = pool.submit(number_until, self.another(), numbered)
            purges = [pool.submit(purge_until, self.another(), done) for _ in range(2)]
            readers = [pool.submit(read_purged_until, self.another(), done) for _ in range(3)]
            try:
                for each in writers:
                    each.result()
            finally:
                numbered.set()
                sequencer.result()
                Sequencer(self.another(), lease_seconds=0).number()
                done.set()
            purged = sum(each.result() for each in purges)
            seen = [each.result() for each in readers]
        last = JournalReader(self.database).last()
        self.assertEqual(last, purged + len(everything_left(self.database)))
        for numbers, gone in seen:
            self.assertEqual(sorted(set(numbers)), numbers)
            self.assertEqual(last, len(numbers) + gone)

    def test_a_reader_for_waiting_requests_that_stood_still_hides_nothing(self) -> None:
        """Events that were purged before it could read them are gone for those who wait, and not silently left out."""
        clock = PausedClock()
        tail = Tail(self.another(), clock)
        self.addCleanup(tail.stop)
        self.addCleanup(clock.go_on.release, 1000)
        sequencer = Sequencer(self.database, lease_seconds=0)
        self.change()
        sequencer.number()

        def wait() -> Sequence[RecordedEvent] | None:
            # It may be woken without an event.
            while (found := tail.after(1, 60)) is not None and not found:
                pass
            return found

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait)
            self.assertTrue(clock.waits.acquire(timeout=60))
            for _ in range(3):
                self.change()
            sequencer.number()
            # SQLite's clock has a grain of a millisecond.
            time.sleep(0.002)
            self.assertEqual(3, purge(self.database, 0, batch=3))
            clock.go_on.release(1000)
            self.assertIsNone(waiting.result(), "what is gone is asked of the database, which says so")
        self.assertEqual([4], [each.number for each in tail.after(3, 60) or ()])

    def test_a_paused_sequencer_numbers_nothing_after_another_one(self) -> None:
        """The first sequencer has read what to number, and sleeps until the second one has numbered it."""
        slow = Sequencer(self.another(), lease_seconds=0)
        for _ in range(3):
            self.change()
        token = slow._hold(None)
        assert token is not None
        quick = Sequencer(self.another(), lease_seconds=0)
        wait_until(lambda: quick.number() == 3, "the second sequencer")
        self.change("two")
        self.assertEqual(0, slow._database.run(lambda tx: slow._number(tx, token, 1000)))
        self.assertEqual([1, 2, 3], [each.number for each in everything(self.database)])
        wait_until(lambda: slow.number() == 1, "the first sequencer after its pause")
        self.assert_ordered(everything(self.database), {"one": 3, "two": 1})

    def test_a_sequencer_that_is_behind_numbers_more_in_each_transaction(self) -> None:
        """Otherwise readers fall behind writers that record more between two turns than one transaction numbers."""
        sequencer, sizes = Sequencer(self.database, lease_seconds=0, batch=2), []
        number_once = sequencer._number_once

        def note(token: int, most: int) -> int:
            sizes.append(number_once(token, most))
            return sizes[-1]

        for _ in range(100):
            self.change()
        with mock.patch.object(sequencer, "_number_once", note):
            self.assertEqual(100, sequencer.number())
            self.change()
            self.assertEqual(1, sequencer.number())
        self.assertEqual([2, 4, 8, 16, 32, 32, 6, 1], sizes, "at most 16 batches")
        self.assertEqual([*range(1, 102)], [each.number for each in everything(self.database)])
        self.assert_ordered(everything(self.database), {"one": 101})

    def test_a_sequencer_leaves_the_work_to_the_one_that_holds_the_lease(self) -> None:
        first, second = Sequencer(self.database, lease_seconds=600), Sequencer(self.another(), lease_seconds=600)
        self.change()
        self.assertEqual(1, first.number())
        self.change()
        self.assertEqual(0, second.number())
        self.assertEqual(1, first.number())

    def test_a_hundred_watchers_cost_one_reader(self) -> None:
        senders: list[str] = []

        def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
            if "FROM events" in statement and "IS NULL" not in statement:
                senders.append(threading.current_thread().name)

        self.change()
        Sequencer(self.database).number()
        tail = Tail(self.another(), SystemClock(), poll=0.05)
        self.assertEqual((), tail.after(1, 0.2))

        def watch(_: int) -> list[int]:
            cursor, found = 1, []  # type: int, list[int]
            while len(found) < WRITTEN:
                some = tail.after(cursor, 5)
                assert some is not None
                found += [each.number for each in some]
                cursor = found[-1] if found else cursor
            return found

        sa.event.listen(sa.Engine, "before_cursor_execute", note)
        self.addCleanup(sa.event.remove, sa.Engine, "before_cursor_execute", note)
        with ThreadPoolExecutor(100) as pool:
            watching = [pool.submit(watch, number) for number in range(100)]
            for _ in range(WRITTEN):
                self.change()
                wait_until(Sequencer(self.database, lease_seconds=0).number, "a number")
            for each in watching:
                self.assertEqual([2, 3, 4, 5, 6], each.result())
        self.assertEqual({"journal-tail"}, set(senders))
        self.assertIsNone(tail.after(0, 5), "what is older is not in memory")


class HeldTransactionTests(JournalCase):
    """Not on SQLite, where one transaction writes at a time."""

    def test_an_event_that_commits_late_is_never_skipped(self) -> None:
        """A transaction inserts its event first and commits last; readers and the sequencer do not wait for it."""
        reader, sequencer = JournalReader(self.database), Sequencer(self.another())
        self.change("two")
        self.assertEqual(1, sequencer.number())
        with self.another().write() as tx:
            change(tx, "one")
            assert isinstance(tx, PreparedConnection)
            events.flush(tx, "late")
            for _ in range(3):
                self.change("two")
                self.assertEqual(1, sequencer.number())
            page = reader.page(None, ALL, 10)
            self.assertEqual(["thing/two"] * 4, [each.subject for each in page.events])
        self.assertEqual(1, sequencer.number())
        self.assertEqual(["thing/one"], [each.subject for each in reader.page(page.cursor, ALL, 10).events])
        self.assert_ordered(everything(self.database), {"one": 1, "two": 4})

    def test_a_sequencer_that_sleeps_inside_of_its_transaction_loses(self) -> None:
        slow, quick = Sequencer(self.another(), lease_seconds=0), Sequencer(self.another(), lease_seconds=0)
        for _ in range(3):
            self.change()
        asleep: list[int] = []

        def sleep(connection: sa.Connection, cursor: Any, statement: str, *rest: Any) -> None:
            if connection.engine is slow._database._writers.engine and "SET last" in statement and not asleep:
                asleep.append(0)
                wait_until(lambda: quick.number() == 3, "the other sequencer")

        sa.event.listen(sa.Engine, "before_cursor_execute", sleep)
        self.addCleanup(sa.event.remove, sa.Engine, "before_cursor_execute", sleep)
        self.assertEqual(0, slow.number())
        self.assertEqual([0], asleep)
        self.assert_ordered(everything(self.database), {"one": 3})
