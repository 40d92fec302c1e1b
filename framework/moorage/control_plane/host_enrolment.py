# SPDX-License-Identifier: Apache-2.0
"""Creates the node of an agent's host, with its provider, from the report of the host's driver (``[agent] enrol``).

The node has the name of the agent, and the uuid that follows from this name (:func:`moorage.fleet.interface.uuid_of_name`). So an
agent whose state folder was lost finds its node again, and a node that was imported by this name is the same one.

The member ``enrolled`` of the node's ``extra`` says which resource classes and traits come from the driver. What an operator added
beside them stays, as do allocation ratios, states and the node's name. What the driver reports no more is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors
from moorage.allocation.interface import AllocationStore, InventoryItem, ProviderCatalogue
from moorage.control_plane.enrolment import Enrolment
from moorage.drivers.interface import DriverError, HostResources
from moorage.fleet.interface import Node, NodeSpec, uuid_of_name
from moorage.fleet.nodes import NodeStore

__all__ = ["HostEnrolment", "gathered"]

LOG = logging.getLogger(__name__)
#: The member of ``extra`` of a node that says what of it comes from the driver.
_ENROLLED = "enrolled"
#: Resource class -> the option of [agent] that reserves units of it for the host itself.
_RESERVED = {
    "VCPU": "reserved_host_cpus",
    "MEMORY_MB": "reserved_host_memory_mb",
    "DISK_GB": "reserved_host_disk_gb",
}
#: What the driver sees decides these fields; an operator may change the others.
_FIELDS = frozenset({"total", "reserved"})


def gathered(services: Iterable[Any]) -> HostResources:
    """What the services of an agent see of their host, together.

    :raises ConfigError: none of them sees anything.
    :raises Unavailable: one cannot see what there is now.
    """
    inventory: dict[str, int] = {}
    traits: frozenset[str] = frozenset()
    for service in services:
        try:
            found = service.host_resources()
        except DriverError as error:
            raise errors.Unavailable(f"The host cannot be enrolled now: {error}.") from error
        inventory |= found.inventory
        traits |= found.traits
    if not inventory:
        raise errors.ConfigError(
            "[agent] enrol (--enrol): no driver of this agent knows what the host has, so there is nothing to enrol. Start the "
            "agent without it and import its node (moorage node import), or choose a driver that knows: [compute] driver = process."
        )
    return HostResources(inventory, traits)


@dataclass(frozen=True, slots=True)
class HostEnrolment:
    """Ensures the node of a host. Repeating it changes nothing.

    :param shard: ``[sharding] my_shard`` of the agent; None: the node keeps its shard.
    """

    nodes: NodeStore
    store: AllocationStore
    enrolment: Enrolment
    conf: cfg.ConfigOpts
    host: str
    shard: str | None

    def enrol(self, found: HostResources) -> None:
        """Brings node, inventories and traits in line with what was found, in one transaction.

        A machine that has less than before gets its inventories all the same, also below what is claimed: nothing new fits then,
        and a warning says so. A resource class that is gone and still used keeps its inventory, all of it reserved.

        :raises ConfigError: more is reserved than there is, or the node belongs to another agent.
        """
        node = self._node()
        spec = self._spec(node, found)
        try:
            counts = self._write(spec)
        except errors.Conflict as error:
            raise errors.ConfigError(f"Host {self.host} cannot be enrolled. {error.message}") from error
        done = next(name for name, count in counts.items() if count)
        LOG.info("Node %s of this host is enrolled (%s): %s.", spec.name, done, _listed(spec.inventories))
        self._warn(spec)

    def _node(self) -> Node | None:
        """Returns the node of the host: by its uuid, since it may have been renamed, else by its name."""
        for ident in (uuid_of_name(self.host), self.host):
            try:
                return self.nodes.get(ident)
            except errors.NotFound:
                continue
        return None

    def _spec(self, node: Node | None, found: HostResources) -> NodeSpec:
        before = self.nodes.free_members(node.uuid).get(_ENROLLED, {}) if node is not None else {}
        known = {name: frozenset(before.get(name, ())) for name in ("inventory", "traits")}
        traits = self._traits(found.traits)
        return NodeSpec(
            node.uuid if node is not None else uuid_of_name(self.host),
            node.name if node is not None else self.host,
            host=self.host,
            shard=self.shard,
            inventories=tuple(self._item(name, total) for name, total in sorted(found.inventory.items())),
            inventory_fields=dict.fromkeys(found.inventory, _FIELDS),
            removed_inventories=known["inventory"] - found.inventory.keys(),
            details={"extra": {_ENROLLED: {"inventory": sorted(found.inventory), "traits": sorted(traits)}}},
            keep_host=True,
            traits=traits,
            removed_traits=known["traits"] - traits,
        )

    def _traits(self, traits: frozenset[str]) -> frozenset[str]:
        if traits and not isinstance(self.store, ProviderCatalogue):
            LOG.warning("[allocation] store keeps no traits of providers, so those of this host are left out.")
            return frozenset()
        return traits

    def _item(self, name: str, total: int) -> InventoryItem:
        option = _RESERVED.get(name)
        reserved = int(self.conf.agent[option]) if option else 0
        if reserved >= total:
            raise errors.ConfigError(
                f"[agent] {option} is {reserved}, but host {self.host} has {total} {name}: nothing is left for instances. "
                "Reserve less, or start the agent without [agent] enrol."
            )
        return InventoryItem(name, total, reserved=reserved)

    def _write(self, spec: NodeSpec) -> Mapping[str, int]:
        try:
            return self.enrolment.enrol([spec])
        except errors.InUse:
            if not spec.removed_inventories:
                raise
            return self.enrolment.enrol([self._reserve_used(spec)])

    def _reserve_used(self, spec: NodeSpec) -> NodeSpec:
        """Keeps the classes that are gone and still used, so that nothing new is claimed of them; a later start removes them."""
        (usage,) = self.store.usages(providers=[spec.uuid])
        kept = [
            replace(item, reserved=item.total)
            for item in usage.provider.inventories
            if item.resource_class in spec.removed_inventories and usage.used.get(item.resource_class)
        ]
        names = {item.resource_class for item in kept}
        enrolled = dict(spec.details["extra"][_ENROLLED])
        enrolled["inventory"] = sorted({*enrolled["inventory"], *names})
        return replace(
            spec,
            details={"extra": {_ENROLLED: enrolled}},
            inventories=(*spec.inventories, *kept),
            inventory_fields={**spec.inventory_fields, **dict.fromkeys(names, frozenset({"reserved"}))},
            removed_inventories=spec.removed_inventories - names,
        )

    def _warn(self, spec: NodeSpec) -> None:
        (usage,) = self.store.usages(providers=[spec.uuid])
        for item in usage.provider.inventories:
            used = usage.used.get(item.resource_class, 0)
            if used > item.capacity:
                LOG.warning(
                    "Instances hold %d %s of node %s, which has %g for them by now. It gets no more of these; delete instances or "
                    "move them away.", used, item.resource_class, spec.name, item.capacity,
                )  # fmt: skip
        others = [node.name for node in self.nodes.list(host=self.host, limit=10) if node.uuid != spec.uuid]
        if others:
            LOG.warning(
                "Agent %s also manages node %s. If these stand for the same machine, it is counted more than once: remove them "
                "with moorage node remove.", self.host, ", ".join(others),
            )  # fmt: skip


def _listed(items: Iterable[InventoryItem]) -> str:
    return ", ".join(f"{item.total} {item.resource_class} ({item.reserved} reserved)" for item in items)
