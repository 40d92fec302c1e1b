# SPDX-License-Identifier: Apache-2.0
"""Cleaners on PostgreSQL and MariaDB."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.work.tables import fences
from tests import servers
from tests.unit.cleanup import cleaner_tests
from tests.unit.cleanup.cleaner_tests import AFTER_DEAD


class PostgresqlCleanerTests(cleaner_tests.CleanerTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("postgresql"))


class MariadbCleanerTests(cleaner_tests.CleanerTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url = servers.fresh_database(servers.shared("mariadb"))

    def test_an_orphan_that_another_one_is_taking_is_passed_by(self) -> None:
        for uuid in ("one", "two"):
            self.orphan(uuid)
        cleaner, _ = self.cleaner()
        with self.open_database().write() as tx:
            # As one does who has got to the second.
            tx.execute(sa.update(fences).where(fences.c.resource_id == "two").values(token=fences.c.token + 1))
            self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 1})
        self.assertEqual(self.claims(), {"won": 1})
