# SPDX-License-Identifier: Apache-2.0
"""A decision reads no database: the statements that a scheduler's request threads send before they claim."""

from __future__ import annotations

import threading
import unittest
from typing import Any
from unittest import mock

import sqlalchemy as sa

from moorage import errors
from moorage.db import Database
from moorage.instances.observed_claims import ObservedClaimer
from moorage.scheduling.plugin_failures import StoredPluginFailures
from tests.functional.scheduling.plane import SOON, Plane
from tests.servers import wait_until


def is_of_requests(thread: str) -> bool:
    """Returns whether a thread handles requests: a thread of the plugin runner, or one that handles calls."""
    return thread.startswith(("select", "rpc-scheduler-")) and "-fanout-" not in thread


class StatementTests(unittest.TestCase):
    def setUp(self) -> None:
        self.plane = Plane(self).up(("h1", "h2"))
        self.before_claim: list[str] = []
        self.claiming = threading.local()

        def executes(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
            name = threading.current_thread().name
            if is_of_requests(name) and not getattr(self.claiming, "now", False):
                self.before_claim.append(statement)

        sa.event.listen(sa.Engine, "before_cursor_execute", executes)
        self.addCleanup(sa.event.remove, sa.Engine, "before_cursor_execute", executes)
        claim = ObservedClaimer.claim

        def claims(claimer: Any, *arguments: Any, **more: Any) -> Any:
            self.claiming.now = True
            self.claimed = threading.current_thread().name
            try:
                return claim(claimer, *arguments, **more)
            finally:
                self.claiming.now = False

        patched = mock.patch.object(ObservedClaimer, "claim", claims)
        patched.start()
        self.addCleanup(patched.stop)
        # What was looked up a moment ago must be looked up again.
        guard = self.plane.roles["scheduler-1"]._policy.guard
        mock.patch.object(guard, "_unbroken", mock.MagicMock(get=lambda *_: 0.0)).start()
        self.addCleanup(mock.patch.stopall)

    def select(self) -> dict[str, Any]:
        found: dict[str, Any] = self.plane.ask("select", {"request": self.plane.request(), "count": 1})
        return found

    def test_a_decision_sends_no_statement_before_its_claim(self) -> None:
        self.assertEqual(1, len(self.select()["selections"]))
        made = self.plane.create()
        self.assertIn(made["host"], ("h1", "h2"))
        self.assertTrue(self.claimed.startswith("rpc-scheduler-") and is_of_requests(self.claimed), "claims are seen")
        self.assertEqual([], self.before_claim)

    def test_a_dry_run_needs_no_store(self) -> None:
        away = errors.StoreUnavailable("the store is away")
        with (
            mock.patch.object(Database, "read", side_effect=away),
            mock.patch.object(Database, "write", side_effect=away),
            mock.patch.object(Database, "run", side_effect=away),
            mock.patch.object(Database, "read_run", side_effect=away),
        ):
            self.assertEqual(1, len(self.select()["selections"]))

    def test_incidents_of_another_process_reach_the_breaker_by_one_statement(self) -> None:
        role = self.plane.roles["scheduler-1"]
        other = StoredPluginFailures(self.plane.database, lambda: 300.0)
        for _ in range(self.plane.conf.scheduling.breaker_threshold):
            other.record("moorage.filters:compute")
        sent: list[str] = []

        def executes(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
            if threading.current_thread() is threading.main_thread() and "plugin_incidents" in statement:
                sent.append(statement)

        sa.event.listen(sa.Engine, "before_cursor_execute", executes)
        self.addCleanup(sa.event.remove, sa.Engine, "before_cursor_execute", executes)
        role._incidents.refresh()
        self.assertEqual(1, len(sent))
        with self.assertRaisesRegex(errors.PluginTimeout, "compute.*hung or exited"):
            self.select()

    def test_a_scheduler_refreshes_the_counts_by_itself(self) -> None:
        other = StoredPluginFailures(self.plane.database, lambda: 300.0)
        for _ in range(self.plane.conf.scheduling.breaker_threshold):
            other.record("moorage.filters:compute")

        def refused() -> bool:
            try:
                self.select()
            except errors.PluginTimeout:
                return True
            return False

        wait_until(refused, "the breaker", SOON)
