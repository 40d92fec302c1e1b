# SPDX-License-Identifier: Apache-2.0
"""What is on a node: instances, instances that move to it, and what else holds resources of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.interface import AllocationStore
from moorage.db import Database
from moorage.fleet.tables import nodes
from moorage.instances.departures import Departures, HostDepartures
from moorage.instances.interface import Instance, InstanceStore, departed_consumer, move_consumer
from moorage.instances.moves import RESIZED

__all__ = ["NodeContents"]

#: Names that an error lists.
_NAMED = 5
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class NodeContents:
    """Counts and names what is on a node. Safe for use by several threads."""

    database: Database
    instances: InstanceStore
    store: AllocationStore
    departures: Departures

    def none(self) -> sa.ColumnElement[bool]:
        """Returns the condition on a row of ``nodes`` that no instance is on it.

        An instance of another service (``instance_uuid``) does not count in maintenance: its operator says that it is gone.
        """
        occupied = self.instances.occupies(nodes.c.uuid)
        external = sa.and_(nodes.c.instance_uuid.is_not(None), nodes.c.maintenance == sa.false())
        return sa.not_(external if occupied is None else sa.or_(external, occupied))

    def counts(self, node_uuid: str) -> Mapping[str, int]:
        """Returns how many ``instances`` are on a node or move to it, and of how many the host has to let go (``departures``)."""
        with self.database.read() as tx:
            uuids = {each.uuid for each in self.instances.on_node(node_uuid, tx)}
        # One that is resized on its own node stands there twice.
        instances = len(uuids - {move_consumer(uuid) for uuid in uuids})
        return {"instances": instances, "departures": len(self.departures.of_node(node_uuid).instances)}

    def refusal(self, node_uuid: str) -> errors.InUse:
        """Returns the error that says why a node is not removed, and what to do."""
        with self.database.read() as tx:
            columns = (nodes.c.name, nodes.c.host, nodes.c.instance_uuid, nodes.c.maintenance)
            row = tx.execute(sa.select(*columns).where(nodes.c.uuid == node_uuid)).first()
            moving = {each.uuid for each in self.instances.on_node(node_uuid, tx)}
        leaving = self.departures.of_node(node_uuid)
        known = {departed_consumer(uuid) for uuid in leaving.instances}
        name, found = (
            (row.name, list(self._parts(row, node_uuid, moving, known))) if row is not None else (node_uuid, [])
        )
        if not found and leaving.instances:
            return errors.InUse(
                f"Node {name} is not removed: {_departing(leaving)}. {_advice(leaving.host)}, then remove the node.",
                provider=node_uuid,
                holder=_departing(leaving),
            )
        if not found:
            return errors.InUse(
                f"Node {name} was used a moment ago, so it is not removed. Try again.", provider=node_uuid
            )
        also = f" Besides, {_departing(leaving)}. {_advice(leaving.host)}." if leaving.instances else ""
        return errors.InUse(
            f"Node {name} is not removed: {'; '.join(found)}. Delete these, move them to other nodes or confirm their resizes "
            "(moorage instance delete, moorage instance migrate, moorage instance confirm-resize), then remove the node. "
            f"moorage node disable {name} keeps new ones away.{also}",
            provider=node_uuid,
            holder="; ".join(found),
        )

    def _parts(self, row: Any, node_uuid: str, moving: set[str], departed: set[str]) -> Iterator[str]:
        here = [each for each in self._of_host(row.host) if each.node_uuid == node_uuid]
        uuids = {each.uuid for each in here}
        others = self.instances.find(sorted(moving - uuids))
        coming = [each for each in others if each.status != RESIZED]
        kept = [each for each in others if each.status == RESIZED]
        if here:
            yield f"{_counted(len(here), 'instance is', 'instances are')} on it ({_listed(here)})"
        if coming:
            yield f"{_counted(len(coming), 'instance moves', 'instances move')} to it ({_listed(coming)})"
        if kept:
            were = _counted(len(kept), "instance was", "instances were")
            yield f"{were} resized away from it without a confirmation ({_listed(kept)})"
        if row.instance_uuid is not None and not row.maintenance:
            yield f"instance {row.instance_uuid} of another service is on it"
        known = {each.uuid for each in (*here, *others)}
        known |= {of(uuid) for uuid in known for of in (move_consumer, departed_consumer)} | departed
        consumers = {item.consumer for item in self.store.allocations(providers=[node_uuid])} - known
        if consumers:
            held = _counted(len(consumers), "other consumer holds", "other consumers hold")
            yield f"{held} resources of it ({_few(sorted(consumers))})"

    def _of_host(self, host: str | None) -> Iterator[Instance]:
        after = ""
        while host is not None:
            page = self.instances.list(after=after, limit=_PAGE, host=host)
            yield from page
            if len(page) < _PAGE:
                return
            after = page[-1].uuid


def _departing(departures: HostDepartures) -> str:
    number, host = len(departures.instances), departures.host
    counted = _counted(number, "evacuated or moved instance", "evacuated or moved instances")
    return f"{counted} that host {host} has not let go ({_few(departures.instances)})"


def _advice(host: str) -> str:
    return (
        f"Start the agent of host {host}, which removes what is left of them. If the host never comes back, make sure that it is "
        f"off and fence it (moorage service set agent:{host} --forced-down, moorage host fence {host} --reason TEXT)"
    )


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _listed(instances: Sequence[Instance]) -> str:
    return _few([each.name or each.uuid for each in instances])


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
