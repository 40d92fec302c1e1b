# SPDX-License-Identifier: Apache-2.0
"""Ledger, claims and controls on a database; mix-ins for the tests of each kind of database."""

from __future__ import annotations

import itertools
import threading
import unittest
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.coordination import tables
from moorage.coordination.ring_ledger import RingRow, SqlRingLedger
from moorage.coordination.task_store import Run, TaskStore
from moorage.coordination.tick_leases import SqlTickLeases, TickLease
from moorage.db import Database, now, read_now

TABLES = (tables.rings, tables.adoptions, tables.claims, tables.tasks, tables.runs, tables.totals)
_sweeps = itertools.count()


def create_tables(database: Database) -> None:
    with database.write() as tx:
        tables.rings.metadata.create_all(tx, tables=TABLES)


def a_claim(tick: int = 1, token: int = 1, owner: str = "one", task: str = "task") -> TickLease:
    return TickLease(task, tick, token, owner, f"sweep-{next(_sweeps)}")


class StoreTests(unittest.TestCase):
    """Subclasses give ``url``."""

    url: str

    def setUp(self) -> None:
        self.database = Database(self.url, lock_timeout=30)
        self.addCleanup(self.database.close)
        create_tables(self.database)
        with self.database.write() as tx:
            for table in TABLES:
                tx.execute(sa.delete(table))
        self.ledger = SqlRingLedger(self.database)
        self.claims = SqlTickLeases(self.database)
        self.tasks = TaskStore(self.database, history=5)

    # -- the ring's row -------------------------------------------------------------------------------------------

    def row(self, *members: bytes) -> RingRow:
        return RingRow(0, members, 40, "md5")

    def test_the_first_proposal_makes_the_row_and_a_second_first_one_does_not(self) -> None:
        self.assertEqual(self.ledger.read("g"), (None, {}))
        self.assertTrue(self.ledger.propose("g", None, self.row(b"b", b"a")))
        self.assertFalse(self.ledger.propose("g", None, self.row(b"c")))
        row, _ = self.ledger.read("g")
        assert row is not None
        self.assertEqual((row.token, row.members, row.replicas, row.hash_function), (1, (b"a", b"b"), 40, "md5"))

    def test_of_proposals_from_the_same_row_one_wins(self) -> None:
        self.ledger.propose("g", None, self.row(b"a"))
        seen, _ = self.ledger.read("g")
        barrier, won = threading.Barrier(6), []

        def propose(number: int) -> None:
            barrier.wait(60)
            if self.ledger.propose("g", seen, self.row(b"m%d" % number)):
                won.append(number)

        threads = [threading.Thread(target=propose, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        row, _ = self.ledger.read("g")
        assert row is not None
        self.assertEqual(len(won), 1)
        self.assertEqual((row.token, row.members), (2, (b"m%d" % won[0],)))

    def test_adoptions_rise_and_are_forgotten(self) -> None:
        for token in (3, 2, 5, 5):
            self.ledger.adopt("g", b"a", token)
        self.ledger.adopt("g", b"b", 1)
        self.assertEqual(self.ledger.read("g")[1], {b"a": 5, b"b": 1})
        self.ledger.forget("g", [b"a", b"c"])
        self.assertEqual(self.ledger.read("g")[1], {b"b": 1})

    # -- claims ---------------------------------------------------------------------------------------------------

    def test_each_object_is_claimed_once_for_a_tick(self) -> None:
        objects = [f"o{number}" for number in range(20)]
        self.assertEqual(self.claims.claim(a_claim(1), objects[:10]), objects[:10])
        self.assertEqual(self.claims.claim(a_claim(1, owner="two"), objects), objects[10:])
        self.assertEqual(self.claims.claim(a_claim(2, owner="two"), objects), objects)

    def test_an_owner_of_an_older_ring_claims_nothing_after_one_of_a_newer(self) -> None:
        self.assertEqual(self.claims.claim(a_claim(1, token=7), ["o"]), ["o"])
        self.assertEqual(self.claims.claim(a_claim(2, token=6), ["o"]), [])
        self.assertEqual(self.claims.claim(a_claim(2, token=7), ["o"]), ["o"])

    def test_a_tick_that_was_named_by_a_clock_that_was_set_back_is_nobodys(self) -> None:
        """Or nothing would be handled until the clock has caught up."""
        with self.database.read() as tx:
            moment = read_now(tx)
        self.assertEqual(self.claims.claim(a_claim(moment), ["o"]), ["o"])
        with self.database.write() as tx:
            tx.execute(sa.update(tables.claims).values(tick=moment + 3600_000_000))
        # Whoever looked at the clock before it was set claims nothing any more, of new objects neither.
        self.assertEqual(self.claims.claim(a_claim(moment + 3605_000_000), ["o", "new"]), [])
        self.assertEqual(self.claims.claim(a_claim(moment + 5), ["o", "new"]), ["o", "new"])
        self.assertEqual(self.claims.claim(a_claim(moment + 5), ["o", "new"]), [])
        # What is ahead by no more than servers' clocks differ is claimed.
        self.assertEqual(self.claims.claim(a_claim(moment + 30_000_000), ["o"]), ["o"])
        self.assertEqual(self.claims.claim(a_claim(moment + 6), ["o"]), [])

    def test_tasks_do_not_disturb_each_other(self) -> None:
        self.assertEqual(self.claims.claim(a_claim(5, task="a"), ["o"]), ["o"])
        self.assertEqual(self.claims.claim(a_claim(1, task="b"), ["o"]), ["o"])

    def test_the_writes_of_an_owner_that_was_overtaken_are_rolled_back(self) -> None:
        old, new = a_claim(1), a_claim(2, token=2, owner="two")
        self.claims.claim(old, ["o"])
        self.claims.claim(new, ["o"])
        with self.assertRaises(errors.Fenced), self.claims.write() as tx:
            tx.execute(sa.insert(tables.tasks).values(
                name="late", paused=False, reason="", requested_at=0, requested_object=""))  # fmt: skip
            self.claims.end(tx, old, "o")
        self.assertEqual(self.tasks.look()[1], {})
        self.claims.run(lambda tx: self.claims.end(tx, new, "o"))

    def test_a_claim_is_ended_once(self) -> None:
        claim = a_claim(1)
        self.claims.claim(claim, ["o"])
        self.claims.run(lambda tx: self.claims.end(tx, claim, "o"))
        with self.assertRaises(errors.Fenced):
            self.claims.run(lambda tx: self.claims.end(tx, claim, "o"))

    def test_many_that_claim_the_same_at_once_share_it(self) -> None:
        objects = [f"o{number:03}" for number in range(100)]
        got: list[str] = []
        barrier = threading.Barrier(6)

        def work(number: int) -> None:
            barrier.wait(60)
            for tick in (1, 2, 3):
                got.extend(f"{tick}:{each}" for each in self.claims.claim(a_claim(tick, owner=str(number)), objects))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual(len(got), len(set(got)), "claimed twice")
        self.assertLessEqual({f"3:{each}" for each in objects}, set(got))

    def test_rows_of_objects_that_are_gone_are_removed(self) -> None:
        self.claims.claim(a_claim(1), ["old"])
        self.claims.claim(a_claim(9), ["new"])
        self.assertEqual(self.claims.prune("task", 9), 1)
        self.assertEqual(self.claims.claim(a_claim(9), ["old", "new"]), ["old"])

    def test_however_many_rows_are_gone_no_transaction_removes_more_than_a_few(self) -> None:
        deleted: list[int] = []

        def seen(connection: object, cursor: Any, statement: str, *_: object) -> None:
            if statement.startswith("DELETE"):
                deleted.append(cursor.rowcount)

        sa.event.listen(sa.Engine, "after_cursor_execute", seen)
        self.addCleanup(sa.event.remove, sa.Engine, "after_cursor_execute", seen)
        self.claims.claim(a_claim(1), [f"o{number:04}" for number in range(1200)])
        self.claims.claim(a_claim(1, task="other"), ["o"])
        self.assertEqual(self.claims.prune("task", 9), 1200)
        self.assertEqual((sum(deleted), max(deleted)), (1200, 500))

    # -- what operators ask ---------------------------------------------------------------------------------------

    def test_pause_resume_and_request_are_seen_by_all(self) -> None:
        self.assertTrue(self.tasks.pause("a", "maintenance").paused)
        self.tasks.request("a", "one-object")
        moment, found = self.tasks.look()
        self.assertEqual((found["a"].reason, found["a"].requested_object), ("maintenance", "one-object"))
        self.assertLessEqual(abs(moment - found["a"].requested_at), 60_000_000)
        self.assertFalse(self.tasks.resume("a").paused)

    def test_a_request_that_may_not_have_been_seen_is_not_replaced_by_one_for_another_object(self) -> None:
        """It was accepted, and nobody would ever heed it."""
        self.tasks.request("a", "one")
        first = self.tasks.request("a", "one")
        with self.assertRaisesRegex(errors.Conflict, "Object one of a was asked for"):
            self.tasks.request("a", "another")
        self.assertEqual(self.tasks.look()[1]["a"], first)
        self.assertEqual(self.tasks.request("a").requested_object, "")
        self.assertEqual(self.tasks.request("a", "another").requested_object, "", "it is one of all")
        with self.database.write() as tx:
            tx.execute(sa.update(tables.tasks).values(requested_at=tables.tasks.c.requested_at - 6_000_000))
        self.assertEqual(self.tasks.request("a", "another").requested_object, "another")

    def test_of_requests_for_different_objects_at_a_time_one_is_accepted(self) -> None:
        barrier, accepted = threading.Barrier(6), []

        def ask(number: int) -> None:
            barrier.wait(60)
            try:
                accepted.append(self.tasks.request("a", f"object-{number}").requested_object)
            except errors.Conflict:
                return

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual(accepted, [self.tasks.look()[1]["a"].requested_object])

    def test_a_group_that_was_renamed_or_lost_its_row_goes_on_where_the_tokens_were(self) -> None:
        """Or nothing that was worked on before would ever be claimed again."""
        self.assertEqual(self.claims.claim(a_claim(token=7), ["x"]), ["x"])
        self.assertTrue(self.ledger.propose("new", None, self.row(b"a")))
        first, _ = self.ledger.read("new")
        assert first is not None
        self.assertGreater(first.token, 7)
        self.assertEqual(self.claims.claim(a_claim(tick=2, token=first.token), ["x"]), ["x"])
        # Two groups at a time, while engines are restarted one by one: whoever moves last is the newest.
        self.assertTrue(self.ledger.propose("old", None, self.row(b"b")))
        self.assertTrue(self.ledger.propose("new", first, self.row(b"a", b"c")))
        (_, one, _), (_, other, _) = self.ledger.groups()
        self.assertGreater(one.token, other.token)

    def test_totals_go_on_when_sweeps_are_forgotten(self) -> None:
        moment = 10
        for number in range(8):
            ended = ("complete", "stale", "failed", "complete")[number % 4]
            self.tasks.record(
                Run("a", "m", number, 1, moment, 5, owned=9, handled=3, failed=1, ended=ended, lost=2, skipped=4)
            )
        (found,) = self.tasks.totals()
        self.assertEqual(len(self.tasks.runs("a")), 5)
        self.assertEqual(
            {name: found[name] for name in ("complete", "stale", "broken", "handled", "failed", "lost", "skipped")},
            {"complete": 4, "stale": 2, "broken": 2, "handled": 24, "failed": 8, "lost": 16, "skipped": 32},
        )
        self.assertEqual((found["milliseconds"], found["tick"]), (40, 7))

    def test_the_history_is_bounded_for_each_task(self) -> None:
        with self.database.read() as tx:
            moment = read_now(tx)
        for number in range(12):
            self.tasks.record(Run("a", "m", number, 1, moment, 5, problem="x" * 400))
        self.tasks.record(Run("b", "m", 99, 1, moment, 5))
        self.assertEqual([run.tick for run in self.tasks.runs("a")], [11, 10, 9, 8, 7])
        self.assertEqual(len(self.tasks.runs()), 6)

    def test_database_time_is_microseconds(self) -> None:
        with self.database.read() as tx:
            self.assertGreater(tx.execute(sa.select(now())).scalar_one(), 1_600_000_000_000_000)
