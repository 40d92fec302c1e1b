# SPDX-License-Identifier: Apache-2.0
"""/workers/cleanup and /workers/auto_cleanup, in Cinder's shape.

PUT is taken like POST, and null like nothing: so the SDK's way of asking works too.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moorage import errors
from moorage.http.routes import PolicyRule, Request, Response, Route
from moorage_plugins.api.volume.application import NAMES_AND_STATES

__all__ = ["POLICIES", "routes"]

POLICIES = (
    PolicyRule("volume:workers:cleanup", "rule:system_admin", "Have dead services cleaned after.", ("system",)),
)
#: Cinder's names of binaries, and ours.
_BINARIES = {"cinder-volume": "agent", "cinder-scheduler": "scheduler", "cinder-backup": "agent"}
_SHOWN = {"agent": "cinder-volume", "scheduler": "cinder-scheduler"}
_TRUE, _FALSE = ("1", "t", "true", "on", "y", "yes"), ("0", "f", "false", "off", "n", "no")
_BOOLEAN = {"type": ["boolean", "string", "null"]}
_NAME = {"type": ["string", "null"], "minLength": 1, "maxLength": 255, "pattern": "^[a-zA-Z0-9-._#@:/+]*$"}
_UUID = "^[0-9a-fA-F]{8}-?([0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}$"
_BODY = {
    "type": ["object", "null"],
    "properties": {
        "cluster_name": _NAME,
        "host": _NAME,
        "binary": {"enum": [None, *_BINARIES, "agent"]},
        "is_up": _BOOLEAN,
        "disabled": _BOOLEAN,
        "resource_id": {"type": ["string", "null"], "pattern": _UUID},
        "resource_type": {"type": ["string", "null"], "minLength": 1, "maxLength": 40},
        "service_id": {"type": ["integer", "string", "null"], "pattern": "^[0-9]{1,11}$"},
        "dry_run": {"type": "boolean"},
    },
    "additionalProperties": False,
}


def routes(ask: Callable[[str, Mapping[str, Any]], Any], prefixes: Sequence[str]) -> list[Route]:
    """Returns the rows of the table, over a way to ask a scheduler."""

    def cleanup(request: Request) -> Response:
        body = {name: value for name, value in (request.body or {}).items() if value is not None}
        args = {"filters": _filters(body), "requested_by": request.context.user_id or "", **_dry(request, body)}
        return _answer(request, ask("request_cleanup", args))

    def automatic(request: Request) -> Response:
        body = {name: value for name, value in (request.body or {}).items() if value is not None}
        if body.keys() - {"dry_run"}:
            raise errors.InvalidInput("Automatic cleanup takes no filters; use /workers/cleanup.", path="body")
        return _answer(
            request, ask("auto_cleanup", {"requested_by": request.context.user_id or "", **_dry(request, body)})
        )

    return [
        Route(method, f"{prefix}/workers/{name}", handler, policy=POLICIES[0].name, since=(3, 24), body=_BODY)
        for prefix in prefixes
        for name, handler in (("cleanup", cleanup), ("auto_cleanup", automatic))
        for method in ("POST", "PUT")
    ]


def _dry(request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
    if "dry_run" in body and request.version < NAMES_AND_STATES:
        raise errors.InvalidInput("dry_run is known from version 3.72 on.", path="dry_run")
    return {"dry_run": bool(body.get("dry_run", False))}


def _filters(body: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {"cluster_name": "cluster", "service_id": "service"}
    found = {renamed.get(name, name): value for name, value in body.items() if name != "dry_run"}
    for name in ("is_up", "disabled"):
        if name in found:
            found[name] = _boolean(name, found[name])
    if "service" in found:
        found["service"] = str(found["service"])
    if "binary" in found:
        found["binary"] = _BINARIES.get(found["binary"], found["binary"])
    if "resource_id" in found:
        # As it is stored.
        found["resource_id"] = str(uuid.UUID(found["resource_id"]))
    if "resource_type" in found:
        found["resource_type"] = found["resource_type"].lower()
    return found


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in (*_TRUE, *_FALSE):
        raise errors.InvalidInput(f"Invalid input for field/attribute {name}. Value: {value}.", path=name)
    return text in _TRUE


def _answer(request: Request, found: Mapping[str, Any]) -> Response:
    shown: dict[str, Any] = {
        kind: [_service(request, each) for each in found[kind]] for kind in ("cleaning", "unavailable")
    }
    if request.version >= NAMES_AND_STATES:
        shown["requests"] = found["requests"]
        if "would_clean" in found:
            shown |= {"would_clean": found["would_clean"], "left_out": found["left_out"]}
    return Response(202, shown)


def _service(request: Request, row: Mapping[str, Any]) -> dict[str, Any]:
    shown = {
        "id": row["id"],
        "host": row["host"],
        "binary": _SHOWN.get(row["binary"], row["binary"]),
        "cluster_name": row["cluster"],
    }
    if request.version >= NAMES_AND_STATES:
        # The seed's three: id, name and state.
        shown |= {"name": row["host"], "state": row["state"]}
    return shown
