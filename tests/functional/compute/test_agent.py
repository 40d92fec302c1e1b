# SPDX-License-Identifier: Apache-2.0
"""The compute agent on PostgreSQL and MariaDB, and as processes that are killed and paused on all three databases."""

from __future__ import annotations

import tempfile

from tests.functional.compute import process_tests
from tests.functional.databases import MariadbCase, PostgresqlCase
from tests.unit.compute import actual_tests, agent_tests, move_tests, resize_tests


class SqliteProcessTests(process_tests.ProcessTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()


class PostgresqlProcessTests(PostgresqlCase, process_tests.ProcessTests):
    pass


class MariadbProcessTests(MariadbCase, process_tests.ProcessTests):
    pass


class PostgresqlAgentTests(PostgresqlCase, agent_tests.AgentTests):
    pass


class MariadbAgentTests(MariadbCase, agent_tests.AgentTests):
    pass


class PostgresqlInstanceStoreTests(PostgresqlCase, agent_tests.InstanceStoreTests):
    pass


class MariadbInstanceStoreTests(MariadbCase, agent_tests.InstanceStoreTests):
    pass


class PostgresqlActualStateTests(PostgresqlCase, actual_tests.ActualStateTests):
    pass


class MariadbActualStateTests(MariadbCase, actual_tests.ActualStateTests):
    pass


class PostgresqlMoveTests(PostgresqlCase, move_tests.MoveTests):
    pass


class MariadbMoveTests(MariadbCase, move_tests.MoveTests):
    pass


class PostgresqlResizeTests(PostgresqlCase, resize_tests.ResizeTests):
    pass


class MariadbResizeTests(MariadbCase, resize_tests.ResizeTests):
    pass
