# SPDX-License-Identifier: Apache-2.0
"""Requests as JSON: the schema that the API publishes and validates with, and the way from there to a RequestSpec."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from moorage import randomness
from moorage.read_only import EMPTY
from moorage.scheduling.interface import Flavor, RequestSpec, ServerGroup
from moorage.scheduling.resource_request import LARGEST
from moorage.services.interface import RUNS_COMMANDS

__all__ = ["EXTRA_SPECS", "REQUEST_PROPERTIES", "RESOURCES", "property_types", "spec_from_json"]

_NAME = {"type": "string", "minLength": 1, "maxLength": 255}
_NAMES = {"type": "array", "items": _NAME, "maxItems": 1000}
#: The resources of a flavor.
RESOURCES: Mapping[str, Any] = {
    "type": "object",
    "propertyNames": {"pattern": "^[A-Z0-9_]{1,255}$"},
    "additionalProperties": {"type": "integer", "minimum": 1, "maximum": LARGEST},
    "minProperties": 1,
    "maxProperties": 64,
}
#: The extra specs of a flavor.
EXTRA_SPECS: Mapping[str, Any] = {
    "type": "object",
    "propertyNames": {"maxLength": 255},
    "additionalProperties": {"type": "string", "maxLength": 1024},
    "maxProperties": 256,
}
_FLAVOR = {
    "type": "object",
    "properties": {"flavorid": _NAME, "resources": RESOURCES, "extra_specs": EXTRA_SPECS},
    # Without resources it is a flavor of the catalogue, which has its own extra specs.
    "required": ["flavorid"],
    "dependentRequired": {"extra_specs": ["resources"]},
    "additionalProperties": False,
}

_UUIDS = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 255}, "maxItems": 10_000}
_GROUP = {
    "type": "object",
    "properties": {
        "name": _NAME,
        "policy": {"enum": ["affinity", "anti-affinity", "soft-affinity", "soft-anti-affinity"]},
        "members": _UUIDS,
        "max_server_per_host": {"type": "integer", "minimum": 1, "maximum": LARGEST},
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


def property_types(image: Mapping[str, Any]) -> Mapping[str, type]:
    """Returns the types of an image's properties, by property name.

    Compare them beside the values: True, 1 and 1.0 are equal, but they are different properties. All else in a request has one
    type.
    """
    return {name: type(value) for name, value in (image.get("properties") or {}).items()}


def spec_from_json(data: Mapping[str, Any], project_id: str, user_id: str, *, all_projects: bool = True) -> RequestSpec:
    """Returns a request from a body that has been validated; a hint may be a text or a list."""
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
            int(flavor.get("version", 0)),
        ),
        project_id=project_id,
        user_id=user_id,
        hints=hints,
        force_hosts=tuple(data.get("force_hosts") or ()),
        force_nodes=tuple(data.get("force_nodes") or ()),
        ignore_hosts=tuple(data.get("ignore_hosts") or ()),
        requested_host=data.get("requested_host"),
        requested_node=data.get("requested_node"),
        image=data.get("image") or EMPTY,
        availability_zone=data.get("availability_zone"),
        server_group=_group(data.get("server_group")),
        properties={
            "name": data.get("name", ""),
            **({"command": list(data["command"])} if data.get("command") else {}),
        },
        all_projects=all_projects,
        powers=(RUNS_COMMANDS,) if data.get("command") else (),
    )


def _group(data: Mapping[str, Any] | None) -> ServerGroup | None:
    if data is None:
        return None
    return ServerGroup(
        data["name"], data["policy"], data.get("max_server_per_host", 1), tuple(data.get("members") or ())
    )
