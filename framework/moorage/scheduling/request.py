# SPDX-License-Identifier: Apache-2.0
"""Requests as JSON: the schema that the API publishes and validates with, and the way from there to a RequestSpec."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

from moorage import errors, randomness
from moorage.scheduling.interface import Flavor, RequestSpec, ServerGroup

__all__ = ["REQUEST_PROPERTIES", "refuse_unsupported", "spec_from_json"]

_LARGEST = 2**31 - 1
_NAME = {"type": "string", "minLength": 1, "maxLength": 255}
_NAMES = {"type": "array", "items": _NAME, "maxItems": 1000}
_FLAVOR = {
    "type": "object",
    "properties": {
        "flavorid": _NAME,
        "resources": {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Z0-9_]{1,255}$"},
            "additionalProperties": {"type": "integer", "minimum": 1, "maximum": _LARGEST},
            "minProperties": 1,
            "maxProperties": 64,
        },
        "extra_specs": {
            "type": "object",
            "propertyNames": {"maxLength": 255},
            "additionalProperties": {"type": "string", "maxLength": 1024},
            "maxProperties": 256,
        },
    },
    "required": ["flavorid", "resources"],
    "additionalProperties": False,
}

_UUIDS = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 255}, "maxItems": 10_000}
_GROUP = {
    "type": "object",
    "properties": {
        "name": _NAME,
        "policy": {"enum": ["affinity", "anti-affinity", "soft-affinity", "soft-anti-affinity"]},
        "members": _UUIDS,
        "max_server_per_host": {"type": "integer", "minimum": 1, "maximum": _LARGEST},
    },
    "required": ["name", "policy"],
    "additionalProperties": False,
}
_IMAGE = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "maxLength": 255},
        "properties": {
            "type": "object",
            "propertyNames": {"maxLength": 255},
            "additionalProperties": {
                "oneOf": [{"type": "string", "maxLength": 1024}, {"type": "number"}, {"type": "boolean"}]
            },
            "maxProperties": 256,
        },
    },
    "additionalProperties": False,
}

#: Properties of the body of a request, for ``POST /instances`` and ``POST /select``.
REQUEST_PROPERTIES: Mapping[str, Any] = {
    "flavor": _FLAVOR,
    "hints": {
        "type": "object",
        "propertyNames": {"maxLength": 255},
        "additionalProperties": {
            "oneOf": [
                {"type": "string", "maxLength": 4096},
                {"type": "array", "items": {"type": "string", "maxLength": 255}, "maxItems": 1000},
            ]
        },
        "maxProperties": 64,
    },
    "force_hosts": _NAMES,
    "force_nodes": _NAMES,
    "ignore_hosts": _NAMES,
    "requested_host": _NAME,
    "requested_node": _NAME,
    "image": _IMAGE,
    "availability_zone": _NAME,
    # The name or uuid of one in the store, or one that the request brings along.
    "server_group": {"oneOf": [_NAME, _GROUP]},
}


#: Extra specs and image properties with which Nova asks Placement for traits, resources and request groups.
_PLACEMENT_KEYS = re.compile(r"(resources|trait)[A-Za-z0-9_-]*:.*|group_policy|same_subtree.*", re.DOTALL)


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Refuse what a flavor or an image asks for and no part of Moorage looks at.

    :raises InvalidInput: an extra spec or an image property asks for traits, resources or request groups; names it.
    """
    for path, found in (
        ("flavor/extra_specs", (body.get("flavor") or {}).get("extra_specs")),
        ("image/properties", (body.get("image") or {}).get("properties")),
    ):
        for key in found or ():
            if _PLACEMENT_KEYS.fullmatch(key):
                raise errors.InvalidInput(
                    f"{path} has {key!r}, which is not supported: it would be ignored. Take it out. Ask for amounts in "
                    "flavor/resources, and for properties of nodes with extra specs such as capabilities:NAME.",
                    path=f"body/{path}/{key}",
                )


def spec_from_json(data: Mapping[str, Any], project_id: str, user_id: str, *, all_projects: bool = True) -> RequestSpec:
    """A request from a body that has been validated; a hint may be a text or a list."""
    flavor = data["flavor"]
    hints = {
        name: [value] if isinstance(value, str) else list(value) for name, value in (data.get("hints") or {}).items()
    }
    return RequestSpec(
        instance_uuid=str(data.get("uuid") or uuid.UUID(randomness.new_uuid())),
        flavor=Flavor(
            flavor["flavorid"],
            {name: int(units) for name, units in flavor["resources"].items()},
            dict(flavor.get("extra_specs") or {}),
        ),
        project_id=project_id,
        user_id=user_id,
        hints=hints,
        force_hosts=tuple(data.get("force_hosts") or ()),
        force_nodes=tuple(data.get("force_nodes") or ()),
        ignore_hosts=tuple(data.get("ignore_hosts") or ()),
        requested_host=data.get("requested_host"),
        requested_node=data.get("requested_node"),
        image=data.get("image") or {},
        availability_zone=data.get("availability_zone"),
        server_group=_group(data.get("server_group")),
        properties={"name": data.get("name", "")},
        all_projects=all_projects,
    )


def _group(data: Mapping[str, Any] | None) -> ServerGroup | None:
    if data is None:
        return None
    return ServerGroup(
        data["name"], data["policy"], data.get("max_server_per_host", 1), tuple(data.get("members") or ())
    )
