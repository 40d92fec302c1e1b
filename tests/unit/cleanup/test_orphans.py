# SPDX-License-Identifier: Apache-2.0
"""The statements of cleaners on SQLite."""

from __future__ import annotations

import tempfile

from tests.unit.cleanup import orphan_tests


class SqliteOrphanTests(orphan_tests.OrphanTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()
