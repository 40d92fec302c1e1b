# SPDX-License-Identifier: Apache-2.0
"""Block storage on PostgreSQL and MariaDB."""

from __future__ import annotations

from tests import servers
from tests.unit.block_storage import storage_tests


class PostgresqlStorageTests(storage_tests.StorageTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbStorageTests(storage_tests.StorageTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))
