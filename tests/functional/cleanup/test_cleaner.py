# SPDX-License-Identifier: Apache-2.0
"""Cleaners on PostgreSQL and MariaDB."""

from __future__ import annotations

from tests import servers
from tests.unit.cleanup import cleaner_tests


class PostgresqlCleanerTests(cleaner_tests.CleanerTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbCleanerTests(cleaner_tests.CleanerTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))
