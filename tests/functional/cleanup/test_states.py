# SPDX-License-Identifier: Apache-2.0
"""Random histories on PostgreSQL and MariaDB."""

from __future__ import annotations

import unittest

from tests import servers
from tests.unit.cleanup import state_tests


class ServerStateTests(unittest.TestCase):
    def run_on(self, kind: str) -> None:
        case, database = state_tests.machine_for(servers.fresh_database(servers.shared(kind)), 12)
        try:
            case("runTest").runTest()
        finally:
            database.close()

    def test_random_histories_on_postgresql(self) -> None:
        self.run_on("postgresql")

    def test_random_histories_on_mariadb(self) -> None:
        self.run_on("mariadb")
