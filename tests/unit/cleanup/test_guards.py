# SPDX-License-Identifier: Apache-2.0
"""No condition of a statement of cleaners can go without a test that fails, on SQLite."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator
from typing import Any

import tests
from moorage.cleanup import orphans
from tests import guards
from tests.unit.cleanup import test_orphans

#: Words of the names of the tests that notice most.
LAWS = ("finds_its_orphans", "between")


def of_searches() -> Iterator[guards.Guard]:
    """Every condition by which each kind of orphan is found and taken."""
    for kind, search in orphans._SEARCHES.items():
        for name in ("types", "look", "find"):
            for text, made in guards.weaker(getattr(search, name)):
                yield guards.Guard(f"{kind.__name__}.{name}: {text}", _replacing(kind, name, made))
        for text, made in guards.weaker(search.take.plain):
            yield guards.Guard(f"{kind.__name__}.take: {text}", _replacing(kind, "take", guards.transfer(made)))


def _replacing(kind: Any, name: str, made: Any) -> Callable[[], None]:
    searches: Any = orphans._SEARCHES
    return lambda: searches.update({kind: searches[kind]._replace(**{name: made})})


@tests.for_ci("a minute of a processor")
class GuardTests(unittest.TestCase):
    maxDiff = None

    def test_every_condition_of_a_search_for_orphans_is_missed_by_a_test(self) -> None:
        self.assertEqual(
            [], guards.survivors(of_searches(), lambda: guards.quick_tests(LAWS, test_orphans.SqliteOrphanTests))
        )

    def test_every_condition_on_an_orphan_that_is_held_is_missed_by_a_test(self) -> None:
        found = guards.guards_of(orphans)
        self.assertEqual(
            [], guards.survivors(found, lambda: guards.quick_tests(("one_line",), test_orphans.SqliteOrphanTests))
        )
