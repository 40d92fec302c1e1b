# SPDX-License-Identifier: Apache-2.0
"""The purge of fences on PostgreSQL and MariaDB, and at three nodes of a Galera cluster by ``make soak``."""

from __future__ import annotations

import unittest

import sqlalchemy as sa

from moorage.db import Database
from tests import SOAK, servers
from tests.servers import galera
from tests.unit.work import fence_tests


class PostgresqlFenceTests(fence_tests.FenceTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbFenceTests(fence_tests.FenceTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))


class GaleraFenceTests(unittest.TestCase):
    def setUp(self) -> None:
        if not SOAK:
            self.skipTest("a cluster takes minutes; make soak runs it")
        servers.refuse(galera.missing())

    def test_operations_that_race_with_purges_at_three_nodes_never_get_a_token_twice(self) -> None:
        with galera.cluster(3) as nodes:
            first = sa.make_url(servers.fresh_database(nodes[0]))
            case = fence_tests.FenceTests("setUp")
            case.url = first.render_as_string(hide_password=False)
            case.setUp()
            self.addCleanup(case.doCleanups)
            urls = [first.set(port=node.port).render_as_string(hide_password=False) for node in nodes]
            # Many threads write few rows: at three nodes most commits lose their race.
            databases = [Database(url, attempts=500) for url in urls]
            for database in databases:
                self.addCleanup(database.close)
                servers.wait_until(lambda database=database: _has_table(database), "the node has the tables", 60)  # type: ignore[misc]
            tokens = fence_tests.Race(databases, 20.0).run()
            for uuid, found in tokens.items():
                self.assertGreater(len(found), 4)
                self.assertEqual(len(set(found)), len(found), uuid)
            print(f"galera: {sum(map(len, tokens.values()))} tokens")  # noqa: T201


def _has_table(database: Database) -> bool:
    with database.read() as tx:
        return sa.inspect(tx).has_table("things")
