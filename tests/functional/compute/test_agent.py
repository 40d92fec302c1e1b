# SPDX-License-Identifier: Apache-2.0
"""The compute agent on PostgreSQL and MariaDB, and as processes that are killed and paused on all three databases."""

from __future__ import annotations

import tempfile
import unittest

from tests import servers
from tests.functional.compute import process_tests
from tests.unit.compute import agent_tests


class SqliteProcessTests(process_tests.ProcessTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()


class _Postgresql(unittest.TestCase):
    url: str

    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class _Mariadb(unittest.TestCase):
    url: str

    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))


class PostgresqlProcessTests(_Postgresql, process_tests.ProcessTests):
    pass


class MariadbProcessTests(_Mariadb, process_tests.ProcessTests):
    pass


class PostgresqlAgentTests(_Postgresql, agent_tests.AgentTests):
    pass


class MariadbAgentTests(_Mariadb, agent_tests.AgentTests):
    pass


class PostgresqlInstanceStoreTests(_Postgresql, agent_tests.InstanceStoreTests):
    pass


class MariadbInstanceStoreTests(_Mariadb, agent_tests.InstanceStoreTests):
    pass
