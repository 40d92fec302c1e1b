# SPDX-License-Identifier: Apache-2.0
"""Serves the limits of projects in ``/scheduling/v1``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from moorage import errors
from moorage.allocation.interface import AllocationStore, QuotaStore
from moorage.http.routes import PolicyRule, Request, Response, Route

__all__ = ["POLICIES", "routes"]

POLICIES = (
    PolicyRule(
        "scheduling:quotas:get",
        "rule:system_reader or rule:project_reader",
        "Show limits of projects. Without a system role only those of the own project.",
    ),
    PolicyRule("scheduling:quotas:set", "rule:system_admin", "Set and remove limits of projects.", ("system",)),
)

#: The subject of an event names the project and the class, and has 255 characters at most.
_PROJECT: Mapping[str, Any] = {"type": "string", "minLength": 1, "maxLength": 244, "pattern": r"^\S(.*\S)?$"}
_CLASS: Mapping[str, Any] = {"type": "string", "pattern": "^[A-Z0-9_]{1,255}$"}
_QUOTA = {
    "type": "object",
    "properties": {
        "project": {"type": "string"},
        "resource_class": {"type": "string"},
        "limit": {"type": "integer", "description": "Units that the instances of the project may hold."},
        "used": {"type": "integer", "description": "Units that they hold. An instance that moves counts once."},
    },
    "required": ["project", "resource_class", "limit", "used"],
}
_QUOTAS = {
    "type": "object",
    "properties": {"quotas": {"type": "array", "items": _QUOTA}},
    "required": ["quotas"],
}
_WANTED = {
    "type": "object",
    "properties": {"limit": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
    "required": ["limit"],
    "additionalProperties": False,
}


def routes(store: AllocationStore, source: str = "") -> Sequence[Route]:
    """Returns the routes over a store; a store without limits refuses them.

    :param source: the quota source that says all limits, so that no request may change them; empty: none.
    """

    def show_quotas(request: Request) -> Response:
        project = request.query.get("project")
        if not request.context.system_scope:
            own = str(request.context.project_id or "")
            if project not in (None, own):
                raise errors.Forbidden(
                    f"The limits of project {project} are shown to its members and to readers of the system.",
                    project=project,
                )
            project = own
        return Response(200, {"quotas": [asdict(each) for each in _limits(store).quotas(project)]})

    def refuse_changes() -> None:
        if source:
            raise errors.Conflict(
                f"The quota source {source} says the limits of all projects. Change the limit there. "
                "To set limits here, remove [quota] source from the configuration.",
                source=source,
            )

    def set_quota(request: Request) -> Response:
        refuse_changes()
        path = request.path_params
        made = _limits(store).set_quota(path["project"], path["resource_class"], request.body["limit"])
        return Response(200, asdict(made))

    def unset_quota(request: Request) -> Response:
        refuse_changes()
        project, name = (request.path_params[each] for each in ("project", "resource_class"))
        if not _limits(store).unset_quota(project, name):
            raise errors.NotFound(
                f"Project {project} has no limit of {name}; moorage quota show lists its limits.", project=project
            )
        return Response(204)

    get, change = (rule.name for rule in POLICIES)
    tags, paths = ("allocation",), {"project": _PROJECT, "resource_class": _CLASS}
    one = "/quotas/{project}/{resource_class}"
    return (
        Route(
            "GET",
            "/quotas",
            show_quotas,
            get,
            "Show limits of projects with what is used of them.",
            {200: _QUOTAS},
            query={"type": "object", "properties": {"project": _PROJECT}, "additionalProperties": False},
            tags=tags,
        ),
        Route(
            "PUT", one, set_quota, change, "Set a limit.", {200: _QUOTA}, body=_WANTED, path_schemas=paths, tags=tags
        ),
        Route("DELETE", one, unset_quota, change, "Remove a limit.", {204: None}, path_schemas=paths, tags=tags),
    )


def _limits(store: AllocationStore) -> QuotaStore:
    if not isinstance(store, QuotaStore):
        raise errors.InvalidInput(
            f"The allocation store {type(store).__name__} keeps no limits of projects. Write [allocation] store = sql."
        )
    return store
