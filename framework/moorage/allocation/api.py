# SPDX-License-Identifier: Apache-2.0
"""Serves allocations and usages in ``/scheduling/v1``, page by page, for audits and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moorage import errors
from moorage.allocation.interface import AllocationStore, ProviderUsage
from moorage.http.routes import PolicyRule, Request, Response, Route

__all__ = ["INVENTORY_FIELDS", "POLICIES", "routes", "show_inventories"]

POLICIES = (
    PolicyRule(
        "scheduling:allocations:get", "rule:system_reader", "List allocations and usages of all projects.", ("system",)
    ),
)

_PAGE = 1000
_KEY_PARTS = 3
_TEXT = {"type": "string", "minLength": 1, "maxLength": 36}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": _PAGE, "default": _PAGE}
_NEXT = {"type": ["string", "null"], "description": "Give it as `after` to get the next page; null: there is none."}
_ALLOCATIONS_QUERY = {
    "type": "object",
    "properties": {
        "consumer": _TEXT,
        "provider": _TEXT,
        "after": {
            "type": "string",
            "maxLength": 400,
            "pattern": "^[^,]+,[^,]+,[A-Z0-9_]+$",
            "description": "`next_after` of the page before.",
        },
        "limit": _LIMIT,
    },
    "additionalProperties": False,
}
_USAGES_QUERY = {
    "type": "object",
    "properties": {"provider": _TEXT, "after": _TEXT, "limit": _LIMIT},
    "additionalProperties": False,
}
_ALLOCATIONS = {
    "type": "object",
    "properties": {
        "allocations": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "consumer": {"type": "string"},
                    "provider": {"type": "string"},
                    "resource_class": {"type": "string"},
                    "used": {"type": "integer"},
                },
                "required": ["consumer", "provider", "resource_class", "used"],
            },
        },
        "next_after": _NEXT,
    },
    "required": ["allocations", "next_after"],
}
_NUMBERS = ("total", "reserved", "min_unit", "max_unit", "step_size", "used")
#: How an inventory is shown, with what is used of it.
INVENTORY_FIELDS = {
    "type": "object",
    "properties": {
        "resource_class": {"type": "string"},
        "allocation_ratio": {"type": "number"},
        "capacity": {"type": "number"},
        **{name: {"type": "integer"} for name in _NUMBERS},
    },
    "required": ["resource_class", "allocation_ratio", "capacity", *_NUMBERS],
}
_USAGES = {
    "type": "object",
    "properties": {
        "usages": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "uuid": {"type": "string"},
                    "name": {"type": "string"},
                    "can_host": {"type": "boolean"},
                    "generation": {"type": "integer"},
                    "inventories": {"type": "array", "items": INVENTORY_FIELDS},
                },
                "required": ["uuid", "name", "can_host", "generation", "inventories"],
            },
        },
        "next_after": _NEXT,
    },
    "required": ["usages", "next_after"],
}


def routes(store: AllocationStore) -> Sequence[Route]:
    """Returns the routes over a store."""

    def list_allocations(request: Request) -> Response:
        limit = int(request.query.get("limit", _PAGE))
        found = store.allocations(
            consumers=_only(request.query.get("consumer")),
            providers=_only(request.query.get("provider")),
            after=_key(request.query.get("after")),
            limit=limit,
        )
        last = found[-1] if len(found) == limit else None
        return Response(
            200,
            {
                "allocations": [
                    {
                        "consumer": each.consumer,
                        "provider": each.provider,
                        "resource_class": each.resource_class,
                        "used": each.used,
                    }
                    for each in found
                ],
                "next_after": last and f"{last.consumer},{last.provider},{last.resource_class}",
            },
        )

    def list_usages(request: Request) -> Response:
        limit = int(request.query.get("limit", _PAGE))
        found = store.usages(
            after=request.query.get("after", ""), limit=limit, providers=_only(request.query.get("provider"))
        )
        last = found[-1].provider.uuid if len(found) == limit else None
        return Response(200, {"usages": [_shown(each) for each in found], "next_after": last})

    rule, tags = POLICIES[0].name, ("allocation",)
    return (
        Route(
            "GET",
            "/allocations",
            list_allocations,
            rule,
            "List stored allocations.",
            {200: _ALLOCATIONS},
            query=_ALLOCATIONS_QUERY,
            tags=tags,
        ),
        Route(
            "GET",
            "/usages",
            list_usages,
            rule,
            "List providers with their inventories and what is used of them.",
            {200: _USAGES},
            query=_USAGES_QUERY,
            tags=tags,
        ),
    )


def _only(value: str | None) -> Sequence[str] | None:
    return None if value is None else [value]


def _key(after: str | None) -> tuple[str, str, str] | None:
    if after is None:
        return None
    parts = after.split(",")
    if len(parts) != _KEY_PARTS or not all(parts):
        raise errors.InvalidInput(
            f"after is {after!r:.80}, and must be the next_after of an earlier page.", path="after"
        )
    return parts[0], parts[1], parts[2]


def _shown(usage: ProviderUsage) -> dict[str, Any]:
    row = usage.provider
    return {
        "uuid": row.uuid,
        "name": row.name,
        "can_host": row.can_host,
        "generation": row.generation,
        "inventories": show_inventories(usage),
    }


def show_inventories(usage: ProviderUsage) -> list[dict[str, Any]]:
    """Returns the inventories of a provider as :data:`INVENTORY_FIELDS` says."""
    return [
        {
            "resource_class": item.resource_class,
            "total": item.total,
            "reserved": item.reserved,
            "min_unit": item.min_unit,
            "max_unit": item.max_unit,
            "step_size": item.step_size,
            "allocation_ratio": item.allocation_ratio,
            "capacity": item.capacity,
            "used": usage.used[item.resource_class],
        }
        for item in usage.provider.inventories
    ]
