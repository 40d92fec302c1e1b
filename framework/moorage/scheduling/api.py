# SPDX-License-Identifier: Apache-2.0
"""Scheduling in ``/scheduling/v1``: questions that a scheduler answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from moorage.context import RequestContext
from moorage.routes import ApiRequest, ApiResponse, PolicyRule, Route
from moorage.scheduling.request import REQUEST_PROPERTIES

__all__ = ["POLICIES", "Resolver", "SchedulerClient", "routes"]

POLICIES = (
    PolicyRule("scheduling:select", "rule:system_reader or rule:project_member", "Ask where an instance would go."),
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
_ANY = {"type": "object"}
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


#: Replaces what a request names (a server group) by what the store has of it.
Resolver = Callable[[Mapping[str, Any], RequestContext], Mapping[str, Any]]


def routes(schedulers: SchedulerClient, resolve: Resolver) -> Sequence[Route]:
    """The routes, over a way to reach schedulers.

    :param resolve: called with the body of a request and who asks.
    """

    def select(request: ApiRequest) -> ApiResponse:
        body = {key: value for key, value in request.body.items() if key not in ("count", "dry_run", "explain")}
        args = {
            "request": resolve(body, request.context),
            "count": int(request.body.get("count", 1)),
            "explain": request.body.get("explain", False),
        }
        return ApiResponse(200, schedulers.ask("select", args))

    def list_hosts(request: ApiRequest) -> ApiResponse:
        return ApiResponse(200, {"hosts": schedulers.ask("list_hosts", {})})

    def show_host(request: ApiRequest) -> ApiResponse:
        return ApiResponse(200, schedulers.ask("show_host", {"host": request.path["host"]}))

    def decision(request: ApiRequest) -> ApiResponse:
        args = {"request_id": request.path["request_id"], **request.query}
        return ApiResponse(200, schedulers.find("decision", args))

    tags = ("scheduling",)
    return (
        Route(
            "POST",
            "/select",
            "scheduling:select",
            "Where instances would go; claims nothing.",
            select,
            {200: _ANY},
            body=_SELECT,
            tags=tags,
        ),
        Route(
            "GET",
            "/hosts",
            "scheduling:hosts:get",
            "Nodes as a scheduler sees them.",
            list_hosts,
            {200: _ANY},
            tags=tags,
        ),
        Route("GET", "/hosts/{host}", "scheduling:hosts:get", "One host.", show_host, {200: _ANY}, tags=tags),
        Route(
            "GET",
            "/decisions/{request_id}",
            "scheduling:decisions:get",
            "What was decided of a request (its id, or the instance's uuid): from the memory of the scheduler that decided, a "
            "refusal also from the store. With node: what the filters say of that one now.",
            decision,
            {200: _ANY},
            query=_DECISION,
            tags=tags,
        ),
    )
