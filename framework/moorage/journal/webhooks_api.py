# SPDX-License-Identifier: Apache-2.0
"""``/scheduling/v1/webhooks``: URLs that get the events of the journal; for administrators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moorage.http.routes import PAGE, PolicyRule, Request, Response, Route
from moorage.journal.subscriptions import Subscription, shown
from moorage.journal.webhooks import Webhook, WebhookStore

__all__ = ["POLICIES", "routes"]

_GET, _CREATE, _UPDATE, _DELETE = (f"scheduling:webhooks:{verb}" for verb in ("get", "create", "update", "delete"))
POLICIES = (
    PolicyRule(_GET, "rule:system_admin", "List webhooks and show one, without its secret.", ("system",)),
    PolicyRule(_CREATE, "rule:system_admin", "Create a webhook, which gets events of all projects.", ("system",)),
    PolicyRule(_UPDATE, "rule:system_admin", "Change a webhook, or move its cursor.", ("system",)),
    PolicyRule(_DELETE, "rule:system_admin", "Remove a webhook.", ("system",)),
)

_KIND = {"type": "string", "maxLength": 64, "pattern": r"^[A-Za-z0-9_-]+\.(\*|[A-Za-z0-9_.-]+)$"}
_PROJECT = {"type": "string", "minLength": 1, "maxLength": 255}
_SETTINGS: Mapping[str, Any] = {
    "url": {"type": "string", "minLength": 1, "maxLength": 2000},
    "secret": {"type": "string", "maxLength": 120},
    "kinds": {"type": "array", "items": _KIND, "maxItems": 100, "uniqueItems": True},
    "projects": {"type": "array", "items": _PROJECT, "maxItems": 1000, "uniqueItems": True},
    "enabled": {"type": "boolean"},
    "after": {"type": "string", "pattern": "^([0-9]{1,18}|oldest|latest)$"},
}
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"}
_NEW = {
    "type": "object",
    "properties": {"name": _NAME, **_SETTINGS},
    "required": ["name", "url"],
    "additionalProperties": False,
}
_CHANGE = {"type": "object", "properties": _SETTINGS, "minProperties": 1, "additionalProperties": False}
_TIME = {"type": ["integer", "null"]}
_SHOWN: Mapping[str, Any] = {
    "uuid": {"type": "string"},
    "name": {"type": "string"},
    "url": {"type": "string"},
    "kinds": {"type": "array", "items": {"type": "string"}},
    "projects": {"type": "array", "items": {"type": "string"}},
    "enabled": {"type": "boolean"},
    "created_at": {"type": "integer"},
    "updated_at": {"type": "integer"},
    "status": {"enum": ["active", "retrying", "failing", "disabled"]},
    "position": {"type": "integer"},
    "lag": {"type": "integer"},
    "missed": {"type": "integer"},
    "failures": {"type": "integer"},
    "failing_since": _TIME,
    "next_try_at": _TIME,
    "last_error": {"type": "string"},
    "last_error_at": _TIME,
    "delivered_at": _TIME,
}
_ONE = {"type": "object", "properties": _SHOWN}
_MADE = {"type": "object", "properties": {**_SHOWN, "secret": {"type": "string"}}}
_LIST = {"type": "object", "properties": {"webhooks": {"type": "array", "items": _ONE}}}
_QUERY = {"type": "object", "properties": {**PAGE}, "additionalProperties": False}


class _WebhooksApi:
    def __init__(self, store: WebhookStore) -> None:
        self._store = store

    def listed(self, request: Request) -> Response:
        limit = request.query.get("limit", 1000)
        found, last = self._store.list(after=request.query.get("after", ""), limit=limit)
        following = found[-1][0].name if len(found) == limit else None
        return Response(200, {"webhooks": [_shown(*each, last) for each in found], "next_after": following})

    def created(self, request: Request) -> Response:
        made = self._store.create(**request.body)
        # The secret is shown once, where it is new.
        secret = {} if "secret" in request.body else {"secret": made.secret}
        headers = {"Location": f"{request.prefix}/webhooks/{made.uuid}"}
        return Response(201, {**_shown(*self._store.get(made.uuid)), **secret}, headers)

    def found(self, request: Request) -> Response:
        return Response(200, _shown(*self._store.get(request.path_params["webhook"])))

    def changed(self, request: Request) -> Response:
        self._store.change(request.path_params["webhook"], **request.body)
        return self.found(request)

    def removed(self, request: Request) -> Response:
        self._store.remove(request.path_params["webhook"])
        return Response(204)


def routes(store: WebhookStore) -> Sequence[Route]:
    """Returns the routes, over the webhooks of the store."""
    api = _WebhooksApi(store)
    one, tags = "/webhooks/{webhook}", ("webhooks",)
    return (
        Route(
            "GET",
            "/webhooks",
            api.listed,
            _GET,
            "List webhooks by name, each with the place that it has reached in the journal, and its last error.",
            {200: _LIST},
            query=_QUERY,
            tags=tags,
        ),
        Route(
            "POST",
            "/webhooks",
            api.created,
            _CREATE,
            "Create a webhook. Without a secret it gets a new one, which only this answer shows.",
            {201: _MADE, 410: None},
            body=_NEW,
            tags=tags,
        ),
        Route("GET", one, api.found, _GET, "Show one, by uuid or name.", {200: _ONE}, tags=tags),
        Route(
            "PATCH",
            one,
            api.changed,
            _UPDATE,
            "Change settings, or move the cursor with after. What failed is tried again at once.",
            {200: _ONE, 410: None},
            body=_CHANGE,
            tags=tags,
        ),
        Route("DELETE", one, api.removed, _DELETE, "Remove one.", {204: None}, tags=tags),
    )


def _shown(webhook: Webhook, subscription: Subscription, last: int) -> dict[str, Any]:
    names = ("uuid", "name", "url", "kinds", "projects", "enabled", "created_at", "updated_at")
    found = {name: getattr(webhook, name) for name in names} | dict(shown(subscription, last))
    return found if webhook.enabled else {**found, "status": "disabled"}
