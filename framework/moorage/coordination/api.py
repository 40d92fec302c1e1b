# SPDX-License-Identifier: Apache-2.0
"""Serves rings and periodic tasks in ``/scheduling/v1``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from moorage import errors
from moorage.coordination.membership import MemberId
from moorage.coordination.ring_ledger import Adoption, RingRow, SqlRingLedger
from moorage.coordination.ring_manager import ring_of
from moorage.coordination.task_store import Control, Run, TaskStore
from moorage.http.routes import PolicyRule, Request, Response, Route

__all__ = ["POLICIES", "EngineDirectory", "routes"]

POLICIES = (
    PolicyRule("scheduling:rings:get", "rule:system_reader", "Show the rings of engines.", ("system",)),
    PolicyRule(
        "scheduling:periodic_tasks:get", "rule:system_reader", "List periodic tasks and their runs.", ("system",)
    ),
    PolicyRule(
        "scheduling:periodic_tasks:update", "rule:system_admin", "Pause, resume or run a periodic task.", ("system",)
    ),
)

_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,80}$"}
_MEMBER = {
    "type": "object",
    "properties": {
        "member": {"type": "string"},
        "service": {"type": "string"},
        "host": {"type": "string"},
        "worker": {"type": "integer"},
        "weight": {"type": "number"},
        "share": {"type": "number", "description": "the part of all positions that it owns"},
        "token": {"type": ["integer", "null"], "description": "the newest ring that it works under"},
        "silent_for_s": {"type": ["number", "null"], "description": "age of its service's heartbeat"},
    },
}
_RING = {
    "type": "object",
    "properties": {
        "group": {"type": "string"},
        "token": {"type": "integer"},
        "digest": {"type": "string"},
        "replicas": {"type": "integer"},
        "hash_function": {"type": "string"},
        "changed_at_us": {"type": "integer"},
        "members": {"type": "array", "items": _MEMBER},
    },
}
_RUN = {
    "type": "object",
    "properties": {
        "task": {"type": "string"},
        "member": {"type": "string"},
        "tick": {"type": "integer"},
        "token": {"type": "integer"},
        "ended": {"enum": ["complete", "stale", "failed"]},
        "lost": {"type": "integer", "description": "objects whose tick was claimed already"},
        "skipped": {"type": "integer", "description": "objects put off after failures"},
    },
}
_TASK = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "enabled": {"type": "boolean"},
        "paused": {"type": "boolean"},
        "reason": {"type": "string"},
        "last_run": {"anyOf": [_RUN, {"type": "null"}]},
    },
}
_CHANGE = {
    "type": "object",
    "properties": {"paused": {"type": "boolean"}, "reason": {"type": "string", "maxLength": 255}},
    "required": ["paused"],
    "additionalProperties": False,
}
_REQUEST = {
    "type": "object",
    "properties": {"object": {"type": "string", "minLength": 1, "maxLength": 255}},
    "additionalProperties": False,
}
_LIMIT = {
    "type": "object",
    "properties": {"limit": {"type": "integer", "minimum": 1, "maximum": 1000}},
    "additionalProperties": False,
}
_OWNER_QUERY = {
    "type": "object",
    "properties": {"object": {"type": "string", "minLength": 1, "maxLength": 255}},
    "additionalProperties": False,
}


class EngineDirectory(Protocol):
    """What the services' register knows of a member's service."""

    def of(self, services: Sequence[str]) -> Mapping[str, tuple[str, float]]:
        """Maps uuids of known services to (host, seconds since the heartbeat changed)."""


class _Views:
    """What the routes answer."""

    def __init__(self, ledger: SqlRingLedger, tasks: TaskStore, enabled: Sequence[str], names: EngineDirectory) -> None:
        self._ledger = ledger
        self._tasks = tasks
        self._enabled = enabled
        self._names = names

    def rings(self, request: Request) -> Response:
        asked = request.query.get("object")
        found = [_shown_ring(*each, self._names, asked) for each in self._ledger.groups()]
        return Response(200, {"rings": found})

    def list(self, request: Request) -> Response:
        found = [self._shown(each) for _, each in sorted(self._known().items())]
        return Response(200, {"periodic_tasks": found})

    def show(self, request: Request) -> Response:
        return Response(200, self._shown(self._one(request)))

    def runs(self, request: Request) -> Response:
        found = self._tasks.runs(self._one(request).name, limit=request.query.get("limit", 100))
        return Response(200, {"runs": [_shown_run(each) for each in found]})

    def change(self, request: Request) -> Response:
        name, paused = self._one(request).name, request.body["paused"]
        changed = self._tasks.pause(name, request.body.get("reason", "")) if paused else self._tasks.resume(name)
        return Response(200, self._shown(changed))

    def run(self, request: Request) -> Response:
        asked = self._tasks.request(self._one(request).name, request.body.get("object", ""))
        return Response(202, {"task": asked.name, "tick": asked.requested_at})

    def _known(self) -> dict[str, Control]:
        _, controls = self._tasks.look()
        return {**{name: Control(name) for name in self._enabled}, **controls}

    def _one(self, request: Request) -> Control:
        name = request.path_params["name"]
        found = self._known().get(name)
        if found is None:
            raise errors.NotFound(f"There is no periodic task {name}; moorage periodic list shows all.")
        return found

    def _shown(self, control: Control) -> dict[str, Any]:
        last = self._tasks.runs(control.name, limit=1)
        return {
            "name": control.name,
            "enabled": control.name in self._enabled,
            "paused": control.paused,
            "reason": control.reason,
            "last_run": _shown_run(last[0]) if last else None,
        }


def routes(ledger: SqlRingLedger, tasks: TaskStore, enabled: Sequence[str], names: EngineDirectory) -> Sequence[Route]:
    """Returns the routes.

    :param enabled: the tasks that the configuration enables.
    """
    views = _Views(ledger, tasks, enabled, names)
    get_rings, get, update = (rule.name for rule in POLICIES)
    rings = {"type": "object", "properties": {"rings": {"type": "array", "items": _RING}}}
    listing = {"type": "object", "properties": {"periodic_tasks": {"type": "array", "items": _TASK}}}
    runs = {"type": "object", "properties": {"runs": {"type": "array", "items": _RUN}}}
    requested = {"type": "object", "properties": {"task": {"type": "string"}, "tick": {"type": "integer"}}}
    path, named = "/periodic-tasks/{name}", {"name": _NAME}
    tags = ("coordination",)
    return (
        Route(
            "GET",
            "/ring",
            views.rings,
            get_rings,
            "Show the rings of engines: members, shares, tokens; with ``object`` also who owns that one.",
            {200: rings},
            query=_OWNER_QUERY,
            tags=tags,
        ),
        Route("GET", "/periodic-tasks", views.list, get, "List the periodic tasks.", {200: listing}, tags=tags),
        Route("GET", path, views.show, get, "Show a periodic task.", {200: _TASK}, path_schemas=named, tags=tags),
        Route(
            "PATCH",
            path,
            views.change,
            update,
            "Pause or resume a periodic task in all engines.",
            {200: _TASK},
            body=_CHANGE,
            path_schemas=named,
            tags=tags,
        ),
        Route(
            "POST",
            path + "/runs",
            views.run,
            update,
            "Have a task swept once more now, paused or not; all objects or one.",
            {202: requested},
            body=_REQUEST,
            path_schemas=named,
            tags=tags,
        ),
        Route(
            "GET",
            path + "/runs",
            views.runs,
            get,
            "List the last sweeps of a task, newest first.",
            {200: runs},
            query=_LIMIT,
            path_schemas=named,
            tags=tags,
        ),
    )


def _shown_ring(
    group: str, row: RingRow, adoptions: Sequence[Adoption], names: EngineDirectory, asked: str | None
) -> dict[str, Any]:
    ring = ring_of(row)
    tokens = {each.member: each.token for each in adoptions}
    ids = {member: MemberId.parse(member) for member in row.members}
    known = names.of([each.service for each in ids.values()])
    members = []
    for member, share in ring.shares().items():
        host, silent_for = known.get(ids[member].service, ("", None))
        members.append(
            {
                "member": member.decode(),
                "service": ids[member].service,
                "host": host,
                "worker": ids[member].worker,
                "weight": ids[member].weight,
                "share": round(share, 6),
                "token": tokens.get(member),
                "silent_for_s": None if silent_for is None else round(silent_for, 3),
            }
        )
    found: dict[str, Any] = {
        "group": group,
        "token": row.token,
        "digest": ring.digest,
        "replicas": row.replicas,
        "hash_function": row.hash_function,
        "changed_at_us": row.changed_at,
        "members": members,
    }
    if asked is not None and len(ring):
        found["owner"] = ring.owner(asked).decode()
    return found


def _shown_run(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in Run.__slots__}
