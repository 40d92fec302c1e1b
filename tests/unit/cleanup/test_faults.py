# SPDX-License-Identifier: Apache-2.0
"""Faults on SQLite."""

from __future__ import annotations

import tempfile

from tests.unit.cleanup import fault_tests


class SqliteFaultTests(fault_tests.FaultTests):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()
