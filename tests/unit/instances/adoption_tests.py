# SPDX-License-Identifier: Apache-2.0
"""Versions for instances that have none, on whatever database the class that this is mixed into has."""

from __future__ import annotations

import functools
import random
import unittest
import uuid
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from moorage import errors
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.instances.flavor_adoption import AdoptionReport, FlavorAdoption
from moorage.instances.interface import Instance
from moorage.scheduling.flavors import FlavorStore
from moorage.scheduling.interface import InstanceSource
from moorage.scheduling.resource_request import HeldResources, given_resources
from moorage.scheduling.tables import flavors
from moorage_plugins.compute.instances import ComputeInstances
from moorage_plugins.compute.tables import instances
from tests.unit.fleet.aggregate_tests import together

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object

#: More than two pages.
INSTANCES = 250
SIZES: tuple[dict[str, int], ...] = ({"VCPU": 1}, {"VCPU": 2}, {"VCPU": 2, "MEMORY_MB": 512})
SPECS: tuple[dict[str, str], ...] = ({}, {"gpu": "yes"})
#: The table as an earlier release knows it.
EARLIER = sa.table(
    "instances",
    *(
        sa.column(each.name, each.type)
        for each in instances.c
        if each.name not in {"id", "flavor_version", "destination_uuid"}
    ),
)


class AdoptionTests(_Base):
    database: Database

    def setUp(self) -> None:
        self.flavors = FlavorStore(self.database)
        self.instances = ComputeInstances(conf=None, database=self.database, clock=SystemClock())
        self.random = random.Random(self.id())
        with self.database.write() as tx:
            for table in (flavors, instances):
                tx.execute(sa.delete(table))

    def earlier(self, **values: Any) -> str:
        """An instance that an earlier release writes."""
        made = Instance(
            str(uuid.UUID(int=self.random.getrandbits(128), version=4)), "", "active", "h", "n", "n", "f", {}
        )
        row = {each.name: getattr(made, each.name) for each in EARLIER.c}
        chosen = {
            "flavorid": self.random.choice(("custom", "small")),
            "resources": self.random.choice(SIZES),
            "request": {"extra_specs": self.random.choice(SPECS)},
        }
        with self.database.write() as tx:
            tx.execute(sa.insert(EARLIER).values({**row, "pending": None, **chosen, **values}))
        return made.uuid

    def resized(self, instance: str, token: int) -> None:
        """An earlier release ends a resize: it does not know the column."""
        with self.database.write() as tx:
            tx.execute(
                sa.update(EARLIER)
                .where(EARLIER.c.uuid == instance)
                .values(resources=self.random.choice(SIZES), fence=token)
            )

    def adopt(self) -> AdoptionReport:
        return FlavorAdoption(self.database, self.instances, self.flavors).run()

    def check(self) -> None:
        """The law: each instance has a version, with the contents of the instance; no contents are twice implicit versions."""
        for each in self.instances.list():
            (version,) = (v for v in self.flavors.versions(each.flavorid) if v.version == each.flavor_version)
            extra_specs = each.request.get("extra_specs", {})
            self.assertTrue(
                version.means(given_resources(HeldResources(each.resources), extra_specs), extra_specs), each
            )
        for flavorid in ("custom", "small"):
            versions = self.flavors.versions(flavorid)
            self.assertEqual(list(range(1, len(versions) + 1)), [each.version for each in versions])
            implicit = [(repr(sorted(v.resources.items())), repr(v.extra_specs)) for v in versions if v.implicit]
            self.assertEqual(len(set(implicit)), len(implicit))

    def test_distinct_sizes_become_versions_and_a_repetition_writes_nothing(self) -> None:
        for _ in range(INSTANCES):
            self.earlier()
        report = self.adopt()
        self.assertEqual((INSTANCES, INSTANCES, 0), (report.seen, report.written, report.changed))
        self.assertEqual(2 * len(SIZES) * len(SPECS), report.versions)
        self.check()
        self.assertEqual(AdoptionReport(INSTANCES, 0, 0, 0), self.adopt())
        # They can be listed, and not requested.
        self.assertEqual(["custom", "small"], [each.flavorid for each in self.flavors.list(implicit=True)])
        self.assertEqual([], self.flavors.list())
        self.assertIsNone(self.flavors.newest("small"))
        self.assertEqual({}, self.flavors.all())
        with self.assertRaises(errors.NotFound):
            self.flavors.deprecate("small")
        made, _ = self.flavors.create("small", {"VCPU": 9}, {})
        self.assertEqual(len(SIZES) * len(SPECS) + 1, made.version)
        self.assertEqual(made, self.flavors.newest("small"))

    def test_a_version_of_the_catalogue_is_taken_before_a_new_one(self) -> None:
        self.flavors.create("small", SIZES[0], {})
        self.flavors.create("small", SIZES[1], {}, 1)
        self.flavors.create("small", SIZES[0], {}, 2)
        uuids = [self.earlier(flavorid="small", resources=size, request={}) for size in SIZES[:2]]
        self.assertEqual(0, self.adopt().versions)
        self.assertEqual([3, 2], [self.instances.get(each).flavor_version for each in uuids])

    def test_an_instance_that_holds_the_sums_of_a_version_has_that_version(self) -> None:
        groups, replaced = {"resources1:PGPU": "1"}, {"resources:VCPU": "3"}
        self.flavors.create("small", {"VCPU": 1}, groups)
        self.flavors.create("small", {"VCPU": 2, "MEMORY_MB": 512}, replaced, 1)
        uuids = [
            self.earlier(flavorid="small", resources=held, request={"extra_specs": specs})
            for held, specs in (
                ({"VCPU": 1, "PGPU": 1}, groups),
                ({"VCPU": 3, "MEMORY_MB": 512}, replaced),
                ({"VCPU": 2, "PGPU": 1}, groups),
                ({"VCPU": 2}, {"resources1:PGPU": "1", "resources2:PGPU": "1"}),
                ({"VCPU": 2}, replaced),
            )
        ]
        self.assertEqual(3, self.adopt().versions)
        self.assertEqual([1, 2], [self.instances.get(each).flavor_version for each in uuids[:2]])
        given = {each.version: each.resources for each in self.flavors.versions("small")}
        self.assertEqual([{"VCPU": 2}] * 3, [given[self.instances.get(each).flavor_version] for each in uuids[2:]])
        self.assertEqual(AdoptionReport(5, 0, 0, 0), self.adopt())

    def test_pages_have_each_instance_that_occupies_a_node_once(self) -> None:
        made = {
            self.earlier(status=status) for status in ("active", "building", "stopped", "resizing") for _ in range(5)
        }
        for status in ("error", "shelved_offloaded"):
            self.earlier(status=status)
        expected = {each.uuid: each for each in self.instances.all()}
        self.assertEqual(made, expected.keys())
        for limit in (1, 7, 20, 100):
            pages = list(self.instances.pages(limit))
            self.assertEqual(20, sum(map(len, pages)))
            self.assertEqual(expected, {each.uuid: each for page in pages for each in page})
            # By its default, each source has pages.
            self.assertEqual(
                expected, {each.uuid: each for page in InstanceSource.pages(self.instances, limit) for each in page}
            )

    def test_corrects_what_an_earlier_release_resized(self) -> None:
        uuids = [self.earlier() for _ in range(20)]
        self.adopt()
        for each in uuids:
            self.resized(each, 1)
        self.adopt()
        self.check()

    def test_leaves_out_what_changes_meanwhile_and_says_so(self) -> None:
        uuids = [self.earlier() for _ in range(3)]
        adoption = FlavorAdoption(self.database, self.instances, self.flavors)
        page = self.instances.list()
        wanted = adoption._versions(page)
        self.resized(uuids[0], 7)
        self.assertEqual(2, adoption._write(wanted))
        self.assertEqual(0, self.instances.get(uuids[0]).flavor_version)
        self.assertEqual(1, self.adopt().written)
        self.check()

    def test_adopters_administrators_and_an_earlier_release_at_once(self) -> None:
        uuids = [self.earlier() for _ in range(INSTANCES)]

        def administrate(number: int) -> None:
            for round_ in range(5):
                newest = self.flavors.newest("small")
                size = {"VCPU": 10 + number + 10 * round_} if round_ % 2 else SIZES[number % len(SIZES)]
                try:
                    self.flavors.create("small", size, {}, newest.version if newest is not None else 0)
                except errors.Conflict:
                    continue

        def resize(number: int) -> None:
            for each in uuids[number::2][:20]:
                self.resized(each, 1)

        work = [functools.partial(administrate, number) for number in range(3)]
        done = together(*work, *(functools.partial(resize, n) for n in range(2)), *[self.adopt] * 3)
        self.assertEqual([], [each for each in done if isinstance(each, errors.MoorageError)])
        self.assertEqual(0, self.adopt().changed)
        self.check()
        self.assertEqual(0, self.adopt().written)
