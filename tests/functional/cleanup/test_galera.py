# SPDX-License-Identifier: Apache-2.0
"""Cleaners at three nodes of a Galera cluster; by ``make soak``. Locks are a node's own there: the commit decides."""

from __future__ import annotations

import functools
import random
import time
import unittest
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import sqlalchemy as sa

from moorage.cleanup.cleaner import Cleaner, Policy
from moorage.cleanup.orphans import OrphanStore
from moorage.cleanup.tables import cleanup_history
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.work.operations import SqlOperationStore
from tests import SOAK, servers
from tests.servers import galera
from tests.unit.cleanup import cleaner_tests
from tests.unit.cleanup.cleaner_tests import AFTER_DEAD, ThingHandler, ThingSetHandler, Tools
from tests.unit.work.operation_tests import TYPE, identity, things

ROWS = 600


class GaleraCleanerTests(unittest.TestCase):
    def setUp(self) -> None:
        if not SOAK:
            self.skipTest("a cluster takes minutes; make soak runs it")
        servers.refuse(galera.missing())

    def test_cleaners_at_three_nodes_finish_each_row_once(self) -> None:
        with galera.cluster(3) as nodes:
            first = sa.make_url(servers.fresh_database(nodes[0]))
            urls = [first.set(port=node.port).render_as_string(hide_password=False) for node in nodes]
            for handler in (ThingSetHandler, ThingHandler):
                with self.subTest(handler.__name__):
                    self.clean(urls, handler)

    def clean(self, urls: list[str], handler: type[ThingHandler]) -> None:
        case = cleaner_tests.CleanerTests("setUp")
        case.url = urls[0]
        case.setUp()
        self.addCleanup(case.doCleanups)
        for number in range(ROWS):
            case.orphan(f"{number * 7919 % 4096:08x}-{number}")
        databases = [Database(url) for url in urls]
        for database in databases:
            self.addCleanup(database.close)
            servers.wait_until(lambda database=database: self.count(database) == ROWS, "the node has all rows", 60)  # type: ignore[misc]
        cleaners = []
        for number, database in enumerate([*databases, databases[0]]):
            who = identity(f"cleaner-{number}")
            store = OrphanStore(database, SqlOperationStore(database, lease_seconds=60), who, SystemClock())
            made = handler(Tools(database, who))
            policy = Policy(batch=50, backoff=0.01, backoff_longest=0.01)
            cleaners.append(Cleaner(store, {TYPE: made}, SystemClock(), random.Random(number), policy))
        began = time.monotonic()
        done: Counter[str] = Counter()
        with ThreadPoolExecutor(len(cleaners)) as pool:
            while self.count(databases[0]):
                done += sum(pool.map(lambda cleaner: cleaner.clean(AFTER_DEAD), cleaners), Counter())
        print(f"galera, {handler.__name__}: {ROWS} rows in {time.monotonic() - began:.1f} s, {dict(done)}")  # noqa: T201
        for cleaner in cleaners:
            cleaner.stop()
        for database in databases:
            # A node applies what others have committed a moment later.
            wait = functools.partial(self.statuses, database)
            servers.wait_until(lambda wait=wait: wait() == {"error": ROWS}, "the node sees all in error", 60)  # type: ignore[misc]
            with database.read() as tx:
                outcomes = Counter(tx.execute(sa.select(cleanup_history.c.outcome)).scalars())
            self.assertEqual((outcomes["done"], self.count(database)), (ROWS, 0), "one end for each")

    def statuses(self, database: Database) -> Counter[str]:
        with database.read() as tx:
            return Counter(tx.execute(sa.select(things.c.status)).scalars())

    def count(self, database: Database) -> int:
        with database.read() as tx:
            return int(tx.execute(sa.text("SELECT COUNT(*) FROM workers")).scalar_one())
