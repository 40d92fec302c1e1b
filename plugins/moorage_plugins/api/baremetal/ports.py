# SPDX-License-Identifier: Apache-2.0
"""Ports and portgroups: what is attached to nodes, and found through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from moorage import errors, randomness
from moorage.control_plane.interface import ApiTools
from moorage.db import Duplicate, now
from moorage.fleet.tables import nodes
from moorage.http.routes import Request, Response
from moorage_plugins.api.baremetal import patching, query
from moorage_plugins.api.baremetal.collection import Collection, is_uuid, node_target
from moorage_plugins.api.baremetal.fields import PORTGROUPS, PORTS, Resource
from moorage_plugins.api.baremetal.patching import Value
from moorage_plugins.api.baremetal.query import Filter
from moorage_plugins.api.baremetal.tables import portgroups, ports

__all__ = ["Attached", "Portgroups", "Ports", "remove_of_node", "remove_strays"]

_TRIES = 10


def _of_node(values: Sequence[str]) -> sa.ColumnElement[bool]:
    ident = values[-1]
    found: sa.ColumnElement[bool] = nodes.c.uuid == ident.lower() if is_uuid(ident) else nodes.c.name == ident
    return found


def _mac(column: Any) -> Filter:
    return Filter((1, 1), lambda values: column == patching.mac("address", values[-1]))


_NODE = {
    "node": Filter((1, 6), _of_node),
    "node_uuid": Filter((1, 1), _of_node),
    "conductor_groups": query.either(nodes.c.conductor_group, (1, 99)),
}
_PORT_FILTERS: Mapping[str, Filter] = {
    **_NODE,
    "address": _mac(ports.c.address),
    "portgroup": Filter(
        (1, 24),
        lambda values: ports.c.portgroup_uuid.in_(
            sa.select(portgroups.c.uuid).where(
                portgroups.c.uuid == values[-1].lower() if is_uuid(values[-1]) else portgroups.c.name == values[-1]
            )
        ),
    ),
    "physical_network": query.equals(ports.c.physical_network, (1, 34)),
    **query.shard_filters((1, 82)),
}
_PORTGROUP_FILTERS: Mapping[str, Filter] = {
    **_NODE,
    "address": _mac(portgroups.c.address),
    **query.shard_filters((1, 106)),
}
_PORT_VALUES: Mapping[str, Value] = {
    "address": Value((1, 1), patching.mac),
    "extra": Value((1, 1), patching.json_object, {}),
    "pxe_enabled": Value((1, 19), patching.flag, True),
    "local_link_connection": Value((1, 19), patching.json_object, {}),
    "portgroup_uuid": Value((1, 24), patching.uuid),
    "physical_network": Value((1, 34), patching.text(64)),
    "is_smartnic": Value((1, 53), patching.flag, False),
    "name": Value((1, 88), patching.name),
    "description": Value((1, 97), patching.text()),
    "vendor": Value((1, 100), patching.text(32)),
    "category": Value((1, 101), patching.text(80)),
}
_PORTGROUP_VALUES: Mapping[str, Value] = {
    "name": Value((1, 23), patching.name),
    "address": Value((1, 23), lambda field, value: None if value is None else patching.mac(field, value)),
    "extra": Value((1, 23), patching.json_object, {}),
    "standalone_ports_supported": Value((1, 23), patching.flag, True),
    "mode": Value((1, 26), patching.text(nullable=False), "active-backup"),
    "properties": Value((1, 26), patching.json_object, {}),
    "physical_network": Value((1, 102), patching.text(64)),
}
_PLACE = {
    "uuid": Value((1, 1), patching.uuid),
    "node_uuid": Value((1, 1), patching.text()),
    "node_ident": Value((1, 94), patching.text()),
}


class Attached(Collection):
    """What ports and portgroups have in common."""

    def __init__(
        self,
        tools: ApiTools,
        resource: Resource,
        kind: str,
        filters: Mapping[str, Filter],
        table: sa.Table,
        values: Mapping[str, Value],
    ) -> None:
        super().__init__(tools, resource, kind, filters, table.c.name)
        self._right = f"baremetal:{kind}:write"
        self._table = table
        self._values = values
        self._columns = [
            table.c.id, table.c.uuid, table.c.generation, nodes.c.owner, nodes.c.lessee, table.c.node_id,
            *(table.c[name] for name in values),
        ]  # fmt: skip

    def of_node(self, request: Request) -> Response:
        """``GET /v1/nodes/<uuid or name>/<resource>``."""
        listing = query.read(self.resource, request, self._filters, detail=False)
        return self.page(request, query.restricted(listing, _of_node([request.path_params["ident"]])))

    def create(self, request: Request) -> Response:
        """``POST /v1/<resource>``."""
        what = self.resource.singular.lower()
        given = patching.fields_of(request.body, {**self._values, **_PLACE}, request.version, what)
        ident = given.pop("node_uuid", None) or given.pop("node_ident", None)
        given.pop("node_ident", None)
        if not ident:
            raise errors.InvalidInput(f"Schema error for {what}: 'node_uuid' is a required property", path="node_uuid")
        self._check_new(given)
        node = self._node(ident)
        request.check_policy(self._right, node_target(node))
        uuid = given.pop("uuid", None) or randomness.new_uuid()
        row = {name: value.empty for name, value in self._values.items()} | given | {"uuid": uuid, "node_id": node.id}
        statement = sa.insert(self._table).values(generation=0, created_at=now())
        self._unique(given, lambda tx: tx.execute(statement, [row]))
        return self.shown(request, uuid, status=201)

    def patch(self, request: Request) -> Response:
        """``PATCH /v1/<resource>/<uuid>``."""
        patching.touched_by(request.body, self._values, request.version)
        for _ in range(_TRIES):
            row = self.row(request, request.path_params["ident"], self._columns)
            request.check_policy(self._right, node_target(row))
            before = {name: getattr(row, name) for name in self._values}
            changes = patching.apply(request.body, before, self._values, request.version)
            if not changes or self._change(row, changes):
                return self.shown(request, row.uuid)
        raise errors.Conflict(
            f"{self.resource.singular} {request.path_params['ident']} is being changed by others; try again."
        )

    def delete(self, request: Request) -> Response:
        """``DELETE /v1/<resource>/<uuid>``."""
        row = self.row(request, request.path_params["ident"], self._columns)
        request.check_policy(self._right, node_target(row))
        self.tools.database.run(lambda tx: self._remove(tx, row))
        return Response(204, None, {"Content-Type": "application/octet-stream"})

    def _check_new(self, given: Mapping[str, Any]) -> None:
        """Refuse what a new thing must have."""

    def _remove(self, tx: sa.Connection, row: Any) -> None:
        tx.execute(sa.delete(self._table).where(self._table.c.id == row.id))

    def _change(self, row: Any, changes: Mapping[str, Any]) -> bool:
        table = self._table
        statement = (
            sa.update(table)
            .where(table.c.id == row.id, table.c.generation == row.generation)
            .values(**changes, generation=table.c.generation + 1, updated_at=now())
        )
        return bool(self._unique(changes, lambda tx: tx.execute(statement)).rowcount == 1)

    def _unique(self, given: Mapping[str, Any], work: Any) -> Any:
        """Do it; once more without what nodes left behind that were removed by other means."""
        try:
            return self.tools.database.run(work)
        except Duplicate:
            pass
        self.tools.database.run(remove_strays)
        try:
            return self.tools.database.run(work)
        except Duplicate as error:
            taken = ", ".join(f"{name} {given[name]}" for name in ("address", "name", "uuid") if given.get(name))
            raise errors.AlreadyExists(f"A {self.resource.singular.lower()} with {taken} already exists.") from error

    def _node(self, ident: str) -> Any:
        columns = (nodes.c.id, nodes.c.uuid, nodes.c.owner, nodes.c.lessee)
        with self.tools.database.read() as tx:
            found = tx.execute(sa.select(*columns).where(_of_node([ident]))).first()
        if found is None:
            raise errors.InvalidInput(f"Node {ident} could not be found.", path="node_uuid")
        return found


class Ports(Attached):
    """``/v1/ports``."""

    def __init__(self, tools: ApiTools) -> None:
        super().__init__(tools, PORTS, "port", _PORT_FILTERS, ports, _PORT_VALUES)

    def _check_new(self, given: Mapping[str, Any]) -> None:
        if not given.get("address"):
            raise errors.InvalidInput("Schema error for port: 'address' is a required property", path="address")


class Portgroups(Attached):
    """``/v1/portgroups``."""

    def __init__(self, tools: ApiTools) -> None:
        super().__init__(tools, PORTGROUPS, "portgroup", _PORTGROUP_FILTERS, portgroups, _PORTGROUP_VALUES)

    def _remove(self, tx: sa.Connection, row: Any) -> None:
        used = sa.exists().where(ports.c.portgroup_uuid == row.uuid)
        removed = tx.execute(sa.delete(portgroups).where(portgroups.c.id == row.id, ~used)).rowcount
        if not removed and tx.execute(sa.select(used)).scalar():
            raise errors.Conflict(f"Portgroup {row.uuid} cannot be deleted as it has ports.")


def remove_of_node(tx: sa.Connection, node_id: int) -> None:
    """Remove what is attached to a node."""
    for table in (ports, portgroups):
        tx.execute(sa.delete(table).where(table.c.node_id == node_id))


def remove_strays(tx: sa.Connection) -> None:
    """Remove what was attached to nodes that are gone. Reads both tables: for when something stands in the way."""
    for table in (ports, portgroups):
        tx.execute(sa.delete(table).where(~sa.exists().where(nodes.c.id == table.c.node_id)))
