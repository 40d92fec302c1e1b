# SPDX-License-Identifier: Apache-2.0
"""The journal on PostgreSQL and MariaDB, and with writers at three nodes of a Galera cluster by ``make soak``."""

from __future__ import annotations

import unittest
from concurrent.futures import ThreadPoolExecutor

import sqlalchemy as sa

from moorage import errors
from moorage.db import Database
from moorage.journal.reader import JournalReader
from moorage.journal.sequencer import Sequencer
from tests import SOAK, servers
from tests.functional.databases import MariadbCase, PostgresqlCase
from tests.servers import galera
from tests.unit.journal import journal_tests


class PostgresqlJournalTests(PostgresqlCase, journal_tests.JournalTests):
    pass


class MariadbJournalTests(MariadbCase, journal_tests.JournalTests):
    pass


class PostgresqlHeldTransactionTests(PostgresqlCase, journal_tests.HeldTransactionTests):
    pass


class MariadbHeldTransactionTests(MariadbCase, journal_tests.HeldTransactionTests):
    pass


class GaleraJournalTests(unittest.TestCase):
    def setUp(self) -> None:
        if not SOAK:
            self.skipTest("a cluster takes minutes; make soak runs it")
        servers.refuse(galera.missing())

    def test_writers_and_sequencers_at_three_nodes_make_one_order(self) -> None:
        with galera.cluster(3) as nodes:
            first = sa.make_url(servers.fresh_database(nodes[0]))
            case = journal_tests.JournalTests("test_writers_and_sequencers_in_a_race_make_one_order")
            urls = [first.set(port=node.port).render_as_string(hide_password=False) for node in nodes]
            case.url = urls[0]
            case.setUp()
            self.addCleanup(case.doCleanups)
            for url in urls[1:]:
                servers.wait_until(lambda url=url: _has_table(url), "the node has the tables", 60)  # type: ignore[misc]
            case.urls = urls
            case.test_writers_and_sequencers_in_a_race_make_one_order()

    def test_a_cursor_that_a_node_has_not_reached_yet_is_waited_for(self) -> None:
        """One node applies nothing while the other one commits; a read at the first node has a cursor of the second one."""
        with galera.cluster(2) as nodes, ThreadPoolExecutor(1) as pool:
            first = sa.make_url(servers.fresh_database(nodes[0]))
            case = journal_tests.JournalTests("test_an_event_exists_exactly_if_its_change_does")
            case.url = first.render_as_string(hide_password=False)
            case.setUp()
            self.addCleanup(case.doCleanups)
            behind = first.set(port=nodes[1].port).render_as_string(hide_password=False)
            servers.wait_until(lambda: _has_table(behind), "the node has the tables", 60)
            case.urls = [case.url, behind]
            lagging = case.another(node=1)
            case.change()
            sequencer = Sequencer(case.database)
            self.assertEqual(1, sequencer.number())
            servers.wait_until(lambda: JournalReader(lagging).last() == 1, "the node has the first event", 60)
            engine = sa.create_engine(behind)
            self.addCleanup(engine.dispose)
            with engine.connect() as stopping:
                stopping.exec_driver_sql("FLUSH TABLES WITH READ LOCK")
                case.change()
                self.assertEqual(1, sequencer.number())
                # Later than the snapshot in which the node is seen behind.
                reading = pool.submit(JournalReader(lagging).page, 2, journal_tests.ALL, 10)
                servers.wait_until(lambda: _waits_for_the_cluster(stopping), "the read waits for the cluster", 60)
                self.assertEqual(1, JournalReader(lagging).last())
                stopping.exec_driver_sql("UNLOCK TABLES")
            page = reading.result(60)
            self.assertEqual(([], 2), (list(page.events), page.cursor))
            with self.assertRaisesRegex(errors.Gone, "never had a newer one"):
                JournalReader(lagging).page(3, journal_tests.ALL, 10)
            with lagging.read() as tx:
                self.assertEqual(0, tx.exec_driver_sql("SELECT @@wsrep_sync_wait").scalar_one(), "as it was before")


def _waits_for_the_cluster(connection: sa.Connection) -> bool:
    """Whether a statement on the sequence runs: it is asked for by primary key of one row, and lasts only when it waits."""
    running = connection.exec_driver_sql("SELECT info FROM information_schema.processlist").scalars()
    return any(text is not None and "FROM event_sequence" in text for text in running)


def _has_table(url: str) -> bool:
    database = Database(url)
    try:
        with database.read() as tx:
            return sa.inspect(tx).has_table("journal_things")
    finally:
        database.close()
