# SPDX-License-Identifier: Apache-2.0
"""What operators say of nodes, in ``/scheduling/v1``: their properties, and the aggregates that they are in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from moorage.fleet.aggregates import HOST, NODE, AggregateStore, StoredAggregate
from moorage.fleet.api import PAGE
from moorage.fleet.nodes import NodeStore
from moorage.routes import ApiRequest, ApiResponse, PolicyRule, Route

__all__ = ["POLICIES", "routes"]

POLICIES = (
    PolicyRule("scheduling:nodes:update", "rule:system_admin", "Change properties of a node.", ("system",)),
    PolicyRule("scheduling:aggregates:get", "rule:system_reader", "List aggregates and show one.", ("system",)),
    PolicyRule("scheduling:aggregates:create", "rule:system_admin", "Create an aggregate.", ("system",)),
    PolicyRule(
        "scheduling:aggregates:update", "rule:system_admin", "Change an aggregate and its members.", ("system",)
    ),
    PolicyRule("scheduling:aggregates:delete", "rule:system_admin", "Remove an aggregate.", ("system",)),
)
_NAME = {"type": "string", "minLength": 1, "maxLength": 255}
_TEXT = {"type": "string", "maxLength": 255}


def _metadata(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "object", "propertyNames": _NAME, "additionalProperties": value, "maxProperties": 256}


_PROPERTIES = {
    "type": "object",
    "properties": {"properties": {"type": "object", "propertyNames": _NAME, "minProperties": 1, "maxProperties": 256}},
    "required": ["properties"],
    "additionalProperties": False,
}
_CREATE = {
    "type": "object",
    "properties": {"name": _NAME, "metadata": _metadata(_TEXT)},
    "required": ["name"],
    "additionalProperties": False,
}
_CHANGE = {
    "type": "object",
    "properties": {"name": _NAME, "metadata": _metadata({"oneOf": [_TEXT, {"type": "null"}]})},
    "minProperties": 1,
    "additionalProperties": False,
}
_QUERY = {"type": "object", "properties": {**PAGE}, "additionalProperties": False}
_SHOWN = {
    "type": "object",
    "properties": {
        "uuid": {"type": "string"},
        "name": {"type": "string"},
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
        "hosts": {"type": "array", "items": {"type": "string"}},
        "nodes": {"type": "array", "items": {"type": "string"}},
        "generation": {"type": "integer"},
    },
}
_NODE = {"type": "object", "properties": {"uuid": {"type": "string"}, "properties": {"type": "object"}}}


def routes(
    nodes: NodeStore,
    aggregates: AggregateStore,
    merge: Callable[[str, Mapping[str, Any]], None],
    changed: Callable[[], None],
) -> Sequence[Route]:
    """The routes.

    :param merge: changes properties of a node, by its uuid.
    :param changed: called after a change, so that schedulers read the fleet soon.
    """
    _, get, create, update, delete = (rule.name for rule in POLICIES)
    return (*_property_routes(nodes, merge, changed), *_routes(aggregates, changed, get, create, update, delete))


def _property_routes(
    nodes: NodeStore, merge: Callable[[str, Mapping[str, Any]], None], changed: Callable[[], None]
) -> Sequence[Route]:
    def change_node(request: ApiRequest) -> ApiResponse:
        uuid = nodes.get(request.path["node"]).uuid
        merge(uuid, request.body["properties"])
        changed()
        return ApiResponse(200, asdict(nodes.get(uuid)))

    return (
        Route(
            "PATCH",
            "/nodes/{node}",
            POLICIES[0].name,
            "Set properties of a node; null takes one away, those that are not named stay.",
            change_node,
            {200: _NODE},
            body=_PROPERTIES,
            tags=("nodes",),
        ),
    )


def _routes(
    aggregates: AggregateStore, changed: Callable[[], None], get: str, create: str, update: str, delete: str
) -> Sequence[Route]:
    def listed(request: ApiRequest) -> ApiResponse:
        limit = request.query.get("limit", 1000)
        found = aggregates.list(after=request.query.get("after", ""), limit=limit)
        following = found[-1].name if len(found) == limit else None
        return ApiResponse(200, {"aggregates": [asdict(each) for each in found], "next_after": following})

    def shown(request: ApiRequest) -> ApiResponse:
        return ApiResponse(200, asdict(aggregates.get(request.path["aggregate"])))

    def created(request: ApiRequest) -> ApiResponse:
        made = aggregates.create(request.body["name"], request.body.get("metadata", {}))
        return ApiResponse(201, asdict(made), {"Location": f"{request.url_prefix}/aggregates/{made.uuid}"})

    def answered(result: StoredAggregate) -> ApiResponse:
        changed()
        return ApiResponse(200, asdict(result))

    def altered(request: ApiRequest) -> ApiResponse:
        return answered(aggregates.change(request.path["aggregate"], **request.body))

    def removed(request: ApiRequest) -> ApiResponse:
        aggregates.remove(request.path["aggregate"])
        changed()
        return ApiResponse(204)

    def member(kind: str, act: Callable[[str, str, str], StoredAggregate]) -> Callable[[ApiRequest], ApiResponse]:
        return lambda request: answered(act(request.path["aggregate"], kind, request.path[kind]))

    tags = ("aggregates",)
    one = "/aggregates/{aggregate}"
    listing = {"type": "object", "properties": {"aggregates": {"type": "array", "items": _SHOWN}}}
    return (
        Route("GET", "/aggregates", get, "List aggregates by name.", listed, {200: listing}, query=_QUERY, tags=tags),
        Route("POST", "/aggregates", create, "Create one.", created, {201: _SHOWN}, body=_CREATE, tags=tags),
        Route("GET", one, get, "Show one, by uuid or name.", shown, {200: _SHOWN}, tags=tags),
        Route(
            "PATCH",
            one,
            update,
            "Change name or metadata; null takes a key away.",
            altered,
            {200: _SHOWN},
            body=_CHANGE,
            tags=tags,
        ),
        Route("DELETE", one, delete, "Remove one; its members stay.", removed, {204: None}, tags=tags),
        *(
            Route(method, f"{one}/{kind}s/{{{kind}}}", update, text, member(kind, act), {200: _SHOWN}, tags=tags)
            for kind, what in ((HOST, "a host with all its nodes"), (NODE, "a node, by uuid or name,"))
            for method, act, text in (
                ("PUT", aggregates.add, f"Add {what} to it."),
                ("DELETE", aggregates.take_out, f"Take {what} out of it."),
            )
        ),
    )
