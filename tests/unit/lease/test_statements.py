# SPDX-License-Identifier: Apache-2.0
"""The two forms of each statement mean the same: the SQL does to a row what the model's step does."""

from __future__ import annotations

import unittest
from typing import Any

import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.work import lease

metadata = sa.MetaData()
#: The columns of a lease and the fence of a resource, in one.
rows = sa.Table(
    "rows",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("token", sa.Integer, nullable=False),
    sa.Column("owner", sa.String(1)),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("expires_at", sa.Integer, nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
)
NAMES = ("token", "owner", "epoch", "expires_at", "fence", "attempts")

SMALL = st.integers(0, 3)
ROW = st.fixed_dictionaries(
    {
        **{"token": SMALL, "owner": st.sampled_from([None, "a", "b"]), "epoch": SMALL, "expires_at": SMALL},
        **{"fence": SMALL, "attempts": SMALL},
    }
)
PARAMETERS = st.fixed_dictionaries(
    {
        **{"token": SMALL, "owner": st.sampled_from("ab"), "epoch": SMALL, "now": SMALL, "lease": SMALL},
        "attempts": st.just(1),
        **{"dead": st.sampled_from("ab"), "dead_epoch": SMALL},
    }
)


class StatementTests(unittest.TestCase):
    def setUp(self) -> None:
        self.engine = sa.create_engine("sqlite://")
        metadata.create_all(self.engine)
        self.addCleanup(self.engine.dispose)

    def after_sql(self, statement: lease.Statement, row: dict[str, Any], parameters: dict[str, Any]) -> Any:
        """Rows that were changed, and the row of id 1 afterwards; another row must stay as it was."""
        build = statement.update if statement.verb is lease.Verb.UPDATE else statement.delete
        with self.engine.begin() as tx:
            tx.execute(sa.delete(rows))
            tx.execute(sa.insert(rows), [{"id": 1, **row}, {"id": 2, **row}])
            count = tx.execute(build(rows, rows.c.id == 1, parameters)).rowcount
            found = {each.id: {name: getattr(each, name) for name in NAMES} for each in tx.execute(sa.select(rows))}
        self.assertEqual(found[2], row)
        return count, found.get(1)

    @settings(max_examples=300, deadline=None)
    @given(st.sampled_from(lease.STATEMENTS), ROW, PARAMETERS)
    def test_sql_and_model_agree(
        self, statement: lease.Statement, row: dict[str, Any], parameters: dict[str, Any]
    ) -> None:
        applies = statement.applies(row, parameters)
        expected = (1, statement.apply(row, parameters)) if applies else (0, row)
        self.assertEqual(self.after_sql(statement, row, parameters), expected)

    def test_no_statement_applies_to_a_missing_row(self) -> None:
        for statement in lease.STATEMENTS:
            self.assertFalse(statement.applies(None, {"token": 1, "now": 1, "owner": "a", "epoch": 1}))

    def test_a_statement_is_only_made_as_what_it_is(self) -> None:
        parameters = {"token": 1, "now": 1, "owner": "a", "epoch": 1, "lease": 1}
        with self.assertRaises(TypeError):
            lease.FINISH.update(rows, rows.c.id == 1, parameters)
        with self.assertRaises(TypeError):
            lease.TAKE.delete(rows, rows.c.id == 1, parameters)
