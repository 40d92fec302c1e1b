# SPDX-License-Identifier: Apache-2.0
"""The purge of fences on SQLite."""

from __future__ import annotations

import pathlib
import tempfile

from tests.unit.work import fence_tests


class SqliteFenceTests(fence_tests.FenceTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{pathlib.Path(folder.name) / 'test.sqlite'}"
        super().setUp()
