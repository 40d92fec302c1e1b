# SPDX-License-Identifier: Apache-2.0
"""Cleaners on SQLite."""

from __future__ import annotations

import tempfile

from tests.unit.cleanup import cleaner_tests


class SqliteCleanerTests(cleaner_tests.CleanerTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()
