# SPDX-License-Identifier: Apache-2.0
"""Worker rows on PostgreSQL and MariaDB."""

from __future__ import annotations

from tests import servers
from tests.unit.cleanup import worker_tests


class PostgresqlWorkerTests(worker_tests.WorkerTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbWorkerTests(worker_tests.WorkerTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))
