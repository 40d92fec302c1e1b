# SPDX-License-Identifier: Apache-2.0
"""Ledger, claims and controls on PostgreSQL and MariaDB."""

from __future__ import annotations

from tests import servers
from tests.unit.coordination import store_tests


class PostgresqlStoreTests(store_tests.StoreTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbStoreTests(store_tests.StoreTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))
