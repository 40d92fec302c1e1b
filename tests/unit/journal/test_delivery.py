# SPDX-License-Identifier: Apache-2.0
"""Delivery of the journal, on SQLite."""

from __future__ import annotations

import pathlib
import tempfile

from tests.unit.journal import delivery_tests


class SqliteDeliveryTests(delivery_tests.DeliveryTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{pathlib.Path(folder.name) / 'test.sqlite'}"
        super().setUp()
