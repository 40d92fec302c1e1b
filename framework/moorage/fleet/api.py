# SPDX-License-Identifier: Apache-2.0
"""Serves nodes in ``/scheduling/v1``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from moorage import errors
from moorage.fleet.importer import from_json
from moorage.fleet.interface import STATES, NodeSpec
from moorage.fleet.nodes import NodeStore
from moorage.fleet.view import FIELDS as VIEWED
from moorage.fleet.view import NodeView
from moorage.http.routes import FIELDS, PAGE, PolicyRule, Request, Response, Route, wanted_fields

__all__ = ["POLICIES", "Enroller", "routes"]

POLICIES = (
    PolicyRule("scheduling:nodes:get", "rule:system_reader", "List nodes and show one.", ("system",)),
    PolicyRule("scheduling:nodes:create", "rule:system_admin", "Enrol nodes.", ("system",)),
    PolicyRule("scheduling:nodes:delete", "rule:system_admin", "Remove a node.", ("system",)),
)

_LARGEST = 2**31 - 1
_WHOLE = {"type": "integer", "minimum": 1, "maximum": _LARGEST}
_TEXT = {"type": "string", "minLength": 1, "maxLength": 255}
_INVENTORY = {
    "type": "object",
    "properties": {
        "total": _WHOLE,
        "reserved": {"type": "integer", "minimum": 0, "maximum": _LARGEST},
        "min_unit": _WHOLE,
        "max_unit": _WHOLE,
        "step_size": _WHOLE,
        "allocation_ratio": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10000},
    },
    "required": ["total"],
    "additionalProperties": False,
}
_NODE = {
    "type": "object",
    "properties": {
        "uuid": {"type": "string", "minLength": 32, "maxLength": 36},
        "name": _TEXT,
        "host": _TEXT,
        "shard": _TEXT,
        "resource_class": {"type": "string", "minLength": 1, "maxLength": 80},
        "properties": {"type": "object", "maxProperties": 256},
        **dict.fromkeys(("driver", "conductor_group", "owner", "lessee", "description"), _TEXT),
        **dict.fromkeys(("driver_info", "extra"), {"type": "object", "maxProperties": 256}),
        "inventories": {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Z0-9_]{1,255}$"},
            "additionalProperties": {"oneOf": [_WHOLE, _INVENTORY, {"type": "null"}]},
            "maxProperties": 256,
        },
    },
    "required": ["name"],
    "additionalProperties": False,
}
_IMPORT = {
    "type": "object",
    "properties": {"nodes": {"type": "array", "items": _NODE, "minItems": 1, "maxItems": 1000}},
    "required": ["nodes"],
    "additionalProperties": False,
}
_QUERY = {
    "type": "object",
    "properties": {
        **dict.fromkeys(("host", "shard", "resource_class"), _TEXT),
        **dict.fromkeys(("sharded", *STATES), {"type": "boolean"}),
        **PAGE,
        "fields": FIELDS,
    },
    "additionalProperties": False,
}
_SHOWN = {
    "type": "object",
    "properties": {
        "uuid": {"type": "string"},
        "name": {"type": "string"},
        "dead": {"type": ["boolean", "null"], "description": "The agent of the node is down; null: it has none."},
    },
}
_ONE = {
    "type": "object",
    "properties": {
        **_SHOWN["properties"],  # type: ignore[dict-item]
        "instances": {"type": "integer", "description": "How many instances are on the node or move to it."},
        "departures": {
            "type": "integer",
            "description": "Of how many moved or evacuated instances the host has not let go.",
        },
    },
}


class Enroller(Protocol):
    """Writes nodes and what belongs to them; bound by the control plane."""

    def enrol(self, specs: Sequence[NodeSpec]) -> Mapping[str, int]:
        """Ensure nodes and providers; counts of created, changed and same."""

    def remove(self, uuid: str) -> None:
        """Remove a node and its provider; InUse when something is on it."""


def routes(nodes: NodeStore, enroller: Enroller, view: NodeView) -> Sequence[Route]:
    """Returns the routes, over the nodes and the object that enrols them."""

    def list_nodes(request: Request) -> Response:
        query = dict(request.query)
        limit = query.pop("limit", 1000)
        names = wanted_fields(query.pop("fields", None), VIEWED)
        found = nodes.list(limit=limit, **query)
        following = found[-1].uuid if len(found) == limit else None
        return Response(200, {"nodes": view.many(found, names), "next_after": following})

    def show_node(request: Request) -> Response:
        return Response(200, view.one(request.path_params["node"]))

    def import_nodes(request: Request) -> Response:
        specs = []
        for number, data in enumerate(request.body["nodes"]):
            try:
                specs.append(from_json(data))
            except ValueError as error:
                raise errors.InvalidInput(f"body/nodes/{number}: {error}.", path=f"body/nodes/{number}") from error
        return Response(200, dict(enroller.enrol(specs)))

    def delete_node(request: Request) -> Response:
        enroller.remove(nodes.get(request.path_params["node"]).uuid)
        return Response(204)

    tags = ("nodes",)
    get, create, delete = (rule.name for rule in POLICIES)
    counts = {"type": "object", "additionalProperties": {"type": "integer"}}
    listing = {"type": "object", "properties": {"nodes": {"type": "array", "items": _SHOWN}}}
    return (
        Route("GET", "/nodes", list_nodes, get, "List nodes by uuid.", {200: listing}, query=_QUERY, tags=tags),
        Route("GET", "/nodes/{node}", show_node, get, "Show a node, by uuid or name.", {200: _ONE}, tags=tags),
        Route(
            "POST",
            "/nodes",
            import_nodes,
            create,
            "Enrol nodes, or merge what is given into nodes that exist (null removes a member of an object); all or nothing.",
            {200: counts},
            body=_IMPORT,
            tags=tags,
        ),
        Route(
            "DELETE",
            "/nodes/{node}",
            delete_node,
            delete,
            "Remove a node on which nothing is; otherwise 409 says what is on it.",
            {204: None},
            tags=tags,
        ),
    )
