# SPDX-License-Identifier: Apache-2.0
"""The journal on SQLite."""

from __future__ import annotations

import pathlib
import tempfile

from tests.unit.journal import journal_tests


class SqliteJournalTests(journal_tests.JournalTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{pathlib.Path(folder.name) / 'test.sqlite'}"
        super().setUp()
