# SPDX-License-Identifier: Apache-2.0
"""Agents that enrol their hosts, on each database: repeated, at once, with more and with less than before."""

from __future__ import annotations

import threading
import unittest
import uuid
from concurrent import futures
from dataclasses import replace
from typing import Any
from unittest import mock

from oslo_config import cfg

from moorage import errors
from moorage.allocation.interface import ClaimRequest
from moorage.clock import SystemClock
from moorage.control_plane import options
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.host_enrolment import HostEnrolment, gathered
from moorage.drivers.interface import DriverError, HostResources
from moorage.fleet.interface import NodeSpec, uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.fleet.properties import change_node
from moorage.services.registry import ServiceRegistry
from tests.conformance.allocation.stores import sql_store
from tests.functional.db.databases import TablesCase

AVX = "HW_CPU_X86_AVX"


def machine(cpus: int = 8, memory: int = 4096, traits: Any = (AVX,), **more: int) -> HostResources:
    return HostResources({"VCPU": cpus, "MEMORY_MB": memory, **more}, frozenset(traits))


class HostEnrolmentCase(TablesCase):
    def setUp(self) -> None:
        super().setUp()
        self.host = f"host-{uuid.uuid4().hex[:8]}"
        self.uuid = uuid_of_name(self.host)
        self.nodes = NodeStore(self.database)
        self.store = sql_store(self.database)
        registry = ServiceRegistry(self.database, SystemClock())
        self.enrolment = Enrolment(self.database, self.nodes, self.store, registry, lambda: None)
        self.conf = cfg.ConfigOpts()
        options.register_opts(self.conf)
        self.conf([], default_config_files=[], default_config_dirs=[])

    def enrol(self, found: HostResources, host: str = "", shard: str | None = None) -> None:
        HostEnrolment(self.nodes, self.store, self.enrolment, self.conf, host or self.host, shard).enrol(found)

    def seen(self) -> dict[str, tuple[int, int]]:
        """Total and reserved by class."""
        (usage,) = self.store.usages(providers=[self.uuid])
        return {item.resource_class: (item.total, item.reserved) for item in usage.provider.inventories}

    def traits(self) -> tuple[str, ...]:
        return self.store.provider_traits(self.uuid)[1]

    def claim(self, **resources: int) -> None:
        self.store.claim(ClaimRequest(str(uuid.uuid4()), {self.uuid: resources}))

    def test_a_host_becomes_a_node_with_its_provider_and_repeating_changes_nothing(self) -> None:
        self.enrol(machine())
        node = self.nodes.get(self.host)
        self.assertEqual((self.uuid, self.host, self.host), (node.uuid, node.name, node.host))
        self.assertEqual({"VCPU": (8, 0), "MEMORY_MB": (4096, 512)}, self.seen())
        self.assertEqual((AVX,), self.traits())
        provider = self.store.provider(self.uuid)
        self.enrol(machine())
        self.assertEqual((node, provider), (self.nodes.get(self.host), self.store.provider(self.uuid)))

    def test_what_grew_and_what_is_new_is_brought_in_line(self) -> None:
        self.enrol(machine())
        self.enrol(machine(16, 8192, (AVX, "CUSTOM_FAST"), DISK_GB=100))
        self.assertEqual({"VCPU": (16, 0), "MEMORY_MB": (8192, 512), "DISK_GB": (100, 0)}, self.seen())
        self.assertEqual(("CUSTOM_FAST", AVX), self.traits())
        self.enrol(machine(traits=()))
        self.assertEqual(({"VCPU": (8, 0), "MEMORY_MB": (4096, 512)}, ()), (self.seen(), self.traits()))

    def test_what_an_operator_added_stays(self) -> None:
        self.enrol(machine())
        change_node(self.database, self.uuid, {"rack": 1}, {"disabled": True, "disabled_reason": "disk"})
        self.store.change_traits(self.uuid, {"CUSTOM_GOLD"})
        (usage,) = self.store.usages(providers=[self.uuid])
        item = next(each for each in usage.provider.inventories if each.resource_class == "VCPU")
        self.enrolment.enrol(
            [
                NodeSpec(
                    self.uuid,
                    f"{self.host}-renamed",
                    inventories=(replace(item, allocation_ratio=4.0),),
                    inventory_fields={"VCPU": frozenset({"allocation_ratio"})},
                )
            ]
        )
        self.enrol(machine(16, traits=()))
        node = self.nodes.get(self.uuid)
        self.assertEqual((True, "disk", {"rack": 1}), (node.disabled, node.disabled_reason, node.properties))
        self.assertEqual(f"{self.host}-renamed", node.name)
        self.assertEqual(("CUSTOM_GOLD",), self.traits())
        (usage,) = self.store.usages(providers=[self.uuid])
        found = {each.resource_class: each for each in usage.provider.inventories}
        self.assertEqual((16, 4.0), (found["VCPU"].total, found["VCPU"].allocation_ratio))

    def test_a_machine_that_shrank_below_its_claims_is_set_and_gets_nothing_more(self) -> None:
        self.enrol(machine())
        self.claim(VCPU=6)
        with self.assertLogs("moorage.control_plane.host_enrolment", "WARNING") as logged:
            self.enrol(machine(4))
        self.assertIn("Instances hold 6 VCPU", logged.output[0])
        self.assertEqual((4, 0), self.seen()["VCPU"])
        with self.assertRaises(errors.CapacityExceeded):
            self.claim(VCPU=1)

    def test_a_class_that_is_gone_and_used_is_reserved_until_it_is_free(self) -> None:
        self.enrol(machine(PGPU=2))
        held = str(uuid.uuid4())
        self.store.claim(ClaimRequest(held, {self.uuid: {"PGPU": 1}}))
        for _ in range(2):
            self.enrol(machine())
            self.assertEqual((2, 2), self.seen()["PGPU"])
        self.store.release(held)
        self.enrol(machine())
        self.assertNotIn("PGPU", self.seen())

    def test_a_node_of_another_agent_is_refused_and_nothing_is_written(self) -> None:
        self.enrolment.enrol([NodeSpec(self.uuid, self.host, host="other")])
        with self.assertRaisesRegex(errors.ConfigError, f"{self.host} belongs to agent other, so agent {self.host}"):
            self.enrol(machine())
        self.assertEqual(({}, ()), (self.seen(), self.traits()))
        self.assertEqual("other", self.nodes.get(self.host).host)

    def test_an_imported_node_of_this_name_becomes_the_node_of_the_host(self) -> None:
        self.uuid = str(uuid.uuid4())
        self.enrolment.create(NodeSpec(self.uuid, self.host))
        self.enrol(machine())
        self.assertEqual((self.uuid, self.host), (self.nodes.get(self.host).uuid, self.nodes.get(self.host).host))
        self.assertEqual((8, 0), self.seen()["VCPU"])

    def test_agents_of_one_name_that_start_at_once_make_one_node(self) -> None:
        start = threading.Barrier(4)

        def work(number: int) -> None:
            start.wait(60)
            self.enrol(machine(8 + number % 2))

        with futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        self.assertIn(self.seen()["VCPU"], ((8, 0), (9, 0)))
        self.assertEqual([self.uuid], [each.uuid for each in self.nodes.list(host=self.host)])

    def test_a_host_that_another_agent_gets_meanwhile_is_not_taken_from_it(self) -> None:
        self.enrolment.create(NodeSpec(self.uuid, self.host))
        found, read = self.nodes.get(self.host), self.nodes.get

        def given_meanwhile(ident: str) -> Any:
            if ident == self.uuid and self.nodes.get(ident) == found:
                self.enrolment.enrol([NodeSpec(self.uuid, self.host, host="other")])
            return found

        nodes = mock.create_autospec(self.nodes, instance=True)
        nodes.get.side_effect, nodes.free_members.return_value = given_meanwhile, {}
        with self.assertRaisesRegex(errors.ConfigError, "belongs to agent other"):
            HostEnrolment(nodes, self.store, self.enrolment, self.conf, self.host, None).enrol(machine())
        self.assertEqual("other", read(self.host).host)

    def test_more_reserved_than_there_is_is_refused(self) -> None:
        with self.assertRaisesRegex(
            errors.ConfigError, "reserved_host_memory_mb is 512, but host .* has 512 MEMORY_MB"
        ):
            self.enrol(machine(memory=512))
        with self.assertRaises(errors.NotFound):
            self.nodes.get(self.host)

    def test_the_shard_of_the_agent_is_the_shard_of_its_node(self) -> None:
        self.enrol(machine(), shard="east")
        self.assertEqual("east", self.nodes.get(self.host).shard)


class GatheredTests(unittest.TestCase):
    class Service:
        def __init__(self, found: HostResources | Exception) -> None:
            self._found = found

        def host_resources(self) -> HostResources:
            if isinstance(self._found, Exception):
                raise self._found
            return self._found

    def test_services_see_their_host_together(self) -> None:
        services = [self.Service(machine()), self.Service(HostResources()), self.Service(HostResources({"PGPU": 1}))]
        self.assertEqual(machine(PGPU=1), gathered(services))

    def test_a_driver_that_knows_nothing_is_refused_with_what_to_do(self) -> None:
        with self.assertRaisesRegex(errors.ConfigError, "moorage node import"):
            gathered([self.Service(HostResources())])

    def test_a_driver_that_cannot_see_is_asked_again_later(self) -> None:
        with self.assertRaisesRegex(errors.Unavailable, "cannot be enrolled now: the disk is gone"):
            gathered([self.Service(DriverError("the disk is gone"))])


class SqliteHostEnrolmentTests(HostEnrolmentCase, unittest.TestCase):
    """On SQLite."""


class PostgresqlHostEnrolmentTests(HostEnrolmentCase, unittest.TestCase):
    """On PostgreSQL."""

    kind = "postgresql"


class MariadbHostEnrolmentTests(HostEnrolmentCase, unittest.TestCase):
    """On MariaDB."""

    kind = "mariadb"
