# SPDX-License-Identifier: Apache-2.0
"""Ledger, claims and controls on SQLite."""

from __future__ import annotations

import tempfile

from tests.unit.coordination import store_tests


class SqliteStoreTests(store_tests.StoreTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()
