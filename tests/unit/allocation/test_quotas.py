# SPDX-License-Identifier: Apache-2.0
"""Limits of projects: their law, what they count, what they cost, and random histories compared with a model."""

from __future__ import annotations

import contextlib
import functools
import unittest
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import hypothesis
import sqlalchemy as sa
from hypothesis import stateful
from hypothesis import strategies as st
from sqlalchemy import event
from typing_extensions import override

from moorage import errors
from moorage.allocation.audit import audit
from moorage.allocation.interface import (
    AllocationChange,
    AllocationStore,
    ClaimRequest,
    Expect,
    InventoryChange,
    InventoryItem,
    Quota,
    QuotaDrift,
)
from moorage.db import Database
from moorage.testing.allocation import new_uuid, provider
from moorage_plugins.stores import tables
from moorage_plugins.stores.combiner import Member
from moorage_plugins.stores.quota_enforcement import LimitsChangedError
from moorage_plugins.stores.sql import SqlStore
from tests import cases
from tests.conformance.allocation.stores import SqlCase, create_tables, sql_store, sqlite_url
from tests.unit.allocation.test_sql import statements

PROJECTS = ("p", "q")
CLASSES = ("VCPU", "MEMORY_MB")
CONSUMERS = tuple(str(uuid.UUID(int=number)) for number in range(1, 5))
#: Each counts with the consumer of the same place.
COMPANIONS = tuple(str(uuid.UUID(int=number)) for number in range(101, 105))
amounts = st.dictionaries(st.sampled_from(CLASSES), st.integers(1, 4), min_size=1)


@contextlib.contextmanager
def before_statement(begins: str, *actions: Callable[[], object]) -> Iterator[None]:
    """Do something just before a statement that begins so: the first action before the first one, and so on. All must be done."""
    left = list(actions)

    def listener(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if left and statement.startswith(begins):
            # First taken from the list, since it may run such statements itself.
            left.pop(0)()

    event.listen(sa.Engine, "before_cursor_execute", listener)
    try:
        yield
    finally:
        event.remove(sa.Engine, "before_cursor_execute", listener)
    if left:
        raise AssertionError(f"{len(left)} statements {begins} fewer than expected")


class QuotaTests(SqlCase, unittest.TestCase):
    def setUp(self) -> None:
        self.empty()
        self.store = sql_store(self.database)
        self.node = provider(VCPU=1000, MEMORY_MB=1000)
        self.other = provider(VCPU=1000, MEMORY_MB=1000)
        self.store.ensure_providers([self.node, self.other])

    def claim(self, project: str = "p", **resources: int) -> str:
        request = ClaimRequest(new_uuid(), {self.node.uuid: resources}, "r", project)
        return self.store.claim(request).consumer

    def used(self, project: str = "p") -> dict[str, int]:
        self.assertEqual([], self.store.quota_drift())
        return {each.resource_class: each.used for each in self.store.quotas(project)}

    def test_refuses_the_first_unit_above_the_limit_and_says_by_how_much(self) -> None:
        self.store.set_quota("p", "VCPU", 10)
        self.claim(VCPU=7, MEMORY_MB=1)
        self.claim(VCPU=3)
        with self.assertRaises(errors.QuotaExceeded) as refused:
            self.claim(VCPU=2)
        expected = {"project": "p", "resource_class": "VCPU", "limit": 10, "used": 10, "asked": 2, "over": 2}
        self.assertEqual(expected, refused.exception.details)
        self.assertEqual({"VCPU": 10}, self.used())
        self.assertEqual(10, self.store.usages(providers=[self.node.uuid])[0].used["VCPU"])

    def test_limits_no_other_project_and_no_other_class(self) -> None:
        self.store.set_quota("p", "VCPU", 1)
        self.claim(MEMORY_MB=50)
        self.claim("q", VCPU=50)
        self.claim("", VCPU=50)
        self.assertEqual([Quota("p", "VCPU", 1, 0)], self.store.quotas())

    def test_the_first_limit_counts_what_is_held_and_takes_nothing(self) -> None:
        held = self.claim(VCPU=8)
        self.assertEqual(Quota("p", "VCPU", 5, 8), self.store.set_quota("p", "VCPU", 5))
        self.assertRaises(errors.QuotaExceeded, self.claim, VCPU=1)
        self.store.release(held)
        self.assertEqual({"VCPU": 0}, self.used())
        self.claim(VCPU=5)

    def test_a_second_limit_counts_what_is_held_of_its_class(self) -> None:
        self.store.set_quota("p", "VCPU", 5)
        self.claim(VCPU=2, MEMORY_MB=30)
        self.assertEqual(30, self.store.set_quota("p", "MEMORY_MB", 40).used)
        self.assertEqual({"VCPU": 2, "MEMORY_MB": 30}, self.used())

    def test_another_process_learns_of_a_limit_with_its_next_claim(self) -> None:
        self.claim(VCPU=1)
        sql_store(self.database).set_quota("p", "VCPU", 1)
        self.assertRaises(errors.QuotaExceeded, self.claim, VCPU=1)
        sql_store(self.database).unset_quota("p", "VCPU")
        self.claim(VCPU=1)
        sql_store(self.database).set_quota("p", "VCPU", 2)
        self.assertRaises(errors.QuotaExceeded, self.claim, VCPU=1)

    def test_a_claim_looks_once_whether_its_project_has_limits(self) -> None:
        self.store.set_quota("p", "VCPU", 2)
        self.claim(VCPU=1)

        def forget() -> None:
            # What another thread does that finds no limits, and learns it late.
            self.store._quotas._limited -= {"p"}

        with before_statement("INSERT INTO allocations", forget):
            self.claim(VCPU=1)
        self.assertEqual({"VCPU": 2}, self.used())
        self.store._quotas._limited |= {"p"}
        with before_statement("INSERT INTO allocations", forget):
            self.assertRaises(errors.QuotaExceeded, self.claim, VCPU=1)
        self.assertEqual({"VCPU": 2}, self.used())

    def test_an_unset_limit_limits_nothing_and_leaves_no_row(self) -> None:
        self.store.set_quota("p", "VCPU", 1)
        self.claim(VCPU=1)
        self.assertTrue(self.store.unset_quota("p", "VCPU"))
        self.assertFalse(self.store.unset_quota("p", "VCPU"))
        self.claim(VCPU=5)
        with self.database.read() as tx:
            for table in (tables.quotas, tables.quota_projects):
                self.assertEqual(0, tx.execute(sa.select(sa.func.count()).select_from(table)).scalar())
            counted = sa.select(sa.func.count()).where(tables.consumers.c.counted == 1)
            self.assertEqual(0, tx.execute(counted).scalar())
        self.assertEqual(6, self.store.set_quota("p", "VCPU", 1).used)

    def test_the_last_limit_lets_go_of_consumers_before_it_takes_the_turn_of_the_project(self) -> None:
        for name in CLASSES:
            self.store.set_quota("p", name, 9)
        self.claim(VCPU=1)

        def written(name: str) -> list[str]:
            seen = statements(lambda: self.store.unset_quota("p", name))
            return [each.split()[1] for each in seen if each.startswith("UPDATE")]

        self.assertEqual(["quota_projects"], written("VCPU"))
        self.assertEqual(["consumers", "quota_projects", "consumers"], written("MEMORY_MB"))

    def test_counts_each_class_and_each_project_by_itself(self) -> None:
        for name, limit in (("VCPU", 9), ("MEMORY_MB", 9)):
            self.store.set_quota("p", name, limit)
        self.store.set_quota("q", "VCPU", 9)
        held = self.claim(VCPU=1, MEMORY_MB=3)
        self.claim(VCPU=2)
        self.claim("q", VCPU=4)
        self.claim("r", VCPU=5)
        self.assertEqual({"VCPU": 3, "MEMORY_MB": 3}, self.used())
        self.store.release(held)
        self.assertEqual({"VCPU": 2, "MEMORY_MB": 0}, self.used())
        self.assertEqual({"VCPU": 4}, self.used("q"))
        with self.database.read() as tx:
            counted = sa.select(tables.consumers.c.project_id).where(tables.consumers.c.counted == 1)
            self.assertEqual(["p", "q"], sorted(tx.execute(counted).scalars()))
        self.store.unset_quota("p", "MEMORY_MB")
        self.assertEqual({"VCPU": 2}, self.used())

    def test_a_recount_leaves_the_counters_of_other_projects(self) -> None:
        for project in PROJECTS:
            self.store.set_quota(project, "VCPU", 9)
            self.claim(project, VCPU=2)
        with self.database.write() as tx:
            tx.execute(sa.update(tables.quotas).values(used=1))
        self.assertTrue(self.store.recount_quotas("p"))
        self.assertFalse(self.store.recount_quotas("r"))
        self.assertEqual([QuotaDrift("q", "VCPU", 1, 2)], self.store.quota_drift())

    def test_a_repeated_request_counts_once(self) -> None:
        self.store.set_quota("p", "VCPU", 2)
        request = ClaimRequest(new_uuid(), {self.node.uuid: {"VCPU": 2}}, "r", "p")
        self.assertEqual([False, True, True], [self.store.claim(request).repeated for _ in range(3)])
        self.assertEqual({"VCPU": 2}, self.used())

    def test_a_move_counts_once_with_its_larger_side(self) -> None:
        self.store.set_quota("p", "VCPU", 6)
        uuid_ = self.claim(VCPU=4)
        move, left = new_uuid(), new_uuid()
        begin = AllocationChange(
            move, {self.other.uuid: {"VCPU": 6}}, Expect.NOTHING, "p", counts_with=uuid_, enforce_quota=True
        )
        self.store.replace([begin])
        self.assertEqual({"VCPU": 6}, self.used())
        self.store.replace(
            [
                AllocationChange(uuid_, {self.other.uuid: {"VCPU": 6}}),
                AllocationChange(move, {}),
                AllocationChange(left, {self.node.uuid: {"VCPU": 4}}, Expect.NOTHING, "p", counts_with=uuid_),
            ]
        )
        self.assertEqual({"VCPU": 6}, self.used())
        self.store.release(uuid_)
        self.assertEqual({"VCPU": 4}, self.used())
        self.store.release(left)
        self.assertEqual({"VCPU": 0}, self.used())

    def test_a_move_to_more_than_the_limit_is_refused(self) -> None:
        self.store.set_quota("p", "VCPU", 6)
        uuid_ = self.claim(VCPU=4)
        begin = AllocationChange(
            new_uuid(), {self.other.uuid: {"VCPU": 7}}, Expect.NOTHING, "p", counts_with=uuid_, enforce_quota=True
        )
        with self.assertRaises(errors.QuotaExceeded) as refused:
            self.store.replace([begin])
        self.assertEqual((3, 1), (refused.exception.details["asked"], refused.exception.details["over"]))

    def test_a_move_of_the_same_size_is_not_refused_above_a_lowered_limit(self) -> None:
        uuid_ = self.claim(VCPU=4)
        self.store.set_quota("p", "VCPU", 1)
        begin = AllocationChange(
            new_uuid(), {self.other.uuid: {"VCPU": 4}}, Expect.NOTHING, "p", counts_with=uuid_, enforce_quota=True
        )
        self.store.replace([begin])
        self.assertEqual({"VCPU": 4}, self.used())

    def test_a_change_without_enforcement_is_counted_and_not_refused(self) -> None:
        self.store.set_quota("p", "VCPU", 1)
        uuid_ = new_uuid()
        self.store.replace([AllocationChange(uuid_, {self.node.uuid: {"VCPU": 5}}, project="p")])
        self.assertEqual({"VCPU": 5}, self.used())
        self.store.replace([AllocationChange(uuid_, {self.node.uuid: {"VCPU": 3}, self.other.uuid: {"VCPU": 6}})])
        self.assertEqual({"VCPU": 9}, self.used())

    def test_a_change_that_lowers_what_is_used_is_not_refused(self) -> None:
        large, small = self.claim(VCPU=5), self.claim(VCPU=1)
        self.store.set_quota("p", "VCPU", 1)
        lower = AllocationChange(large, {self.node.uuid: {"VCPU": 1}}, project="p")
        higher = AllocationChange(small, {self.node.uuid: {"VCPU": 2}}, project="p", enforce_quota=True)
        self.store.replace([lower, higher])
        self.assertEqual({"VCPU": 3}, self.used())
        higher = AllocationChange(small, {self.node.uuid: {"VCPU": 4}}, project="p", enforce_quota=True)
        self.assertRaises(errors.QuotaExceeded, self.store.replace, [lower, higher])

    def test_a_consumer_that_counts_with_itself_counts_once(self) -> None:
        self.store.set_quota("p", "VCPU", 9)
        uuid_ = new_uuid()
        change = AllocationChange(
            uuid_, {self.node.uuid: {"VCPU": 2}}, Expect.NOTHING, "p", counts_with=uuid_, enforce_quota=True
        )
        self.store.replace([change])
        self.assertEqual({"VCPU": 2}, self.used())
        self.store.release(uuid_)
        self.assertEqual({"VCPU": 0}, self.used())

    def test_a_consumer_that_changes_its_project_is_counted_there(self) -> None:
        for project in PROJECTS:
            self.store.set_quota(project, "VCPU", 5)
        uuid_ = self.claim(VCPU=3)
        self.store.replace([AllocationChange(uuid_, {self.node.uuid: {"VCPU": 4}}, project="q")])
        self.assertEqual(({"VCPU": 0}, {"VCPU": 4}), (self.used("p"), self.used("q")))
        self.store.unset_quota("p", "VCPU")
        self.store.replace([AllocationChange(uuid_, {self.node.uuid: {"VCPU": 4}}, project="p")])
        self.assertEqual({"VCPU": 0}, self.used("q"))

    def test_a_claim_whose_time_is_over_counts_no_more(self) -> None:
        self.store.set_quota("p", "VCPU", 1)
        request = ClaimRequest(new_uuid(), {self.node.uuid: {"VCPU": 1}}, "r", "p", lifetime=1000.0)
        self.store.claim(request)
        self.assertEqual((False, []), (self.store.has_expired(), self.store.expire()))
        self.store.renew(request.consumer, 0.0)
        self.assertEqual((True, [request.consumer]), (self.store.has_expired(), self.store.expire()))
        self.assertFalse(self.store.has_expired())
        self.assertEqual({"VCPU": 0}, self.used())

    def test_many_changes_of_one_transaction_are_counted_together(self) -> None:
        self.store.set_quota("p", "VCPU", 9)
        held = [self.claim(VCPU=3) for _ in range(3)]
        with self.database.write() as tx:
            for each in held[:2]:
                self.store.release(each, tx)
        self.assertEqual({"VCPU": 3}, self.used())

    def test_a_transaction_that_is_undone_counts_nothing(self) -> None:
        self.store.set_quota("p", "VCPU", 9)
        held = self.claim(VCPU=3)

        def companion(tx: sa.Connection) -> None:
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            self.store.claim(ClaimRequest(new_uuid(), {self.node.uuid: {"VCPU": 1}}, "r", "p"), companion)
        with self.assertRaises(ZeroDivisionError), self.database.write() as tx:
            self.store.release(held, tx)
            raise ZeroDivisionError
        self.assertEqual({"VCPU": 3}, self.used())

    def test_grouped_claims_keep_the_limit(self) -> None:
        store = sql_store(self.database, claims_per_transaction=8)
        store.set_quota("p", "VCPU", 2)
        self.store = store
        self.claim(VCPU=2)
        self.assertRaises(errors.QuotaExceeded, self.claim, VCPU=1)
        fresh = sql_store(self.database, claims_per_transaction=8)
        changes = [
            AllocationChange(new_uuid(), {self.node.uuid: {"VCPU": 1}}, Expect.NOTHING, name, enforce_quota=True)
            for name in ("p", "q")
        ]
        for change in changes[1:]:
            fresh.replace([change])
        self.assertRaises(errors.QuotaExceeded, fresh.replace, changes[:1])

    def members(self, *projects: str) -> list[Member]:
        resources = {self.node.uuid: {"VCPU": 1}}
        changes = [
            AllocationChange(new_uuid(), resources, Expect.NOTHING, project, request_id="r", enforce_quota=True)
            for project in projects
        ]
        return [Member(each, None) for each in changes]

    def made(self, store: SqlStore, *projects: str) -> list[str]:
        """Claims that one transaction made, by project."""
        members = self.members(*projects)
        store._together(members)
        for each in members:
            self.assertNotEqual(each.alone, each.outcome is not None)
        return [each.change.project or "" for each in members if each.outcome is not None]

    def test_claims_made_together_are_counted_together_and_refused_together(self) -> None:
        store = sql_store(self.database)
        self.assertEqual(["q", "q"], self.made(store, "q", "q"))
        # Set by another process.
        self.store.set_quota("p", "VCPU", 3)
        self.assertEqual([], self.made(store, *"pppp"))
        self.assertEqual({"VCPU": 0}, self.used())
        self.assertEqual(["p"] * 3, self.made(store, *"ppp"))
        self.assertEqual({"VCPU": 3}, self.used())
        with self.database.read() as tx:
            counted = sa.select(tables.consumers.c.project_id).where(tables.consumers.c.counted == 1)
            self.assertEqual(["p"] * 3, list(tx.execute(counted).scalars()))

    def test_a_limit_refuses_no_claims_of_other_projects(self) -> None:
        for known in (False, True):
            with self.subTest(known=known):
                self.setUp()
                store = sql_store(self.database)
                self.store.set_quota("p", "VCPU", 2)
                self.store.set_quota("q", "VCPU", 1)
                if known:
                    store.recount_quotas("p")
                self.assertEqual(["p", "r"], self.made(store, "p", "q", "q", "r"))
                self.assertEqual(({"VCPU": 1}, {"VCPU": 0}), (self.used("p"), self.used("q")))
                self.assertEqual(["p", "q", "r"], self.made(store, "p", "q", "r"))
                self.assertEqual(({"VCPU": 2}, {"VCPU": 1}), (self.used("p"), self.used("q")))

    def test_a_reshape_of_all_its_providers_counts_what_it_gives(self) -> None:
        self.store.set_quota("p", "VCPU", 1)
        (reshaped,) = self.store.usages(providers=[self.node.uuid])
        change = InventoryChange(self.node.uuid, (InventoryItem("VCPU", 5),), reshaped.provider.generation)
        fresh = sql_store(self.database)
        fresh.reshape([change], [AllocationChange(new_uuid(), {self.node.uuid: {"VCPU": 4}}, project="p")])
        with self.database.read() as tx:
            self.assertEqual(4, tx.execute(sa.select(tables.quotas.c.used)).scalar())
        self.assertEqual({"VCPU": 4}, self.used())

    def test_consumers_of_claims_that_began_before_the_limit_are_counted_later(self) -> None:
        early = self.claim(VCPU=3)
        self.store.set_quota("p", "VCPU", 5)
        # What a claim leaves that read the limits before this one was set.
        with self.database.write() as tx:
            tx.execute(sa.update(tables.consumers).where(tables.consumers.c.uuid == early).values(counted=0))
            tx.execute(sa.update(tables.quotas).values(used=0))
        self.assertRaises(errors.QuotaExceeded, self.claim, VCPU=3)
        self.claim(VCPU=2)
        self.assertEqual({"VCPU": 5}, self.used())
        self.store.release(early)
        self.assertEqual({"VCPU": 2}, self.used())

    def test_shows_claims_that_began_before_the_limit(self) -> None:
        early = self.claim(VCPU=3)
        self.store.set_quota("p", "VCPU", 5)
        with self.database.write() as tx:
            tx.execute(sa.update(tables.consumers).where(tables.consumers.c.uuid == early).values(counted=0))
            tx.execute(sa.update(tables.quotas).values(used=0))
        self.assertEqual([Quota("p", "VCPU", 5, 3)], self.store.quotas())

    def test_looks_only_at_the_project_that_is_shown(self) -> None:
        for project in PROJECTS:
            self.claim(project, VCPU=3)
            self.store.set_quota(project, "VCPU", 5)
        with self.database.write() as tx:
            tx.execute(sa.update(tables.consumers).values(counted=0))
            tx.execute(sa.update(tables.quotas).values(used=0))
        with self.database.read() as tx:
            found = [self.store._quotas.uncounted(tx, project) for project in ("p", "r", "", None)]
        self.assertEqual([["p"], [], [], ["p", "q"]], found)
        self.assertEqual([Quota("p", "VCPU", 5, 3)], self.store.quotas("p"))
        with self.database.read() as tx:
            self.assertEqual(["q"], self.store._quotas.uncounted(tx, None))

    def test_names_are_as_long_as_the_journal_takes(self) -> None:
        name = "CUSTOM_" + "X" * 100
        self.store.create_resource_class(name)
        self.store.set_quota("p" * 141, name, 1)
        with self.assertRaisesRegex(errors.InvalidInput, "have 249 characters together, and may have 248"):
            self.store.set_quota("p" * 142, name, 1)
        self.store.set_quota("p" * 244, "VCPU", 1)
        self.assertRaises(errors.InvalidInput, self.store.set_quota, "p" * 245, "VCPU", 1)
        self.assertEqual(2, len(self.store.quotas()))

    def test_the_audit_finds_and_repairs_a_wrong_counter(self) -> None:
        self.store.set_quota("p", "VCPU", 5)
        self.claim(VCPU=3)
        self.assertEqual((), audit(self.store).findings)
        with self.database.write() as tx:
            tx.execute(sa.update(tables.quotas).values(used=1))
        self.assertEqual([QuotaDrift("p", "VCPU", 1, 3)], self.store.quota_drift())
        found = audit(self.store).findings
        self.assertEqual([("quota_drift", False)], [(each.kind, each.repaired) for each in found])
        self.assertIn("Project p", found[0].message)
        self.assertEqual([True], [each.repaired for each in audit(self.store, repair=True).findings])
        self.assertEqual({"VCPU": 3}, self.used())
        self.assertEqual((), audit(self.store).findings)

    def test_refuses_what_is_no_project_class_or_limit(self) -> None:
        for project, name, limit, error in (
            ("", "VCPU", 1, errors.InvalidInput),
            (" p", "VCPU", 1, errors.InvalidInput),
            ("p", "VCPU", -1, errors.InvalidInput),
            ("p", "VCPU", 2**31, errors.InvalidInput),
            ("p", "CUSTOM_NONE", 1, errors.NotFound),
        ):
            with self.subTest(project=project, name=name, limit=limit):
                self.assertRaises(error, self.store.set_quota, project, name, limit)
        self.assertEqual([], self.store.quotas())

    def test_a_class_with_a_limit_is_not_deleted(self) -> None:
        name = "CUSTOM_LICENSE"
        self.store.create_resource_class(name)
        self.store.set_quota("p", name, 5)
        with self.assertRaisesRegex(errors.InUse, "1 projects have a limit of resource class CUSTOM_LICENSE"):
            self.store.delete_resource_class(name)
        self.assertEqual([Quota("p", name, 5, 0)], self.store.quotas())
        self.store.unset_quota("p", name)
        self.store.delete_resource_class(name)
        self.assertRaises(errors.NotFound, self.store.set_quota, "p", name, 5)

    def test_a_class_that_is_deleted_while_its_limit_is_set_gets_none(self) -> None:
        name = "CUSTOM_LICENSE"
        self.store.create_resource_class(name)
        deleted = sa.update(tables.resource_classes).where(tables.resource_classes.c.name == name).values(name=None)
        counter = self.store._quotas
        found: list[dict[str, int]] = []
        numbers = counter._classes.numbers

        def read_and_delete(tx: sa.Connection, names: Iterable[str]) -> dict[str, int]:
            found.append(numbers(tx, names))
            tx.execute(deleted)
            return found[-1]

        with (
            mock.patch.object(counter._classes, "numbers", read_and_delete),
            self.assertRaisesRegex(errors.NotFound, name),
        ):
            self.store.set_quota("p", name, 5)
        self.assertEqual(1, len(found))
        self.assertEqual([], self.store.quotas())

    def test_shows_and_removes_a_limit_of_a_class_that_is_gone(self) -> None:
        name = "CUSTOM_LICENSE"
        self.store.create_resource_class(name)
        self.store.set_quota("p", name, 5)
        with self.database.write() as tx:
            tx.execute(sa.update(tables.resource_classes).values(name=None))
            tx.execute(sa.update(tables.quotas).values(used=1))
            number = tx.execute(sa.select(tables.quotas.c.resource_class_id)).scalar()
        shown = f"DELETED_CLASS_{number}"
        self.assertEqual([Quota("p", shown, 5, 1)], self.store.quotas())
        self.assertEqual([QuotaDrift("p", shown, 1, 0)], self.store.quota_drift())
        self.assertRaises(errors.NotFound, self.store.set_quota, "p", shown, 6)
        self.assertFalse(self.store.unset_quota("p", name))
        self.assertTrue(self.store.unset_quota("p", shown))
        self.assertEqual([], self.store.quotas())

    def test_gives_up_where_the_limits_change_all_the_time(self) -> None:
        store = sql_store(self.database)
        tries: list[sa.Connection] = []

        def changed(tx: sa.Connection, *_: object) -> bool:
            tries.append(tx)
            raise LimitsChangedError

        with mock.patch.object(store._quotas, "unset", changed), self.assertRaises(errors.StoreBusy):
            store.unset_quota("p", "VCPU")
        self.assertEqual(store._attempts, len(tries))

    def test_costs_no_statement_where_there_is_no_limit(self) -> None:
        self.claim(VCPU=1)
        claimed = statements(functools.partial(self.claim, VCPU=1))
        self.assertEqual(4, len(claimed), claimed)
        released = statements(functools.partial(self.store.release, self.claim(VCPU=1)))
        self.assertEqual(5, len(released), released)

    def test_a_claim_with_a_limit_costs_five_statements_more_and_one_for_each_limited_class(self) -> None:
        self.store.set_quota("p", "VCPU", 100)
        self.claim(VCPU=1)
        seen = statements(functools.partial(self.claim, VCPU=1))
        self.assertEqual(4 + 5 + 1, len(seen), seen)
        self.store.set_quota("p", "MEMORY_MB", 100)
        seen = statements(functools.partial(self.claim, VCPU=1, MEMORY_MB=1))
        self.assertEqual(4 + 5 + 2, len(seen), seen)
        self.assertTrue(all(each.startswith("UPDATE quotas") for each in seen[-2:]), seen)


class PostgresqlQuotaTests(QuotaTests):
    """Transactions that meet: a listener begins the second one between two statements of the first."""

    server = "postgresql"

    def setUp(self) -> None:
        super().setUp()
        database = Database(self.url)
        self.addCleanup(database.close)
        self.other_store = sql_store(database)

    def test_a_limit_that_is_set_while_the_last_one_is_removed_keeps_what_counts(self) -> None:
        self.store.set_quota("p", "VCPU", 9)
        self.claim(VCPU=1, MEMORY_MB=3)
        with before_statement("UPDATE quota_projects", lambda: self.other_store.set_quota("p", "MEMORY_MB", 9)):
            self.assertTrue(self.store.unset_quota("p", "VCPU"))
        with self.database.read() as tx:
            self.assertEqual([1], list(tx.execute(sa.select(tables.consumers.c.counted)).scalars()))
        self.assertEqual({"MEMORY_MB": 3}, self.used())

    def test_a_limit_that_is_removed_meanwhile_is_not_removed_again(self) -> None:
        for name in CLASSES:
            self.store.set_quota("p", name, 9)
        self.claim(VCPU=1, MEMORY_MB=3)
        with before_statement("UPDATE quota_projects", lambda: self.other_store.unset_quota("p", "VCPU")):
            self.assertFalse(self.store.unset_quota("p", "VCPU"))
        self.assertEqual({"MEMORY_MB": 3}, self.used())
        self.store.set_quota("p", "VCPU", 9)
        with before_statement("UPDATE quota_projects", lambda: self.other_store.unset_quota("p", "VCPU")):
            self.assertTrue(self.store.unset_quota("p", "MEMORY_MB"))
        with self.database.read() as tx:
            self.assertEqual([0], list(tx.execute(sa.select(tables.consumers.c.counted)).scalars()))
        self.assertEqual([], self.store.quotas())

    def test_consumers_marked_while_the_last_limit_is_removed_are_let_go(self) -> None:
        self.store.set_quota("p", "VCPU", 9)

        def claim() -> None:
            request = ClaimRequest(new_uuid(), {self.other.uuid: {"VCPU": 1}}, "r", "p")
            self.other_store.claim(request)

        with before_statement("UPDATE quota_projects", claim):
            self.assertTrue(self.store.unset_quota("p", "VCPU"))
        with self.database.read() as tx:
            self.assertEqual([0], list(tx.execute(sa.select(tables.consumers.c.counted)).scalars()))
        self.assertEqual(1, self.store.set_quota("p", "VCPU", 9).used)


class MariadbQuotaTests(PostgresqlQuotaTests):
    server = "mariadb"


class PostgresqlFirstLimitTests(SqlCase, unittest.TestCase):
    server = "postgresql"

    def test_a_limit_is_set_while_others_set_and_remove_the_first_one(self) -> None:
        # On MariaDB the row that an insert met stays locked, so nobody removes it.
        self.empty()
        database = Database(self.url)
        self.addCleanup(database.close)
        store, other = sql_store(self.database), sql_store(database)

        def come() -> None:
            other.set_quota("p", "MEMORY_MB", 9)

        def go() -> None:
            other.unset_quota("p", "MEMORY_MB")

        # It finds no row; its insert meets the row of another transaction (which looks twice), and that is removed again.
        with (
            before_statement("INSERT INTO quota_projects", come),
            before_statement("UPDATE quota_projects", bool, bool, bool, go),
        ):
            self.assertEqual(Quota("p", "VCPU", 5, 0), store.set_quota("p", "VCPU", 5))
        self.assertEqual([Quota("p", "VCPU", 5, 0)], store.quotas())


class Model:
    """What is held and what is limited, as dictionaries."""

    def __init__(self) -> None:
        #: consumer -> (project, what it counts with, units by class)
        self.held: dict[str, tuple[str, str, dict[str, int]]] = {}
        self.limits: dict[tuple[str, str], int] = {}

    def used(self, project: str, name: str) -> int:
        units: dict[str, int] = {}
        for of_project, unit, resources in self.held.values():
            if of_project == project:
                units[unit] = max(units.get(unit, 0), resources.get(name, 0))
        return sum(units.values())

    def fits(self, before: dict[str, tuple[str, str, dict[str, int]]], project: str) -> bool:
        """Whether no limit is exceeded by what is held more than before."""
        was = Model()
        was.held = before
        return all(
            self.used(of, name) <= max(limit, was.used(of, name))
            for (of, name), limit in self.limits.items()
            if of == project
        )


class QuotaMachine(stateful.RuleBasedStateMachine):
    """Drives two stores of one database, with memories of their own, and the model."""

    database: Database

    def __init__(self) -> None:
        super().__init__()
        case = SqlCase()
        case.database = self.database
        case.empty()
        self.model = Model()
        self.stores = (sql_store(self.database), sql_store(self.database, claims_per_transaction=4))
        self.nodes = [provider(VCPU=10_000, MEMORY_MB=10_000) for _ in range(2)]
        self.stores[0].ensure_providers(self.nodes)

    def change(self, store: AllocationStore, wanted: list[tuple[str, str, str, dict[str, int]]], enforce: bool) -> None:
        """Give consumers what they shall hold; refused exactly where the model says so."""
        before = dict(self.model.held)
        for consumer, project, unit, resources in wanted:
            self.model.held.pop(consumer, None)
            if resources:
                # What it counts with never changes.
                known = before.get(consumer)
                self.model.held[consumer] = (project, known[1] if known else unit, resources)
        projects = {project for _, project, _, _ in wanted}
        fits = not enforce or all(self.model.fits(before, project) for project in projects)
        changes = [
            AllocationChange(
                consumer,
                {self.nodes[number % 2].uuid: resources} if resources else {},
                project=project,
                counts_with=None if unit == consumer else unit,
                enforce_quota=enforce,
            )
            for number, (consumer, project, unit, resources) in enumerate(wanted)
        ]
        assert isinstance(store, SqlStore)
        try:
            store.replace(changes)
        except errors.QuotaExceeded:
            assert not fits, self.model.limits
            self.model.held = before
        else:
            assert fits, self.model.limits

    @stateful.rule(
        first=st.booleans(),
        place=st.integers(0, len(CONSUMERS) - 1),
        project=st.sampled_from(PROJECTS),
        resources=amounts,
        enforce=st.booleans(),
    )
    def hold(self, first: bool, place: int, project: str, resources: dict[str, int], enforce: bool) -> None:
        # A change that is checked takes more or less for a new consumer or in the same project.
        known = self.model.held.get(CONSUMERS[place])
        project = known[0] if known and enforce else project
        self.change(self.stores[first], [(CONSUMERS[place], project, CONSUMERS[place], resources)], enforce)

    @stateful.rule(first=st.booleans(), place=st.integers(0, len(CONSUMERS) - 1), resources=amounts)
    def begin_move(self, first: bool, place: int, resources: dict[str, int]) -> None:
        known = self.model.held.get(CONSUMERS[place])
        if known and COMPANIONS[place] not in self.model.held:
            self.change(self.stores[first], [(COMPANIONS[place], known[0], CONSUMERS[place], resources)], True)

    @stateful.rule(first=st.booleans(), place=st.integers(0, len(CONSUMERS) - 1))
    def end_move(self, first: bool, place: int) -> None:
        there, moved = (self.model.held.get(each[place]) for each in (CONSUMERS, COMPANIONS))
        if there and moved and there[0] == moved[0]:
            wanted = [
                (CONSUMERS[place], there[0], CONSUMERS[place], moved[2]),
                (COMPANIONS[place], there[0], CONSUMERS[place], there[2]),
            ]
            self.change(self.stores[first], wanted, False)

    @stateful.rule(first=st.booleans(), consumer=st.sampled_from(CONSUMERS + COMPANIONS))
    def release(self, first: bool, consumer: str) -> None:
        assert self.stores[first].release(consumer) == (self.model.held.pop(consumer, None) is not None)

    @stateful.rule(first=st.booleans(), consumers=st.sets(st.sampled_from(CONSUMERS + COMPANIONS), max_size=4))
    def release_many(self, first: bool, consumers: set[str]) -> None:
        with self.database.write() as tx:
            for each in sorted(consumers):
                self.stores[first].release(each, tx)
        for each in consumers:
            self.model.held.pop(each, None)

    @stateful.rule(
        first=st.booleans(),
        project=st.sampled_from(PROJECTS),
        name=st.sampled_from(CLASSES),
        limit=st.integers(0, 12),
    )
    def set(self, first: bool, project: str, name: str, limit: int) -> None:
        self.model.limits[project, name] = limit
        shown = self.stores[first].set_quota(project, name, limit)
        assert shown == Quota(project, name, limit, self.model.used(project, name)), shown

    @stateful.rule(first=st.booleans(), project=st.sampled_from(PROJECTS), name=st.sampled_from(CLASSES))
    def unset(self, first: bool, project: str, name: str) -> None:
        known = self.model.limits.pop((project, name), None) is not None
        assert self.stores[first].unset_quota(project, name) == known

    @stateful.rule(first=st.booleans(), project=st.sampled_from(PROJECTS))
    def recount(self, first: bool, project: str) -> None:
        limited = any(of == project for of, _ in self.model.limits)
        assert self.stores[first].recount_quotas(project) == limited

    @stateful.invariant()
    def counters_are_what_the_model_says(self) -> None:
        expected = [
            Quota(project, name, limit, self.model.used(project, name))
            for (project, name), limit in sorted(self.model.limits.items())
        ]
        with self.database.read() as tx:
            # Read as they are stored, because the store counts before it shows.
            rows = tx.execute(sa.select(tables.quotas)).all()
            counted = {row.uuid for row in tx.execute(sa.select(tables.consumers)) if row.counted}
        assert sorted(row.used for row in rows) == sorted(each.used for each in expected), (rows, expected)
        limited = {project for project, _ in self.model.limits}
        assert counted == {uuid for uuid, (project, _, _) in self.model.held.items() if project in limited}
        assert self.stores[0].quotas() == expected
        assert self.stores[1].quota_drift() == []


class QuotaModelTests(unittest.TestCase):
    def test_the_store_does_what_the_model_does(self) -> None:
        database = Database(sqlite_url(self))
        self.addCleanup(database.close)
        create_tables(database)

        class Machine(QuotaMachine):
            @override
            def __init__(self) -> None:
                self.database = database
                super().__init__()

        settings: Any = hypothesis.settings(max_examples=cases(40), stateful_step_count=30, deadline=None)
        stateful.run_state_machine_as_test(Machine, settings=settings)
