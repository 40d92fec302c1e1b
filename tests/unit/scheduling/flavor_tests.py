# SPDX-License-Identifier: Apache-2.0
"""The catalogue of flavors in the store, on whatever database the class that this is mixed into has."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import sqlalchemy as sa

from moorage import errors
from moorage.db import Database
from moorage.db.tables import events
from moorage.scheduling.flavors import FlavorStore, FlavorVersion
from tests.unit.fleet.aggregate_tests import together

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object

THREADS = 12
SMALL, LARGE = {"VCPU": 1}, {"VCPU": 4, "MEMORY_MB": 8192}


class FlavorTests(_Base):
    database: Database

    def setUp(self) -> None:
        self.store = FlavorStore(self.database)
        self.name = self.id().rpartition(".")[2][-60:]

    def create(self, resources: Mapping[str, int], expected: int = 0, **extra_specs: str) -> FlavorVersion:
        return self.store.create(self.name, resources, extra_specs, expected)[0]

    def versions(self) -> list[tuple[int, Mapping[str, int]]]:
        return [(each.version, each.resources) for each in self.store.versions(self.name)]

    def events(self, flavorid: str) -> list[tuple[str, int]]:
        uuids = [f"flavor/{each.uuid}" for each in self.store.versions(flavorid)]
        query = sa.select(events.c.kind, events.c.version).where(events.c.subject.in_(uuids)).order_by(events.c.id)
        with self.database.read() as tx:
            return [(row.kind, row.version) for row in tx.execute(query)]

    def test_other_contents_are_the_next_version_and_a_version_never_changes(self) -> None:
        first = self.create(SMALL)
        second = self.create(LARGE, 1)
        third = self.create(LARGE, 2, gpu="yes")
        self.assertEqual([1, 2, 3], [each.version for each in (first, second, third)])
        self.assertEqual([first, second, third], self.store.versions(self.name))
        self.assertEqual(third, self.store.newest(self.name))
        self.assertEqual([("flavor.create", 1)] * 3, self.events(self.name))

    def test_a_repetition_changes_nothing(self) -> None:
        first, new = self.store.create(self.name, SMALL, {}, 0)
        self.assertTrue(new)
        for expected in (0, 1):
            self.assertEqual((first, False), self.store.create(self.name, dict(SMALL), {}, expected))
        self.assertEqual([("flavor.create", 1)], self.events(self.name))

    def test_what_expects_another_version_is_refused_with_the_remedy(self) -> None:
        with self.assertRaisesRegex(errors.Conflict, f"There is no flavor {self.name}.*expect version 0"):
            self.create(SMALL, 1)
        self.create(SMALL)
        self.create(LARGE, 1)
        for expected in (0, 1, 3):
            with self.assertRaisesRegex(errors.Conflict, r"newest version .* is 2 .*--expected-version 2") as caught:
                self.create({"VCPU": 9}, expected)
            self.assertEqual(2, caught.exception.details["version"])
        # What an older version had can come back, as a version of its own.
        self.assertEqual(3, self.create(SMALL, 2).version)

    def test_a_deprecated_version_keeps_its_meaning(self) -> None:
        self.create(SMALL)
        before = self.create(LARGE, 1)
        other, _ = self.store.create(f"{self.name}-other", SMALL, {})
        (changed,) = self.store.deprecate(self.name, 2, successor=other.flavorid)
        self.assertEqual((True, other.flavorid, 2), (changed.deprecated, changed.successor, changed.generation))
        self.assertTrue(changed.means(before.resources, before.extra_specs))
        self.assertEqual([False, True], [each.deprecated for each in self.store.versions(self.name)])
        self.assertEqual([True, True], [each.deprecated for each in self.store.deprecate(self.name)])
        again = self.store.deprecate(self.name, deprecated=False)
        self.assertEqual([(False, "")] * 2, [(each.deprecated, each.successor) for each in again])
        # The second time changes nothing.
        self.assertEqual(again, self.store.deprecate(self.name, deprecated=False))

    def test_refuses_to_deprecate_what_is_not_there(self) -> None:
        with self.assertRaisesRegex(errors.NotFound, f"no flavor {self.name}"):
            self.store.deprecate(self.name)
        with self.assertRaisesRegex(errors.NotFound, f"no flavor {self.name}"):
            self.store.versions(self.name)
        self.assertIsNone(self.store.newest(self.name))
        self.create(SMALL)
        with self.assertRaisesRegex(errors.NotFound, f"no version 2 of flavor {self.name}"):
            self.store.deprecate(self.name, 2)
        for successor in (self.name, f"{self.name}-none"):
            with self.assertRaises(errors.InvalidInput):
                self.store.deprecate(self.name, successor=successor)
        with self.assertRaises(errors.InvalidInput):
            self.store.deprecate(self.name, deprecated=False, successor="x")

    def test_lists_the_newest_versions_in_pages(self) -> None:
        names = [f"{self.name}-{number}" for number in range(5)]
        for name in names:
            self.store.create(name, SMALL, {})
            self.store.create(name, LARGE, {}, 1)
        after = self.name
        found: list[FlavorVersion] = []
        while page := self.store.list(after=after, limit=2):
            found += page
            after = page[-1].flavorid
        mine = [each for each in found if each.flavorid in names]
        self.assertEqual([(name, 2) for name in names], [(each.flavorid, each.version) for each in mine])
        known = self.store.all()
        self.assertEqual([2, 1], [each.version for each in known[names[0]]])

    def test_the_state_differs_after_each_change(self) -> None:
        changes: tuple[Callable[[], object], ...] = (
            lambda: self.create(SMALL),
            lambda: self.create(LARGE, 1),
            lambda: self.store.deprecate(self.name, 1),
            lambda: self.store.deprecate(self.name),
            lambda: self.store.deprecate(self.name, deprecated=False),
        )
        seen = {self.store.state()}
        for number, change in enumerate(changes):
            change()
            seen.add(self.store.state())
            self.assertEqual(number + 2, len(seen))

    def test_of_many_who_add_the_next_version_at_once_one_succeeds(self) -> None:
        for expected in range(5):
            wanted = [{"VCPU": 100 * expected + number + 1} for number in range(THREADS)]
            done = together(*(functools.partial(self.create, each, expected) for each in wanted))
            made = [each for each in done if isinstance(each, FlavorVersion)]
            self.assertEqual([expected + 1], [each.version for each in made], done)
            refused = [each for each in done if isinstance(each, errors.Conflict)]
            self.assertEqual(THREADS - 1, len(refused), done)
            self.assertEqual((expected + 1, made[0].resources), self.versions()[-1])
        self.assertEqual([1, 2, 3, 4, 5], [version for version, _ in self.versions()])
        self.assertEqual([("flavor.create", 1)] * 5, self.events(self.name))

    def test_many_who_add_equal_contents_at_once_add_one_version(self) -> None:
        done = together(*(lambda: self.store.create(self.name, SMALL, {}, 0) for _ in range(THREADS)))
        self.assertEqual(1, sum(each[1] for each in done))  # type: ignore[index]
        self.assertEqual([(1, SMALL)], self.versions())

    def test_what_is_deprecated_and_added_at_once_is_as_if_one_came_first(self) -> None:
        for round_ in range(5):
            name = f"{self.name}-{round_}"
            self.store.create(name, SMALL, {})
            adding = [
                functools.partial(self.store.create, name, {"VCPU": 10 + number}, {}, 1)
                for number in range(THREADS // 2)
            ]
            done = together(*adding, *[functools.partial(self.store.deprecate, name)] * (THREADS // 2))
            self.assertEqual(1, sum(isinstance(each, tuple) for each in done), done)
            deprecations = [each for each in done if isinstance(each, list)]
            self.assertEqual(THREADS // 2, len(deprecations), done)
            first, second = self.store.versions(name)
            self.assertTrue(first.deprecated)
            self.assertEqual(2, first.generation)
            # The new version is deprecated exactly if a deprecation came after it.
            self.assertEqual(second.deprecated, any(len(each) == 2 for each in deprecations))
            self.assertEqual(second.generation, 1 + second.deprecated)
            kinds = self.events(name)
            self.assertEqual(2, kinds.count(("flavor.create", 1)))
            self.assertEqual(1 + second.deprecated, kinds.count(("flavor.change", 2)))
