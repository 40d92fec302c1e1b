# SPDX-License-Identifier: Apache-2.0
"""A fleet on each database, and plans over it."""

from __future__ import annotations

import uuid as uuid_module
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from moorage.clock import SystemClock
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.sharding_factories import open_mover
from moorage.db import Database
from moorage.fleet.interface import NodeSpec, uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.fleet.tables import nodes
from moorage.instances.interface import Instance
from moorage.services.registry import ServiceRegistry
from moorage.services.tables import services
from moorage.sharding.interface import STRATEGIES
from moorage.sharding.plans import Plans
from moorage.sharding.tables import shard_moves, shard_plans
from moorage.testing.database import create_all
from moorage_plugins.compute.instances import ComputeInstances
from moorage_plugins.compute.tables import instances
from tests import servers
from tests.conformance.allocation.stores import sql_store
from tests.functional.db.databases import Mixin, sqlite_url

__all__ = ["FleetCase", "make_instances", "make_plans"]

if TYPE_CHECKING:
    from moorage.sharding.interface import ShardStrategy


def make_instances(database: Database) -> ComputeInstances:
    return ComputeInstances(conf=None, database=database, clock=SystemClock())


def make_plans(database: Database, *, batch: int = 10) -> Plans:
    """Plans as the API makes them."""

    def strategy(name: str | None) -> tuple[str, ShardStrategy]:
        loaded = STRATEGIES.load(name or "balanced")
        return loaded.name, loaded.plugin()

    return Plans(database, NodeStore(database), strategy, open_mover(make_instances(database)), batch=batch, keep=5)


class FleetCase(Mixin):
    """Empty tables for each test, on the database of ``kind``."""

    kind = "sqlite"
    url: str
    database: Database

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if cls.kind != "sqlite":
            servers.require(cls.kind)
        cls.url = sqlite_url(cls) if cls.kind == "sqlite" else servers.fresh_database(servers.shared(cls.kind))
        cls.database = Database(cls.url)
        cls.addClassCleanup(cls.database.close)
        create_all(cls.database)

    def setUp(self) -> None:
        super().setUp()
        with self.database.write() as tx:
            for table in (shard_moves, shard_plans, instances, services, nodes):
                tx.execute(sa.delete(table))
        self.nodes = NodeStore(self.database)
        self.registry = ServiceRegistry(self.database, SystemClock())
        self.plans = make_plans(self.database)
        self.instances = make_instances(self.database)
        self.enrolment = Enrolment(
            self.database, self.nodes, sql_store(self.database), self.registry, lambda: None,
            mover=open_mover(self.instances),
        )  # fmt: skip

    def fleet(self, **sizes: int) -> None:
        """Nodes by shard; ``_`` are those without one."""
        for shard, size in sizes.items():
            for number in range(size):
                name = f"{shard}-{number:03}"
                given = None if shard == "_" else shard
                with self.database.write() as tx:
                    self.nodes.insert(tx, NodeSpec(uuid_of_name(name), name, shard=given))

    def instance(
        self, node: str, host: str = "h", status: str = "active", pending: Mapping[str, Any] | None = None
    ) -> str:
        """An instance of ours on a node; its uuid."""
        found = Instance(
            str(uuid_module.uuid4()),
            "i",
            status,
            host,
            node,
            uuid_of_name(node),
            "small",
            {"VCPU": 1},
            pending=pending or {},
        )
        with self.database.write() as tx:
            self.instances.insert(tx, found)
        return found.uuid

    def sizes(self) -> dict[str | None, int]:
        return dict(self.nodes.shards())

    def homes(self) -> dict[str, str | None]:
        """Node -> shard, counted from the nodes one by one."""
        with self.database.read() as tx:
            found = {row.uuid: row.shard for row in tx.execute(sa.select(nodes.c.uuid, nodes.c.shard))}
        # The counts of the API are of the same nodes.
        self.assertEqual(dict(Counter(found.values())), self.sizes())
        return found

    def write(self, name: str, **changes: object) -> None:
        """What somebody else does to a node."""
        uuid = uuid_of_name(name)
        generation = self.nodes.get(uuid).generation
        with self.database.write() as tx:
            self.assertTrue(self.nodes.change(tx, uuid, generation, changes))
