# SPDX-License-Identifier: Apache-2.0
"""Services in ``/scheduling/v1``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moorage.http.routes import PolicyRule, Request, Response, Route
from moorage.services.interface import Service
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import ServiceRegistry

__all__ = ["POLICIES", "routes"]

POLICIES = (
    PolicyRule("scheduling:services:get", "rule:system_reader", "List services and show one.", ("system",)),
    PolicyRule("scheduling:services:update", "rule:system_admin", "Disable a service or force it down.", ("system",)),
    PolicyRule(
        "scheduling:services:fence", "rule:system_admin", "Say that nothing runs on the host of an agent.", ("system",)
    ),
)

_SERVICE = {
    "type": "object",
    "properties": {
        "uuid": {"type": "string"},
        "host": {"type": "string"},
        "binary": {"type": "string"},
        "cluster": {"type": ["string", "null"]},
        "shard": {"type": ["string", "null"], "description": "The shard whose nodes an agent serves."},
        "state": {"enum": ["up", "down"]},
        "epoch": {"type": "integer"},
        "rpc_version": {"type": "string"},
        "disabled": {"type": "boolean"},
        "disabled_reason": {"type": "string"},
        "forced_down": {"type": "boolean"},
        "fenced": {"type": "boolean", "description": "Nothing runs on the host of the agent, by an operator's word."},
        "fence_reason": {"type": "string"},
        "evacuated": {"type": "integer", "description": "Instances evacuated since the host was fenced."},
        "offers": {"type": ["array", "null"], "items": {"type": "string"}},
        "silent_for_s": {"type": "number"},
    },
}
_QUERY = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 255} for name in ("binary", "host", "cluster")},
    "additionalProperties": False,
}
_CHANGE = {
    "type": "object",
    "properties": {
        "disabled": {"type": "boolean"},
        "disabled_reason": {"type": "string", "maxLength": 255},
        "forced_down": {"type": "boolean"},
    },
    "minProperties": 1,
    "additionalProperties": False,
}
_FENCE = {
    "type": "object",
    "properties": {"reason": {"type": "string", "minLength": 1, "maxLength": 255}},
    "required": ["reason"],
    "additionalProperties": False,
}


def routes(registry: ServiceRegistry, observer: LivenessObserver, changed: Callable[[], None]) -> Sequence[Route]:
    """The routes, over a register and what this process saw of heartbeats.

    :param changed: called after a service was changed, so that who chooses among services hears of it at once.
    """

    def shown(row: Service) -> dict[str, Any]:
        up = observer.observe([row])[row.uuid]
        return {
            "uuid": row.uuid,
            "host": row.host,
            "binary": row.binary,
            "cluster": row.cluster,
            "shard": row.shard,
            "state": "up" if up else "down",
            "epoch": row.epoch,
            "rpc_version": row.rpc_version,
            "disabled": bool(row.disabled),
            "disabled_reason": row.disabled_reason,
            "forced_down": bool(row.forced_down),
            "fenced": row.fenced,
            "fence_reason": row.fence_reason,
            "evacuated": row.evacuated,
            "offers": None if row.offers is None else sorted(row.offers),
            "silent_for_s": round(observer.silent_for(row.uuid), 3),
        }

    def list_services(request: Request) -> Response:
        return Response(200, {"services": [shown(row) for row in registry.list(**request.query)]})

    def show_service(request: Request) -> Response:
        return Response(200, shown(registry.get(request.path_params["uuid"])))

    def change_service(request: Request) -> Response:
        row = registry.set(request.path_params["uuid"], **request.body)
        changed()
        return Response(200, shown(row))

    def fence_service(request: Request) -> Response:
        row = registry.fence(request.path_params["uuid"], request.body["reason"], down_time=observer.down_time)
        changed()
        return Response(200, shown(row))

    listing = {"type": "object", "properties": {"services": {"type": "array", "items": _SERVICE}}}
    tags = ("services",)
    get, update, fence = (rule.name for rule in POLICIES)
    return (
        Route("GET", "/services", list_services, get, "List services.", {200: listing}, query=_QUERY, tags=tags),
        Route("GET", "/services/{uuid}", show_service, get, "Show a service.", {200: _SERVICE}, tags=tags),
        Route(
            "PATCH",
            "/services/{uuid}",
            change_service,
            update,
            "Disable or enable a service, or say that it is dead.",
            {200: _SERVICE},
            body=_CHANGE,
            tags=tags,
        ),
        Route(
            "POST",
            "/services/{uuid}/fence",
            fence_service,
            fence,
            "Say that nothing runs on the host of an agent that is declared dead: its instances may then be evacuated. Ends when "
            "the agent starts again.",
            {200: _SERVICE},
            body=_FENCE,
            tags=tags,
        ),
    )
