# SPDX-License-Identifier: Apache-2.0
"""Serves cleanup in ``/scheduling/v1``: operations and what they wait for, requests and their progress, the history."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from moorage import errors
from moorage.cleanup.requests import CleanupRequest, RequestStore
from moorage.cleanup.views import OperationViews
from moorage.http.routes import PolicyRule, Request, Response, Route
from moorage.work.interface import Phase

__all__ = ["POLICIES", "CleanupClient", "routes"]

POLICIES = (
    PolicyRule(
        "scheduling:cleanup:get", "rule:system_reader", "See operations in progress, requests and history.", ("system",)
    ),
    PolicyRule("scheduling:cleanup:request", "rule:system_admin", "Have dead services cleaned after.", ("system",)),
    PolicyRule(
        "scheduling:cleanup:update", "rule:system_admin", "Retry or discard what is in quarantine.", ("system",)
    ),
)

_TEXT = {"type": "string", "minLength": 1, "maxLength": 255}
_TYPE, _ID = ({"type": "string", "minLength": 1, "maxLength": length} for length in (40, 36))
_RESOURCE = {"resource_type": _TYPE, "resource_id": _ID}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": 1000}
_WORKERS_QUERY = {
    "type": "object",
    "properties": {
        **_RESOURCE,
        "host": _TEXT,
        "status": _TEXT,
        "worker": _TEXT,
        "phase": {"enum": [phase.value for phase in Phase]},
        "limit": _LIMIT,
        "after": {"type": "string", "pattern": "^[^,]+,[^,]+$", "maxLength": 100},
    },
    "additionalProperties": False,
}
_REQUEST = {
    "type": "object",
    "properties": {
        **dict.fromkeys(("service", "cluster", "host", "binary"), _TEXT),
        **_RESOURCE,
        **{name: {"type": "boolean"} for name in ("is_up", "disabled", "dry_run")},
    },
    "additionalProperties": False,
}
_AUTOMATIC = {"type": "object", "properties": {"dry_run": {"type": "boolean"}}, "additionalProperties": False}
_REQUESTS_QUERY = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}, "limit": _LIMIT, "after": _TEXT},
    "additionalProperties": False,
}
_HISTORY_QUERY = {
    "type": "object",
    "properties": {
        **_RESOURCE,
        "outcome": _TEXT,
        "limit": _LIMIT,
        "after": {"type": "integer", "minimum": 0, "maximum": 2**62},
    },
    "additionalProperties": False,
}
_WORKER = {
    "type": "object",
    "properties": {
        **{
            name: {"type": "string"} for name in ("resource_type", "resource_id", "operation", "status", "phase", "why")
        },
        **{name: {"type": ["string", "null"]} for name in ("owner", "worker")},
        **{name: {"type": "integer"} for name in ("epoch", "token", "attempts", "created_at", "updated_at")},
    },
    "required": ["resource_type", "resource_id", "phase", "why"],
}
_ANSWER = {
    "type": "object",
    "properties": {
        **{name: {"type": "array", "items": {"type": "object"}} for name in ("cleaning", "unavailable", "requests")},
        "would_clean": {"type": "array", "items": {"type": "object"}},
        "left_out": {"type": "integer"},
    },
    "required": ["cleaning", "unavailable", "requests"],
}


class CleanupClient(Protocol):
    """How the API reaches a scheduler; bound by the control plane."""

    def ask(self, method: str, args: Mapping[str, Any]) -> Any:
        """Call any live scheduler; another one when it is lost: a request that is made twice is one."""


class _Types:
    """The types of resources that are cleaned; of another one there is what was written while it was."""

    def __init__(self, types: Sequence[str]) -> None:
        self._types = sorted(types)

    def check(self, kind: str | None) -> None:
        """Refuses types that no handler cleans; None means all types."""
        if kind is not None and kind not in self._types:
            raise errors.InvalidInput(
                f"Resources of the type {kind!r} are not cleaned here: [cleanup] enabled_handlers has "
                f"{', '.join(self._types) or 'none'}.",
                path="resource_type",
            )

    def check_empty(self, found: Sequence[object], query: Mapping[str, Any]) -> None:
        """The same of a filter that finds nothing; the page after the last one is empty too."""
        if not found and not query.get("after"):
            self.check(query.get("resource_type"))

    @contextlib.contextmanager
    def check_missing(self, kind: str) -> Iterator[None]:
        """The same of a row that is not there."""
        try:
            yield
        except errors.NotFound:
            self.check(kind)
            raise


def routes(
    views: OperationViews,
    requests: RequestStore,
    schedulers: CleanupClient,
    types: Sequence[str],
    blocked_reason: Callable[[str], str] = lambda resource_type: "",
) -> Sequence[Route]:
    """Returns the routes, over the store and a way to the schedulers.

    :param types: of resources that are cleaned (``[cleanup] enabled_handlers``).
    :param blocked_reason: why resources of a type are not cleaned at present.
    """
    known = _Types(types)

    def list_workers(request: Request) -> Response:
        query = dict(request.query)
        limit = int(query.pop("limit", 1000))
        kind, _, uuid = str(query.pop("after", ",")).partition(",")
        found = views.rows(after=(kind, uuid), limit=limit, **query)
        known.check_empty(found, request.query)
        last = found[-1] if len(found) == limit else None
        following = last and f"{last['resource_type']},{last['resource_id']}"
        return Response(200, {"workers": found, "next_after": following})

    def show_worker(request: Request) -> Response:
        return Response(200, views.get(**_key(request)))

    def retry(request: Request) -> Response:
        known.check(request.path_params["resource_type"])
        return Response(200, views.retry(**_key(request)))

    def discard(request: Request) -> Response:
        with known.check_missing(request.path_params["resource_type"]):
            views.discard(**_key(request))
        return Response(204)

    def clean(request: Request) -> Response:
        known.check(request.body.get("resource_type"))
        filters = {name: value for name, value in request.body.items() if name != "dry_run"}
        dry_run = bool(request.body.get("dry_run", False))
        args = {"filters": filters, "requested_by": _who(request), "dry_run": dry_run}
        return Response(200 if dry_run else 202, schedulers.ask("request_cleanup", args))

    def automatic(request: Request) -> Response:
        dry_run = bool(request.body.get("dry_run", False))
        args = {"requested_by": _who(request), "dry_run": dry_run}
        return Response(200 if dry_run else 202, schedulers.ask("auto_cleanup", args))

    def list_requests(request: Request) -> Response:
        limit = int(request.query.get("limit", 1000))
        found = requests.page(after=request.query.get("after", ""), limit=limit, is_open=request.query.get("open"))
        following = found[-1].uuid if len(found) == limit else None
        return Response(200, {"requests": [_shown(each) for each in found], "next_after": following})

    def show_request(request: Request) -> Response:
        found = requests.get(request.path_params["uuid"])
        return Response(200, {**_shown(found), **requests.progress(found, blocked_reason)})

    def history(request: Request) -> Response:
        query = dict(request.query)
        limit = int(query.setdefault("limit", 1000))
        found = views.history(**query)
        known.check_empty(found, query)
        return Response(200, {"history": found, "next_after": found[-1]["id"] if len(found) == limit else None})

    see, ask, change = (rule.name for rule in POLICIES)
    tags, anything = ("cleanup",), {"type": "object"}
    return (
        Route(
            "GET",
            "/workers",
            list_workers,
            see,
            "Operations in progress, with who does each and why it does not go on.",
            {200: {"type": "object", "properties": {"workers": {"type": "array", "items": _WORKER}}}},
            query=_WORKERS_QUERY,
            tags=tags,
        ),
        Route(
            "GET",
            "/workers/{resource_type}/{resource_id}",
            show_worker,
            see,
            "The operation in progress on a resource.",
            {200: _WORKER},
            tags=tags,
        ),
        Route(
            "POST",
            "/workers/{resource_type}/{resource_id}/retry",
            retry,
            change,
            "Take a row out of quarantine and clean it again.",
            {200: _WORKER},
            tags=tags,
        ),
        Route(
            "DELETE",
            "/workers/{resource_type}/{resource_id}",
            discard,
            change,
            "End a row in quarantine without cleaning it.",
            {204: None},
            tags=tags,
        ),
        Route(
            "POST",
            "/cleanup",
            clean,
            ask,
            "Have those services cleaned after that the filters name, all dead ones without filters; dry_run writes nothing and "
            "lists what would become of each row, up to a thousand of each service; left_out is how many more there are.",
            {200: _ANSWER, 202: _ANSWER},
            body=_REQUEST,
            tags=tags,
        ),
        Route(
            "POST",
            "/cleanup/auto",
            automatic,
            ask,
            "Have all services cleaned after that have been dead for [cleanup] auto_cleanup_checks samples, now.",
            {200: _ANSWER, 202: _ANSWER},
            body=_AUTOMATIC,
            tags=tags,
        ),
        Route(
            "GET",
            "/cleanup/requests",
            list_requests,
            see,
            "Requests for cleanup.",
            {200: anything},
            query=_REQUESTS_QUERY,
            tags=tags,
        ),
        Route(
            "GET",
            "/cleanup/requests/{uuid}",
            show_request,
            see,
            "A request with what is left of it and what became of the rest.",
            {200: anything},
            tags=tags,
        ),
        Route(
            "GET",
            "/cleanup/history",
            history,
            see,
            "What became of orphans, oldest first.",
            {200: anything},
            query=_HISTORY_QUERY,
            tags=tags,
        ),
    )


def _key(request: Request) -> dict[str, str]:
    key = {"resource_type": request.path_params["resource_type"], "resource_id": request.path_params["resource_id"]}
    if any(len(value) > 255 for value in key.values()):
        raise errors.NotFound("No operation on such a resource is in progress.")
    return key


def _who(request: Request) -> str:
    return request.context.user_id or ""


def _shown(request: CleanupRequest) -> dict[str, Any]:
    return {**asdict(request), "state": "open" if request.done_at is None else "done"}
