# SPDX-License-Identifier: Apache-2.0
"""All nodes of a shard to another host, with their instances, in one transaction.

For a service that is moved to work by shards: its old process is stopped and declared dead (``forced_down``), the nodes of a shard
and what is on them are given to the host that shall have that shard, and the new process is started with ``my_shard``. The death is
a write: the epoch of each old service is raised in the same transaction, so that one which still runs can finish nothing any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from moorage import errors
from moorage.db import Database
from moorage.fleet.interface import Node
from moorage.fleet.nodes import NodeStore
from moorage.instances.action_kinds import OPERATIONS
from moorage.instances.departures import Departures
from moorage.instances.interface import Instance, InstanceStore, Reassignable
from moorage.instances.moves import RESIZED
from moorage.services.interface import Service
from moorage.services.registry import ServiceRegistry

__all__ = ["Preview", "Reassignment", "ReassignReport"]

_PAGE = 1000
_AGENT = "agent"
_BUSY = frozenset({"building", "deleting", *(each.status for each in OPERATIONS.values())})


@dataclass(frozen=True, slots=True)
class Preview:
    """What would happen.

    :param sources: host -> nodes of the shard that are its; the empty name: nodes without a host.
    :param already: nodes that are the destination's.
    :param problems: why it is refused; nothing is done while there is one.
    """

    shard: str
    host: str
    sources: Mapping[str, int]
    already: int
    instances: Sequence[Instance] = field(repr=False, default=())
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReassignReport:
    """What happened, and what is left afterwards: ``left`` are sentences, none when everything is as it should be."""

    nodes: int
    instances: int
    left: tuple[str, ...]


class Reassignment:
    """Moves the nodes of shards between hosts, with what the old hosts have to let go of there."""

    def __init__(
        self,
        database: Database,
        registry: ServiceRegistry,
        nodes: NodeStore,
        instances: InstanceStore,
        departures: Departures,
    ) -> None:
        self._database = database
        self._registry = registry
        self._nodes = nodes
        self._instances = instances
        self._departures = departures

    def preview(self, shard: str, host: str) -> Preview:
        """Look, and change nothing."""
        members = self._members(shard)
        sources = Counter(node.host or "" for node in members if node.host != host)
        mine = {node.uuid for node in members}
        found = [
            instance for source in sources if source for instance in self._on_host(source) if instance.node_uuid in mine
        ]
        problems = [
            *([] if members else [f"No node is in shard {shard}."]),
            *self._wrong_destination(host, shard),
            *(problem for source in sorted(sources) if source for problem in self._wrong_source(source)),
            *_wrong_instances(found),
        ]
        with self._database.read() as tx:
            problems += self._unconfirmed(tx, found, mine)
        if found and not isinstance(self._instances, Reassignable):
            problems.append("The instance store cannot hand instances to another host.")
        already = sum(node.host == host for node in members)
        return Preview(shard, host, dict(sources), already, found, tuple(problems))

    def execute(self, preview: Preview) -> ReassignReport:
        """Do what was previewed, all or nothing.

        :raises Conflict: it is refused, or something has changed since.
        """
        if preview.problems:
            raise errors.Conflict(preview.problems[0], problems=list(preview.problems))
        sources = sorted(source for source in preview.sources if source)
        members = {node.uuid for node in self._members(preview.shard)}
        departures = self._departures.of_hosts(sources, members)

        def work(tx: sa.Connection) -> tuple[int, int]:
            if not self._registry.hold_up(tx, _AGENT, preview.host):
                raise errors.Conflict(f"Agent {preview.host} was declared dead meanwhile; nothing was changed.")
            for source in sources:
                if not self._registry.evict_forced(tx, _AGENT, source):
                    raise errors.Conflict(f"Agent {source} is not declared dead any more; nothing was changed.")
            # What is kept before what departs: a confirmation turns the one into the other. The old agents can keep nothing now.
            if unconfirmed := self._unconfirmed(tx, preview.instances, members):
                raise errors.Conflict(unconfirmed[0], problems=unconfirmed)
            self._departures.readdress(tx, sources, departures, preview.host)
            moved = self._nodes.reassign(tx, preview.shard, [*sources, None], preview.host)
            hosts = {instance.uuid: instance.host for instance in preview.instances}
            if hosts:
                assert isinstance(self._instances, Reassignable)  # noqa: S101  (the preview refuses others)
                if self._instances.reassign(tx, hosts, preview.host) != len(hosts):
                    raise errors.Conflict(
                        "An instance was changed or deleted meanwhile; nothing was changed. Try again."
                    )
            return moved, len(hosts)

        moved, instances = self._database.run(work)
        return ReassignReport(moved, instances, tuple(self._left(preview.shard, preview.host, sources)))

    def _unconfirmed(self, tx: sa.Connection, found: Sequence[Instance], mine: Collection[str]) -> list[str]:
        """Resizes that are not confirmed name the host that keeps the old place; also while an operation is in progress."""
        kept = self._instances.kept_on(tx, mine) if isinstance(self._instances, Reassignable) else ()
        uuids = sorted({*kept, *(each.uuid for each in found if each.status == RESIZED)})
        if not uuids:
            return []
        return [
            f"The resizes of {len(uuids)} instances are not confirmed: {', '.join(uuids[:10])}. Confirm them "
            "(moorage instance confirm-resize), which a host that is dead allows, or revert them. Let operations on them end first."
        ]

    def _left(self, shard: str, host: str, sources: Sequence[str]) -> list[str]:
        found = []
        elsewhere = [node.name for node in self._members(shard) if node.host != host]
        if elsewhere:
            found.append(f"{len(elsewhere)} nodes of {shard} are not {host}'s: {', '.join(elsewhere[:10])}.")
        for source in sources:
            nodes = self._nodes.list(host=source, limit=_PAGE)
            instances = self._on_host(source)
            if nodes or instances:
                more = " or more" if len(nodes) == _PAGE else ""
                found.append(
                    f"{source} still has {len(nodes)}{more} nodes and {len(instances)} instances of other shards."
                )
        known = {node.uuid for node in self._members(shard)}
        strays = [each for each in self._on_host(host) if each.node_uuid not in known and not self._is_of(each, host)]
        if strays:
            found.append(f"{len(strays)} instances of {host} are on nodes that are not its own, or are gone.")
        return found

    def _is_of(self, instance: Instance, host: str) -> bool:
        try:
            return self._nodes.get(instance.node_uuid).host == host
        except errors.NotFound:
            return False

    def _members(self, shard: str) -> list[Node]:
        found: list[Node] = []
        while True:
            page = self._nodes.list(after=found[-1].uuid if found else "", limit=_PAGE, shard=shard)
            found += page
            if len(page) < _PAGE:
                return found

    def _on_host(self, host: str) -> list[Instance]:
        return self._pages(host=host)

    def _pages(self, **which: str) -> list[Instance]:
        """Returns all instances that have these fields."""
        found: list[Instance] = []
        while True:
            page = self._instances.list(after=found[-1].uuid if found else "", limit=_PAGE, **which)
            found += page
            if len(page) < _PAGE:
                return found

    def _agent(self, host: str) -> Service | None:
        return next(iter(self._registry.list(binary=_AGENT, host=host)), None)

    def _wrong_destination(self, host: str, shard: str) -> list[str]:
        agent = self._agent(host)
        if agent is None:
            return [
                f"There is no agent {host}; start it once, or correct the name (moorage service list --binary agent)."
            ]
        if agent.shard not in (None, shard):
            return [f"Agent {host} serves shard {agent.shard}; choose an agent that serves {shard}, or all shards."]
        if agent.forced_down:
            return [
                f"Agent {host} is declared dead; say that it lives (moorage service set agent:{host} --up), or choose another."
            ]
        return []

    def _wrong_source(self, host: str) -> list[str]:
        agent = self._agent(host)
        if agent is None or agent.forced_down:
            return [] if agent else [f"Nodes are of agent {host}, which is not known."]
        return [
            f"Agent {host} has nodes of the shard and is not declared dead: stop it, then say so "
            f"(moorage service set agent:{host} --forced-down)."
        ]


def _wrong_instances(instances: Sequence[Instance]) -> list[str]:
    crowded = [node for node, count in Counter(each.node for each in instances).items() if count > 1]
    busy = [each.uuid for each in instances if each.status in _BUSY]
    return [
        *([f"More than one instance is on {len(crowded)} nodes: {', '.join(crowded[:10])}."] if crowded else []),
        *([f"{len(busy)} instances are being built or deleted: {', '.join(busy[:10])}. Let that end."] if busy else []),
    ]
