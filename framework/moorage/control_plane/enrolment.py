# SPDX-License-Identifier: Apache-2.0
"""Nodes and their providers: one uuid, written in one transaction, compared again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import AllocationStore, InventoryItem, PoolSource, ProviderUsage, ResourceProvider
from moorage.control_plane.pooling import offer
from moorage.db import Database, Duplicate
from moorage.fleet.aggregates import AggregateStore
from moorage.fleet.interface import Along, FleetWriter, NodeSpec
from moorage.fleet.nodes import Change, NodeStore
from moorage.ring import Ring
from moorage.scheduling.interface import Aggregate, NodeState
from moorage.services.heartbeat import LivenessObserver
from moorage.services.interface import Service
from moorage.services.registry import ServiceRegistry

__all__ = ["Enrolment", "StoreFleet"]

LOG = logging.getLogger(__name__)
_PAGE = 1000
_ATTEMPTS = 5


#: What schedulers look at: when one of these changes, they read the fleet anew.
_SEEN = frozenset({"name", "resource_class", "properties"})


class Enrolment(FleetWriter):
    """Ensures nodes with their providers, and gives nodes without an agent one of those that are there.

    :param shards: gives new nodes without a shard one; None leaves them without.
    :param changed: called after nodes were written, so that schedulers read them soon.
    :param resharded: called after nodes that there were got another shard, with how many.
    """

    def __init__(
        self,
        database: Database,
        nodes: NodeStore,
        store: AllocationStore,
        registry: ServiceRegistry,
        changed: Callable[[], None],
        shards: Callable[[Sequence[NodeSpec]], Sequence[NodeSpec]] | None = None,
        resharded: Callable[[int], None] = lambda nodes: None,
    ) -> None:
        self._database = database
        self._nodes = nodes
        self._store = store
        self._registry = registry
        self._changed = changed
        self._shards = shards
        self._resharded = resharded

    def enrol(self, specs: Sequence[NodeSpec]) -> Mapping[str, int]:
        """Ensure nodes and providers in one transaction, all or nothing; counts by what became of them.

        :raises InvalidInput: a uuid or a name stands twice among them.
        :raises AlreadyExists: a name belongs to another node.
        """
        for what, counted in (
            ("uuid", Counter(each.uuid for each in specs)),
            ("name", Counter(each.name for each in specs)),
        ):
            twice = [value for value, times in counted.items() if times > 1]
            if twice:
                raise errors.InvalidInput(f"The {what} {twice[0]} stands twice among the nodes.", path="nodes")
        if self._shards is not None:
            specs = self._shards(specs)
        providers = [_provider(spec) for spec in specs]

        def work(tx: sa.Connection) -> Sequence[Change]:
            changes = self._nodes.ensure(tx, specs)
            touched = self._store.ensure_providers(providers, tx)
            same = sum(change is Change.SAME for change in changes)
            if touched > len(changes) - same:
                LOG.info("%d providers were brought in line with their nodes.", touched - (len(changes) - same))
            return changes

        for attempt in range(1, _ATTEMPTS + 1):
            try:
                changes = self._database.run(work)
                break
            except Duplicate:
                # Somebody else enrolled one of them at the same time; a new transaction sees that.
                if attempt == _ATTEMPTS:
                    raise
        self.assign()
        self._changed()
        counts = Counter(changes)
        if resharded := counts.pop(Change.RESHARDED, 0):
            self._resharded(resharded)
            counts[Change.CHANGED] += resharded
        return {kind.value: counts[kind] for kind in (Change.CREATED, Change.CHANGED, Change.SAME)}

    @override
    def create(self, spec: NodeSpec) -> None:
        if self._shards is not None:
            spec = self._shards([spec])[0]

        def work(tx: sa.Connection) -> None:
            self._nodes.insert(tx, spec)
            self._store.ensure_providers([_provider(spec)], tx)

        try:
            self._database.run(work)
        except Duplicate as error:
            raise self._taken(spec.uuid, spec.name, creating=True) from error
        self.assign()
        self._changed()

    @override
    def change(
        self,
        uuid: str,
        generation: int,
        changes: Mapping[str, Any],
        inventories: Sequence[InventoryItem] | None = None,
        *,
        along: Along | None = None,
    ) -> bool:
        provider = self._changed_provider(uuid, changes, inventories)

        def work(tx: sa.Connection) -> bool:
            if not self._nodes.change(tx, uuid, generation, changes):
                return False
            if provider is not None:
                self._store.ensure_providers([provider], tx)
            if along is not None:
                along(tx)
            return True

        try:
            done = self._database.run(work)
        except Duplicate as error:
            raise self._taken(uuid, str(changes.get("name", "")), creating=False) from error
        if done and (provider is not None or changes.keys() & _SEEN):
            self._changed()
        if done and "shard" in changes:
            self._resharded(1)
        return done

    @override
    def remove(self, uuid: str, *, along: Along | None = None) -> None:
        def work(tx: sa.Connection) -> bool:
            if along is not None:
                along(tx)
            self._store.delete_provider(uuid, tx)
            AggregateStore(self._database).forget_node(tx, uuid)
            return self._nodes.delete(tx, uuid)

        if not self._database.run(work):
            raise errors.NotFound(f"There is no node {uuid}; moorage node list shows all.")
        self._changed()

    def _changed_provider(
        self, uuid: str, changes: Mapping[str, Any], inventories: Sequence[InventoryItem] | None
    ) -> ResourceProvider | None:
        if inventories is None and "name" not in changes:
            return None
        usages = self._store.usages(providers=[uuid])
        known = usages[0].provider if usages else ResourceProvider(uuid, uuid)
        return ResourceProvider(
            uuid,
            str(changes.get("name", known.name)),
            known.can_host,
            inventories=known.inventories if inventories is None else tuple(inventories),
        )

    def _taken(self, uuid: str, name: str, *, creating: bool) -> errors.AlreadyExists:
        if name and (found := self._uuid_of(name)) not in (None, uuid):
            return errors.AlreadyExists(f"The name {name} belongs to node {found}; choose another one.")
        if creating and self._uuid_of(uuid):
            return errors.AlreadyExists(f"A node with UUID {uuid} already exists.")
        return errors.AlreadyExists(
            "The instance belongs to another node; a node has at most one, and it has one node."
        )

    def _uuid_of(self, name_or_uuid: str) -> str | None:
        try:
            return self._nodes.get(name_or_uuid).uuid
        except errors.NotFound:
            return None

    def assign(self) -> int:
        """Give nodes that have no agent one, by a ring of the agents that are enlisted; how many were given one."""
        agents = [row.host for row in self._registry.list(binary="agent") if not (row.stopped or row.forced_down)]
        if not agents:
            return 0
        ring = Ring(agents)
        assigned, after = 0, ""
        while True:
            page = self._nodes.list(after=after, limit=_PAGE, without_host=True)
            assigned += self._nodes.assign_hosts({node.uuid: str(ring.owner(node.uuid)) for node in page})
            if len(page) < _PAGE:
                return assigned
            after = page[-1].uuid

    def reconcile(self) -> int:
        """Compare page by page: a node whose provider is missing gets an empty one and a line in the log."""
        missing, after = 0, ""
        while True:
            page = self._nodes.list(after=after, limit=_PAGE)
            known = {usage.provider.uuid for usage in self._store.usages(providers=[node.uuid for node in page])}
            lost = [node for node in page if node.uuid not in known]
            if lost:
                self._store.ensure_providers([ResourceProvider(node.uuid, node.name) for node in lost])
                LOG.warning("%d nodes had no provider; import them again to give them inventories.", len(lost))
            missing += len(lost)
            if len(page) < _PAGE:
                return missing
            after = page[-1].uuid


def _provider(spec: NodeSpec) -> ResourceProvider:
    return ResourceProvider(spec.uuid, spec.name, inventories=spec.inventories)


class StoreFleet:
    """What a scheduler reads of the fleet: nodes, what is used of them, and whether their agents work."""

    def __init__(
        self,
        nodes: NodeStore,
        store: AllocationStore,
        registry: ServiceRegistry,
        observer: LivenessObserver,
        aggregates: AggregateStore,
    ) -> None:
        self._aggregates = aggregates
        self._nodes = nodes
        self._store = store
        self._registry = registry
        self._observer = observer
        self._names: dict[str, str] = {}
        self._pools: dict[str, Mapping[str, Sequence[str]]] = {}

    def nodes(self) -> Iterable[NodeState]:
        """All nodes that have an agent, by pages; four statements a page, two for all aggregates, and a few more for pools."""
        membership = self._aggregates.membership()
        services = self._registry.list(binary="agent")
        up = self._observer.observe(services)
        by_host = {row.host: row for row in services}
        after = ""
        while True:
            page = self._nodes.list(after=after, limit=_PAGE)
            usages = {
                usage.provider.uuid: usage
                for usage in self._store.usages(providers=[node.uuid for node in page], limit=_PAGE)
            }
            shared: Mapping[str, Sequence[ProviderUsage]] = {}
            if isinstance(self._store, PoolSource):
                shared = self._store.pools(list(usages))
            for node in page:
                self._names[node.uuid] = node.name
                usage = usages.get(node.uuid)
                if node.host is None or usage is None:
                    continue
                offered = offer(usage, shared.get(node.uuid, ()))
                self._pools[node.uuid] = offered.pools
                service = by_host.get(node.host)
                yield NodeState(
                    node.uuid,
                    node.name,
                    node.host,
                    offered.capacity,
                    offered.used,
                    usage.provider.can_host,
                    service is not None and up[service.uuid],
                    _enabled(service),
                    node.properties,
                    tuple(Aggregate(name, metadata) for name, metadata in membership.of(node.host, node.uuid)),
                )
            if len(page) < _PAGE:
                return
            after = page[-1].uuid

    def node_name(self, uuid: str) -> str:
        """The name of a node that was read."""
        return self._names.get(uuid, "")

    def pools_of(self, uuid: str) -> Mapping[str, Sequence[str]]:
        """The pools that a node that was read takes of, by the class that it lacks; the roomiest first."""
        return self._pools.get(uuid, {})


def _enabled(service: Service | None) -> bool:
    return service is not None and not service.disabled
