# SPDX-License-Identifier: Apache-2.0
"""Column types, names of constraints, database time as SQL."""

from __future__ import annotations

import unittest
from typing import Any

import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.dialects import mysql, oracle, postgresql, sqlite
from sqlalchemy.schema import CreateTable

from moorage.db import new_metadata, now
from moorage.db.schema import BigId, JsonText, Uuid, exact, source_of

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def _table() -> sa.Table:
    return sa.Table(
        "things",
        new_metadata(),
        sa.Column("id", BigId, primary_key=True),
        sa.Column("uuid", Uuid, nullable=False),
        sa.Column("name", exact(80), nullable=False),
        sa.Column("extra", JsonText),
        sa.UniqueConstraint("uuid", "name"),
        sa.Index(None, "name", "id"),
    )


def _ddl(dialect: Any) -> str:
    return " ".join(str(CreateTable(_table()).compile(dialect=dialect)).split())


class SchemaTest(unittest.TestCase):
    """What a table of Moorage is on each database."""

    def test_constraints_have_names_that_do_not_depend_on_the_database(self) -> None:
        for dialect in (sqlite.dialect(), postgresql.dialect(), mysql.dialect()):
            with self.subTest(dialect.name):
                self.assertIn("CONSTRAINT uq_things_uuid_name UNIQUE", _ddl(dialect))
        self.assertEqual({"ix_things_name_id"}, {index.name for index in _table().indexes})

    def test_text_is_compared_by_its_code_points(self) -> None:
        self.assertIn('name VARCHAR(80) COLLATE "C" NOT NULL', _ddl(postgresql.dialect()))
        self.assertIn("name VARCHAR(80) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL", _ddl(mysql.dialect()))

    def test_mariadb_keeps_tables_in_innodb_with_all_of_unicode(self) -> None:
        ddl = _ddl(mysql.dialect())
        self.assertIn("ENGINE=InnoDB", ddl)
        self.assertRegex(ddl, r"CHARSET=utf8mb4")

    def test_other_peoples_tables_are_left_alone(self) -> None:
        foreign = sa.Table("foreign", sa.MetaData(), sa.Column("id", sa.Integer))
        self.assertNotIn("ENGINE", str(CreateTable(foreign).compile(dialect=mysql.dialect())))

    def test_keys_count_up_on_sqlite(self) -> None:
        self.assertIn("id INTEGER NOT NULL", _ddl(sqlite.dialect()))
        self.assertIn("id BIGSERIAL NOT NULL", _ddl(postgresql.dialect()))

    def test_revisions_write_the_types_by_their_names(self) -> None:
        self.assertEqual(
            ["BigId", "exact(36)", "exact(80)", "JsonText()", None],
            [source_of(each) for each in (BigId, Uuid, exact(80), JsonText(), sa.String(80))],
        )

    @settings(max_examples=50)
    @given(_JSON)
    def test_json_comes_back_as_it_went(self, value: Any) -> None:
        column, dialect = JsonText(), sqlite.dialect()
        self.assertEqual(value, column.process_result_value(column.process_bind_param(value, dialect), dialect))

    def test_database_time_is_refused_where_nobody_defined_it(self) -> None:
        with self.assertRaisesRegex(NotImplementedError, "oracle"):
            sa.select(now()).compile(dialect=oracle.dialect())
