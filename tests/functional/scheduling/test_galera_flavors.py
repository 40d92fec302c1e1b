# SPDX-License-Identifier: Apache-2.0
"""The catalogue of flavors on a Galera cluster: administrators and adopters write at different nodes at once."""

from __future__ import annotations

import functools
import unittest

import sqlalchemy as sa

from moorage import errors
from moorage.clock import SystemClock
from moorage.db import Database, migrations
from moorage.instances.flavor_adoption import FlavorAdoption
from moorage.scheduling.flavors import FlavorStore, FlavorVersion
from moorage_plugins.compute.instances import ComputeInstances
from tests import SOAK, servers
from tests.servers import galera
from tests.unit.fleet.aggregate_tests import together
from tests.unit.instances.adoption_tests import AdoptionTests

NODES, THREADS = 3, 4


class GaleraFlavorTests(unittest.TestCase):
    def setUp(self) -> None:
        if not SOAK:
            self.skipTest("a cluster takes minutes; make soak runs it")
        servers.refuse(galera.missing())

    def _has_version(self, store: FlavorStore, version: int) -> bool:
        found = store.newest("small")
        return version == (found.version if found is not None else 0)

    def test_of_many_at_three_nodes_one_adds_the_next_version_and_all_adopt_the_same(self) -> None:
        nodes = self.enterContext(galera.cluster(NODES))
        first = sa.make_url(servers.fresh_database(nodes[0]))
        databases = [
            Database(first.set(port=node.port).render_as_string(hide_password=False), pool_size=16, service="test")
            for node in nodes
        ]
        for database in databases:
            self.addCleanup(database.close)
        migrations.upgrade_all(databases[0])
        for database in databases:
            servers.wait_until(functools.partial(self._has_table, database), "the node has the tables", 60)
        self._add_versions([FlavorStore(database) for database in databases])
        self._adopt(databases)

    def _has_table(self, database: Database) -> bool:
        with database.read() as tx:
            columns = sa.inspect(tx).get_columns("instances") if sa.inspect(tx).has_table("instances") else []
            return any(each["name"] == "flavor_version" for each in columns)

    def _add_versions(self, stores: list[FlavorStore]) -> None:
        for expected in range(5):
            for store in stores:
                servers.wait_until(
                    functools.partial(self._has_version, store, expected), "the node has the version", 60
                )
            done = together(
                *(
                    functools.partial(
                        store.create, "small", {"VCPU": 100 * expected + 10 * node + number + 1}, {}, expected
                    )
                    for node, store in enumerate(stores)
                    for number in range(THREADS)
                )
            )
            made = [each[0] for each in done if isinstance(each, tuple)]
            self.assertEqual([expected + 1], [each.version for each in made], done)
            refused = sum(isinstance(each, errors.Conflict) for each in done)
            self.assertEqual(NODES * THREADS - 1, refused, done)
        together(*(functools.partial(store.deprecate, "small") for store in stores))
        found: list[FlavorVersion] = list(stores[0].versions("small"))
        self.assertEqual(
            [(number, True, 2) for number in range(1, 6)], [(e.version, e.deprecated, e.generation) for e in found]
        )

    def _adopt(self, databases: list[Database]) -> None:
        class Case(AdoptionTests, unittest.TestCase):
            pass

        case = Case("check")
        case.database = databases[0]
        case.setUp()
        uuids = [case.earlier() for _ in range(250)]
        for database in databases:
            instances = ComputeInstances(conf=None, database=database, clock=SystemClock())
            servers.wait_until(lambda s=instances: len(s.list()) == len(uuids), "the node has the instances", 60)  # type: ignore[misc]
        done = together(
            *(
                FlavorAdoption(
                    database, ComputeInstances(conf=None, database=database, clock=SystemClock()), FlavorStore(database)
                ).run
                for database in databases
            )
        )
        self.assertEqual([], [each for each in done if isinstance(each, errors.MoorageError)])
        case.adopt()
        case.check()
        self.assertEqual(0, case.adopt().written)
