# SPDX-License-Identifier: Apache-2.0
"""States on SQLite."""

from __future__ import annotations

import pathlib
import tempfile
import unittest

from moorage.db import Database, migrations
from tests.unit.fleet.state_tests import StateTests


class TestStates(StateTests, unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.database = Database(f"sqlite:///{pathlib.Path(folder.name) / 'moorage.sqlite'}")
        cls.addClassCleanup(cls.database.close)
        migrations.upgrade_all(cls.database)
