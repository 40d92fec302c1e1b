# SPDX-License-Identifier: Apache-2.0
"""Enrolling nodes with their providers, on each database: repeated, at once, half gone, and while somebody moves them."""

from __future__ import annotations

import threading
import unittest
import uuid
from concurrent import futures
from dataclasses import replace
from typing import Any
from unittest import mock

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.interface import ClaimRequest, ResourceProvider
from moorage.clock import SystemClock
from moorage.control_plane import enrolment
from moorage.control_plane.enrolment import Enrolment
from moorage.fleet import importer
from moorage.fleet.interface import InventoryItem, NodeSpec, uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.fleet.tables import nodes
from moorage.randomness import new_uuid
from moorage.services.registry import ServiceRegistry
from tests.conformance.allocation.stores import sql_store
from tests.functional.db.databases import TablesCase


def spec(name: str, cpus: int = 8, **more: Any) -> NodeSpec:
    """A node of a name that no other test uses, when the name ends with one's own mark."""
    return NodeSpec(uuid_of_name(name), name, inventories=(InventoryItem("VCPU", cpus),), **more)


class EnrolmentCase(TablesCase):
    """The laws, on the database of ``kind``; each test has nodes of its own."""

    def setUp(self) -> None:
        super().setUp()
        self.mark = uuid.uuid4().hex[:8]
        self.told = 0
        self.nodes = NodeStore(self.database)
        self.store = sql_store(self.database)
        self.registry = ServiceRegistry(self.database, SystemClock())
        self.resharded: list[int] = []
        self.enrolment = Enrolment(
            self.database, self.nodes, self.store, self.registry, self._changed, resharded=self.resharded.append
        )

    def _changed(self) -> None:
        self.told += 1

    def specs(self, count: int, **more: Any) -> list[NodeSpec]:
        return [spec(f"n{number}-{self.mark}", **more) for number in range(count)]

    def total(self, uuid_of_node: str) -> int:
        (usage,) = self.store.usages(providers=[uuid_of_node])
        return usage.provider.inventories[0].total

    def test_a_node_and_its_provider_have_one_uuid_and_repeating_changes_nothing(self) -> None:
        given = self.specs(3, shard="east")
        self.assertEqual({"created": 3, "changed": 0, "same": 0}, self.enrolment.enrol(given))
        before = [self.nodes.get(each.uuid) for each in given]
        self.assertEqual({"created": 0, "changed": 0, "same": 3}, self.enrolment.enrol(given))
        self.assertEqual(before, [self.nodes.get(each.uuid) for each in given])
        self.assertEqual([8, 8, 8], [self.total(each.uuid) for each in given])
        self.assertEqual(2, self.told)

    def test_what_a_file_does_not_give_stays(self) -> None:
        (given,) = self.specs(1, shard="east", host="h", resource_class="gold")
        self.enrolment.enrol([given])
        changed = self.enrolment.enrol([spec(given.name, 16, properties={"rack": 1})])
        self.assertEqual(1, changed["changed"])
        node = self.nodes.get(given.name)
        self.assertEqual(("east", "h", "gold"), (node.shard, node.host, node.resource_class))
        self.assertEqual(({"rack": 1}, 1, 16), (node.properties, node.generation, self.total(given.uuid)))

    def test_an_import_without_inventories_and_properties_keeps_what_the_node_has(self) -> None:
        (given,) = self.specs(1)
        full = importer.from_json(
            {
                "name": given.name,
                "properties": {"rack": 1, "row": 2},
                "extra": {"a": 1},
                "inventories": {
                    "VCPU": {"total": 8, "allocation_ratio": 4.0, "reserved": 1},
                    "MEMORY_MB": 1024,
                    "PGPU": 2,
                },
            }
        )
        self.enrolment.enrol([full])
        present = self.inventories(given.uuid)
        self.assertEqual(1, self.enrolment.enrol([NodeSpec(given.uuid, given.name)])["same"])
        self.assertEqual(present, self.inventories(given.uuid))
        renamed = f"renamed-{self.mark}"
        self.assertEqual(
            1, self.enrolment.enrol([importer.from_json({"name": renamed, "uuid": given.uuid})])["changed"]
        )
        self.assertEqual(present, self.inventories(given.uuid))
        self.assertEqual({"rack": 1, "row": 2}, self.nodes.get(renamed).properties)
        (usage,) = self.store.usages(providers=[given.uuid])
        self.assertEqual(renamed, usage.provider.name)
        # What is given is merged, and null removes.
        partial = {
            "inventories": {"VCPU": 16, "PGPU": None},
            "properties": {"rack": None, "unit": 3},
            "extra": {"b": 2},
        }
        self.enrolment.enrol([importer.from_json({"name": renamed, "uuid": given.uuid, **partial})])
        self.assertEqual(
            {"VCPU": InventoryItem("VCPU", 16, 1, allocation_ratio=4.0), "MEMORY_MB": InventoryItem("MEMORY_MB", 1024)},
            self.inventories(given.uuid),
        )
        self.assertEqual({"row": 2, "unit": 3}, self.nodes.get(given.uuid).properties)
        with self.database.read() as tx:
            self.assertEqual(
                {"a": 1, "b": 2}, tx.execute(sa.select(nodes.c.extra).where(nodes.c.name == renamed)).scalar()
            )

    def test_imports_of_different_properties_and_inventories_at_once_are_all_kept(self) -> None:
        (given,) = self.specs(1)
        self.enrolment.enrol([given])
        start = threading.Barrier(4)

        def work(number: int) -> None:
            data = {"properties": {f"p{number}": number}, "inventories": {f"CUSTOM_C{number}": number + 1}}
            start.wait()
            self.enrolment.enrol([importer.from_json({"name": given.name, **data})])

        with futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        self.assertEqual({f"p{number}": number for number in range(4)}, self.nodes.get(given.uuid).properties)
        self.assertEqual(
            {"VCPU": 8, **{f"CUSTOM_C{number}": number + 1 for number in range(4)}},
            {name: item.total for name, item in self.inventories(given.uuid).items()},
        )

    def inventories(self, uuid_of_node: str) -> dict[str, InventoryItem]:
        (usage,) = self.store.usages(providers=[uuid_of_node])
        return {item.resource_class: item for item in usage.provider.inventories}

    def test_nodes_that_get_another_shard_are_told_of_whoever_changes_it(self) -> None:
        given = self.specs(4, shard="east")
        self.enrolment.enrol(given[:3])
        self.assertEqual([], self.resharded, "those that are new had none before")
        moved = [replace(each, shard="west") for each in given[1:]]
        counts = self.enrolment.enrol([given[0], *moved])
        self.assertEqual({"created": 1, "changed": 2, "same": 1}, counts)
        self.assertEqual([2], self.resharded)
        self.enrolment.enrol([replace(each, properties={"rack": 1}, shard=None) for each in given])
        node = self.nodes.get(given[0].uuid)
        self.assertTrue(self.enrolment.change(node.uuid, node.generation, {"description": "x"}))
        self.assertFalse(self.enrolment.change(node.uuid, node.generation, {"shard": "north"}))
        self.assertEqual([2], self.resharded)
        self.assertTrue(self.enrolment.change(node.uuid, node.generation + 1, {"shard": None}))
        self.assertEqual([2, 1], self.resharded)

    def test_a_name_or_uuid_that_stands_twice_is_named_and_nothing_is_written(self) -> None:
        first, second = self.specs(2)
        for wrong in (
            [first, second, first],
            [first, NodeSpec(second.uuid, first.name)],
            [first, NodeSpec(first.uuid, second.name)],
        ):
            with self.assertRaisesRegex(errors.InvalidInput, "stands twice"):
                self.enrolment.enrol(wrong)
        self.assertRaises(errors.NotFound, self.nodes.get, first.uuid)
        self.assertEqual(0, self.told)

    def test_a_name_of_another_node_is_refused_and_nothing_is_written(self) -> None:
        first, second = self.specs(2)
        self.enrolment.enrol([first])
        with self.assertRaisesRegex(errors.AlreadyExists, first.uuid):
            self.enrolment.enrol([second, NodeSpec(str(uuid.uuid4()), first.name)])
        self.assertRaises(errors.NotFound, self.nodes.get, second.uuid)

    def test_files_imported_at_once_create_each_node_once(self) -> None:
        given = self.specs(40)
        start = threading.Barrier(6)

        def work(number: int) -> int:
            start.wait()
            mine = given if number % 2 else list(reversed(given))
            return self.enrolment.enrol(mine)["created"]

        with futures.ThreadPoolExecutor(6) as pool:
            created = list(pool.map(work, range(6)))
        self.assertEqual(40, sum(created))
        self.assertEqual([8] * 40, [self.total(each.uuid) for each in given])

    def test_a_removed_node_takes_its_provider_along_unless_something_is_there(self) -> None:
        free, busy = self.specs(2)
        self.enrolment.enrol([free, busy])
        self.store.claim(ClaimRequest(str(uuid.uuid4()), {busy.uuid: {"VCPU": 1}}))
        self.enrolment.remove(free.uuid)
        self.assertRaises(errors.NotFound, self.nodes.get, free.uuid)
        self.assertEqual([], self.store.usages(providers=[free.uuid]))
        self.assertRaises(errors.InUse, self.enrolment.remove, busy.uuid)
        self.assertEqual(busy.name, self.nodes.get(busy.uuid).name)

    def test_a_node_without_agent_gets_one_that_is_enlisted_and_keeps_it(self) -> None:
        given = self.specs(30)
        self.enrolment.enrol(given)
        hosts = {f"{name}-{self.mark}" for name in ("a", "b", "c")}
        for host in sorted(hosts):
            self.registry.enlist("agent", host, rpc_version="1.0")
        known = {row.host for row in self.registry.list(binary="agent")}
        self.enrolment.assign()
        first = {each.uuid: self.nodes.get(each.uuid).host for each in given}
        self.assertLessEqual(set(first.values()), known)
        self.registry.enlist("agent", f"d-{self.mark}", rpc_version="1.0")
        self.assertEqual(0, self.enrolment.assign())
        self.assertEqual(first, {each.uuid: self.nodes.get(each.uuid).host for each in given})

    def test_a_provider_that_got_lost_is_found_and_made_anew(self) -> None:
        (given,) = self.specs(1)
        self.enrolment.enrol([given])
        self.store.delete_provider(given.uuid)
        self.assertEqual(1, self.enrolment.reconcile())
        self.assertEqual(0, self.enrolment.reconcile())
        self.assertEqual(1, len(self.store.usages(providers=[given.uuid])))

    def test_a_reconciliation_reads_only_the_nodes_that_were_written_since_the_last_one(self) -> None:
        old, new = self.specs(2)
        self.enrolment.enrol([old])
        self.enrolment.reconcile()
        self.enrolment.reconcile()
        self.enrolment.enrol([new])
        with mock.patch.object(self.enrolment, "nodes_without_provider") as all_nodes:
            self.assertEqual(0, self.enrolment.reconcile())
            # One of the new nodes and another provider: there are as many as before.
            self.store.delete_provider(new.uuid)
            self.store.ensure_providers([ResourceProvider(new_uuid(), f"other-{self.mark}")])
            self.assertEqual(1, self.enrolment.reconcile())
            all_nodes.assert_not_called()
        # What was missing may be a sign of more.
        with mock.patch.object(self.enrolment, "nodes_without_provider", return_value=iter(())) as all_nodes:
            self.enrolment.reconcile()
            all_nodes.assert_called_once()

    def test_a_reconciliation_after_a_large_import_reads_uuids_alone(self) -> None:
        self.enterContext(mock.patch.object(enrolment, "_PAGE", 2))
        old, *new = self.specs(4)
        self.enrolment.enrol([old])
        self.enrolment.reconcile()
        self.enrolment.reconcile()
        self.enrolment.enrol(new)
        with mock.patch.object(self.store, "usages") as usages:
            self.assertEqual(0, self.enrolment.reconcile())
            usages.assert_not_called()
        self.store.delete_provider(new[0].uuid)
        self.store.ensure_providers([ResourceProvider(new_uuid(), f"other-{self.mark}")])
        self.assertEqual(1, self.enrolment.reconcile())

    def test_all_nodes_are_compared_when_a_provider_is_missing_and_now_and_then(self) -> None:
        given = self.specs(2)
        self.enrolment.enrol(given)
        self.enrolment.reconcile()
        # As if the nodes had been written long ago.
        recent = self.nodes.recent(2**62)
        self.enterContext(mock.patch.object(self.nodes, "recent", return_value=recent))
        self.store.delete_provider(given[0].uuid)
        self.assertEqual(1, self.enrolment.reconcile())
        # The count of providers cannot say that one was replaced by another one.
        self.assertEqual(0, self.enrolment.reconcile())
        self.store.delete_provider(given[1].uuid)
        self.store.ensure_providers([ResourceProvider(new_uuid(), f"another-{self.mark}")])
        self.assertEqual([0] * 59 + [1], [self.enrolment.reconcile() for _ in range(60)])


class Interrupted:
    """A transaction in which something else happens, and commits, between the first statement and the second."""

    def __init__(self, tx: sa.Connection, pool: futures.Executor, what: Any, argument: str) -> None:
        self._tx = tx
        self.info = tx.info
        self._pool = pool
        self._what = what
        self._argument = argument
        self._done = False

    def execute(self, *args: Any) -> Any:
        result = self._tx.execute(*args)
        if not self._done:
            self._done = True
            rows = result.all()
            self._pool.submit(self._what, self._argument).result()
            return iter(rows)
        return result


class ServerCase(EnrolmentCase):
    """What cannot happen on SQLite, where a transaction that writes has the database for itself from its beginning."""

    def test_an_import_that_read_before_somebody_moved_the_node_leaves_it_where_it_is(self) -> None:
        (given,) = self.specs(1, shard="east")
        self.enrolment.enrol([given])
        ensured = self.nodes.ensure

        def moved_meanwhile(tx: Any, specs: Any, hosts: Any) -> Any:
            with futures.ThreadPoolExecutor(1) as pool:
                between: Any = Interrupted(tx, pool, self._move, given.uuid)
                return ensured(between, specs, hosts)

        with mock.patch.object(self.nodes, "ensure", moved_meanwhile):
            self.enrolment.enrol([spec(given.name, properties={"rack": 2})])
        node = self.nodes.get(given.uuid)
        self.assertEqual(("west", {"rack": 2}), (node.shard, node.properties))

    def _move(self, uuid_of_node: str) -> None:
        with self.database.write() as tx:
            tx.execute(sa.update(nodes).where(nodes.c.uuid == uuid_of_node).values(shard="west"))


class SqliteEnrolmentTests(EnrolmentCase, unittest.TestCase):
    """On SQLite."""


class PostgresqlEnrolmentTests(ServerCase, unittest.TestCase):
    """On PostgreSQL."""

    kind = "postgresql"


class MariadbEnrolmentTests(ServerCase, unittest.TestCase):
    """On MariaDB."""

    kind = "mariadb"
