# SPDX-License-Identifier: Apache-2.0
"""Serves pools and the audit in ``/scheduling/v1``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moorage.allocation.api import INVENTORY_FIELDS, show_inventories
from moorage.allocation.audit import AuditReport, Check, audit
from moorage.allocation.interface import AllocationStore, InventoryItem, OrphanDetector
from moorage.allocation.pools import Pool, PoolKeeper
from moorage.http.routes import PolicyRule, Request, Response, Route

__all__ = ["POLICIES", "routes"]

POLICIES = (
    PolicyRule("scheduling:pools:get", "rule:system_reader", "List pools.", ("system",)),
    PolicyRule("scheduling:pools:set", "rule:system_admin", "Make, change and remove pools.", ("system",)),
    PolicyRule(
        "scheduling:allocations:audit",
        "rule:system_admin",
        "Compare the counters of the store with its allocations, and set them right.",
        ("system",),
    ),
)

_LARGEST = 2**31 - 1
_UUID = {"type": "string", "minLength": 1, "maxLength": 36}
_WHOLE = {"type": "integer", "minimum": 1, "maximum": _LARGEST}
_WANTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 255},
        "members": {"type": "array", "items": _UUID, "uniqueItems": True, "maxItems": 10000},
        "inventories": {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Z0-9_]{1,255}$"},
            "additionalProperties": {
                "type": "object",
                "properties": {
                    **dict.fromkeys(("total", "min_unit", "max_unit", "step_size"), _WHOLE),
                    "reserved": {"type": "integer", "minimum": 0, "maximum": _LARGEST},
                    "allocation_ratio": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10000},
                },
                "required": ["total"],
                "additionalProperties": False,
            },
            "maxProperties": 256,
        },
    },
    "required": ["name", "members", "inventories"],
    "additionalProperties": False,
}
_POOL = {
    "type": "object",
    "properties": {
        "uuid": {"type": "string"},
        "name": {"type": "string"},
        "generation": {"type": "integer"},
        "members": {"type": "array", "items": {"type": "string"}},
        "inventories": {"type": "array", "items": INVENTORY_FIELDS},
    },
    "required": ["uuid", "name", "generation", "members", "inventories"],
}
_POOLS = {
    "type": "object",
    "properties": {"pools": {"type": "array", "items": _POOL}},
    "required": ["pools"],
}
_WHERE = {"provider": {"type": "string"}, "resource_class": {"type": "string"}}
_REPORT = {
    "type": "object",
    "properties": {
        "clean": {"type": "boolean"},
        "providers": {"type": "integer", "description": "How many were looked at."},
        "drift": {
            "type": "array",
            "description": "Counters that differed from the sum of the stored allocations.",
            "items": {
                "type": "object",
                "properties": {**_WHERE, "counted": {"type": ["integer", "null"]}, "held": {"type": "integer"}},
            },
        },
        "overuse": {
            "type": "array",
            "description": "Inventories of which more is held than there is, as after they shrank.",
            "items": {
                "type": "object",
                "properties": {**_WHERE, "used": {"type": "integer"}, "capacity": {"type": "number"}},
            },
        },
        "orphans": {
            "type": "array",
            "description": "Consumers behind which there is nothing, by the detectors that are enabled.",
            "items": {
                "type": "object",
                "properties": {
                    "consumer": {"type": "string"},
                    "consumer_type": {"type": "string"},
                    "project_id": {"type": "string"},
                    "released": {"type": "boolean"},
                },
            },
        },
        "repaired": {"type": "array", "items": {"type": "string"}, "description": "Providers whose counters were set."},
        "findings": {
            "type": "array",
            "description": "Contradictions between providers and nodes, and between instances and allocations.",
            "items": {
                "type": "object",
                "properties": {
                    **{name: {"type": "string"} for name in ("kind", "provider", "consumer", "message")},
                    "repaired": {"type": "boolean"},
                },
            },
        },
    },
    "required": ["clean", "providers", "drift", "overuse", "orphans", "repaired", "findings"],
}


def routes(
    store: AllocationStore, detectors: Sequence[OrphanDetector] = (), checks: Sequence[Check] = ()
) -> Sequence[Route]:
    """Returns the routes over a store; a store without pools refuses the routes of pools.

    :param detectors: find orphans for the audit.
    :param checks: further checks of the audit.
    """

    def list_pools(request: Request) -> Response:
        return Response(200, {"pools": [_shown(each) for each in PoolKeeper(store).list()]})

    def set_pool(request: Request) -> Response:
        items = [InventoryItem(name, **fields) for name, fields in request.body["inventories"].items()]
        pool = PoolKeeper(store).set(
            request.path_params["uuid"], request.body["name"], items, set(request.body["members"])
        )
        return Response(200, _shown(pool))

    def delete_pool(request: Request) -> Response:
        PoolKeeper(store).delete(request.path_params["uuid"])
        return Response(204)

    def audit_store(request: Request) -> Response:
        repair, release = (bool(request.body.get(name, False)) for name in ("repair", "release_orphans"))
        found = audit(store, repair=repair, detectors=detectors, release_orphans=release, checks=checks)
        return Response(200, _report(found))

    get, change, check = (rule.name for rule in POLICIES)
    tags, paths = ("allocation",), {"uuid": _UUID}
    return (
        Route("GET", "/pools", list_pools, get, "List pools with what is used of them.", {200: _POOLS}, tags=tags),
        Route(
            "PUT",
            "/pools/{uuid}",
            set_pool,
            change,
            "Make a pool, or bring it to this state.",
            {200: _POOL},
            body=_WANTED,
            path_schemas=paths,
            tags=tags,
        ),
        Route(
            "DELETE", "/pools/{uuid}", delete_pool, change, "Remove a pool.", {204: None}, path_schemas=paths, tags=tags
        ),
        Route(
            "POST",
            "/allocations/audit",
            audit_store,
            check,
            "Compare the counters of the store with its allocations, nodes with providers, and instances with allocations; repair "
            "corrects what is safe.",
            {200: _REPORT},
            body={
                "type": "object",
                "properties": dict.fromkeys(("repair", "release_orphans"), {"type": "boolean", "default": False}),
                "additionalProperties": False,
            },
            tags=tags,
        ),
    )


def _shown(pool: Pool) -> dict[str, Any]:
    row = pool.usage.provider
    return {
        "uuid": row.uuid,
        "name": row.name,
        "generation": row.generation,
        "members": list(pool.members),
        "inventories": show_inventories(pool.usage),
    }


def _report(found: AuditReport) -> dict[str, Any]:
    return {
        "clean": found.clean,
        "providers": found.providers,
        "drift": [
            {
                "provider": each.provider,
                "resource_class": each.resource_class,
                "counted": each.counted,
                "held": each.held,
            }
            for each in found.drift
        ],
        "overuse": [
            {
                "provider": each.provider,
                "resource_class": each.resource_class,
                "used": each.used,
                "capacity": each.capacity,
            }
            for each in found.overuse
        ],
        "orphans": [
            {
                "consumer": each.uuid,
                "consumer_type": each.consumer_type,
                "project_id": each.project,
                "released": each.uuid in found.released,
            }
            for each in found.orphans
        ],
        "repaired": list(found.repaired),
        "findings": [asdict(each) for each in found.findings],
    }
