# SPDX-License-Identifier: Apache-2.0
"""The catalogue of flavors in ``/scheduling/v1``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from moorage import errors
from moorage.http.routes import PAGE, PolicyRule, Request, Response, Route
from moorage.scheduling.flavors import FlavorStore, FlavorVersion
from moorage.scheduling.request import EXTRA_SPECS, RESOURCES
from moorage.scheduling.resource_request import GivenResources, check_flavor

__all__ = ["POLICIES", "routes"]

POLICIES = (
    PolicyRule("scheduling:flavors:get", "rule:system_reader or rule:project_reader", "List flavors and show one."),
    PolicyRule("scheduling:flavors:create", "rule:system_admin", "Add a flavor, or a version of one.", ("system",)),
    PolicyRule(
        "scheduling:flavors:update",
        "rule:system_admin",
        "Refuse new requests for a flavor or a version of it, or accept them again.",
        ("system",),
    ),
)

_LARGEST = 2**31 - 1
#: A part of a path. The events, the instances and the server groups have the same length for it.
_FLAVORID = {"type": "string", "maxLength": 255, "pattern": "^[A-Za-z0-9][A-Za-z0-9 ._:+@-]*$"}
#: Of implicit flavors, too, which may have any name.
_ANY_FLAVORID = {"type": "string", "minLength": 1, "maxLength": 255}
_VERSION = {"type": "integer", "minimum": 1, "maximum": _LARGEST}
_CREATE = {
    "type": "object",
    "properties": {
        "flavorid": _FLAVORID,
        "resources": RESOURCES,
        "extra_specs": EXTRA_SPECS,
        "expected_version": {"type": "integer", "minimum": 0, "maximum": _LARGEST},
    },
    "required": ["flavorid", "resources"],
    "additionalProperties": False,
}
_UPDATE = {
    "type": "object",
    "properties": {"deprecated": {"type": "boolean"}, "version": _VERSION, "successor": _FLAVORID},
    "required": ["deprecated"],
    "additionalProperties": False,
}
_SHOWN = {
    "type": "object",
    "properties": {
        "uuid": {"type": "string"},
        "flavorid": {"type": "string"},
        "version": {"type": "integer"},
        "resources": {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "description": "As they were given: what extra specs add or replace is not counted.",
        },
        "extra_specs": {"type": "object", "additionalProperties": {"type": "string"}},
        "implicit": {"type": "boolean", "description": "It records what instances have, and cannot be requested."},
        "deprecated": {"type": "boolean", "description": "New requests are refused."},
        "successor": {"type": "string", "description": "The flavor to ask for instead; empty for none."},
        "generation": {"type": "integer"},
        "created_at": {"type": "integer", "description": "Microseconds since the Unix epoch."},
        "updated_at": {"type": "integer"},
    },
    "required": ["flavorid", "version", "resources", "extra_specs", "implicit", "deprecated", "successor"],
}
_VERSIONS = {
    "type": "object",
    "properties": {**_SHOWN["properties"], "versions": {"type": "array", "items": {"type": "integer"}}},  # type: ignore[dict-item]
    "required": [*_SHOWN["required"], "versions"],
}
_CHANGED = {
    "type": "object",
    "properties": {"versions": {"type": "array", "items": _SHOWN}},
    "required": ["versions"],
}
_LIST = {
    "type": "object",
    "properties": {"flavors": {"type": "array", "items": _SHOWN}, "next_after": {"type": ["string", "null"]}},
    "required": ["flavors", "next_after"],
}


def routes(store: FlavorStore, changed: Callable[[], object] = lambda: None) -> Sequence[Route]:
    """Returns the routes, over the flavors of the store.

    :param changed: called after a change.
    """

    def created(request: Request) -> Response:
        body = request.body
        # What cannot be parsed in a request is refused here, with the same words.
        check_flavor({"flavor": body})
        resources, extra_specs = GivenResources(body["resources"]), body.get("extra_specs", {})
        made, new = store.create(body["flavorid"], resources, extra_specs, body.get("expected_version", 0))
        changed()
        return Response(201 if new else 200, asdict(made))

    def listed(request: Request) -> Response:
        limit, implicit = request.query.get("limit", 1000), request.query.get("implicit", False)
        found = store.list(after=request.query.get("after", ""), limit=limit, implicit=implicit)
        following = found[-1].flavorid if len(found) == limit else None
        return Response(200, {"flavors": [asdict(each) for each in found], "next_after": following})

    def shown(request: Request) -> Response:
        flavorid, version = request.path_params["flavorid"], request.query.get("version")
        found = store.versions(flavorid)
        return Response(200, {**asdict(_chosen(found, version)), "versions": [each.version for each in found]})

    def updated(request: Request) -> Response:
        body: dict[str, Any] = dict(request.body)
        found = store.deprecate(request.path_params["flavorid"], body.pop("version", None), **body)
        changed()
        return Response(200, {"versions": [asdict(each) for each in found]})

    get, create, update = (rule.name for rule in POLICIES)
    tags, one, paths = ("flavors",), "/flavors/{flavorid}", {"flavorid": _ANY_FLAVORID}
    return (
        Route(
            "POST",
            "/flavors",
            created,
            create,
            "Add a flavor, or the next version of one: expected_version is the newest version that the caller knows. Does nothing "
            "when the newest version has these contents already.",
            {200: _SHOWN, 201: _SHOWN},
            body=_CREATE,
            tags=tags,
        ),
        Route(
            "GET",
            "/flavors",
            listed,
            get,
            "List flavors by flavorid, each with its newest version. With implicit=true also those that only instances have.",
            {200: _LIST},
            query={
                "type": "object",
                "properties": {**PAGE, "implicit": {"type": "boolean"}},
                "additionalProperties": False,
            },
            tags=tags,
        ),
        Route(
            "GET",
            one,
            shown,
            get,
            "Show the newest version of a flavor, or the given one, and the numbers of all versions.",
            {200: _VERSIONS},
            query={"type": "object", "properties": {"version": _VERSION}, "additionalProperties": False},
            path_schemas=paths,
            tags=tags,
        ),
        Route(
            "PATCH",
            one,
            updated,
            update,
            "Deprecate a version, or all versions: new requests are refused, and instances keep what they have. With deprecated "
            "false they are accepted again.",
            {200: _CHANGED},
            body=_UPDATE,
            path_schemas=paths,
            tags=tags,
        ),
    )


def _chosen(found: Sequence[FlavorVersion], version: int | None) -> FlavorVersion:
    """Returns the version of a flavor that a request means: the newest one that can be requested, or else the newest one."""
    if version is None:
        return max(found, key=lambda each: (not each.implicit, each.version))
    for each in found:
        if each.version == version:
            return each
    raise errors.NotFound(
        f"Flavor {found[0].flavorid} has no version {version}; its versions are "
        f"{', '.join(str(each.version) for each in found)}."
    )
