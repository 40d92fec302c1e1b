# SPDX-License-Identifier: Apache-2.0
"""Departures: operations by which hosts let go of instances that were moved or evacuated to other hosts.

The agent of the host ends a departure when it has removed what is left of the instance. A host that never comes back has none, so
the removal of its node ends the departures. That needs that the host is fenced: nothing runs there then, and its agent, should it
start later, destroys what belongs elsewhere before it takes work. Nodes that are given to another host take their departures along.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from moorage import errors, randomness
from moorage.allocation.interface import AllocationStore
from moorage.db import Database
from moorage.fleet.tables import nodes
from moorage.instances.interface import DEPARTURE, departed_consumer
from moorage.services.registry import ServiceRegistry
from moorage.work.interface import Operation
from moorage.work.operations import SqlOperationStore
from moorage.work.tables import workers

__all__ = ["Departures", "HostDepartures"]

#: Consumers whose claims are read at once.
_PAGE = 100
_OF_HOST = sa.select(workers.c.resource_id).where(
    workers.c.target_host == sa.bindparam("of_host"), workers.c.resource_type == DEPARTURE
)
_HOST_OF = sa.select(nodes.c.host).where(nodes.c.uuid == sa.bindparam("of_node"))
_OTHER_NODES = sa.select(nodes.c.uuid).where(
    nodes.c.host == sa.bindparam("of_host"), nodes.c.uuid != sa.bindparam("of_node")
)


@dataclass(frozen=True, slots=True)
class HostDepartures:
    """Departures of a host.

    :param instances: uuids of the instances that the host has to let go of.
    """

    host: str
    instances: Sequence[str]


@dataclass(frozen=True, slots=True)
class Departures:
    """Reads the departures of nodes and ends those of fenced hosts. Safe for use by several threads."""

    database: Database
    store: AllocationStore
    workers: SqlOperationStore
    registry: ServiceRegistry

    def of_node(self, node_uuid: str) -> HostDepartures:
        """Returns the departures of a node's host, except departures that hold resources of another node of this host."""
        with self.database.read() as tx:
            host = tx.execute(_HOST_OF, {"of_node": node_uuid}).scalar() or ""
            found = sorted(tx.execute(_OF_HOST, {"of_host": host}).scalars()) if host else []
            others = set(tx.execute(_OTHER_NODES, {"of_host": host, "of_node": node_uuid}).scalars()) if found else ()
        elsewhere = self._holders(found, others) if others else frozenset()
        return HostDepartures(host, [uuid for uuid in found if departed_consumer(uuid) not in elsewhere])

    def _holders(self, instances: Sequence[str], providers: set[str]) -> frozenset[str]:
        """Returns the consumers of departures that hold resources of some of the providers."""
        found: set[str] = set()
        for begin in range(0, len(instances), _PAGE):
            some = instances[begin : begin + _PAGE]
            items = self.store.allocations(consumers=[departed_consumer(uuid) for uuid in some], limit=_PAGE * _PAGE)
            found |= {item.consumer for item in items if item.provider in providers}
        return frozenset(found)

    def of_hosts(self, hosts: Sequence[str], node_uuids: Collection[str]) -> Mapping[str, Operation | None]:
        """Returns the departures of some hosts by instance: its operation if it holds resources of one of the nodes, or None."""
        with self.database.read() as tx:
            found = sorted(uuid for host in hosts for uuid in tx.execute(_OF_HOST, {"of_host": host}).scalars())
        holders = self._holders(found, set(node_uuids)) if found else frozenset()
        return {
            uuid: self.workers.get(DEPARTURE, uuid) if departed_consumer(uuid) in holders else None for uuid in found
        }

    def readdress(self, tx: Any, hosts: Sequence[str], seen: Mapping[str, Operation | None], host: str) -> None:
        """Gives departures to the host that gets the nodes of which they hold resources.

        :param hosts: the hosts that had the nodes. Their agents can write nothing more in this transaction.
        :param seen: what :meth:`of_hosts` read before the transaction.
        :raises Conflict: a departure has begun or changed meanwhile.
        """
        still = {uuid for each in hosts for uuid in tx.execute(_OF_HOST, {"of_host": each}).scalars()}
        if still - seen.keys():
            raise errors.Conflict("An instance began to leave meanwhile; nothing was changed. Try again.")
        for uuid in sorted(still):
            operation = seen[uuid]
            if operation is not None:
                self.workers.readdress(tx, operation, host)

    def end(self, tx: Any, node_uuid: str, seen: HostDepartures) -> bool:
        """Ends departures and gives back what they hold; False, and nothing is done, when the host is not fenced.

        An agent of the host that starts at the same time waits for the end of the transaction, or its start ends the fence first.
        """
        # As a claim does: first the node's provider, then the row of the agent.
        self.store.release(randomness.new_uuid(), tx, residents=[node_uuid])
        if not self.registry.hold_fence(tx, seen.host, evacuation=False):
            return False
        # An instance that was evacuated again meanwhile departs from another host. While the fence is held, none does.
        still = set(tx.execute(_OF_HOST, {"of_host": seen.host}).scalars())
        for uuid in sorted(still.intersection(seen.instances)):
            self.workers.reset(tx, DEPARTURE, uuid)
            self.store.release(departed_consumer(uuid), tx, residents=[node_uuid])
        return True
