# SPDX-License-Identifier: Apache-2.0
"""Nodes and their providers: one uuid, written in one transaction, compared again and again."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, randomness
from moorage.allocation.interface import (
    AllocationStore,
    ChangeSource,
    HasChildren,
    InventoryItem,
    ProviderCatalogue,
    ResourceProvider,
)
from moorage.control_plane.shard_hosts import AgentRings
from moorage.db import Database, Duplicate
from moorage.db.changes import RecentRows
from moorage.fleet.aggregates import AggregateStore
from moorage.fleet.interface import STATES, Along, FleetWriter, Node, NodeSpec, merged_inventories
from moorage.fleet.nodes import Change, NodeStore
from moorage.fleet.properties import change_node
from moorage.instances.on_node import NodeContents
from moorage.services.registry import ServiceRegistry
from moorage.sharding.moving import ShardMover

__all__ = ["Enrolment"]

LOG = logging.getLogger(__name__)
_PAGE = 1000
_ATTEMPTS = 5
#: One out of so many reconciliations compares all nodes.
_COMPARE_EVERY = 60
#: A moment in the far future, in microseconds: a reading of what was written since then only counts.
_NEVER = 2**62

#: What schedulers look at: when one of these changes, they read the fleet again.
_SEEN = frozenset({"name", "resource_class", "properties"})


class Enrolment(FleetWriter):
    """Creates and updates nodes with their providers, and gives nodes without an agent one of the running agents.

    :param shards: gives new nodes without a shard one; None leaves them without.
    :param changed: called after nodes were written, so that schedulers read them soon.
    :param resharded: called after nodes that there were got another shard, with how many.
    :param states_changed: called after a node was disabled, enabled, or began or ended its maintenance.
    :param mover: refuses that occupied nodes leave their shard or their host; None allows it.
    :param contents: refuses that nodes with instances are removed, and says what is on them; None looks at allocations alone.
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
        states_changed: Callable[[], None] = lambda: None,
        mover: ShardMover | None = None,
        contents: NodeContents | None = None,
    ) -> None:
        self._database = database
        self._nodes = nodes
        self._store = store
        self._registry = registry
        self._changed = changed
        self._shards = shards
        self._resharded = resharded
        self._states_changed = states_changed
        self._mover = mover
        self._contents = contents
        #: What the last reconciliation read when it began; None: the next one compares all nodes.
        self._compared: _Rows | None = None
        #: Reconciliations until one compares all nodes anyway.
        self._until_all = 0

    def enrol(self, specs: Sequence[NodeSpec]) -> Mapping[str, int]:
        """Ensure nodes and providers in one transaction, all or nothing; counts by what became of them.

        :raises InvalidInput: a uuid or a name stands twice among them.
        :raises AlreadyExists: a name belongs to another node.
        :raises Conflict: an occupied node would leave its shard or its host, or a node that shall keep its host has another one.
        :raises InUse: an inventory would vanish of which something is allocated.
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
        rings = self._rings()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                changes = self._database.run(lambda tx: self._write(tx, specs, rings))
                break
            except (Duplicate, _NodeRemoved):
                # Another transaction wrote one of the nodes at the same time; a new transaction sees what it wrote.
                if attempt == _ATTEMPTS:
                    raise
        if any(change is not Change.CREATED for change in changes):
            # New nodes were given agents when they were inserted.
            self.assign()
        self._changed()
        counts = Counter(changes)
        if resharded := counts.pop(Change.RESHARDED, 0):
            self._resharded(resharded)
            counts[Change.CHANGED] += resharded
        return {kind.value: counts[kind] for kind in (Change.CREATED, Change.CHANGED, Change.SAME)}

    def _rings(self) -> AgentRings:
        return AgentRings(self._registry.list(binary="agent"))

    def _write(self, tx: sa.Connection, specs: Sequence[NodeSpec], rings: AgentRings) -> Sequence[Change]:
        if self._mover is not None:
            self._mover.refuse_leaving(
                tx,
                {spec.uuid: spec.shard for spec in specs if spec.shard is not None},
                {spec.uuid: spec.host for spec in specs if spec.host is not None},
            )
        changes = self._nodes.ensure(tx, specs, lambda spec: rings.owner(spec.uuid, spec.shard))
        by_uuid = {spec.uuid: spec for spec in specs}
        existing: set[str] = set()

        def merge(uuid: str, present: Mapping[str, InventoryItem]) -> Sequence[InventoryItem]:
            existing.add(uuid)
            return merged_inventories(by_uuid[uuid], present)

        touched = self._store.merge_providers([_provider(spec) for spec in specs], merge, tx)
        for spec in specs:
            if spec.traits or spec.removed_traits:
                self._change_traits(tx, spec)
        unwritten = {each.uuid for each, change in zip(specs, changes, strict=True) if change is Change.SAME}
        # A provider was made for these nodes, and their rows were only read.
        alone = sorted(unwritten - existing)
        if len(self._nodes.touch(tx, alone)) < len(alone):
            raise _NodeRemoved("A node was removed while it was enrolled; try again.")
        if touched > len(changes) - len(unwritten):
            LOG.info("%d providers were brought in line with their nodes.", touched - len(changes) + len(unwritten))
        return changes

    def _change_traits(self, tx: sa.Connection, spec: NodeSpec) -> None:
        if not isinstance(self._store, ProviderCatalogue):
            raise errors.InvalidInput(
                f"Node {spec.name} cannot get traits, because [allocation] store keeps none.", path="traits"
            )
        self._store.change_traits(spec.uuid, spec.traits, spec.removed_traits, tx)

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
        provider = None
        if inventories is not None or "name" in changes:
            provider = self._changed_provider(uuid, changes, inventories or ())

        def work(tx: sa.Connection) -> bool:
            if self._mover is not None and "shard" in changes:
                self._mover.refuse_leaving(tx, {uuid: changes["shard"]})
            if not self._nodes.change(tx, uuid, generation, changes):
                return False
            self._end_claims(tx, uuid, changes)
            if provider is not None:
                self._store.merge_providers(
                    [provider], lambda _, present: list(present.values()) if inventories is None else inventories, tx
                )
            if along is not None:
                along(tx)
            return True

        try:
            done = self._database.run(work)
        except Duplicate as error:
            raise self._taken(uuid, str(changes.get("name", "")), creating=False) from error
        if done:
            self._tell(changes, provider is not None)
        return done

    def _tell(self, changes: Mapping[str, Any], provider_changed: bool) -> None:
        if provider_changed or changes.keys() & _SEEN:
            self._changed()
        if not changes.keys().isdisjoint(STATES):
            self._states_changed()
        if "shard" in changes:
            self._resharded(1)

    def change_properties(self, uuid: str, properties: Mapping[str, Any], states: Mapping[str, Any]) -> None:
        """Change single properties of a node and its states; see :func:`moorage.fleet.properties.change_node`.

        :raises NotFound: there is no such node.
        """
        change_node(self._database, uuid, properties, states, along=lambda tx: self._end_claims(tx, uuid, states))

    def _end_claims(self, tx: sa.Connection, uuid: str, changes: Mapping[str, Any]) -> None:
        """Waits for claims of a node that gets a state which keeps them away: after the commit no claim of it commits.

        A claim writes the row of its node's provider before it reads the states. So this transaction writes that row too: one of
        both waits, or loses its commit. The store writes it as for an instance that leaves; the consumer holds nothing.
        """
        if any(changes.get(flag) for flag in STATES):
            self._store.release(randomness.new_uuid(), tx, residents=[uuid])

    @override
    def remove(self, uuid: str, *, along: Along | None = None) -> None:
        contents = self._contents
        conditions = () if contents is None else (contents.none(),)
        departures = None if contents is None else contents.departures.of_node(uuid)

        def work(tx: sa.Connection) -> bool:
            # The node's row is written first: a reconciliation that makes its provider waits, and then finds no node.
            if not self._nodes.touch(tx, [uuid]):
                return False
            if along is not None:
                along(tx)
            if contents is not None and departures is not None and departures.instances:
                # A host that is not fenced keeps them, and the provider stays in use.
                contents.departures.end(tx, uuid, departures)
            self._store.delete_provider(uuid, tx)
            AggregateStore(self._database).forget_node(tx, uuid)
            # The provider's row is written by now, so no claim commits between this condition and the end.
            if not self._nodes.delete(tx, uuid, *conditions):
                raise errors.InUse(f"Node {uuid} has instances.", provider=uuid)
            return True

        try:
            removed = self._database.run(work)
        except HasChildren:
            raise
        except errors.InUse as error:
            raise error if contents is None else contents.refusal(uuid) from error
        if not removed:
            raise errors.NotFound(f"There is no node {uuid}; moorage node list shows all.")
        self._changed()

    def _changed_provider(
        self, uuid: str, changes: Mapping[str, Any], inventories: Sequence[InventoryItem]
    ) -> ResourceProvider:
        usages = self._store.usages(providers=[uuid])
        known = usages[0].provider if usages else ResourceProvider(uuid, uuid)
        name = str(changes.get("name", known.name))
        return ResourceProvider(uuid, name, known.can_host, inventories=tuple(inventories))

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
        """Gives nodes that have no agent one; returns how many got one. See :class:`AgentRings` for which agent it is."""
        rings = self._rings()
        if not rings:
            return 0
        assigned, after = 0, ""
        while True:
            page = self._nodes.without_host(after, _PAGE)
            owners = {node.uuid: (node.shard, rings.owner(node.uuid, node.shard)) for node in page}
            assigned += self._nodes.assign_hosts(
                {uuid: (shard, host) for uuid, (shard, host) in owners.items() if host is not None}
            )
            if len(page) < _PAGE:
                return assigned
            after = page[-1].uuid

    def reconcile(self) -> int:
        """Gives a provider without inventories to each node that has none; returns how many nodes lacked one.

        Compares the nodes that were written since the last reconciliation, where the store is a :class:`ChangeSource`. Compares
        all nodes at the first call and each 60th call, after a call that made a provider, when more than 1,000 nodes were written,
        and when the numbers of nodes and providers have not changed by the same amount.

        A provider is made in the transaction that writes its node's row, so a node that is removed at the same time leaves no
        provider behind.
        """
        before, self._compared = self._compared, None
        found = self._rows(self._store, before) if isinstance(self._store, ChangeSource) else None
        self._until_all -= 1
        lacking: Iterable[str]
        if (
            self._until_all > 0
            and before is not None
            and found is not None
            and before.explains(found)
            and len(found.nodes.versions) <= _PAGE
        ):
            lacking = self._lacking_of(found.nodes.versions.keys())
        else:
            self._until_all = _COMPARE_EVERY
            lacking = (node.uuid for node in self.nodes_without_provider())
        made = sum(self.make_provider(uuid) for uuid in lacking)
        if made:
            LOG.warning("%d nodes had no provider; import them again to give them inventories.", made)
        else:
            self._compared = found
        return made

    def _rows(self, store: ChangeSource, before: _Rows | None) -> _Rows:
        """Counts the nodes and the providers, and reads which nodes were written since an earlier reading."""
        since = _NEVER if before is None else before.nodes.next_since
        return _Rows(self._nodes.recent(since), store.recent_providers(_NEVER).count)

    def _lacking_of(self, uuids: Collection[str]) -> list[str]:
        """Returns the uuids of nodes without a provider.

        :param uuids: of nodes, at most :data:`_PAGE`.
        """
        known = {usage.provider.uuid for usage in self._store.usages(providers=sorted(uuids), limit=_PAGE)}
        return sorted(set(uuids) - known)

    def nodes_without_provider(self) -> Iterator[Node]:
        """Yields the nodes whose provider does not exist.

        Compares uuids where the store tells those of its providers, else reads all nodes page by page.
        """
        if isinstance(self._store, ChangeSource):
            # The nodes first: a provider is written with its node.
            nodes = self._nodes.uuids()
            for uuid in sorted(nodes - self._store.provider_uuids()):
                with contextlib.suppress(errors.NotFound):
                    yield self._nodes.get(uuid)
            return
        after = ""
        while True:
            page = self._nodes.list(after=after, limit=_PAGE)
            known = {usage.provider.uuid for usage in self._store.usages(providers=[node.uuid for node in page])}
            yield from (node for node in page if node.uuid not in known)
            if len(page) < _PAGE:
                return
            after = page[-1].uuid

    def make_provider(self, uuid: str) -> bool:
        """Makes the provider of a node that has none; False when the node is gone, or has one by now."""

        def work(tx: sa.Connection) -> bool:
            providers = [ResourceProvider(uuid, name) for name in self._nodes.touch(tx, [uuid]).values()]
            return bool(self._store.merge_providers(providers, lambda _, present: list(present.values()), tx))

        return self._database.run(work)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The nodes and providers that one reconciliation has read.

    :param nodes: the nodes written since an earlier moment, with the number of all. :param providers: the number of all providers.
    """

    nodes: RecentRows
    providers: int

    def explains(self, later: _Rows) -> bool:
        """Returns whether the numbers of nodes and providers changed by the same amount.

        If not, a provider may have been removed whose node still exists.
        """
        return later.providers - self.providers == later.nodes.count - self.nodes.count


class _NodeRemoved(errors.StoreBusy):
    """A node was removed by another transaction after this one had read it."""


def _provider(spec: NodeSpec) -> ResourceProvider:
    return ResourceProvider(spec.uuid, spec.name, inventories=spec.inventories)
