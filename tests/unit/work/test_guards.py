# SPDX-License-Identifier: Apache-2.0
"""No condition of a statement on worker rows and fences can go without a test that fails, on SQLite."""

from __future__ import annotations

import unittest

import tests
from moorage.work import fences, operation_statements
from tests import guards
from tests.unit.work import test_fences, test_operations

#: Words of the names of the tests that were written for guards.
LAWS = (
    *("leaves_every", "not_there_to_be_taken", "overtaken", "has_changed", "only_what_waits", "lost_only"),
    *(
        "pending_and_what",
        "live_lease",
        "next_incarnation",
        "of_one_type",
        "first_token",
        "creation",
        "late_message",
        "is_not_readdressed",
    ),
)


@tests.for_ci("a minute of a processor")
class GuardTests(unittest.TestCase):
    maxDiff = None
    CASES = (test_operations.SqliteWorkerTests, test_fences.SqliteFenceTests)

    def test_every_condition_on_worker_rows_is_missed_by_a_test(self) -> None:
        # MariaDB alone runs TAKEN, LOCK_NEW and BEGIN; HELD may read more rows than it is
        # asked for.
        of_mariadb = ("TAKEN:", "LOCK_NEW", "BEGIN:")
        found = guards.guards_of(operation_statements, skipped=(*of_mariadb, "HELD: workers.resource_id"))
        self.assertEqual([], guards.survivors(found, lambda: guards.quick_tests(LAWS, *self.CASES)))

    def test_every_condition_on_fences_is_missed_by_a_test(self) -> None:
        found = guards.guards_of(fences)
        self.assertEqual([], guards.survivors(found, lambda: guards.quick_tests(LAWS, *reversed(self.CASES))))
