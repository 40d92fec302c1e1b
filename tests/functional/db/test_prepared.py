# SPDX-License-Identifier: Apache-2.0
"""Prepared statements answer as SQLAlchemy does on each of the three databases."""

from __future__ import annotations

import gc
import time
import unittest
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from oslo_db import exception as db_errors

from moorage import errors
from moorage.db import Duplicate, new_metadata, now
from moorage.db.prepared import PreparedConnection, Rows
from moorage.db.schema import BigId, JsonText, exact
from tests.functional.db.databases import ROWS, DatabaseCase

THINGS = sa.Table(
    "things",
    new_metadata(),
    sa.Column("id", BigId, primary_key=True),
    sa.Column("kind", exact(20), nullable=False),
    sa.Column("data", JsonText()),
    sa.Column("place", sa.Integer, nullable=False, default=7),
    sa.Column("more", JsonText(), default=["seven"]),
)
_IDS: Any = sa.bindparam("ids", expanding=True)
_NAMES: Any = sa.bindparam("names", expanding=True)
_BY_ID = sa.select(ROWS.c.id, ROWS.c.name, ROWS.c.v.label("value")).where(ROWS.c.id == sa.bindparam("of_id"))
_BY_IDS: Any = (
    sa.select(ROWS.c.id).where(ROWS.c.id.in_(_IDS), ROWS.c.v < 100, ROWS.c.name.in_(_NAMES)).order_by(ROWS.c.id)
)
_OTHERS = sa.select(ROWS.c.id).where(ROWS.c.id.not_in(_IDS)).order_by(ROWS.c.id)
_COUNT = sa.select(sa.func.count()).select_from(ROWS)
_OPTIONAL = sa.select(ROWS.c.id).where(ROWS.c.v >= sa.bindparam("least", 0, type_=sa.Integer)).order_by(ROWS.c.id)
_RAISE = (
    sa.update(ROWS)
    .where(ROWS.c.id == sa.bindparam("of_id"))
    .values(v=ROWS.c.v + sa.bindparam("more", type_=sa.Integer))
)
_DROP = sa.delete(ROWS).where(ROWS.c.id.in_(_IDS))
_ADD = sa.insert(ROWS)
_ADD_THING = sa.insert(THINGS)
_THINGS = sa.select(THINGS.c.kind, THINGS.c.data).order_by(THINGS.c.id)
_THING = sa.select(THINGS.c.kind, THINGS.c.data).order_by(THINGS.c.id).limit(sa.bindparam("of_id", type_=sa.Integer))
_UNION = sa.union_all(sa.select(ROWS.c.id).where(ROWS.c.v == sa.bindparam("v")), sa.select(ROWS.c.v)).order_by("id")


class PreparedCases(DatabaseCase):
    """Each statement is executed three times: by SQLAlchemy, then prepared, then prepared again."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        with cls.database.write() as tx:
            THINGS.create(tx)

    def setUp(self) -> None:
        super().setUp()
        with self.database.write() as tx:
            tx.execute(sa.delete(THINGS))

    def thrice(self, statement: Any, parameters: Any = None) -> list[Any]:
        """Results of three executions; the later ones are prepared."""
        with self.database.read() as tx:
            self.first(tx, statement, parameters)
            results = [tx.execute(statement, parameters) for _ in range(2)]
            self.assertEqual([Rows, Rows], [type(each) for each in results])
            unprepared = sa.Connection.execute(tx, statement, parameters)
            return [unprepared, *results]

    def first(self, tx: Any, statement: Any, parameters: Any) -> None:
        tx.execute(statement, parameters)

    def assert_alike(self, statement: Any, parameters: Any, expected: Sequence[Any]) -> None:
        for result in self.thrice(statement, parameters):
            self.assertEqual(list(expected), [tuple(row) for row in result.all()])

    def test_rows_have_names_and_places(self) -> None:
        for result in self.thrice(_BY_ID, {"of_id": 2}):
            row = result.one()
            self.assertEqual((2, "two", 0), tuple(row))
            self.assertEqual((2, "two", 0, "two"), (row.id, row.name, row.value, row[1]))
            self.assertEqual({"id": 2, "name": "two", "value": 0}, dict(row._mapping))

    def test_results_have_the_methods_of_sqlalchemy(self) -> None:
        self.assertEqual([2] * 3, [each.scalar() for each in self.thrice(_COUNT)])
        self.assertEqual([2] * 3, [each.scalar_one() for each in self.thrice(_COUNT)])
        self.assertEqual([None] * 3, [each.first() for each in self.thrice(_BY_ID, {"of_id": 9})])
        self.assertEqual([None] * 3, [each.scalar() for each in self.thrice(_BY_ID, {"of_id": 9})])
        self.assertEqual([None] * 3, [each.one_or_none() for each in self.thrice(_BY_ID, {"of_id": 9})])
        self.assertEqual([["two"]] * 3, [each.scalars("name").all() for each in self.thrice(_BY_ID, {"of_id": 2})])
        self.assertEqual([True] * 3, [each.returns_rows for each in self.thrice(_COUNT)])
        for each in self.thrice(_BY_ID, {"of_id": 9}):
            with self.assertRaises(sa.exc.NoResultFound):
                each.one()
        for each in self.thrice(_OPTIONAL):
            with self.assertRaises(sa.exc.MultipleResultsFound):
                each.scalar_one()

    def test_lists_of_every_length_find_the_same_rows(self) -> None:
        many = [*range(3, 2000)]
        for ids in ([], [1], [2, 1], [7, 2, 1], [1, 2, 3, 4, 5], many[:1021] + [1, 2], [*many, 1]):
            expected = [(each,) for each in (1, 2) if each in ids]
            with self.database.read() as tx:
                given = {"ids": ids, "names": ["one", "two", "three"]}
                for _ in range(3):
                    self.assertEqual(expected, [tuple(row) for row in tx.execute(_BY_IDS, given)], len(ids))
                    others = [(each,) for each in (1, 2) if each not in ids]
                    self.assertEqual(others, [tuple(row) for row in tx.execute(_OTHERS, {"ids": ids})], len(ids))
        self.assert_alike(_BY_IDS, {"ids": [2, 1, 1], "names": ["two"]}, [(2,)])

    def test_a_parameter_with_a_default_may_be_left_out(self) -> None:
        self.assert_alike(_OPTIONAL, None, [(1,), (2,)])
        self.assert_alike(_OPTIONAL, {"least": 1}, [])
        self.assert_alike(_UNION, {"v": 0}, [(0,), (0,), (1,), (2,)])

    def test_a_missing_parameter_is_named(self) -> None:
        with self.database.read() as tx:
            for _ in range(3):
                with self.assertRaisesRegex(db_errors.DBError, "of_id"):
                    tx.execute(_BY_ID, {})

    def test_writes_count_their_rows(self) -> None:
        with self.database.write() as tx:
            for _ in range(3):
                self.assertEqual(1, tx.execute(_RAISE, {"of_id": 1, "more": 2}).rowcount)
                self.assertEqual(0, tx.execute(_RAISE, {"of_id": 9, "more": 2}).rowcount)
                result = tx.execute(_RAISE, [{"of_id": 1, "more": 1}, {"of_id": 2, "more": 5}])
                self.assertFalse(result.returns_rows)
            self.assertEqual(
                [(1, 9), (2, 15)], [tuple(r) for r in tx.execute(sa.select(ROWS.c.id, ROWS.c.v).order_by(ROWS.c.id))]
            )
            self.assertEqual([2, 0, 0], [tx.execute(_DROP, {"ids": [1, 2, 3]}).rowcount for _ in range(3)])

    def test_values_are_converted_as_their_types_say(self) -> None:
        data: list[Any] = [{"b": [1, None], "a": "ü"}, None, "text", [], 7]
        with self.database.write() as tx:
            for each in data:
                tx.execute(_ADD_THING, {"kind": "it's 50% \\ :x", "data": each})
            tx.execute(_ADD_THING, [{"kind": "many", "data": each} for each in data])
            tx.execute(_ADD_THING, [{"kind": "many", "data": each} for each in data])
        expected = [("it's 50% \\ :x", each) for each in data] + [("many", each) for each in 2 * data]
        self.assert_alike(_THINGS, None, expected)
        for result in self.thrice(_THINGS):
            self.assertEqual([each for _, each in expected], result.scalars("data").all())
        for result in self.thrice(_THING, {"of_id": 1}):
            self.assertEqual(expected[0], tuple(result.one()))

    def test_errors_of_the_database_are_those_of_the_project(self) -> None:
        for place in range(3):
            with self.assertRaises(Duplicate), self.database.write() as tx:
                tx.execute(_ADD, {"id": 10 + place, "name": "one", "v": 0})
        for _ in range(3):
            # A failed statement undoes the transaction, also if its error is not passed on.
            with self.assertRaises(Duplicate), self.database.write() as tx:
                tx.execute(_RAISE, {"of_id": 1, "more": 1})
                with self.assertRaises(Duplicate):
                    tx.execute(_ADD, {"id": 20, "name": "two", "v": 0})
        self.assertEqual(0, self.value())
        kinds: list[type[Exception]] = []
        for _ in range(3):
            with self.database.read() as tx:
                try:
                    tx.execute(_BY_ID, {"of_id": 2**70})
                except Exception as error:
                    kinds.append(type(error))
        self.assertIn(len(set(kinds)), (0, 1), kinds)
        self.assertIn(len(kinds), (0, 3))

    def test_columns_that_are_not_given_get_their_defaults(self) -> None:
        found = sa.select(THINGS.c.kind, THINGS.c.place, THINGS.c.more).order_by(THINGS.c.id)
        one: dict[str, Any] = {"kind": "one", "data": None}
        many = [{**one, "place": 8}, {**one, "place": 9}]
        several = [one, {**one, "kind": "two"}]
        expected: list[Any] = []
        kinds: list[Any] = []
        for _ in range(3):
            with self.database.write() as tx:
                kinds += [type(tx.execute(_ADD_THING, each)) for each in (one, many, several)]
                expected += [("one", 7), ("one", 8), ("one", 9), ("one", 7), ("two", 7)]
                self.assertEqual([(*each, ["seven"]) for each in expected], [tuple(row) for row in tx.execute(found)])
        # Servers insert several rows by a statement of SQLAlchemy's.
        prepared = [each is Rows for each in kinds[3:6]]
        self.assertEqual([True] * 3 if self.kind == "sqlite" else [True, False, False], prepared)

    def test_a_savepoint_keeps_the_transaction_after_an_error(self) -> None:
        for place in range(3):
            with self.database.write() as tx:
                with self.assertRaises(Duplicate), tx.begin_nested():
                    tx.execute(_ADD, {"id": 30 + place, "name": "two", "v": 0})
                tx.execute(_RAISE, {"of_id": 2, "more": 1})
        self.assertEqual(3, self.value(2))

    def test_the_time_of_the_database_is_new_in_each_execution(self) -> None:
        statement = sa.select(now())
        with self.database.read() as tx:
            first = [tx.execute(statement).scalar_one() for _ in range(3)][-1]
            time.sleep(0.01)
            self.assertLess(first, tx.execute(statement).scalar_one())

    def test_statements_that_are_built_for_one_use_are_forgotten(self) -> None:
        kept = []
        with self.database.read() as tx:
            for value in range(20):
                statement = sa.select(ROWS.c.id).where(ROWS.c.v == value)
                kept.append(weakref.ref(statement))
                results = [tx.execute(statement) for _ in range(3)]
                self.assertIsInstance(results[-1], Rows)
        del statement
        gc.collect()
        # SQLAlchemy keeps the first one in its cache of compiled statements, and the last one is still in use here.
        self.assertLessEqual(sum(each() is not None for each in kept), 2)

    def test_a_statement_that_is_derived_from_a_prepared_one_is_another_one(self) -> None:
        with self.database.read() as tx:
            for _ in range(3):
                self.assertEqual([(1,), (2,)], [tuple(row) for row in tx.execute(_OPTIONAL)])
            derived = _OPTIONAL.where(ROWS.c.id == 2)
            for _ in range(3):
                self.assertEqual([(2,)], [tuple(row) for row in tx.execute(derived)])

    def test_a_value_of_a_statement_gives_way_to_a_parameter_of_its_name(self) -> None:
        statement = sa.insert(ROWS).values(id=77, name="fixed", v=1)
        for place in range(3):
            with self.database.write() as tx:
                tx.execute(statement, {"name": f"given {place}", "id": 80 + place})
                found = tx.execute(sa.select(ROWS.c.name, ROWS.c.v).where(ROWS.c.id == 80 + place)).one()
                self.assertEqual((f"given {place}", 1), tuple(found))

    def test_an_insert_without_values_counts_the_key_up(self) -> None:
        table = sa.Table(f"counted_{self.kind}", new_metadata(), sa.Column("id", BigId, primary_key=True))
        with self.database.write() as tx:
            table.create(tx)
        statement = sa.insert(table)
        with self.database.write() as tx:
            for _ in range(4):
                tx.execute(statement)
            self.assertEqual([1, 2, 3, 4], sorted(tx.execute(sa.select(table.c.id)).scalars()))

    def test_a_set_may_be_a_list(self) -> None:
        with self.database.read() as tx:
            for _ in range(3):
                self.assertEqual([(2,)], [tuple(row) for row in tx.execute(_OTHERS, {"ids": {1, 7}})])

    def test_rows_are_fetched_one_after_the_other(self) -> None:
        for result in self.thrice(_OPTIONAL):
            self.assertEqual([(1,), (2,), None], [row and tuple(row) for row in (result.fetchone() for _ in range(3))])

    def test_a_lost_connection_is_named_alike(self) -> None:
        for _ in range(3):
            database = self.another()
            with self.assertRaises(errors.MoorageError) as caught, database.read() as tx:
                self.first(tx, _COUNT, None)
                self.first(tx, _COUNT, None)
                self.cut(tx)
                tx.execute(_COUNT)
            self.assertIsInstance(caught.exception, errors.StoreUnavailable)

    def cut(self, tx: sa.Connection) -> None:
        """Lose the connection."""
        driver: Any = tx.connection.driver_connection
        driver.close()

    def test_an_error_of_a_type_leaves_the_transaction_as_it_is(self) -> None:
        class Broken(sa.types.TypeDecorator[Any]):
            impl = sa.Integer
            cache_ok = True

            def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:
                raise ValueError("boom")

        statement = sa.select(sa.type_coerce(ROWS.c.v, Broken))
        with self.database.write() as tx:
            for place in range(3):
                with self.assertRaisesRegex(ValueError, "boom"):
                    tx.execute(statement).all()
                self.assertEqual(1, tx.execute(_RAISE, {"of_id": 1, "more": 1}).rowcount, place)
        self.assertEqual(3, self.value())

    def test_text_of_the_driver_is_executed_as_sqlalchemy_does(self) -> None:
        seen: list[str] = []
        with self.database.write() as tx:
            place = "?" if tx.dialect.paramstyle == "qmark" else "%s"
            table = tx.dialect.identifier_preparer.format_table(ROWS)
            text = f"INSERT INTO {table} (id, name, v) VALUES ({place}, {place}, {place})"
            self.write(tx, text, (50, "fifty", 5))
            self.assertEqual([(50, "fifty", 5)], [tuple(row) for row in tx.execute(_BY_ID, {"of_id": 50})])
        for database_error in (Duplicate, db_errors.DBDuplicateEntry):
            with self.assertRaises(database_error), self.database.write() as tx:
                self.write(tx, text, (50, "again", 5))
        with self.assertRaises(sa.exc.InvalidRequestError), self.database.write() as tx, tx.begin_nested() as savepoint:
            savepoint.rollback()
            self.write(tx, text, (51, "never", 5))
        with self.database.write() as tx:
            sa.event.listen(
                sa.Engine,
                "before_cursor_execute",
                note := lambda conn, cursor, statement, *more: seen.append(statement),
            )
            self.addCleanup(sa.event.remove, sa.Engine, "before_cursor_execute", note)
            self.write(tx, text, (52, "heard", 5))
        self.assertEqual([text], [each for each in seen if each.startswith("INSERT")])
        with self.database.read() as tx:
            self.assertEqual([50, 52], list(tx.execute(_OTHERS, {"ids": [1, 2]}).scalars()))

    def write(self, tx: sa.Connection, text: str, values: tuple[Any, ...]) -> None:
        assert isinstance(tx, PreparedConnection)
        tx.write_driver_sql(text, values)

    def test_a_savepoint_that_was_rolled_back_takes_no_statement(self) -> None:
        for _ in range(3):
            with (
                self.database.write() as tx,
                self.assertRaises(sa.exc.InvalidRequestError),
                tx.begin_nested() as savepoint,
            ):
                savepoint.rollback()
                tx.execute(_COUNT)

    def test_listeners_see_every_statement(self) -> None:
        seen: list[str] = []

        def note(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
            seen.append(statement)

        self.thrice(_COUNT)
        sa.event.listen(sa.Engine, "before_cursor_execute", note)
        self.addCleanup(sa.event.remove, sa.Engine, "before_cursor_execute", note)
        with self.database.read() as tx:
            seen.clear()
            for _ in range(3):
                self.assertNotIsInstance(tx.execute(_COUNT), Rows)
        self.assertEqual(3, len(seen))


class SqlitePreparedTests(PreparedCases, unittest.TestCase):
    def test_several_rows_are_prepared_too(self) -> None:
        given: list[Mapping[str, Any]] = [{"of_id": 1, "more": 1}, {"of_id": 2, "more": 1}]
        with self.database.write() as tx:
            tx.execute(_RAISE, given)
            result = tx.execute(_RAISE, given)
            self.assertIsInstance(result, Rows)
            self.assertEqual(2, result.rowcount)
            self.assertIsInstance(tx, PreparedConnection)


class PostgresqlPreparedTests(PreparedCases, unittest.TestCase):
    kind = "postgresql"


class MariadbPreparedTests(PreparedCases, unittest.TestCase):
    kind = "mariadb"
