# SPDX-License-Identifier: Apache-2.0
"""The coordination backend on Moorage's conformance kit."""

from __future__ import annotations

import unittest

from acme_moorage.coordination import LeaseBackend
from acme_moorage.tables import metadata

from moorage import errors
from moorage.clock import SystemClock
from moorage.coordination.interface import BackendTools, CoordinationBackend
from moorage.testing import database as databases
from moorage.testing.coordination import CoordinationBackendTests


class LeaseBackendTests(CoordinationBackendTests, unittest.TestCase):
    session_timeout = 1.0

    def setUp(self) -> None:
        super().setUp()
        self.database = self.enterContext(databases.temporary())
        with self.database.write() as tx:
            metadata.create_all(tx)

    def tools(self, session_timeout: float, database: object) -> BackendTools:
        return BackendTools(None, "", SystemClock(), session_timeout, 10.0, 3.0, database=database)

    def make_client(self, session_timeout: float) -> CoordinationBackend:
        return LeaseBackend(self.tools(session_timeout, self.database))

    def test_without_a_database_it_says_what_is_missing(self) -> None:
        with self.assertRaisesRegex(errors.ConfigError, "keeps its members in a database"):
            LeaseBackend(self.tools(1.0, None))
