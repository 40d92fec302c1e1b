# SPDX-License-Identifier: Apache-2.0
"""Readings of the fleet by what changed, on SQLite."""

from __future__ import annotations

import pathlib
import tempfile
import unittest

from typing_extensions import override

from moorage.db import Database, migrations
from tests.unit.fleet.store_fleet_tests import StoreFleetTests


class TestStoreFleet(StoreFleetTests, unittest.TestCase):
    @override
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.database = Database(f"sqlite:///{pathlib.Path(folder.name) / 'moorage.sqlite'}")
        self.addCleanup(self.database.close)
        migrations.upgrade_all(self.database)
        super().setUp()
