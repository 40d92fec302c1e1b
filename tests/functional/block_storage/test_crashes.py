# SPDX-License-Identifier: Apache-2.0
"""Crashes and pauses at every point, on PostgreSQL and MariaDB; by ``make soak``."""

from __future__ import annotations

import unittest

from tests import SOAK, servers
from tests.unit.block_storage import crash_tests


@unittest.skipUnless(SOAK, "make soak")
class PostgresqlCrashTests(crash_tests.CrashTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


@unittest.skipUnless(SOAK, "make soak")
class PostgresqlPauseTests(crash_tests.PauseTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


@unittest.skipUnless(SOAK, "make soak")
class MariadbCrashTests(crash_tests.CrashTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))


@unittest.skipUnless(SOAK, "make soak")
class MariadbPauseTests(crash_tests.PauseTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))
