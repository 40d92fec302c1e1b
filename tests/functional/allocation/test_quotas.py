# SPDX-License-Identifier: Apache-2.0
"""Limits of projects under claims of several processes, of which some are killed."""

from __future__ import annotations

import signal
import unittest
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moorage.allocation.audit import audit
from moorage.db import Database
from moorage.testing.allocation import all_allocations, provider
from tests import servers
from tests.conformance.allocation.stores import create_tables, sql_store, sqlite_url
from tests.functional.allocation import claimer
from tests.functional.allocation.test_processes import Claimer, acknowledged, wait_for_claims

PROCESSES = 8
LIMIT = 120

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object


class QuotaRaces(_Base):
    """Mixed in; ``new_url()`` gives an empty database."""

    def new_url(self) -> str:
        raise NotImplementedError

    def setUp(self) -> None:
        self.url = self.new_url()
        self.database = Database(self.url)
        self.addCleanup(self.database.close)
        create_tables(self.database)
        self.store = sql_store(self.database)
        given = [provider(VCPU=100_000, MEMORY_MB=100_000) for _ in range(2)]
        self.store.ensure_providers(given)
        self.providers = [each.uuid for each in given]

    def start(self, names: Sequence[str], target: Callable[..., None], providers: Sequence[str]) -> list[Claimer]:
        found = [Claimer(self, self.url, name, providers, target) for name in names]
        for each in found:
            each.ready()
        for each in found:
            each.go()
        return found

    def held(self) -> int:
        return sum(each.used for each in all_allocations(self.store))

    def check_used(self, used: int) -> None:
        (quota,) = self.store.quotas("p")
        self.assertEqual((used, used), (quota.used, self.held()))
        self.assertTrue(audit(self.store).clean)

    def end(self, claimers: Sequence[Claimer]) -> None:
        for each in claimers:
            each.join()
            self.assertEqual(("full", ""), each.last)

    def test_processes_fill_a_limit_exactly(self) -> None:
        self.store.set_quota("p", "VCPU", LIMIT)
        self.end(self.start([f"p{number}" for number in range(PROCESSES)], claimer.of_project, self.providers[:1]))
        self.check_used(LIMIT)

    def test_killed_processes_leave_the_counter_right(self) -> None:
        # No process comes to the end of the limit before it is killed.
        self.store.set_quota("p", "VCPU", 100_000)
        claimers = self.start([f"p{number}" for number in range(PROCESSES)], claimer.of_project, self.providers[:1])
        for number, each in enumerate(claimers[:3]):
            wait_for_claims([each], 2 + number)
            each.signal(signal.SIGKILL)
        for each in claimers[:3]:
            each.join()
        again = self.start([each.name for each in claimers[:3]], claimer.of_project, self.providers[:1])
        limit = self.store.quotas("p")[0].used + LIMIT
        # More may be used by then, and no more is given after that.
        limit = max(limit, self.store.set_quota("p", "VCPU", limit).used)
        self.end([*claimers[3:], *again])
        self.check_used(limit)

    def test_a_limit_that_is_set_meanwhile_counts_the_claims_that_began_before(self) -> None:
        claimers = self.start([f"p{number}" for number in range(PROCESSES)], claimer.of_project, self.providers[:1])
        wait_for_claims(claimers, PROCESSES)
        counted = self.store.set_quota("p", "VCPU", LIMIT).used
        self.end(claimers)
        held = self.held()
        self.assertEqual(held, acknowledged(claimers))
        # Each process has made one claim at a time.
        self.assertLessEqual(held, max(LIMIT, counted) + PROCESSES)
        self.assertGreaterEqual(held, LIMIT)
        self.check_used(held)

    def test_claims_moves_and_releases_leave_the_counters_right_while_limits_come_and_go(self) -> None:
        self.end(self.start([f"p{number}" for number in range(PROCESSES)], claimer.churn, self.providers))
        self.assertTrue(audit(self.store).clean)
        for project in ("p", "q"):
            limited = {each.resource_class for each in self.store.quotas(project)}
            # Where the last round removed the limits, there are none to compare.
            for name in {"VCPU", "MEMORY_MB"} - limited:
                self.store.set_quota(project, name, 1)
        # What a first limit counts is read again, so the same limits set afresh must count the same.
        for project in ("p", "q"):
            shown = {each.resource_class: each.used for each in self.store.quotas(project)}
            self.assertEqual({"VCPU", "MEMORY_MB"}, shown.keys())
            for name in ("VCPU", "MEMORY_MB"):
                self.store.unset_quota(project, name)
            for name, used in shown.items():
                self.assertEqual(used, self.store.set_quota(project, name, 1).used)


class SqliteQuotaRaces(QuotaRaces, unittest.TestCase):
    def new_url(self) -> str:
        return sqlite_url(self)


class PostgresqlQuotaRaces(QuotaRaces, unittest.TestCase):
    def new_url(self) -> str:
        return servers.fresh_database(servers.shared("postgresql"))


class MariadbQuotaRaces(QuotaRaces, unittest.TestCase):
    def new_url(self) -> str:
        return servers.fresh_database(servers.shared("mariadb"))
