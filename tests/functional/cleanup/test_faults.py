# SPDX-License-Identifier: Apache-2.0
"""Faults on PostgreSQL and MariaDB."""

from __future__ import annotations

from tests import servers
from tests.unit.cleanup import fault_tests


class PostgresqlFaultTests(fault_tests.FaultTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbFaultTests(fault_tests.FaultTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))
