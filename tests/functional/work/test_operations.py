# SPDX-License-Identifier: Apache-2.0
"""Worker rows on PostgreSQL and MariaDB."""

from __future__ import annotations

from tests import servers
from tests.unit.work import operation_tests


class PostgresqlWorkerTests(operation_tests.OperationTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbWorkerTests(operation_tests.OperationTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))
