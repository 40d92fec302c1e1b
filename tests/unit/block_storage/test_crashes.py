# SPDX-License-Identifier: Apache-2.0
"""Crashes and pauses at every point, on SQLite."""

from __future__ import annotations

import tempfile

from tests.unit.block_storage import crash_tests


class SqliteCrashTests(crash_tests.CrashTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()


class SqlitePauseTests(crash_tests.PauseTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()
