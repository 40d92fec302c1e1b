# SPDX-License-Identifier: Apache-2.0
"""Supervisors on SQLite."""

from __future__ import annotations

import tempfile

from tests.unit.cleanup import coordinator_tests


class SqliteSupervisorTests(coordinator_tests.SupervisorTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()
