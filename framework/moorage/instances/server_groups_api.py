# SPDX-License-Identifier: Apache-2.0
"""Server groups in ``/scheduling/v1``, and what a request's ``server_group`` means."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moorage import errors
from moorage.context import RequestContext
from moorage.http.routes import PolicyRule, Request, Response, Route
from moorage.instances.interface import InstanceStore
from moorage.scheduling.groups import GroupStore, StoredGroup

__all__ = ["POLICIES", "Groups", "routes"]

_MEMBER = "rule:system_member or rule:project_member"
POLICIES = (
    PolicyRule("scheduling:server_groups:create", _MEMBER, "Create a server group."),
    PolicyRule("scheduling:server_groups:get", "rule:system_reader or rule:project_reader", "List server groups."),
    PolicyRule("scheduling:server_groups:delete", _MEMBER, "Remove a server group."),
)
_LARGEST = 2**31 - 1
_CREATE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 255},
        "policy": {"enum": ["affinity", "anti-affinity", "soft-affinity", "soft-anti-affinity"]},
        "max_server_per_host": {"type": "integer", "minimum": 1, "maximum": _LARGEST},
    },
    "required": ["name", "policy"],
    "additionalProperties": False,
}
_QUERY = {
    "type": "object",
    "properties": {
        "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
        "after": {"type": "string", "maxLength": 36},
    },
    "additionalProperties": False,
}
_SHOWN = {
    "type": "object",
    "properties": {
        "uuid": {"type": "string"},
        "name": {"type": "string"},
        "project_id": {"type": "string"},
        "policy": {"type": "string"},
        "max_server_per_host": {"type": "integer"},
        "members": {"type": "array", "items": {"type": "string"}},
    },
}


@dataclass(frozen=True, slots=True)
class Groups:
    """Server groups with their members."""

    store: GroupStore
    instances: InstanceStore

    def shown(self, group: StoredGroup) -> dict[str, Any]:
        """Returns a group as the API shows it."""
        return {**asdict(group), "members": self._members(group)}

    def _members(self, group: StoredGroup) -> list[str]:
        return list(dict.fromkeys(member for member, _ in self.instances.group_members(group.uuid)))

    def resolved(self, body: Mapping[str, Any], context: RequestContext) -> dict[str, Any]:
        """A request in which a server group's name or uuid (also Nova's hint ``group``) is replaced by what the store has of it.

        :raises InvalidInput: the project has no such group, or the request brings one along under a name that looks like a uuid:
            what is stored is known by its uuid, and is joined by that alone.
        """
        asked = body.get("server_group")
        hint = (body.get("hints") or {}).get("group")
        if asked is None and hint:
            asked = hint if isinstance(hint, str) else hint[0]
        if not isinstance(asked, str):
            if asked is not None and _is_uuid(asked["name"]):
                raise errors.InvalidInput(
                    f"A server group that a request brings along cannot be called by a uuid ({asked['name']}); to join a stored "
                    "one, write its uuid or name alone.",
                    path="body/server_group/name",
                )
            return dict(body)
        try:
            group = self.store.get(asked, _project(context))
        except errors.NotFound as error:
            raise errors.InvalidInput(error.message, path="body/server_group") from error
        return {
            **body,
            "server_group": {
                "name": group.uuid,
                "policy": group.policy,
                "max_server_per_host": group.max_server_per_host,
                "members": self._members(group),
            },
        }


def _is_uuid(name: str) -> bool:
    try:
        uuid.UUID(name)
    except ValueError:
        return False
    return True


def _project(context: RequestContext) -> str | None:
    """Whose groups are seen; None for all."""
    return None if context.system_scope else str(context.project_id or "")


def routes(groups: Groups) -> Sequence[Route]:
    """Returns the routes, over the groups."""

    def created(request: Request) -> Response:
        made = groups.store.create(project_id=request.context.project_id or "", **request.body)
        return Response(201, groups.shown(made), {"Location": f"{request.prefix}/server-groups/{made.uuid}"})

    def listed(request: Request) -> Response:
        limit = request.query.get("limit", 1000)
        found = groups.store.list(_project(request.context), after=request.query.get("after", ""), limit=limit)
        following = found[-1].uuid if len(found) == limit else None
        return Response(200, {"server_groups": [groups.shown(each) for each in found], "next_after": following})

    def shown(request: Request) -> Response:
        return Response(200, groups.shown(groups.store.get(request.path_params["group"], _project(request.context))))

    def removed(request: Request) -> Response:
        groups.store.remove(groups.store.get(request.path_params["group"], _project(request.context)).uuid)
        return Response(204)

    create, get, delete = (rule.name for rule in POLICIES)
    tags = ("server groups",)
    one = "/server-groups/{group}"
    listing = {"type": "object", "properties": {"server_groups": {"type": "array", "items": _SHOWN}}}
    return (
        Route("POST", "/server-groups", created, create, "Create one.", {201: _SHOWN}, body=_CREATE, tags=tags),
        Route("GET", "/server-groups", listed, get, "List them by uuid.", {200: listing}, query=_QUERY, tags=tags),
        Route("GET", one, shown, get, "Show one with its members, by uuid or name.", {200: _SHOWN}, tags=tags),
        Route("DELETE", one, removed, delete, "Remove one; its members stay where they are.", {204: None}, tags=tags),
    )
