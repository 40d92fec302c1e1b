# SPDX-License-Identifier: Apache-2.0
"""Indexes that have only some rows are used by the statements that look for these rows."""

from __future__ import annotations

import unittest
from typing import Any

import sqlalchemy as sa

from moorage.db import Database
from moorage.testing import database
from moorage_plugins.compute import instances
from moorage_plugins.stores import quota_enforcement, statements
from tests.functional.databases import PostgresqlCase
from tests.plans import plan_of

#: Index -> the statements that must find their rows by it, with their parameters.
USES: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "ix_consumers_expires_at": [(statements.OVERDUE, {"of_limit": 10})],
    "ix_consumers_counts_with": [(quota_enforcement.HOLDINGS, {"units": list("abcdefghij"), "of_project": "p"})],
    "ix_instances_server_group": [
        (instances._MEMBERS, {"of_group": "g"}),
        (instances._MEMBERS_OF_PROJECT, {"of_group": "g", "of_project": "p"}),
    ],
    "ix_instances_destination": [
        (instances._ON_NODE, {"of_node": "n"}),
        (instances._GOING_TO, {"of_nodes": ["n", "m"]}),
    ],
}


class PartialIndexTests(unittest.TestCase):
    url = ""

    def setUp(self) -> None:
        super().setUp()
        if self.url:
            self.database = Database(self.url)
            self.addCleanup(self.database.close)
            database.create_all(self.database)
        else:
            self.database = self.enterContext(database.temporary(tables=True))

    def test_statements_that_look_for_the_rows_use_the_index(self) -> None:
        for index, uses in USES.items():
            for statement, parameters in uses:
                plan = self.plan(statement, parameters)
                self.assertIn(index, plan, statement)
                self.assertNotIn("ix_consumers_project_id", plan)

    def test_the_indexes_have_no_other_rows(self) -> None:
        with self.database.read() as tx:
            for index in USES:
                self.assertIn(" WHERE ", self.definition(tx, index))

    def plan(self, statement: Any, parameters: dict[str, Any]) -> str:
        with self.database.read() as tx:
            if tx.dialect.name == "postgresql":
                # A table without rows is read as a whole otherwise.
                tx.exec_driver_sql("SET LOCAL enable_seqscan = off").close()
            return plan_of(tx, statement, parameters)

    def definition(self, tx: sa.Connection, index: str) -> str:
        query = "SELECT sql FROM sqlite_master WHERE name = :name"
        if tx.dialect.name == "postgresql":
            query = "SELECT indexdef FROM pg_indexes WHERE indexname = :name"
        return str(tx.execute(sa.text(query), {"name": index}).scalar_one())


class PostgresqlPartialIndexTests(PostgresqlCase, PartialIndexTests):
    pass
