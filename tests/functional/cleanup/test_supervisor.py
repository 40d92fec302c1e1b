# SPDX-License-Identifier: Apache-2.0
"""Supervisors on PostgreSQL and MariaDB."""

from __future__ import annotations

from tests import servers
from tests.unit.cleanup import supervisor_tests


class PostgresqlSupervisorTests(supervisor_tests.SupervisorTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbSupervisorTests(supervisor_tests.SupervisorTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))
