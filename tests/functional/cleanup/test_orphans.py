# SPDX-License-Identifier: Apache-2.0
"""Which orphans cleaners find and take on PostgreSQL and MariaDB."""

from __future__ import annotations

from typing import Any

from moorage.cleanup import orphans
from tests.functional.databases import MariadbCase, PostgresqlCase
from tests.unit.cleanup import orphan_tests
from tests.unit.cleanup.orphan_tests import KINDS, kept
from tests.unit.work.operation_tests import TYPE, identity


class PostgresqlOrphanTests(PostgresqlCase, orphan_tests.OrphanTests):
    pass


class MariadbOrphanTests(MariadbCase, orphan_tests.OrphanTests):
    def test_orphans_that_are_locked_are_read_as_the_take_leaves_them(self) -> None:
        for wanted, good, bad in KINDS:
            with self.subTest(type(wanted).__name__):
                self.clear()
                (row, *_) = good.values()
                self.rows({**good, **bad, **kept(wanted, row)})
                search = orphans._SEARCHES[type(wanted)]
                key = {
                    "of_type": TYPE,
                    "of_resources": sorted({**good, **bad, **kept(wanted, row)}),
                    **wanted.parameters,
                }
                with self.database.write() as tx:
                    locked = tx.execute(search.lock, key).all()
                    taken = self.store.transfer(tx, search.take, key, identity("cleaner"))
                self.assertEqual(set(good), {each.resource_id for each in taken})
                self.assertFalse(set(bad) & {each.resource_id for each in locked})
                before = {each.resource_id: each for each in locked}
                self.assertEqual(
                    [_without_time(each) for each in taken], [_without_time(before[each.resource_id]) for each in taken]
                )


def _without_time(row: Any) -> dict[str, Any]:
    return {name: value for name, value in row._mapping.items() if name != "updated_at"}
