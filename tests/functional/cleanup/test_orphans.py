# SPDX-License-Identifier: Apache-2.0
"""Which orphans cleaners find and take on PostgreSQL and MariaDB."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from moorage.cleanup import orphans
from moorage.cleanup.conditions import OrphanSelector
from moorage.work.tables import workers
from tests.functional.databases import MariadbCase, PostgresqlCase
from tests.unit.cleanup import orphan_tests
from tests.unit.cleanup.orphan_tests import KINDS, kept
from tests.unit.work.operation_tests import TYPE, identity


class PostgresqlOrphanTests(PostgresqlCase, orphan_tests.OrphanTests):
    pass


class MariadbOrphanTests(MariadbCase, orphan_tests.OrphanTests):
    def kinds(self) -> Iterator[tuple[type[OrphanSelector], Mapping[str, Any], Collection[str], Collection[str]]]:
        """Yields each kind of orphan with the parameters of its statements, its orphans, and rows that are none."""
        for wanted, good, bad in KINDS:
            self.clear()
            (row, *_) = good.values()
            everything = {**good, **bad, **kept(wanted, row)}
            self.rows(everything)
            key = {"of_type": TYPE, "of_resources": sorted(everything), **wanted.parameters}
            yield type(wanted), key, set(good), set(bad)

    def test_orphans_that_are_locked_are_read_as_the_take_leaves_them(self) -> None:
        for kind, key, good, bad in self.kinds():
            search = orphans._SEARCHES[kind]
            with self.subTest(kind.__name__), self.database.write() as tx:
                locked = tx.execute(search.lock, key).all()
                taken = self.store.transfer(tx, search.take, key, identity("cleaner"))
                self.assertEqual(good, {each.resource_id for each in taken})
                self.assertFalse(set(bad) & {each.resource_id for each in locked})
                before = {each.resource_id: each for each in locked}
                self.assertEqual(
                    [_without_time(each) for each in taken], [_without_time(before[each.resource_id]) for each in taken]
                )

    def test_orphans_that_get_one_token_are_taken_and_nothing_else(self) -> None:
        owners = sa.select(workers.c.resource_id, workers.c.token).where(workers.c.owner == "service-cleaner")
        for kind, key, good, _ in self.kinds():
            search = orphans._SEARCHES[kind]
            with self.subTest(kind.__name__), self.database.write() as tx:
                locked = [each for each in tx.execute(search.lock, key) if each.resource_id in good]
                self.assertEqual(1, len({each.token for each in locked}), "or the statement is another one")
                self.store.transfer(tx, search.take, key, identity("cleaner"), locked)
                taken = tx.execute(owners).all()
                self.assertEqual({each.resource_id: each.token for each in locked}, dict(map(tuple, taken)))


def _without_time(row: Any) -> dict[str, Any]:
    return {name: value for name, value in row._mapping.items() if name != "updated_at"}
