# SPDX-License-Identifier: Apache-2.0
"""Aggregates on real database servers."""

from __future__ import annotations

import unittest

from moorage.db import Database, migrations
from tests import servers
from tests.unit.fleet.aggregate_tests import AggregateTests


class ServerCase(AggregateTests):
    kind: str

    @classmethod
    def setUpClass(cls) -> None:
        cls.database = Database(servers.fresh_database(servers.shared(cls.kind)))
        cls.addClassCleanup(cls.database.close)
        migrations.upgrade_all(cls.database)


class TestPostgresql(ServerCase, unittest.TestCase):
    kind = "postgresql"


class TestMariadb(ServerCase, unittest.TestCase):
    kind = "mariadb"
