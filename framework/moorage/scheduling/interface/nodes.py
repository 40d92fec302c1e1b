# SPDX-License-Identifier: Apache-2.0
"""Describes the nodes as the scheduler reads them from the stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from moorage.inventory import InventoryItem
from moorage.read_only import freeze_fields

__all__ = ["Aggregate", "ProviderState", "NodeState", "ExcludedTargets", "FleetChanges", "FleetSource"]


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Names a set of nodes with metadata, like a host aggregate of Nova."""

    name: str
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze_fields(self, "metadata")


@dataclass(frozen=True, slots=True)
class ProviderState:
    """Describes a resource provider of a node: what it has, and what is used of it.

    :param parent: uuid of the provider above; None for a root.
    :param shared: it is a pool, in another tree; other nodes use it too.
    """

    uuid: str
    parent: str | None
    inventories: tuple[InventoryItem, ...]
    used: Mapping[str, int]
    traits: frozenset[str] = frozenset()
    shared: bool = False

    def __post_init__(self) -> None:
        freeze_fields(self, "used")


@dataclass(frozen=True, slots=True)
class NodeState:
    """Describes a node without its instances, as read from the stores of the fleet, of allocations and of services.

    :param up: its agent's heartbeats arrive.
    :param enabled: neither the node nor its agent is disabled, and the node is not in maintenance.
    :param disabled_reason: why it is not enabled; empty when it is.
    :param traits: the traits of its own provider.
    :param capacity: by class, the sum of its own provider and all below it; of a class that none of them has, that of the roomiest
        pool. Likewise ``used``.
    :param providers: its own provider, then those below it (NUMA cells, GPUs), then the pools that it uses. Empty: its own provider
        has everything.
    """

    uuid: str
    name: str
    host: str
    capacity: Mapping[str, float]
    used: Mapping[str, int]
    can_host: bool = True
    up: bool = True
    enabled: bool = True
    properties: Mapping[str, Any] = field(default_factory=dict)
    aggregates: tuple[Aggregate, ...] = ()
    disabled_reason: str = ""
    traits: frozenset[str] = frozenset()
    providers: tuple[ProviderState, ...] = ()

    def __post_init__(self) -> None:
        freeze_fields(self, "capacity", "used", "properties")

    @property
    def own_and_nested(self) -> tuple[ProviderState, ...]:
        """The providers; at least its own provider."""
        if self.providers:
            return self.providers
        items = tuple(InventoryItem(name, 1, allocation_ratio=amount) for name, amount in self.capacity.items())
        return (ProviderState(self.uuid, None, items, self.used, self.traits),)


@dataclass(frozen=True, slots=True)
class ExcludedTargets:
    """Lists the hosts and nodes that get no new instances at one moment.

    :param down: hosts whose agent is down.
    :param disabled: host -> why, of agents that are disabled or do not work on instances.
    :param nodes: uuid -> why, of nodes that are disabled or in maintenance.
    """

    down: frozenset[str] = frozenset()
    disabled: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, str] = field(default_factory=dict)

    def applied(self, node: NodeState) -> NodeState:
        """Returns the node with these states; the same object if its states are the same."""
        up = node.host not in self.down
        reason = self.nodes.get(node.uuid) or self.disabled.get(node.host, "")
        if up == node.up and reason == node.disabled_reason:
            return node
        return replace(node, up=up, enabled=not reason, disabled_reason=reason)


@dataclass(frozen=True, slots=True)
class FleetChanges:
    """Lists the nodes that changed between two readings of the fleet.

    :param changed: nodes that are new or have changed, without the states of :class:`ExcludedTargets`.
    :param removed: uuids of nodes that are gone; some of them may never have been known.
    """

    changed: tuple[NodeState, ...] = ()
    removed: frozenset[str] = frozenset()


class FleetSource(Protocol):
    """Reads nodes for the scheduler. The control plane implements it."""

    def nodes(self) -> Iterable[NodeState]:
        """Reads all nodes that have a host."""

    def changes(self, *, compare: bool = False) -> FleetChanges | None:
        """Reads what changed since the last reading of nodes or changes; None: all nodes must be read.

        :param compare: also find what a transaction committed long after it had written.
        """

    def unavailable(self) -> ExcludedTargets:
        """Reads the hosts and nodes that get no new instances now; cheap enough to be called every second."""
