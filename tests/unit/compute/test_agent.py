# SPDX-License-Identifier: Apache-2.0
"""The compute agent and its instances on SQLite."""

from __future__ import annotations

import tempfile
import unittest

from tests.unit.compute import actual_tests, agent_tests, move_tests, resize_tests


class _Sqlite(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()


class SqliteAgentTests(_Sqlite, agent_tests.AgentTests):
    pass


class SqliteInstanceStoreTests(_Sqlite, agent_tests.InstanceStoreTests):
    pass


class SqliteActualStateTests(_Sqlite, actual_tests.ActualStateTests):
    pass


class SqliteMoveTests(_Sqlite, move_tests.MoveTests):
    pass


class SqliteResizeTests(_Sqlite, resize_tests.ResizeTests):
    pass
