# SPDX-License-Identifier: Apache-2.0
"""Worker rows on SQLite."""

from __future__ import annotations

import tempfile

from tests.unit.work import operation_tests


class SqliteWorkerTests(operation_tests.OperationTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()
