# SPDX-License-Identifier: Apache-2.0
"""Claims on a Galera cluster with several writers; conflicts come as late as at the commit there."""

from __future__ import annotations

import os
import signal
import unittest
from concurrent.futures import ThreadPoolExecutor

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.audit import audit
from moorage.allocation.interface import ClaimRequest
from moorage.db import Database
from moorage.testing.allocation import all_allocations, new_uuid, provider
from tests import SOAK, servers
from tests.conformance.allocation.stores import create_tables, sql_store
from tests.functional.allocation import claimer
from tests.functional.allocation.test_failover import Generations
from tests.functional.allocation.test_processes import Claimer, Race, wait_for_claims
from tests.servers import galera
from tests.servers.proxy import Proxy


class GaleraTests(unittest.TestCase):
    def setUp(self) -> None:
        if not SOAK:
            self.skipTest("a cluster takes minutes; make soak runs it")
        servers.refuse(galera.missing())

    def test_a2_writers_on_three_nodes_fill_providers_exactly(self) -> None:
        with galera.cluster(3) as nodes:
            first = sa.make_url(servers.fresh_database(nodes[0]))
            urls = [first.set(port=node.port).render_as_string(hide_password=False) for node in nodes]
            race = Race(self, urls[0], 300)
            for url in urls:
                servers.wait_until(lambda url=url: self.sees(url, 2), "the node has the providers", 60)  # type: ignore[misc]
            claimers = race.start([f"p{number}" for number in range(6)], urls=urls)
            for each in claimers:
                each.join()
                self.assertEqual(("full", ""), each.last)
            race.check(claimers, unknown=0)
            for url in urls:
                servers.wait_until(lambda url=url: self.held(url) == 600, "the node has all of it", 60)  # type: ignore[misc]
            race.database.close()

    def test_a4_all_nodes_killed_at_once_lose_no_acknowledged_claim(self) -> None:
        with galera.cluster(3) as nodes:
            first = sa.make_url(servers.fresh_database(nodes[0]))
            urls = [first.set(port=node.port).render_as_string(hide_password=False) for node in nodes]
            race = Race(self, urls[0], 300)
            for url in urls:
                servers.wait_until(lambda url=url: self.sees(url, 2), "the node has the providers", 60)  # type: ignore[misc]
            claimers = race.start([f"p{number}" for number in range(6)], urls=urls)
            wait_for_claims(claimers, 30)
            for node in nodes:
                os.kill(node.pid, signal.SIGKILL)
            for node in nodes:
                node.kill()
            galera.recover(nodes)
            for each in claimers:
                each.join()
                self.assertEqual(("full", ""), each.last)
            race.check(claimers, unknown=0)
            for url in urls:
                servers.wait_until(lambda url=url: self.held(url) == 600, "the node has all of it", 60)  # type: ignore[misc]
            race.database.close()

    def test_a5_clients_that_fail_over_to_another_node_see_no_generation_fall_and_lose_nothing(self) -> None:
        with galera.cluster(3) as nodes, Proxy(nodes[0].host, nodes[0].port, lambda piece: False) as proxy:
            first = sa.make_url(servers.fresh_database(nodes[0]))
            urls = [first.set(port=node.port).render_as_string(hide_password=False) for node in nodes]
            race = Race(self, urls[1], 300)
            for url in urls:
                servers.wait_until(lambda url=url: self.sees(url, 2), "the node has the providers", 60)  # type: ignore[misc]
            through = first.set(port=proxy.port).render_as_string(hide_password=False)
            watch = Generations(through, race.providers[0], wsrep_sync_wait=1)
            self.addCleanup(watch.end)
            claimers = race.start([f"p{number}" for number in range(4)], urls=[through])
            wait_for_claims(claimers, 30)
            nodes[0].pause()
            proxy.turn_to(nodes[1].host, nodes[1].port)
            wait_for_claims(claimers, 30)
            nodes[0].resume()
            for each in claimers:
                each.join()
                self.assertEqual(("full", ""), each.last)
            watch.end()
            self.assertEqual(([], True), (watch.falls, watch.seen > 100), watch.seen)
            race.check(claimers, unknown=0)
            for url in urls:
                servers.wait_until(lambda url=url: self.held(url) == 600, "the node has all of it", 120)  # type: ignore[misc]
            race.database.close()

    def test_combined_claims_on_two_nodes_fill_providers_exactly(self) -> None:
        with galera.cluster(2) as nodes:
            first = sa.make_url(servers.fresh_database(nodes[0]))
            urls = [first.set(port=node.port).render_as_string(hide_password=False) for node in nodes]
            given = [provider(VCPU=60) for _ in range(4)]
            stores = []
            for url in urls:
                database = Database(url, pool_size=16)
                self.addCleanup(database.close)
                stores.append(sql_store(database, claims_per_transaction=16))
            create_tables(stores[0]._database)
            stores[0].ensure_providers(given)
            servers.wait_until(lambda: self.sees(urls[1], 4), "the node has the providers", 60)
            together: list[int] = []

            def claims(number: int) -> int:
                """Claim of each provider in turn until all are full."""
                store, made, free = stores[number % 2], 0, {each.uuid for each in given}
                while free:
                    uuid = sorted(free)[(number + made) % len(free)]
                    request = ClaimRequest(new_uuid(), {uuid: {"VCPU": 1}}, "r")
                    while True:
                        try:
                            together.append(store.claim(request).together)
                            made += 1
                        except errors.CapacityExceeded:
                            free.discard(uuid)
                        except (errors.StoreBusy, errors.StoreUnavailable):
                            continue
                        break
                return made

            with ThreadPoolExecutor(16) as pool:
                self.assertEqual(240, sum(pool.map(claims, range(16))))
            self.assertLess(1, max(together))
            for url in urls:
                servers.wait_until(lambda url=url: self.held(url) == 240, "the node has all of it", 60)  # type: ignore[misc]
            self.assertTrue(audit(stores[0]).clean)

    def test_writers_on_three_nodes_fill_a_limit_exactly_and_leave_its_counter_right(self) -> None:
        limit = 400
        with galera.cluster(3) as nodes:
            first = sa.make_url(servers.fresh_database(nodes[0]))
            urls = [first.set(port=node.port).render_as_string(hide_password=False) for node in nodes]
            race = Race(self, urls[0], 100_000)
            given = [provider(VCPU=10_000, MEMORY_MB=10_000) for _ in range(2)]
            race.store.ensure_providers(given)
            race.store.set_quota("p", "VCPU", limit)
            for url in urls:
                # A claim on a node that has no limit yet began before the limit.
                servers.wait_until(lambda url=url: self.limits(url) == [(limit, 0)], "the node has the limit", 60)  # type: ignore[misc]
            claimers = [
                Claimer(self, urls[number % 3], f"p{number}", [given[0].uuid], claimer.of_project)
                for number in range(6)
            ]
            for each in claimers:
                each.ready()
            for each in claimers:
                each.go()
            wait_for_claims(claimers, 60)
            claimers[1].signal(signal.SIGKILL)
            for each in claimers:
                each.join()
            self.assertEqual({("full", "")}, {each.last for each in claimers if each is not claimers[1]})
            for url in urls:
                servers.wait_until(lambda url=url: self.limits(url) == [(limit, limit)], "the node has it full", 60)  # type: ignore[misc]
                self.assertEqual(limit, self.held(url))
            self.assertTrue(audit(race.store).clean)
            churning = [
                Claimer(self, urls[number % 3], f"c{number}", [each.uuid for each in given], claimer.churn)
                for number in range(6)
            ]
            for each in churning:
                each.ready()
            for each in churning:
                each.go()
            for each in churning:
                each.join()
                self.assertEqual(("full", ""), each.last)
            self.assertEqual([], race.store.quota_drift())
            self.assertTrue(audit(race.store).clean)

    def limits(self, url: str) -> list[tuple[int, int]]:
        database = Database(url)
        try:
            return [(each.limit, each.used) for each in sql_store(database).quotas()]
        finally:
            database.close()

    def sees(self, url: str, providers: int) -> bool:
        database = Database(url)
        try:
            return len(sql_store(database).usages()) == providers
        finally:
            database.close()

    def held(self, url: str) -> int:
        """What the node has; a node that is coming back is asked again by the caller."""
        database = Database(url)
        try:
            store = sql_store(database)
            self.assertEqual([], store.drift())
            return sum(item.used for item in all_allocations(store))
        except errors.StoreUnavailable:
            return -1
        finally:
            database.close()
