# SPDX-License-Identifier: Apache-2.0
"""Random histories on SQLite."""

from __future__ import annotations

import tempfile
import unittest

from tests.unit.cleanup import state_tests


class SqliteStateTests(unittest.TestCase):
    def test_random_histories(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            case, database = state_tests.machine_for(f"sqlite:///{folder}/test.sqlite", 25)
            try:
                case("runTest").runTest()
            finally:
                database.close()
