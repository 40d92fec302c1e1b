# SPDX-License-Identifier: Apache-2.0
"""Scheduling in ``/scheduling/v1``: questions that a scheduler answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from moorage import errors
from moorage.context import RequestContext
from moorage.http.routes import FIELDS, PAGE, PolicyRule, Request, Response, Route, wanted_fields
from moorage.scheduling.host_pages import HOST_FIELDS
from moorage.scheduling.request import REQUEST_PROPERTIES
from moorage.scheduling.resource_request import check_flavor

__all__ = ["POLICIES", "Resolver", "SchedulerClient", "allowed", "check_free_form", "check_request", "routes"]

FORCED_HOST = "scheduling:instances:create:forced_host"
REQUESTED_DESTINATION = "scheduling:instances:create:requested_destination"
FREE_FORM = "scheduling:instances:create:free_form"
SELECT_HOSTS = "scheduling:select:hosts"
POLICIES = (
    PolicyRule(
        "scheduling:select",
        "rule:system_reader or rule:project_member",
        "Ask whether an instance could be placed. Names of hosts and nodes need scheduling:select:hosts.",
    ),
    PolicyRule(SELECT_HOSTS, "rule:system_reader", "See the names of hosts and nodes where an instance would go."),
    PolicyRule(
        FORCED_HOST,
        "rule:system_admin",
        "Choose the host or node of a new instance with force_hosts or force_nodes, which skips all filters.",
    ),
    PolicyRule(
        REQUESTED_DESTINATION,
        "rule:system_admin",
        "Choose the host or node of a new instance with requested_host or requested_node; the filters must pass it.",
    ),
    PolicyRule(
        FREE_FORM,
        "@",
        "Bring the resources of the flavor along, in a request for an instance, a resize or a selection. By default, callers who "
        "may send the request may do so. With rule:system_admin, all others choose from the catalogue of flavors.",
    ),
    PolicyRule("scheduling:hosts:get", "rule:system_reader", "See the fleet as a scheduler does.", ("system",)),
    PolicyRule("scheduling:decisions:get", "rule:system_reader", "See why a request was decided so.", ("system",)),
)

_SELECT = {
    "type": "object",
    "properties": {
        **REQUEST_PROPERTIES,
        "count": {"type": "integer", "minimum": 1, "maximum": 1000},
        "dry_run": {"const": True},
        "explain": {"type": "boolean"},
    },
    "required": ["flavor"],
    "additionalProperties": False,
}
#: Fields of a request that need a rule of their own, as in Nova.
_RULES_OF_FIELDS = {
    "force_hosts": FORCED_HOST,
    "force_nodes": FORCED_HOST,
    "requested_host": REQUESTED_DESTINATION,
    "requested_node": REQUESTED_DESTINATION,
}
_ANY = {"type": "object"}
_NAME = {"type": "string", "minLength": 1, "maxLength": 255}
_HOSTS = {
    "type": "object",
    "properties": {
        "host": _NAME,
        "node": _NAME,
        **dict.fromkeys(("up", "enabled", "can_host"), {"type": "boolean"}),
        **PAGE,
        "fields": FIELDS,
    },
    "additionalProperties": False,
}
_DECISION = {
    "type": "object",
    "properties": {"node": {"type": "string", "minLength": 1, "maxLength": 255}},
    "additionalProperties": False,
}


class SchedulerClient(Protocol):
    """How the API reaches a scheduler; bound by the control plane."""

    def ask(self, method: str, args: Mapping[str, Any]) -> Any:
        """Call any live scheduler; for questions only, so another one is asked when one is lost."""

    def find(self, method: str, args: Mapping[str, Any]) -> Any:
        """Call one scheduler after the other until one knows; NotFound when none does."""


#: Replaces what a request names (a flavor, a server group) by what the store has of it.
Resolver = Callable[[Mapping[str, Any], RequestContext], Mapping[str, Any]]


def check_request(request: Request) -> Mapping[str, Any]:
    """Checks the body of a request for an instance beyond the route's own policy and schema; returns it.

    :raises Forbidden: it chooses hosts or nodes, or brings resources along, and the caller may not.
    :raises InvalidInput: it asks for something that is not supported.
    """
    for field, rule in _RULES_OF_FIELDS.items():
        if request.body.get(field):
            request.check_policy(rule)
    check_free_form(request, request.body)
    body: Mapping[str, Any] = request.body
    check_flavor(body)
    return body


def check_free_form(request: Request, asked: Mapping[str, Any]) -> None:
    """Checks whether the caller may bring the resources of a flavor along.

    :param asked: has ``flavor``, if a flavor is asked for.
    :raises Forbidden: the caller may not.
    """
    if "resources" in asked.get("flavor", ()):
        request.check_policy(FREE_FORM)


def allowed(request: Request, rule: str) -> bool:
    """Returns whether the caller may do more than the route's own policy says."""
    try:
        request.check_policy(rule)
    except errors.Forbidden:
        return False
    return True


def _without_hosts(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an answer of select for callers who may not see the fleet: how many would find a place, without names."""
    return {**answer, "selections": [{"weight": each["weight"]} for each in answer["selections"]]}


def routes(schedulers: SchedulerClient, resolve: Resolver) -> Sequence[Route]:
    """Returns the routes, over a way to reach schedulers.

    :param resolve: called with the body of a request and who asks.
    """

    def select(request: Request) -> Response:
        asked = check_request(request)
        if request.body.get("explain"):
            request.check_policy(SELECT_HOSTS)
        body = {key: value for key, value in asked.items() if key not in ("count", "dry_run", "explain")}
        args = {
            "request": resolve(body, request.context),
            "count": int(request.body.get("count", 1)),
            "explain": request.body.get("explain", False),
        }
        answer = schedulers.ask("select", args)
        return Response(200, answer if allowed(request, SELECT_HOSTS) else _without_hosts(answer))

    def list_hosts(request: Request) -> Response:
        filters = dict(request.query)
        limit, after = filters.pop("limit", 1000), filters.pop("after", "")
        fields = wanted_fields(filters.pop("fields", None), HOST_FIELDS)
        args = {"after": after, "limit": limit, "filters": filters, "fields": fields}
        found = schedulers.ask("list_hosts", args)
        following = found[-1]["uuid"] if len(found) == limit else None
        return Response(200, {"hosts": found, "next_after": following})

    def show_host(request: Request) -> Response:
        page = {"limit": 1000, **request.query}
        return Response(200, schedulers.ask("show_host", {"host": request.path_params["host"], **page}))

    def decision(request: Request) -> Response:
        args = {"request_id": request.path_params["request_id"], **request.query}
        return Response(200, schedulers.find("decision", args))

    tags = ("scheduling",)
    return (
        Route(
            "POST",
            "/select",
            select,
            "scheduling:select",
            "Where instances would go; claims nothing.",
            {200: _ANY},
            body=_SELECT,
            tags=tags,
        ),
        Route(
            "GET",
            "/hosts",
            list_hosts,
            "scheduling:hosts:get",
            "Nodes as a scheduler sees them, by uuid.",
            {200: _ANY},
            query=_HOSTS,
            tags=tags,
        ),
        Route(
            "GET",
            "/hosts/{host}",
            show_host,
            "scheduling:hosts:get",
            "One host: its nodes by uuid, with the instances on them.",
            {200: _ANY},
            query={"type": "object", "properties": dict(PAGE), "additionalProperties": False},
            tags=tags,
        ),
        Route(
            "GET",
            "/decisions/{request_id}",
            decision,
            "scheduling:decisions:get",
            "What was decided of a request (its id, or the instance's uuid): from the memory of the scheduler that decided, a "
            "refusal also from the store. With node: what the filters say of that one now.",
            {200: _ANY},
            query=_DECISION,
            tags=tags,
        ),
    )
