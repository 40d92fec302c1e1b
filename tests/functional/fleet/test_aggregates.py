# SPDX-License-Identifier: Apache-2.0
"""Aggregates, server groups, flavors, states and readings of the fleet on real database servers."""

from __future__ import annotations

import unittest

from moorage.db import Database, migrations
from tests import servers
from tests.unit.fleet.aggregate_tests import AggregateTests
from tests.unit.fleet.state_tests import StateTests
from tests.unit.fleet.store_fleet_tests import StoreFleetTests
from tests.unit.instances.adoption_tests import AdoptionTests
from tests.unit.scheduling.flavor_tests import FlavorTests
from tests.unit.scheduling.group_tests import GroupTests


class ServerCase(unittest.TestCase):
    database: Database
    kind: str

    @classmethod
    def setUpClass(cls) -> None:
        cls.database = Database(servers.fresh_database(servers.shared(cls.kind)), pool_size=16, service="test")
        cls.addClassCleanup(cls.database.close)
        migrations.upgrade_all(cls.database)


class TestPostgresql(AggregateTests, ServerCase):
    kind = "postgresql"


class TestMariadb(AggregateTests, ServerCase):
    kind = "mariadb"


class TestGroupsOnPostgresql(GroupTests, ServerCase):
    kind = "postgresql"


class TestGroupsOnMariadb(GroupTests, ServerCase):
    kind = "mariadb"


class TestFlavorsOnPostgresql(FlavorTests, ServerCase):
    kind = "postgresql"


class TestFlavorsOnMariadb(FlavorTests, ServerCase):
    kind = "mariadb"


class TestAdoptionOnPostgresql(AdoptionTests, ServerCase):
    kind = "postgresql"


class TestAdoptionOnMariadb(AdoptionTests, ServerCase):
    kind = "mariadb"


class TestStatesOnPostgresql(StateTests, ServerCase):
    kind = "postgresql"


class TestStatesOnMariadb(StateTests, ServerCase):
    kind = "mariadb"


class TestReadingsOnPostgresql(StoreFleetTests, ServerCase):
    kind = "postgresql"


class TestReadingsOnMariadb(StoreFleetTests, ServerCase):
    kind = "mariadb"
