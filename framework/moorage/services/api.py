# SPDX-License-Identifier: Apache-2.0
"""Serves services in ``/scheduling/v1``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moorage import errors
from moorage.db import MICROSECONDS
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

_LONGEST_REASON = 255
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
        "fenced": {"type": "boolean", "description": "Nothing runs on the host of the agent; fence_reason says why."},
        "fence_reason": {"type": "string"},
        "evacuated": {"type": "integer", "description": "Instances evacuated since the host was fenced."},
        "self_fence_s": {
            "type": ["number", "null"],
            "description": "The lease after which the host of the agent ends its workloads by itself; null: it does not.",
        },
        "self_fenced": {
            "type": "boolean",
            "description": "The lease and a margin are over, so the host may be fenced without an operator's word.",
        },
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
    "properties": {
        "reason": {"type": "string", "minLength": 1, "maxLength": _LONGEST_REASON},
        "power_off": {
            "const": True,
            "description": "Beside a reason: turn the machines of the host off first, and fence it only if they are seen off.",
        },
        "by_itself": {
            "const": True,
            "description": "In place of a reason: the host fences itself, and has done so by now.",
        },
    },
    "minProperties": 1,
    "maxProperties": 2,
    "dependentRequired": {"power_off": ["reason"]},
    "additionalProperties": False,
}


def _fenced(
    registry: ServiceRegistry,
    down_time: float,
    turn_off: Callable[[str], str],
    uuid: str,
    body: Mapping[str, Any],
) -> Service:
    """Fences the host of an agent as the request says; the agent."""
    if "by_itself" not in body and "power_off" not in body:
        return registry.fence(uuid, body["reason"], down_time=down_time)
    if "by_itself" in body:
        if "reason" in body:
            raise errors.InvalidInput("by_itself stands in place of a reason; send one of them.", path="by_itself")
        return registry.fence_itself(uuid)
    # Read before: an agent that has started since has another epoch, and then its host is on.
    agent = registry.dead_agent(uuid)
    how = turn_off(agent.host)
    reason = f"{body['reason']} ({how})"[:_LONGEST_REASON]
    return registry.fence(uuid, reason, down_time=down_time, epoch=agent.epoch)


def routes(
    registry: ServiceRegistry,
    observer: LivenessObserver,
    changed: Callable[[], None],
    turn_off: Callable[[str], str],
) -> Sequence[Route]:
    """Returns the routes, over a register and what this process saw of heartbeats.

    :param changed: called after a service was changed, so that who chooses among services hears of it at once.
    :param turn_off: turns the machines of a host off; returns how, when all are seen to be off, and raises otherwise.
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
            "self_fence_s": None if row.self_fence is None else row.self_fence / MICROSECONDS,
            "self_fenced": row.self_fenced,
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
        row = _fenced(registry, observer.down_time, turn_off, request.path_params["uuid"], request.body)
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
            "the agent starts again. With power_off: turn the machines of the host off first. With by_itself: declare the agent "
            "dead and its host fenced, if the host fences itself and has had the time to do so.",
            {200: _SERVICE},
            body=_FENCE,
            tags=tags,
        ),
    )
