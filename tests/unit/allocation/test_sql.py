# SPDX-License-Identifier: Apache-2.0
"""What is particular to the sql store: how many statements things cost, options, audit and repair of real rows."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from moorage import errors
from moorage.allocation.audit import audit
from moorage.allocation.interface import (
    STORES,
    AllocationStore,
    ClaimRelease,
    ClaimRequest,
    Drift,
    InventoryItem,
    OrphanDetector,
    ResourceProvider,
)
from moorage.db import Database, Duplicate
from moorage.testing.allocation import all_allocations, held, new_uuid, provider
from moorage_plugins.stores import sql, tables
from tests.conformance.allocation.stores import SqlCase, memory_store, sql_store


def statements(work: Callable[[], Any]) -> list[str]:
    """The statements that ran on any engine of this process, without the begin of transactions."""
    seen: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith(("BEGIN", "SAVEPOINT", "RELEASE")):
            seen.append(statement)

    event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        work()
    finally:
        event.remove(sa.Engine, "before_cursor_execute", note)
    return seen


class _Detector(OrphanDetector):
    """Knows who is alive, and does something while it looks."""

    api_version = (2, 0)
    consumer_types = frozenset({"INSTANCE"})

    def __init__(self, alive: set[str], meanwhile: Callable[[], None]) -> None:
        self._alive = alive
        self._meanwhile = meanwhile
        self.asked: set[str] = set()

    def missing(self, consumers: Sequence[str]) -> set[str]:
        self.asked |= set(consumers)
        self._meanwhile()
        return set(consumers) - self._alive


class SqlStoreTests(SqlCase, unittest.TestCase):
    def setUp(self) -> None:
        self.empty()
        self.store = sql_store(self.database)

    def claim(self, *providers: ResourceProvider, **resources: int) -> str:
        request = ClaimRequest(new_uuid(), {each.uuid: resources for each in providers}, "r")
        return self.store.claim(request).consumer

    def test_a_claim_costs_two_statements_and_two_for_each_provider(self) -> None:
        given = [provider(VCPU=100, MEMORY_MB=1000, DISK_GB=1000) for _ in range(3)]
        self.store.ensure_providers(given)
        self.claim(*given, VCPU=1)
        for count in (1, 2, 3):
            for resources in ({"VCPU": 1}, {"VCPU": 1, "MEMORY_MB": 2, "DISK_GB": 3}):
                seen = statements(functools.partial(self.claim, *given[:count], **resources))
                self.assertEqual(2 + 2 * count, len(seen), seen)

    def test_a_release_costs_three_statements_and_two_for_each_provider(self) -> None:
        given = [provider(VCPU=100, MEMORY_MB=1000) for _ in range(2)]
        self.store.ensure_providers(given)
        for count in (1, 2):
            consumer = self.claim(*given[:count], VCPU=1, MEMORY_MB=1)
            seen = statements(functools.partial(self.store.release, consumer))
            self.assertEqual(3 + 2 * count, len(seen), seen)

    def test_releases_of_several_consumers_cost_as_many_statements_as_those_of_two(self) -> None:
        given = [provider(VCPU=100, MEMORY_MB=1000) for _ in range(4)]
        self.store.ensure_providers(given)
        for count in (2, 8):
            claims = [self.claim(*given[number % 3 :], VCPU=1, MEMORY_MB=1) for number in range(count)]
            releases = [ClaimRelease(each) for each in claims]
            seen = statements(functools.partial(self.store.release_many, releases))
            # Consumers, what they hold, the providers, their inventories, allocations.
            self.assertEqual(5, len(seen), seen)
        self.assertEqual({}, held(self.store))

    def test_no_statement_of_a_claim_reads_other_consumers(self) -> None:
        given = provider(VCPU=100)
        self.store.ensure_providers([given])
        self.claim(given, VCPU=1)
        for each in statements(lambda: self.claim(given, VCPU=1)):
            self.assertTrue(each.startswith(("INSERT", "UPDATE")), each)

    def test_a_page_of_usages_costs_two_statements_and_one_of_allocations_one(self) -> None:
        given = [provider(VCPU=100, MEMORY_MB=1000) for _ in range(20)]
        self.store.ensure_providers(given)
        self.claim(*given, VCPU=1)
        self.assertEqual(2, len(statements(lambda: self.store.usages(limit=10))))
        self.assertEqual(1, len(statements(lambda: self.store.allocations(limit=10))))

    def test_usages_of_a_user_are_read_by_the_whole_index(self) -> None:
        for seen in statements(lambda: self.store.project_usages("p", user="u")):
            with self.database.read() as tx:
                plan = tx.exec_driver_sql("EXPLAIN QUERY PLAN " + seen, ("p", 0, 1, "u")).all()
            text = "; ".join(str(row[-1]) for row in plan)
            self.assertIn("ix_consumers_project_id (project_id=? AND counted=? AND user_id=?)", text)

    def test_a_page_of_allocations_is_read_in_the_order_of_the_index(self) -> None:
        seen = statements(lambda: self.store.allocations(after=("c", "p", "VCPU"), limit=10))[-1]
        with self.database.read() as tx:
            plan = tx.exec_driver_sql("EXPLAIN QUERY PLAN " + seen, ("c", "c", 0, 0, 0, 10, 0)[: seen.count("?")]).all()
        text = "; ".join(str(row[-1]) for row in plan)
        self.assertIn("SEARCH allocations USING INDEX", text)
        self.assertIn("(consumer_id>?)", text)
        self.assertNotIn("TEMP B-TREE", text)

    def test_ensuring_many_providers_again_costs_a_few_statements(self) -> None:
        given = [provider(VCPU=8, MEMORY_MB=1000) for _ in range(900)]
        self.assertEqual(900, self.store.ensure_providers(given))
        self.assertLessEqual(len(statements(lambda: self.store.ensure_providers(given))), 9)

    def test_the_rule_of_placement_refuses_the_smallest_unit_that_is_no_step(self) -> None:
        for store in (sql_store(self.database, step_size_rule="modulo"), memory_store(step_size_rule="modulo")):
            given = provider(DISK_GB=InventoryItem("DISK_GB", 100, min_unit=5, step_size=10))
            store.ensure_providers([given])
            with self.subTest(store=store), self.assertRaises(errors.ConstraintViolated):
                store.claim(ClaimRequest(new_uuid(), {given.uuid: {"DISK_GB": 5}}))
            store.claim(ClaimRequest(new_uuid(), {given.uuid: {"DISK_GB": 20}}))

    def test_standard_classes_have_the_numbers_that_all_clients_know(self) -> None:
        given = provider(VCPU=1, MEMORY_MB=1, DISK_GB=1, PCI_DEVICE=1, CUSTOM_A=1, CUSTOM_B=1)
        self.store.ensure_providers([given])
        with self.database.read() as tx:
            numbers = tx.execute(sa.select(tables.inventories.c.resource_class_id)).scalars().all()
        self.assertEqual({0, 1, 2, 3, 10_000, 10_001}, set(numbers))

    def test_a_duplicate_of_the_companion_is_no_repetition(self) -> None:
        given = provider(VCPU=10)
        self.store.ensure_providers([given])
        calls = []

        def companion(tx: sa.Connection) -> None:
            calls.append(1)
            row = {"uuid": given.uuid, "root_uuid": given.uuid, "name": "other", "generation": 0, "can_host": True}
            tx.execute(sa.insert(tables.resource_providers), row)

        with self.assertRaises(Duplicate):
            self.store.claim(ClaimRequest(new_uuid(), {given.uuid: {"VCPU": 1}}, "r"), companion)
        self.assertEqual([1], calls)
        self.assertEqual({}, held(self.store))

    def test_a_claim_that_fits_after_a_release_in_between_is_granted(self) -> None:
        given = provider(VCPU=1)
        self.store.ensure_providers([given])
        first = self.claim(given, VCPU=1)
        other, explain = sql_store(self.database), self.store._explain
        self.store._explain = lambda *changes: (other.release(first), explain(*changes))[1]  # type: ignore[method-assign]
        second = self.claim(given, VCPU=1)
        self.assertEqual([second], [item.consumer for item in all_allocations(self.store)])

    def test_audit_finds_and_repairs_wrong_counters(self) -> None:
        given = [provider(VCPU=10, MEMORY_MB=1000) for _ in range(3)]
        self.store.ensure_providers(given)
        self.claim(*given, VCPU=2)
        self.assertTrue(audit(self.store).clean)
        wrong = min(given, key=lambda each: each.uuid)
        with self.database.write() as tx:
            number = tx.execute(
                sa.select(tables.resource_providers.c.id).where(tables.resource_providers.c.uuid == wrong.uuid)
            ).scalar_one()
            tx.execute(
                sa.update(tables.inventories)
                .where(tables.inventories.c.resource_provider_id == number)
                .values(used=7 + tables.inventories.c.resource_class_id)
            )
        expected = (Drift(wrong.uuid, "MEMORY_MB", 8, 0), Drift(wrong.uuid, "VCPU", 7, 2))
        self.assertEqual(expected, audit(self.store).drift)
        report = audit(self.store, repair=True)
        self.assertEqual((expected, (wrong.uuid,), 3), (report.drift, report.repaired, report.providers))
        self.assertTrue(audit(self.store).clean)
        self.assertFalse(self.store.recount(new_uuid()))

    def test_audit_finds_allocations_without_inventory_and_overuse(self) -> None:
        given = provider(VCPU=10, DISK_GB=10)
        self.store.ensure_providers([given])
        consumer = self.claim(given, VCPU=4, DISK_GB=4)
        with self.database.write() as tx:
            tx.execute(sa.delete(tables.inventories).where(tables.inventories.c.resource_class_id == 2))
            tx.execute(sa.update(tables.inventories).values(total=3))
        report = audit(self.store, repair=True)
        self.assertEqual((Drift(given.uuid, "DISK_GB", None, 4),), report.drift)
        self.assertEqual(((given.uuid, "VCPU", 4, 3.0),), tuple(
            (each.provider, each.resource_class, each.used, each.capacity) for each in report.overuse
        ))  # fmt: skip
        self.assertEqual((), report.repaired)
        self.assertTrue(self.store.release(consumer))

    def test_audit_finds_what_belongs_to_no_provider(self) -> None:
        given = [provider(VCPU=10, DISK_GB=10) for _ in range(2)]
        self.store.ensure_providers(given)
        self.claim(given[0], VCPU=4)
        of_given = tables.resource_providers.c.uuid.in_([each.uuid for each in given])
        with self.database.write() as tx:
            tx.execute(sa.delete(tables.resource_providers).where(of_given))
            tx.execute(sa.delete(tables.inventories).where(tables.inventories.c.total == 10, tables.inventories.c.used == 0,
                                                          tables.inventories.c.resource_class_id == 0))  # fmt: skip
        report = audit(self.store, repair=True)
        self.assertEqual({Drift("", "VCPU", 4, 4), Drift("", "DISK_GB", 0, 0)}, set(report.drift))
        self.assertEqual((), report.repaired)
        with self.database.write() as tx:
            tx.execute(sa.delete(tables.inventories))
            tx.execute(sa.delete(tables.allocations))

    def test_audit_finds_orphans_and_releases_them_only_when_asked(self) -> None:
        given = provider(VCPU=10)
        for store in (self.store, memory_store()):
            store.ensure_providers([given])
            alive, gone, foreign = (new_uuid() for _ in range(3))
            for consumer, kind in ((alive, "INSTANCE"), (gone, "INSTANCE"), (foreign, "MIGRATION")):
                store.claim(ClaimRequest(consumer, {given.uuid: {"VCPU": 1}}, consumer_type=kind))
            late = new_uuid()
            store.claim(ClaimRequest(late, {given.uuid: {"VCPU": 1}}))

            def release_meanwhile(store: AllocationStore = store, late: str = late) -> None:
                store.release(late)

            detector = _Detector({alive}, release_meanwhile)
            report = audit(store, repair=True, detectors=[detector])
            self.assertEqual(
                ([gone], (), False), ([each.uuid for each in report.orphans], report.released, report.clean)
            )
            self.assertEqual({gone, alive, late}, set(detector.asked))
            self.assertEqual({(given.uuid, "VCPU"): 3}, held(store))
            self.assertEqual((gone,), audit(store, detectors=[detector], release_orphans=True).released)
            self.assertEqual({(given.uuid, "VCPU"): 2}, held(store))
            self.assertTrue(audit(store, detectors=[detector]).clean)

    def test_the_entry_point_loads(self) -> None:
        self.assertIs(sql.SqlStore, STORES.load("sql").plugin)


class UnreachableTests(unittest.TestCase):
    def test_a_store_that_cannot_be_opened_says_so(self) -> None:
        database = Database("sqlite:////nonexistent-folder/moorage.sqlite")
        store = sql_store(database)
        for work in (
            lambda: store.claim(ClaimRequest(new_uuid(), {new_uuid(): {"VCPU": 1}})),
            lambda: store.release(new_uuid()),
            lambda: store.usages(),
            lambda: store.drift(),
        ):
            with self.assertRaises(errors.StoreUnavailable):
                work()
