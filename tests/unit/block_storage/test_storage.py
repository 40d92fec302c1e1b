# SPDX-License-Identifier: Apache-2.0
"""Block storage on SQLite."""

from __future__ import annotations

import tempfile

from tests.unit.block_storage import storage_tests


class SqliteStorageTests(storage_tests.StorageTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()
