# SPDX-License-Identifier: Apache-2.0
"""Reads the fleet for schedulers: nodes, their use, their aggregates, and whether their agents are up.

After the first reading, a reading costs what changed since the last one (:mod:`moorage.db.changes`). Three changes make it read all
nodes again, since they may concern any node: of an aggregate, of a pool, and of nearly all nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any

from moorage.allocation.interface import AllocationStore, ChangeSource, TreeSource
from moorage.db.changes import KnownRows
from moorage.fleet.aggregates import AggregateMembership, AggregateStore
from moorage.fleet.nodes import NodeStore
from moorage.instances.availability import Availability
from moorage.instances.providers import offer, read_providers
from moorage.read_only import FrozenDict
from moorage.scheduling.interface import Aggregate, ExcludedTargets, FleetChanges, NodeState

__all__ = ["StoreFleet"]

#: Nodes that are read together.
_PAGE = 250
#: More nodes than this are read by their uuids only if they are less than nine tenths of the fleet.
_FEW = 1000
#: Mappings that are shared at most.
_SHARED = 10_000


class StoreFleet:
    """Reads the fleet from the stores. For one thread at a time.

    :param nodes: the nodes; ``store`` their providers.
    :param rest: called between two steps of a reading, in the thread that reads; it may wait.
    """

    def __init__(
        self,
        nodes: NodeStore,
        store: AllocationStore,
        availability: Availability,
        aggregates: AggregateStore,
        rest: Callable[[], object] = lambda: None,
    ) -> None:
        self._aggregates = aggregates
        self._rest = rest
        self._nodes = nodes
        self._store = store
        self._availability = availability
        #: Hosts of nodes that had no agent when the nodes were last read.
        self._absent: frozenset[str] = frozenset()
        self._names: dict[str, str] = {}
        #: Provider below a node -> the node.
        self._owners: dict[str, str] = {}
        self._membership = AggregateMembership()
        self._aggregates_version: object = None
        self._known_nodes, self._known_providers = KnownRows(), KnownRows()
        self._sharing: frozenset[str] = frozenset()
        self._complete = False
        #: Equal mappings of different nodes are one object each.
        self._capacities: dict[object, FrozenDict] = {}
        self._uses: dict[object, FrozenDict] = {}

    def nodes(self) -> Iterator[NodeState]:
        """Reads all nodes that have an agent, by pages; four statements a page, and a few more for pools."""
        self._complete = False
        self._aggregates_version = self._aggregates.version()
        self._membership = self._aggregates.membership()
        if isinstance(self._store, ChangeSource):
            # Before the nodes: what is written meanwhile is read again the next time.
            self._known_nodes.start(self._nodes.recent(0))
            self._known_providers.start(self._store.recent_providers(0))
            self._sharing = self._store.sharing()
        # Claims ask for names meanwhile, so what is gone goes at the end.
        read: set[str] = set()
        self._owners = {}
        enlisted, self._absent = self._availability.enlisted(), frozenset()
        unavailable = self._availability.read(())
        after = ""
        while True:
            page = self._nodes.for_scheduling(after=after, limit=_PAGE)
            read.update(row.uuid for row in page)
            for found in self._states(page, enlisted):
                yield unavailable.applied(found) if found.up else found
            if len(page) < _PAGE:
                for uuid in self._names.keys() - read:
                    self._names.pop(uuid, None)
                self._complete = True
                return
            after = page[-1].uuid
            self._rest()

    def changes(self, *, compare: bool = False) -> FleetChanges | None:
        """Reads what changed since the last reading; None when all nodes must be read.

        :param compare: compare the versions of all rows instead of those that were written lately.
        """
        store, known_nodes, known_providers = self._store, self._known_nodes, self._known_providers
        if not self._complete or not isinstance(store, ChangeSource):
            return None
        if self._aggregates.version() != self._aggregates_version:
            return None
        nodes = self._nodes.recent(0 if compare else known_nodes.since)
        self._rest()
        providers = store.recent_providers(0 if compare else known_providers.since)
        self._rest()
        gone_nodes = known_nodes.gone(self._nodes.uuids()) if known_nodes.misses(nodes) else set()
        gone_providers = known_providers.gone(store.provider_uuids()) if known_providers.misses(providers) else set()
        changed_providers = known_providers.changed(providers)
        changed_nodes = known_nodes.changed(nodes)
        changed = changed_nodes | changed_providers
        if len(changed) > max(_FEW, nodes.count * 9 // 10):
            return None
        if self._absent:
            # Agents that were started since. So many hosts are not named one by one.
            self._absent -= self._availability.enlisted(self._absent if len(self._absent) < _FEW else None)
        if changed_providers or gone_providers:
            sharing = store.sharing()
            if sharing != self._sharing or not sharing.isdisjoint(changed_providers):
                return None
        changed |= self._owners_of(changed_providers | gone_providers, changed_nodes | gone_nodes)
        # Before the reading, which leaves a node out of what the node above it has.
        known_nodes.take(nodes, gone_nodes)
        states = self._read(sorted(changed - gone_nodes))
        # A node that has lost its host or its provider, or never had them, is none for the scheduler.
        removed = (changed | gone_nodes | gone_providers) - {each.uuid for each in states}
        for uuid in removed:
            self._names.pop(uuid, None)
        known_providers.take(providers, gone_providers)
        return FleetChanges(tuple(states), frozenset(removed))

    def _owners_of(self, providers: Set[str], nodes: Set[str]) -> set[str]:
        """Returns the nodes above providers, now or at the last reading, and those above nodes at the last reading.

        :param nodes: their roots are not looked up: what the node above a node has leaves it out.
        """
        owners = {self._owners[uuid] for uuid in providers | nodes if uuid in self._owners}
        new = [uuid for uuid in providers - nodes if uuid not in self._owners and uuid not in self._names]
        if new and isinstance(self._store, TreeSource):
            owners.update(self._store.roots_of(new).values())
        return owners

    def _read(self, uuids: Sequence[str]) -> list[NodeState]:
        """Reads single nodes."""
        found: list[NodeState] = []
        for first in range(0, len(uuids), _PAGE):
            self._rest()
            page = self._nodes.for_scheduling(uuids=uuids[first : first + _PAGE])
            enlisted = self._availability.enlisted({row.host for row in page if row.host is not None})
            found += self._states(page, enlisted)
        return found

    def _states(self, page: Sequence[Any], enlisted: Collection[str]) -> Iterator[NodeState]:
        """Returns the nodes of a page that have an agent and a provider."""
        usages = {
            usage.provider.uuid: usage
            for usage in self._store.usages(providers=[row.uuid for row in page], limit=_PAGE)
        }
        providers = read_providers(self._store, list(usages.values()), self._is_node)
        absent = set()
        for row in page:
            self._names[row.uuid] = row.name
            usage = usages.get(row.uuid)
            if row.host is None or usage is None:
                continue
            here = providers[row.uuid]
            capacity, used = offer(here)
            for each in here[1:]:
                if not each.shared:
                    self._owners[each.uuid] = row.uuid
            if row.host not in enlisted:
                absent.add(row.host)
            yield NodeState(
                row.uuid,
                row.name,
                row.host,
                _shared(capacity, self._capacities),
                _shared(used, self._uses),
                usage.provider.can_host,
                row.host in enlisted,
                properties=row.properties,
                aggregates=tuple(
                    Aggregate(name, metadata) for name, metadata in self._membership.of(row.host, row.uuid)
                ),
                traits=here[0].traits,
                providers=here,
            )
        self._absent |= absent

    def _is_node(self, uuid: str) -> bool:
        return uuid in self._names or uuid in self._known_nodes

    def unavailable(self, transaction: Any = None) -> ExcludedTargets:
        """Reads what gets no new instances now.

        :param transaction: to read in, where the caller has one.
        """
        return self._availability.read(self._absent, transaction)

    def node_name(self, uuid: str) -> str:
        """Returns the name of a node that was read."""
        return self._names.get(uuid, "")


def _shared(values: Mapping[str, float], known: dict[object, FrozenDict]) -> FrozenDict:
    """Returns a read-only mapping with the values. Nodes with equal values share one mapping."""
    key = tuple(values.items())
    found = known.get(key)
    if found is None:
        if len(known) >= _SHARED:
            known.clear()
        found = known[key] = FrozenDict(values)
    return found
