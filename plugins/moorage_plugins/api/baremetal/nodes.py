# SPDX-License-Identifier: Apache-2.0
"""Nodes: what is written of them. A node of this dialect is the fleet's own row, with its provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moorage import errors, randomness
from moorage.control_plane.interface import ApiTools
from moorage.fleet.interface import InventoryItem, NodeSpec, inventory_of_class
from moorage.fleet.tables import nodes
from moorage.http.routes import Request, Response
from moorage_plugins.api.baremetal import patching
from moorage_plugins.api.baremetal.collection import Collection, node_target
from moorage_plugins.api.baremetal.fields import NODES
from moorage_plugins.api.baremetal.patching import Value
from moorage_plugins.api.baremetal.ports import remove_of_node
from moorage_plugins.api.baremetal.query import NODE_FILTERS

__all__ = ["Nodes"]

#: What a client may write. What else Ironic has belongs to deploying, which is not done here.
_WRITABLE: Mapping[str, Value] = {
    "name": Value((1, 5), patching.name),
    "driver": Value((1, 1), patching.text()),
    "driver_info": Value((1, 1), patching.json_object, {}),
    "properties": Value((1, 1), patching.json_object, {}),
    "extra": Value((1, 1), patching.json_object, {}),
    "instance_info": Value((1, 1), patching.json_object, {}),
    "instance_uuid": Value((1, 1), patching.uuid),
    "maintenance": Value((1, 1), patching.flag, False),
    "maintenance_reason": Value((1, 1), patching.text(65_535)),
    "resource_class": Value((1, 21), patching.resource_class),
    "conductor_group": Value((1, 46), patching.text(nullable=False), ""),
    "owner": Value((1, 50), patching.text()),
    "description": Value((1, 51), patching.text(4096)),
    "lessee": Value((1, 65), patching.text()),
    "shard": Value((1, 82), patching.shard),
}
_CREATABLE = {**_WRITABLE, "uuid": Value((1, 1), patching.uuid)}
#: Fields whose change needs a right of their own.
_GUARDED = ("shard", "owner", "lessee")
_SPEC = {"uuid", "name", "shard", "resource_class", "properties"}
_COLUMNS = [
    nodes.c.uuid, nodes.c.generation, nodes.c.owner, nodes.c.lessee, nodes.c.reservation, nodes.c.instance_uuid, nodes.c.id,
    *(nodes.c[name] for name in _WRITABLE if name not in ("owner", "lessee", "instance_uuid")),
]  # fmt: skip
_TRIES = 10


class Nodes(Collection):
    """``/v1/nodes``."""

    def __init__(self, tools: ApiTools) -> None:
        super().__init__(tools, NODES, "node", NODE_FILTERS, nodes.c.name)

    def create(self, request: Request) -> Response:
        """``POST /v1/nodes``."""
        given = patching.fields_of(request.body, _CREATABLE, request.version, "node")
        if not given.get("driver"):
            raise errors.InvalidInput("Schema error for node: 'driver' is a required property", path="driver")
        self._check_creation(request, given)
        uuid = given.get("uuid") or randomness.new_uuid()
        details = {name: value for name, value in given.items() if name not in _SPEC and value is not None}
        # As in Ironic: since 1.11 a node begins its life in the state "enroll".
        details["provision_state"] = "enroll" if request.version >= (1, 11) else "available"
        resource_class = given.get("resource_class")
        self.tools.fleet().create(
            NodeSpec(
                uuid,
                # In the store every node has a name; this one shows none.
                given.get("name") or uuid,
                shard=given.get("shard"),
                resource_class=resource_class,
                properties=given.get("properties") or {},
                inventories=(inventory_of_class(resource_class),) if resource_class else (),
                details=details,
            )
        )
        return self.shown(request, uuid, status=201)

    def patch(self, request: Request) -> Response:
        """``PATCH /v1/nodes/<uuid or name>``: repeated on the node as it is then, when another request was faster."""
        touched = patching.touched_by(request.body, _WRITABLE, request.version)
        for _ in range(_TRIES):
            row = self.row(request, request.path_params["ident"], _COLUMNS)
            self._check_change(request, row, touched)
            before = {name: getattr(row, name) for name in _WRITABLE}
            if before["name"] == row.uuid:
                before["name"] = None
            changes = patching.apply(request.body, before, _WRITABLE, request.version)
            if not changes or self._write(row, changes):
                return self.shown(request, row.uuid)
        raise errors.Conflict(
            f"Node {request.path_params['ident']} is being changed by others all the time; try again."
        )

    def delete(self, request: Request) -> Response:
        """``DELETE /v1/nodes/<uuid or name>``, with its ports and portgroups."""
        row = self.row(request, request.path_params["ident"], _COLUMNS)
        request.check_policy("baremetal:node:delete", node_target(row))
        _refuse_locked(row)
        if row.instance_uuid and not row.maintenance:
            raise errors.Conflict(f"Node {row.uuid} is associated with instance {row.instance_uuid}.")
        self.tools.fleet().remove(row.uuid, along=lambda tx: remove_of_node(tx, row.id))
        # The clients look at the type even though there is no body.
        return Response(204, None, {"Content-Type": "application/octet-stream"})

    def set_maintenance(self, request: Request) -> Response:
        """``PUT /v1/nodes/<uuid or name>/maintenance``."""
        body = request.body or {}
        if not isinstance(body, dict):
            raise errors.InvalidInput("The body must be an object with a reason, or be left out.", path="body")
        if unknown := sorted(set(body) - {"reason"}):
            raise errors.InvalidInput(f"Unexpected arguments: {', '.join(unknown)}", path="body")
        reason = patching.text(65_535)("reason", body.get("reason"))
        return self._maintain(request, {"maintenance": True, "maintenance_reason": reason})

    def clear_maintenance(self, request: Request) -> Response:
        """``DELETE /v1/nodes/<uuid or name>/maintenance``."""
        return self._maintain(request, {"maintenance": False, "maintenance_reason": None})

    def _maintain(self, request: Request, changes: Mapping[str, Any]) -> Response:
        for _ in range(_TRIES):
            row = self.row(request, request.path_params["ident"], _COLUMNS)
            self._check_change(request, row, set())
            if self.tools.fleet().change(row.uuid, row.generation, changes):
                return Response(202)
        raise errors.Conflict(
            f"Node {request.path_params['ident']} is being changed by others all the time; try again."
        )

    def _check_creation(self, request: Request, given: dict[str, Any]) -> None:
        try:
            request.check_policy("baremetal:node:create")
        except errors.Forbidden:
            request.check_policy("baremetal:node:create:self_owned_node")
            project = request.context.project_id
            if given.get("owner") not in (None, project):
                raise errors.Forbidden("Cannot create a node as a project scoped admin with another owner.") from None
            given["owner"] = project
        if given.get("shard") is not None:
            request.check_policy("baremetal:node:update:shard", {})

    def _check_change(self, request: Request, row: Any, touched: set[str]) -> None:
        target = node_target(row)
        for guarded in _GUARDED:
            if guarded in touched:
                request.check_policy(f"baremetal:node:update:{guarded}", target)
        if touched - {"shard"} or not touched:
            request.check_policy("baremetal:node:update", target)
        _refuse_locked(row)

    def _write(self, row: Any, changes: Mapping[str, Any]) -> bool:
        values = dict(changes)
        if "name" in values and values["name"] is None:
            values["name"] = row.uuid
        inventories = None
        if "resource_class" in values:
            inventories = self._inventories(row, values["resource_class"])
        return self.tools.fleet().change(row.uuid, row.generation, values, inventories)

    def _inventories(self, row: Any, resource_class: str | None) -> Sequence[InventoryItem]:
        """What the provider has, with the new class instead of the old."""
        old = inventory_of_class(row.resource_class).resource_class if row.resource_class else None
        usages = self.tools.store().usages(providers=[row.uuid])
        present = usages[0].provider.inventories if usages else ()
        kept = [item for item in present if item.resource_class != old]
        fresh = inventory_of_class(resource_class) if resource_class else None
        if fresh is None or any(item.resource_class == fresh.resource_class for item in kept):
            return kept
        return [*kept, fresh]


def _refuse_locked(row: Any) -> None:
    if row.reservation is not None:
        raise errors.Conflict(
            f"Node {row.uuid} is locked by host {row.reservation}, please retry after the current operation is completed."
        )
