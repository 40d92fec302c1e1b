# SPDX-License-Identifier: Apache-2.0
"""What /metrics says of cleanup."""

from __future__ import annotations

import tempfile

import prometheus_client

from moorage.cleanup.cleanup_metrics import CleanupCollector
from moorage.cleanup.conditions import OrphansOfService
from tests.unit.cleanup.cleaner_tests import AFTER_DEAD, CleanerCase


class CleanupCollectorTests(CleanerCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()

    def test_rows_by_phase_and_outcomes(self) -> None:
        self.orphan("one")
        self.orphan("two")
        self.create("three")
        cleaner, handler = self.cleaner(max_attempts=1)
        handler.answers["two"] = ValueError("broken")
        with self.assertLogs("moorage.cleanup.cleaner", "ERROR"):
            cleaner.clean(AFTER_DEAD)
        cleaner.clean(OrphansOfService("nobody", 1))
        registry = prometheus_client.CollectorRegistry()
        registry.register(CleanupCollector(self.database))
        text = prometheus_client.generate_latest(registry).decode()
        for line in (
            'moorage_workers{phase="quarantined",resource_type="thing",status="building"} 1.0',
            'moorage_workers{phase="waiting",resource_type="thing",status="building"} 1.0',
            'moorage_cleanup_claims_total{resource_type="thing",result="won"} 2.0',
            'moorage_cleanup_outcomes_total{outcome="done",resource_type="thing"} 1.0',
            'moorage_cleanup_outcomes_total{outcome="quarantined",resource_type="thing"} 1.0',
        ):
            self.assertIn(line, text)

    def test_without_a_store_there_are_none(self) -> None:
        with self.database.write() as tx:
            tx.exec_driver_sql("DROP TABLE workers")
        registry = prometheus_client.CollectorRegistry()
        registry.register(CleanupCollector(self.database))
        self.assertEqual(prometheus_client.generate_latest(registry), b"")
