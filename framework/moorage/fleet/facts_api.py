# SPDX-License-Identifier: Apache-2.0
"""Routes of ``/scheduling/v1`` that change properties and states of nodes, and aggregates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from moorage.fleet.aggregates import HOST, NODE, AggregateStore, StoredAggregate
from moorage.fleet.interface import STATES, check_states
from moorage.fleet.view import NodeView
from moorage.http.routes import PAGE, PolicyRule, Request, Response, Route

__all__ = ["POLICIES", "routes"]

POLICIES = (
    PolicyRule(
        "scheduling:nodes:update",
        "rule:system_admin",
        "Change properties of a node, disable it, drain it or set maintenance.",
        ("system",),
    ),
    PolicyRule("scheduling:aggregates:get", "rule:system_reader", "List aggregates and show one.", ("system",)),
    PolicyRule("scheduling:aggregates:create", "rule:system_admin", "Create an aggregate.", ("system",)),
    PolicyRule(
        "scheduling:aggregates:update", "rule:system_admin", "Change an aggregate and its members.", ("system",)
    ),
    PolicyRule("scheduling:aggregates:delete", "rule:system_admin", "Remove an aggregate.", ("system",)),
)
#: Writes properties and states of a node, by its uuid.
ChangeNode = Callable[[str, Mapping[str, Any], Mapping[str, Any]], None]
_NAME = {"type": "string", "minLength": 1, "maxLength": 255}
_TEXT = {"type": "string", "maxLength": 255}


def _metadata(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "object", "propertyNames": _NAME, "additionalProperties": value, "maxProperties": 256}


_REASON = {"type": ["string", "null"], "maxLength": 65_535}
_FACTS = {
    "type": "object",
    "properties": {
        "properties": {"type": "object", "propertyNames": _NAME, "minProperties": 1, "maxProperties": 256},
        **{flag: {"type": "boolean"} for flag in STATES},
        **{f"{flag}_reason": _REASON for flag in STATES},
    },
    "minProperties": 1,
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
_NODE = {
    "type": "object",
    "properties": {
        "uuid": {"type": "string"},
        "properties": {"type": "object"},
        **{flag: {"type": "boolean"} for flag in STATES},
        **{f"{flag}_reason": {"type": ["string", "null"]} for flag in STATES},
        **{f"{flag}_since": {"type": ["integer", "null"]} for flag in STATES},
        **{f"{flag}_by": {"type": ["string", "null"]} for flag in STATES},
        "dead": {"type": ["boolean", "null"]},
        "instances": {"type": "integer"},
        "departures": {"type": "integer"},
    },
}


def routes(
    view: NodeView,
    aggregates: AggregateStore,
    change: ChangeNode,
    changed: Callable[[], None],
    states_changed: Callable[[], None],
) -> Sequence[Route]:
    """Returns the routes.

    :param change: changes properties and states of a node, by its uuid.
    :param changed: called after a change; schedulers then read the whole fleet.
    :param states_changed: called after a node changed its states; schedulers then read only the states.
    """
    _, get, create, update, delete = (rule.name for rule in POLICIES)
    return (
        *_node_routes(view, change, changed, states_changed),
        *_routes(aggregates, changed, get, create, update, delete),
    )


def _node_routes(
    view: NodeView, change: ChangeNode, changed: Callable[[], None], states_changed: Callable[[], None]
) -> Sequence[Route]:
    def change_node(request: Request) -> Response:
        uuid = view.nodes.get(request.path_params["node"]).uuid
        properties, states = request.body.get("properties", {}), check_states(request.body)
        change(uuid, properties, states)
        if properties:
            changed()
        if states:
            states_changed()
        return Response(200, view.one(uuid))

    return (
        Route(
            "PATCH",
            "/nodes/{node}",
            change_node,
            POLICIES[0].name,
            "Change properties of a node (null removes one, those that are not named stay), disable or enable it, or begin or end "
            "its maintenance or draining. Each of the three keeps new instances away; the instances on the node stay.",
            {200: _NODE},
            body=_FACTS,
            tags=("nodes",),
        ),
    )


def _routes(
    aggregates: AggregateStore, changed: Callable[[], None], get: str, create: str, update: str, delete: str
) -> Sequence[Route]:
    def listed(request: Request) -> Response:
        limit = request.query.get("limit", 1000)
        found = aggregates.list(after=request.query.get("after", ""), limit=limit)
        following = found[-1].name if len(found) == limit else None
        return Response(200, {"aggregates": [asdict(each) for each in found], "next_after": following})

    def shown(request: Request) -> Response:
        return Response(200, asdict(aggregates.get(request.path_params["aggregate"])))

    def created(request: Request) -> Response:
        made = aggregates.create(request.body["name"], request.body.get("metadata", {}))
        return Response(201, asdict(made), {"Location": f"{request.prefix}/aggregates/{made.uuid}"})

    def answered(result: StoredAggregate) -> Response:
        changed()
        return Response(200, asdict(result))

    def altered(request: Request) -> Response:
        return answered(aggregates.change(request.path_params["aggregate"], **request.body))

    def removed(request: Request) -> Response:
        aggregates.remove(request.path_params["aggregate"])
        changed()
        return Response(204)

    def member(kind: str, act: Callable[[str, str, str], StoredAggregate]) -> Callable[[Request], Response]:
        return lambda request: answered(act(request.path_params["aggregate"], kind, request.path_params[kind]))

    tags = ("aggregates",)
    one = "/aggregates/{aggregate}"
    listing = {"type": "object", "properties": {"aggregates": {"type": "array", "items": _SHOWN}}}
    return (
        Route("GET", "/aggregates", listed, get, "List aggregates by name.", {200: listing}, query=_QUERY, tags=tags),
        Route("POST", "/aggregates", created, create, "Create one.", {201: _SHOWN}, body=_CREATE, tags=tags),
        Route("GET", one, shown, get, "Show one, by uuid or name.", {200: _SHOWN}, tags=tags),
        Route(
            "PATCH",
            one,
            altered,
            update,
            "Change name or metadata; null takes a key away.",
            {200: _SHOWN},
            body=_CHANGE,
            tags=tags,
        ),
        Route("DELETE", one, removed, delete, "Remove one; its members stay.", {204: None}, tags=tags),
        *(
            Route(method, f"{one}/{kind}s/{{{kind}}}", member(kind, act), update, text, {200: _SHOWN}, tags=tags)
            for kind, what in ((HOST, "a host with all its nodes"), (NODE, "a node, by uuid or name,"))
            for method, act, text in (
                ("PUT", aggregates.add, f"Add {what} to it."),
                ("DELETE", aggregates.take_out, f"Take {what} out of it."),
            )
        ),
    )
