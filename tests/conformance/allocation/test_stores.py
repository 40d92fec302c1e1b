# SPDX-License-Identifier: Apache-2.0
"""The reference stores on the conformance kit: memory, and sql on the three databases."""

from __future__ import annotations

import contextlib
import unittest
from typing import Any

from typing_extensions import override

from moorage.allocation.interface import AllocationStore
from moorage.testing.allocation import AllocationStoreTests
from moorage.testing.candidates import CandidateTests
from moorage.testing.catalogue import CatalogueTests
from moorage.testing.ledger import LedgerTests
from tests.conformance.allocation.stores import SqlCase, memory_store, sql_store


class MemoryStoreTests(AllocationStoreTests, CatalogueTests, LedgerTests, CandidateTests, unittest.TestCase):
    @override
    def make_store(self) -> AllocationStore:
        return memory_store()


class SqliteStoreTests(SqlCase, AllocationStoreTests, CatalogueTests, LedgerTests, CandidateTests, unittest.TestCase):
    @override
    def make_store(self) -> AllocationStore:
        self.empty()
        return self.another_store()

    @override
    def another(self, store: AllocationStore) -> AllocationStore:
        return self.another_store()

    def another_store(self) -> AllocationStore:
        return sql_store(self.database)

    @override
    def transaction(self, store: AllocationStore) -> contextlib.AbstractContextManager[Any]:
        return self.database.write()


class PostgresqlStoreTests(SqliteStoreTests):
    server = "postgresql"


class MariadbStoreTests(SqliteStoreTests):
    server = "mariadb"


class GroupingStoreTests(SqliteStoreTests):
    """Claims that come at once are made together; nobody may notice."""

    @override
    def another(self, store: AllocationStore) -> AllocationStore:
        # Threads of one process have one store; otherwise nothing would be grouped.
        return store

    @override
    def another_store(self) -> AllocationStore:
        return sql_store(self.database, claims_per_transaction=8)


class GroupingPostgresqlStoreTests(GroupingStoreTests):
    server = "postgresql"
