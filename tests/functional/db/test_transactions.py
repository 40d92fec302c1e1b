# SPDX-License-Identifier: Apache-2.0
"""What a transaction means on each of the three databases."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import threading
import time
import unittest
from collections.abc import Callable
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from moorage import errors
from moorage.db import MICROSECONDS, Duplicate, ReadOnlyTransaction, execute_set, now, read_now
from moorage.testing.clock import ManualClock
from tests.functional.db.databases import ADD_ONE, ROWS, DatabaseCase, Watch, add_one, poll


class _SomeError(Exception):
    pass


class SetCases(DatabaseCase):
    """Statements that are executed for many rows."""

    def test_a_set_writes_the_rows_whose_conditions_hold_and_counts_them(self) -> None:
        seen = sa.bindparam("of_v", type_=sa.Integer)
        statement = (
            sa.update(ROWS)
            .where(ROWS.c.id == sa.bindparam("of_id"), ROWS.c.v == sa.func.coalesce(seen, ROWS.c.v))
            .values(v=ROWS.c.v + sa.bindparam("more", type_=sa.Integer))
        )
        given: list[dict[str, Any]] = [{"of_id": 1, "of_v": None, "more": 2}, {"of_id": 2, "of_v": 7, "more": 2}]
        self.assertEqual(1, self.database.run(lambda tx: execute_set(tx, statement, given)))
        self.assertEqual((2, 0), (self.value(1), self.value(2)))
        given = [{"of_id": 1, "of_v": 2, "more": -1}, {"of_id": 2, "of_v": 0, "more": 5}]
        self.assertEqual(2, self.database.run(lambda tx: execute_set(tx, statement, given)))
        self.assertEqual((1, 5), (self.value(1), self.value(2)))
        one = [{"of_id": 1, "of_v": 1, "more": -1}]
        self.assertEqual(1, self.database.run(lambda tx: execute_set(tx, statement, one)))
        self.assertEqual(0, self.value(1))

    def test_a_set_inserts_what_is_not_there_whatever_characters_it_has(self) -> None:
        names = ["one", "it's", 'a "b"', "50% \\ :x", "naïve 漢", "𝄞 {}[]", "", "line\nend\t", "null", "€uro '' \"\""]
        wanted = sa.bindparam("of_name", type_=ROWS.c.name.type)
        row = sa.select(sa.bindparam("of_id", type_=sa.BigInteger), wanted, sa.literal(3)).where(
            ~sa.exists().where(ROWS.alias().c.name == wanted)
        )
        statement = sa.insert(ROWS).from_select(["id", "name", "v"], row).execution_options(preserve_rowcount=True)
        given: list[dict[str, Any]] = [{"of_id": 2**40 + place, "of_name": name} for place, name in enumerate(names)]
        self.assertEqual(len(names) - 1, self.database.run(lambda tx: execute_set(tx, statement, given)))
        with self.database.read() as tx:
            found = tx.execute(sa.select(ROWS.c.id, ROWS.c.name).where(ROWS.c.v == 3).order_by(ROWS.c.id)).all()
        self.assertEqual([(each["of_id"], each["of_name"]) for each in given[1:]], list(map(tuple, found)))
        again = [{**each, "of_id": 2**41 + place} for place, each in enumerate(given)]
        self.assertEqual(0, self.database.run(lambda tx: execute_set(tx, statement, again)))


class TransactionCases(SetCases):
    """What the three have in common."""

    # -- ending ---------------------------------------------------------------------------------------------------

    def test_a_block_that_ends_is_committed(self) -> None:
        with self.database.write() as tx:
            add_one(tx)
        self.assertEqual(1, self.value())

    def test_a_block_that_raises_is_rolled_back_and_its_error_goes_on(self) -> None:
        with self.assertRaises(_SomeError), self.database.write() as tx:
            add_one(tx)
            raise _SomeError
        self.assertEqual(0, self.value())

    def test_an_interrupt_rolls_back_too(self) -> None:
        with self.assertRaises(KeyboardInterrupt), self.database.write() as tx:
            add_one(tx)
            raise KeyboardInterrupt
        self.assertEqual(0, self.value())

    def test_a_swallowed_error_comes_again_instead_of_the_commit(self) -> None:
        with self.assertRaises(Duplicate), self.database.write() as tx:
            add_one(tx)
            with contextlib.suppress(Duplicate):
                tx.execute(sa.insert(ROWS), {"id": 3, "name": "one", "v": 0})
        self.assertEqual(0, self.value())

    def test_a_savepoint_contains_an_error(self) -> None:
        with self.database.write() as tx:
            add_one(tx)
            try:
                with tx.begin_nested():
                    tx.execute(sa.insert(ROWS), {"id": 3, "name": "one", "v": 0})
            except Duplicate:
                add_one(tx)
        self.assertEqual(2, self.value())

    # -- reading --------------------------------------------------------------------------------------------------

    def test_a_reader_sees_one_snapshot_and_waits_for_nobody(self) -> None:
        with self.database.read() as tx:
            query = sa.select(ROWS.c.v).where(ROWS.c.id == 1)
            before = tx.execute(query).scalar_one()
            done = threading.Thread(target=lambda: self.database.run(add_one))
            done.start()
            done.join(60)
            self.assertEqual((0, 0), (before, tx.execute(query).scalar_one()))
        self.assertEqual(1, self.value())

    def test_reads_in_a_shared_read_see_one_snapshot_and_those_after_it_another_one(self) -> None:
        with self.database.shared_read():
            before = self.value()
            with self.database.shared_read() as inner:
                self.assertEqual(0, inner.execute(sa.select(ROWS.c.v).where(ROWS.c.id == 1)).scalar_one())
            # Another thread is not in it, and may write.
            done = threading.Thread(target=lambda: self.database.run(add_one))
            done.start()
            done.join(60)
            seen = self.value(), self.database.read_run(lambda tx: tx.execute(sa.select(ROWS.c.v)).scalars().first())
            with self.assertRaisesRegex(RuntimeError, "inside a read"):
                self.database.run(add_one)
        self.assertEqual((0, (0, 0)), (before, seen))
        self.assertEqual(1, self.value())
        with self.assertRaises(_SomeError), self.database.shared_read():
            raise _SomeError
        self.database.run(add_one)
        self.assertEqual(2, self.value())

    def test_a_reader_does_not_wait_for_an_open_write(self) -> None:
        with self.database.write() as tx:
            add_one(tx)
            seen: list[int] = []
            reader = threading.Thread(target=lambda: seen.append(self.value()))
            reader.start()
            reader.join(60)
            self.assertEqual([0], seen)

    def test_a_write_in_a_read_is_refused(self) -> None:
        with self.assertRaises(ReadOnlyTransaction), self.database.read() as tx:
            add_one(tx)
        self.assertEqual(0, self.value())

    def test_writing_connections_still_write_after_readers_used_the_database(self) -> None:
        for _ in range(3):
            self.value()
            self.database.run(add_one)
        self.assertEqual(3, self.value())

    # -- nesting --------------------------------------------------------------------------------------------------

    def test_a_transaction_inside_of_a_write_is_refused(self) -> None:
        for inner in (self.database.read, self.database.write):
            with (
                self.subTest(inner.__name__),
                self.assertRaisesRegex(RuntimeError, "pass the open transaction"),
                self.database.write() as tx,
            ):
                add_one(tx)
                with inner():
                    self.fail("it was begun")
        self.assertEqual(0, self.value())

    def test_a_write_inside_of_a_read_is_refused(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "inside a read"), self.database.read():
            self.database.run(add_one)
        self.database.run(add_one)
        self.assertEqual(1, self.value())

    # -- rows and errors ------------------------------------------------------------------------------------------

    def test_rows_count_when_they_match_even_if_nothing_changes(self) -> None:
        with self.database.write() as tx:
            same = tx.execute(sa.update(ROWS).where(ROWS.c.id == 1).values(v=0))
            none = tx.execute(sa.update(ROWS).where(ROWS.c.id == 99).values(v=0))
            self.assertEqual((1, 0), (same.rowcount, none.rowcount))

    def test_a_duplicate_says_which_constraint(self) -> None:
        with self.assertRaises(Duplicate) as caught:
            self.database.run(lambda tx: tx.execute(sa.insert(ROWS), {"id": 3, "name": "one", "v": 0}))
        self.assertIn("name", caught.exception.details["constraint"])
        with self.assertRaises(Duplicate):
            self.database.run(lambda tx: tx.execute(sa.insert(ROWS), {"id": 1, "name": "three", "v": 0}))

    def test_a_value_that_does_not_fit_is_the_callers_mistake(self) -> None:
        with self.assertRaises(errors.InvalidInput):
            self.database.run(lambda tx: tx.execute(sa.insert(ROWS), {"id": 2**70, "name": "x", "v": 0}))

    def test_a_missing_table_asks_for_the_upgrade(self) -> None:
        with self.assertRaisesRegex(errors.StoreUnavailable, "moorage-manage db upgrade"), self.database.read() as tx:
            tx.execute(sa.text("SELECT * FROM missing"))

    def test_text_compares_exactly_and_keeps_every_character(self) -> None:
        with self.database.write() as tx:
            tx.execute(
                sa.insert(ROWS),
                [{"id": 3, "name": "ONE", "v": 0}, {"id": 4, "name": "Zed", "v": 0}, {"id": 5, "name": "ä🚢", "v": 0}],
            )
        with self.database.read() as tx:
            names = list(tx.execute(sa.select(ROWS.c.name).order_by(ROWS.c.name)).scalars())
        self.assertEqual(["ONE", "Zed", "one", "two", "ä🚢"], names)

    def test_zero_is_a_key_like_any_other(self) -> None:
        with self.database.write() as tx:
            tx.execute(sa.insert(ROWS), {"id": 0, "name": "zero", "v": 7})
        self.assertEqual(7, self.value(0))

    # -- the retry rule -------------------------------------------------------------------------------------------

    def test_no_increment_of_competing_threads_is_lost(self) -> None:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(15):
                    self.database.run(add_one, attempts=100)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(([], 90), (failures, self.value()))

    # -- time -----------------------------------------------------------------------------------------------------

    def test_database_time_is_in_microseconds_since_the_epoch(self) -> None:
        with self.database.read() as tx:
            before, moment, after = time.time(), read_now(tx), time.time()
        self.assertLess((before - 1) * MICROSECONDS, moment)
        self.assertLess(moment, (after + 1) * MICROSECONDS)

    def test_database_time_goes_on_within_a_transaction(self) -> None:
        with self.database.write() as tx:
            first = read_now(tx)
            poll(lambda: read_now(tx) > first, "a later time in the same transaction")

    def test_database_time_is_a_number_in_a_statement(self) -> None:
        with self.database.write() as tx:
            tx.execute(sa.update(ROWS).values(v=(now() - now()) / MICROSECONDS))
            lease = tx.execute(sa.select(now() + 60 * MICROSECONDS > now())).scalar_one()
        self.assertEqual((True, 0), (bool(lease), self.value()))

    # -- processes ------------------------------------------------------------------------------------------------

    def test_parent_and_forked_child_both_go_on(self) -> None:
        self.database.run(add_one)
        child = _fork(lambda: self.database.run(add_one) == 1 and self.value() >= 1)
        self.database.run(add_one)
        self.assertEqual(0, child())
        self.database.run(add_one)
        self.assertEqual(4, self.value())

    def test_a_child_forked_inside_of_a_transaction_cannot_end_it(self) -> None:
        def end() -> bool:
            try:
                block.__exit__(None, None, None)
            except RuntimeError as error:
                return "forked inside" in str(error)
            return False

        block = self.database.write()
        tx = block.__enter__()
        add_one(tx)
        self.assertEqual(0, _fork(end)())
        add_one(tx)
        block.__exit__(None, None, None)
        self.assertEqual(2, self.value())

    def test_a_closed_database_opens_again(self) -> None:
        self.database.run(add_one)
        self.database.close()
        self.database.run(add_one)
        self.assertEqual(2, self.value())


def _fork(work: Callable[[], bool]) -> Callable[[], int]:
    """Run it in a forked child; what comes back waits for its status: 0 when the work answered with truth."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


_LOST = {
    "postgresql": "DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$",
    "mysql": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'Deadlock found when trying to get lock'",
}


def _lose_a_race(tx: sa.Connection) -> None:
    """Have the server report a lost race, as it does for a deadlock."""
    tx.exec_driver_sql(_LOST[tx.dialect.name])


class ServerCases(TransactionCases):
    """What only a server can do."""

    def test_work_is_run_again_as_a_whole_and_bounded(self) -> None:
        tries: list[int] = []

        def lose(tx: sa.Connection) -> None:
            tries.append(add_one(tx))
            _lose_a_race(tx)

        with self.assertRaises(errors.StoreBusy) as caught:
            self.database.run(lose, attempts=3)
        self.assertEqual(([1, 1, 1], 0), (tries, self.value()))
        self.assertGreater(caught.exception.retry_after, 0)

    def test_no_try_begins_after_the_deadline(self) -> None:
        tries: list[int] = []

        def lose(tx: sa.Connection) -> None:
            tries.append(1)
            _lose_a_race(tx)

        with self.assertRaises(errors.StoreBusy):
            self.database.run(lose, attempts=1000, deadline=0)
        self.assertEqual([1], tries)

    def test_nobody_waits_for_what_is_held_much_longer_than_a_lock_may_take(self) -> None:
        clock, tries = ManualClock(), []

        def wait_in_vain(tx: sa.Connection) -> None:
            tries.append(clock.monotonic())
            clock.advance(10)
            _lose_a_race(tx)

        with self.assertRaises(errors.StoreBusy):
            self.another(lock_timeout=10, clock=clock).run(wait_in_vain, attempts=1000)
        self.assertEqual(2, len(tries))

    def test_a_lost_race_that_the_work_swallows_is_still_run_again(self) -> None:
        tries: list[int] = []

        def lose_once(tx: sa.Connection) -> None:
            tries.append(add_one(tx))
            if len(tries) == 1:
                try:
                    _lose_a_race(tx)
                except Exception:
                    return

        self.database.run(lose_once)
        self.assertEqual(([1, 1], 1), (tries, self.value()))

    def test_a_deadlock_is_resolved_by_running_the_loser_again(self) -> None:
        both, tries, failures = threading.Barrier(2), [], []

        def work(tx: sa.Connection, mine: int, others: int) -> None:
            tries.append(mine)
            add_one(tx, mine)
            if tries.count(mine) == 1:
                both.wait(60)
            add_one(tx, others)

        def run(mine: int, others: int) -> None:
            try:
                self.database.run(lambda tx: work(tx, mine, others))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=pair) for pair in ((1, 2), (2, 1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(([], 2, 2), (failures, self.value(1), self.value(2)))
        # One had to lose; that it loses once only, nobody promises: it may meet the other again, which still has to commit.
        self.assertGreaterEqual(len(tries), 3)

    def test_waiting_for_a_lock_is_bounded(self) -> None:
        hasty = self.another(lock_timeout=1)
        with self.database.write() as tx:
            add_one(tx)
            refused: list[BaseException] = []

            def run() -> None:
                try:
                    hasty.run(add_one, attempts=2)
                except errors.StoreBusy as error:
                    refused.append(error)

            with Watch() as watch:
                thread = threading.Thread(target=run)
                thread.start()
                thread.join(60)
            self.assertEqual(1, len(refused))
            self.assertLess(watch.seconds, 60)
        self.assertEqual(1, self.value())

    def test_waiting_for_a_connection_is_bounded_and_none_is_leaked(self) -> None:
        small = self.another(pool_size=1, pool_timeout=1)
        release, inside = threading.Event(), threading.Barrier(3)

        def hold() -> None:
            with small.write() as tx:
                tx.execute(sa.select(1))
                inside.wait(60)
                release.wait(60)

        threads = [threading.Thread(target=hold) for _ in range(2)]  # one of the pool, one above it
        for thread in threads:
            thread.start()
        inside.wait(60)
        with self.assertRaisesRegex(errors.StoreBusy, "max_pool_size"):
            small.run(add_one)
        release.set()
        for thread in threads:
            thread.join()
        small.run(add_one)
        self.assertEqual(1, self.value())

    def test_a_set_does_not_lock_other_rows(self) -> None:
        with self.database.write() as tx:
            tx.execute(sa.insert(ROWS), [{"id": 3, "name": "three", "v": 0}, {"id": 4, "name": "four", "v": 0}])
        same = sa.func.coalesce(sa.bindparam("of_v", type_=sa.Integer), ROWS.c.v)
        statement = ADD_ONE.where(ROWS.c.name == sa.bindparam("of_name"), ROWS.c.v == same)
        hasty, failures = self.another(lock_timeout=1), []

        def count_others() -> None:
            given = [{"of_id": 3, "of_name": "three", "of_v": None}, {"of_id": 4, "of_name": "four", "of_v": 0}]
            try:
                hasty.run(lambda tx: execute_set(tx, statement, given), attempts=1)
            except errors.StoreBusy as error:
                failures.append(error)

        with self.database.write() as tx:
            given = [{"of_id": 1, "of_name": "one", "of_v": None}, {"of_id": 2, "of_name": "two", "of_v": 0}]
            self.assertEqual(2, execute_set(tx, statement, given))
            others = threading.Thread(target=count_others)
            others.start()
            others.join()
        self.assertEqual(([], [1, 1, 1, 1]), (failures, [self.value(number) for number in (1, 2, 3, 4)]))


class SqliteTransactions(TransactionCases, unittest.TestCase):
    """On SQLite."""

    def test_a_writer_that_knows_no_queue_makes_others_wait_and_then_give_up(self) -> None:
        hasty = self.another(lock_timeout=1)
        stranger = sqlite3.connect(self.url.removeprefix("sqlite:///"), isolation_level=None)
        self.addCleanup(stranger.close)
        stranger.execute("BEGIN IMMEDIATE")
        with Watch() as watch, self.assertRaises(errors.StoreBusy):
            hasty.run(add_one, attempts=2)
        self.assertLess(watch.seconds, 60)
        stranger.execute("COMMIT")
        hasty.run(add_one)
        self.assertEqual(1, self.value())

    def test_the_file_is_durable_and_keeps_foreign_keys(self) -> None:
        with self.database.write() as tx:
            found = [
                tx.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys")
            ]
        self.assertEqual(["wal", 2, 1], found)


class PostgresqlTransactions(ServerCases, unittest.TestCase):
    """On PostgreSQL."""

    kind = "postgresql"


class MariadbTransactions(ServerCases, unittest.TestCase):
    """On MariaDB."""

    kind = "mariadb"

    def test_the_session_is_strict_in_utc_and_read_committed(self) -> None:
        with self.database.write() as tx:
            row = tx.exec_driver_sql("SELECT @@tx_isolation, @@time_zone, @@sql_mode").one()
        self.assertEqual(("READ-COMMITTED", "+00:00"), tuple(row[:2]))
        self.assertIn("STRICT_ALL_TABLES", row[2])

    def test_a_server_that_vanishes_is_given_up_after_a_minute(self) -> None:
        with self.database.write() as tx:
            found = cast(Any, tx.connection.driver_connection)._sock
            self.assertEqual(1, found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
            seconds = [
                found.getsockopt(socket.IPPROTO_TCP, each) for each in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
            ]
            tries = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
            self.assertEqual(60, seconds[0] + seconds[1] * tries)
            self.assertEqual(60_000, found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))

    def test_rows_that_are_inserted_together_are_one_statement(self) -> None:
        with self.database.write() as tx:
            before = int(tx.exec_driver_sql("SHOW SESSION STATUS LIKE 'Com_insert'").one()[1])
            added = sa.insert(ROWS).values(v=sa.func.abs(sa.bindparam("of_v")))
            tx.execute(added, [{"id": 10 + place, "name": f"n{place}", "of_v": -place} for place in range(300)])
            after = int(tx.exec_driver_sql("SHOW SESSION STATUS LIKE 'Com_insert'").one()[1])
        self.assertEqual((2, 299), (after - before, self.value(309)))

    def test_a_transaction_that_has_ended_is_not_rolled_back_again(self) -> None:
        def rollbacks() -> int:
            with self.database.write() as tx:
                return int(tx.exec_driver_sql("SHOW SESSION STATUS LIKE 'Com_rollback'").one()[1])

        before = rollbacks()
        after_a_commit = rollbacks() - before
        with contextlib.suppress(KeyError), self.database.write() as tx:
            tx.execute(ADD_ONE, {"of_id": 1})
            raise KeyError
        self.assertEqual((0, 1, 0), (after_a_commit, rollbacks() - before, self.value()))

    def test_large_rows_are_inserted_by_statements_that_the_server_takes(self) -> None:
        texts = sa.Table("texts", sa.MetaData(), *(sa.Column("id", sa.BigInteger), sa.Column("text", mysql.LONGTEXT)))
        add = sa.insert(texts).values(id=sa.func.abs(sa.bindparam("of_id", type_=sa.BigInteger)))
        given = [{"of_id": -number, "text": "'" * 2_000_000} for number in range(1, 11)]
        given += [{"of_id": -number, "text": ""} for number in range(11, 300)]
        with self.database.write() as tx:
            self.assertLess(int(tx.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()), 20_000_000)
            texts.create(tx)
        for statement in (add, add.returning(texts.c.id)):
            with self.subTest(str(statement)), self.database.write() as tx:
                tx.execute(sa.delete(texts))
                result = tx.execute(statement, given)
                self.assertEqual(statement is not add, result.returns_rows)
                found = tx.execute(sa.select(sa.func.count(), sa.func.sum(sa.func.length(texts.c.text)))).one()
                self.assertEqual((299, 20_000_000), (found[0], int(found[1])))

    def test_database_time_does_not_depend_on_the_sessions_time_zone(self) -> None:
        with self.database.write() as tx:
            tx.exec_driver_sql("SET time_zone = '-09:30'")
            odd = read_now(tx)
            tx.exec_driver_sql("SET time_zone = '+00:00'")
            self.assertLess(abs(read_now(tx) - odd), 60 * MICROSECONDS)


class LatinMariadbSets(SetCases, unittest.TestCase):
    """On MariaDB, in a database whose charset lacks characters."""

    kind = "mariadb"
    defaults = "CHARACTER SET latin1"


class UnicodeMariadbSets(SetCases, unittest.TestCase):
    """On MariaDB, in a database with a collation that no table has."""

    kind = "mariadb"
    defaults = "CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci"
