# SPDX-License-Identifier: Apache-2.0
"""The audit of nodes against providers and of instances against allocations, and the races that it looks for."""

from __future__ import annotations

import threading
import unittest
import uuid as uuid_module
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any
from unittest import mock

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.audit import AuditReport, Finding, audit
from moorage.allocation.interface import InventoryItem, ResourceProvider
from moorage.clock import SystemClock
from moorage.control_plane.fleet_audit import FleetAudit
from moorage.fleet.interface import NodeSpec, uuid_of_name
from moorage.fleet.tables import nodes
from moorage.instances.interface import Instance
from moorage.testing.allocation import new_uuid
from moorage.testing.database import empty_tables
from moorage_plugins.compute.instances import ComputeInstances
from moorage_plugins.compute.tables import instances
from moorage_plugins.schema import plugins_metadata
from tests.conformance.allocation.stores import sql_store
from tests.functional.sharding.case import FleetCase


class AuditCase(FleetCase):
    def setUp(self) -> None:
        super().setUp()
        self.store = sql_store(self.database)
        self.instances = ComputeInstances(conf=None, database=self.database, clock=SystemClock())
        self.checks = FleetAudit(self.database, self.nodes, self.store, self.instances, self.enrolment).checks()
        with self.database.write() as tx:
            empty_tables(tx, plugins_metadata)
        self.enrolment.enrol([self.spec(f"n{number}") for number in range(3)])

    def spec(self, name: str) -> NodeSpec:
        return NodeSpec(uuid_of_name(name), name, inventories=(InventoryItem("VCPU", 4),))

    def audit(self, *, repair: bool = False) -> AuditReport:
        return audit(self.store, repair=repair, checks=self.checks)

    def found(self, *, repair: bool = False) -> list[tuple[str, str, bool]]:
        return [(each.kind, each.provider, each.repaired) for each in self.audit(repair=repair).findings]

    def providers(self) -> set[str]:
        return {usage.provider.uuid for usage in self.store.usages(limit=1000)}

    def meanwhile(self, transaction: Any, work: Callable[[Any], Any]) -> None:
        """Another transaction commits ``work`` now. On SQLite nobody else can write, so the open transaction does the work."""
        if self.kind == "sqlite":
            work(transaction)
            return
        with futures.ThreadPoolExecutor(1) as pool:
            pool.submit(self.database.run, work).result()

    # -- nodes and providers --------------------------------------------------------------------------------------

    def test_a_node_that_is_removed_while_providers_are_compared_leaves_no_provider(self) -> None:
        gone = uuid_of_name("n1")
        self.store.delete_provider(gone)
        missing = self.enrolment.nodes_without_provider

        def removed_meanwhile() -> Any:
            found = list(missing())
            self.assertEqual([gone], [node.uuid for node in found])
            self.enrolment.remove(gone)
            return iter(found)

        with mock.patch.object(self.enrolment, "nodes_without_provider", removed_meanwhile):
            self.assertEqual(0, self.enrolment.reconcile())
        self.assertEqual({uuid_of_name("n0"), uuid_of_name("n2")}, self.providers())
        self.enrolment.create(NodeSpec(new_uuid(), "n1"))

    def test_reconciling_and_removing_at_once_never_leaves_a_provider_behind(self) -> None:
        for _ in range(10):
            gone = uuid_of_name("n1")
            self.enrolment.enrol([self.spec("n1")])
            self.store.delete_provider(gone)
            start = threading.Barrier(3)

            def reconcile(start: threading.Barrier = start) -> None:
                start.wait()
                self.enrolment.reconcile()

            def remove(start: threading.Barrier = start, gone: str = gone) -> None:
                start.wait()
                self.enrolment.remove(gone)

            with futures.ThreadPoolExecutor(3) as pool:
                for each in [pool.submit(work) for work in (reconcile, remove, reconcile)]:
                    each.result()
            self.assertEqual({uuid_of_name("n0"), uuid_of_name("n2")}, self.providers())

    def test_providers_and_nodes_without_each_other_are_found_and_healed_where_it_is_safe(self) -> None:
        empty, full, child = (new_uuid() for _ in range(3))
        self.store.ensure_providers(
            [
                ResourceProvider(empty, "ghost"),
                ResourceProvider(full, "full", inventories=(InventoryItem("VCPU", 1),)),
                ResourceProvider(child, "child", parent=uuid_of_name("n0")),
                ResourceProvider(new_uuid(), "pool", can_host=False, inventories=(InventoryItem("DISK_GB", 1),)),
            ]
        )
        self.store.delete_provider(uuid_of_name("n2"))
        lost = ("node_without_provider", uuid_of_name("n2"))
        ghost, kept = ("provider_without_node", empty), ("provider_without_node", full)
        self.assertFalse(self.audit().clean)
        self.assertEqual({(*ghost, False), (*kept, False), (*lost, False)}, set(self.found()))
        self.assertEqual({(*ghost, True), (*kept, False), (*lost, True)}, set(self.found(repair=True)))
        (left,) = self.audit(repair=True).findings
        self.assertEqual((full, False), (left.provider, left.repaired))
        self.assertIn(f"openstack resource provider delete {full}", left.message)
        self.assertIn(uuid_of_name("n2"), self.providers())
        # The name is free again.
        self.enrolment.create(NodeSpec(new_uuid(), "ghost"))

    def test_a_store_that_serves_other_services_alone_is_clean(self) -> None:
        for name in ("n0", "n1", "n2"):
            self.enrolment.remove(uuid_of_name(name))
        other = ResourceProvider(new_uuid(), "other", inventories=(InventoryItem("VCPU", 1),))
        self.store.ensure_providers([other])
        self.assertTrue(self.audit().clean)

    def test_a_provider_whose_node_is_enrolled_meanwhile_is_kept(self) -> None:
        ghost = uuid_of_name("late")
        self.store.ensure_providers([ResourceProvider(ghost, "late")])
        delete = self.store.delete_provider

        def enrolled_meanwhile(uuid: str, transaction: Any = None) -> bool:
            done = delete(uuid, transaction)
            if uuid == ghost:
                self.meanwhile(transaction, lambda tx: self.nodes.insert(tx, NodeSpec(ghost, "late")))
            return done

        with mock.patch.object(self.store, "delete_provider", enrolled_meanwhile):
            (found,) = self.audit(repair=True).findings
        self.assertEqual((ghost, False), (found.provider, found.repaired))
        self.assertIn("enrolled meanwhile", found.message)
        self.assertIn(ghost, self.providers())

    # -- instances ------------------------------------------------------------------------------------------------

    def owned(self, node: str, status: str = "active", cpus: int = 2) -> str:
        uuid, of_node = str(uuid_module.uuid4()), uuid_of_name(node)
        found = Instance(uuid, "i", status, "h", node, of_node, "small", {"VCPU": cpus}, project_id="p", user_id="u")
        with self.database.write() as tx:
            self.instances.insert(tx, found)
        return uuid

    def missing(self, *, repair: bool = False) -> Sequence[Finding]:
        found = self.audit(repair=repair).findings
        self.assertEqual(
            {"instance_without_allocation"}, {each.kind for each in found} or {"instance_without_allocation"}
        )
        return found

    def test_live_instances_without_an_allocation_are_found_and_claimed_again_if_they_fit(self) -> None:
        first, second = sorted([self.owned("n0", cpus=3), self.owned("n0", cpus=3)])
        for status in ("error", "shelved_offloaded"):
            self.owned("n1", status)
        found = self.missing()
        self.assertEqual([first, second], [each.consumer for each in found])
        self.assertEqual({False}, {each.repaired for each in found})
        self.assertIn("3 VCPU", found[0].message)
        self.assertEqual([], self.store.allocations())
        healed = {each.consumer: each for each in self.missing(repair=True)}
        self.assertEqual({first: True, second: False}, {uuid: each.repaired for uuid, each in healed.items()})
        self.assertIn("has 1 VCPU free, and 3 were asked for", healed[second].message)
        held = self.store.consumer(first)
        assert held is not None
        self.assertEqual(
            ("INSTANCE", "p", "u"), (held.consumer.consumer_type, held.consumer.project, held.consumer.user)
        )
        self.assertEqual([second], [each.consumer for each in self.missing()])
        self.store.release(first)
        self.assertEqual({first, second}, {each.consumer for each in self.missing(repair=True)})

    def test_a_repair_takes_nothing_of_a_node_below(self) -> None:
        self.store.update_provider(uuid_of_name("n1"), name="n1", parent=uuid_of_name("n0"))
        first, second = sorted([self.owned("n0", cpus=3), self.owned("n0", cpus=3)])
        healed = {each.consumer: each.repaired for each in self.missing(repair=True)}
        self.assertEqual({first: True, second: False}, healed)

    def test_an_instance_that_goes_while_it_is_claimed_again_gets_nothing(self) -> None:
        uuid = self.owned("n0")
        change = self.instances.change

        def gone_meanwhile(transaction: Any, *args: Any, **more: Any) -> bool:
            self.meanwhile(transaction, lambda tx: tx.execute(sa.delete(instances).where(instances.c.uuid == uuid)))
            return change(transaction, *args, **more)

        with mock.patch.object(self.instances, "change", gone_meanwhile):
            (found,) = self.missing(repair=True)
        self.assertFalse(found.repaired)
        self.assertIn("changed or deleted meanwhile", found.message)
        self.assertEqual([], self.store.allocations())

    def test_an_instance_of_a_node_that_is_gone_is_reported(self) -> None:
        uuid = self.owned("n0")
        with self.database.write() as tx:
            tx.execute(sa.delete(nodes).where(nodes.c.name == "n0"))
        self.store.delete_provider(uuid_of_name("n0"))
        (found,) = self.missing(repair=True)
        self.assertEqual((uuid, False), (found.consumer, found.repaired))
        with self.assertRaises(errors.NotFound):
            self.nodes.get("n0")


class TestSqlite(AuditCase, unittest.TestCase):
    pass


class TestPostgresql(AuditCase, unittest.TestCase):
    kind = "postgresql"


class TestMariadb(AuditCase, unittest.TestCase):
    kind = "mariadb"
