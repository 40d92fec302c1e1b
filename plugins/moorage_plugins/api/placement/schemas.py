# SPDX-License-Identifier: Apache-2.0
"""What bodies and queries may be, by microversion, as Placement's API reference documents it.

A schema is named after the first microversion that has it; :mod:`extension` says until when.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AGGREGATES_1_1",
    "AGGREGATES_1_19",
    "ALLOCATIONS_1_0",
    "ALLOCATIONS_1_8",
    "ALLOCATIONS_1_12",
    "ALLOCATIONS_1_28",
    "ALLOCATIONS_1_34",
    "ALLOCATIONS_1_38",
    "CANDIDATES",
    "CUSTOM_NAME",
    "INVENTORIES",
    "INVENTORY",
    "LARGEST",
    "MANY_ALLOCATIONS_1_13",
    "MANY_ALLOCATIONS_1_28",
    "MANY_ALLOCATIONS_1_34",
    "MANY_ALLOCATIONS_1_38",
    "NEW_INVENTORY",
    "NEW_PROVIDER_1_0",
    "NEW_PROVIDER_1_14",
    "PROVIDERS_1_0",
    "PROVIDERS_1_3",
    "PROVIDERS_1_4",
    "PROVIDERS_1_14",
    "PROVIDERS_1_18",
    "PROVIDER_1_0",
    "PROVIDER_1_14",
    "PROVIDER_TRAITS",
    "RESHAPE_1_30",
    "RESHAPE_1_34",
    "RESHAPE_1_38",
    "RESOURCE_CLASS",
    "TRAITS",
    "USAGES_1_9",
    "USAGES_1_38",
]

_Json = dict[str, Any]

LARGEST = 2**31 - 1
#: The largest float of single precision, as Placement has it.
_LARGEST_RATIO = 3.40282e38
_NAME = "^[A-Z0-9_]+$"
_CUSTOM = "^CUSTOM_[A-Z0-9_]+$"
_UUID_KEY = "^[0-9a-fA-F-]{36}$"
_UUID: _Json = {"type": "string", "format": "uuid"}
_TEXT: _Json = {"type": "string"}
_IDENTITY: _Json = {"type": "string", "minLength": 1, "maxLength": 255}
#: A generation; what no database could hold is refused before one is asked.
_INTEGER: _Json = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
CUSTOM_NAME: _Json = {"type": "string", "pattern": _CUSTOM, "maxLength": 255}


def _object(properties: _Json, *required: str, **more: Any) -> _Json:
    return {
        "type": "object",
        "properties": properties,
        **({"required": list(required)} if required else {}),
        "additionalProperties": False,
        **more,
    }


def _mapping(pattern: str, value: _Json, **more: Any) -> _Json:
    return {"type": "object", "patternProperties": {pattern: value}, "additionalProperties": False, **more}


# -- providers ----------------------------------------------------------------------------------------------------

_PROVIDER_NAME: _Json = {"name": {"type": "string", "maxLength": 200}}
_PARENT: _Json = {"parent_provider_uuid": {"anyOf": [_UUID, {"type": "null"}]}}
PROVIDER_1_0 = _object(_PROVIDER_NAME, "name")
PROVIDER_1_14 = _object({**_PROVIDER_NAME, **_PARENT}, "name")
NEW_PROVIDER_1_0 = _object({**_PROVIDER_NAME, "uuid": _UUID}, "name")
NEW_PROVIDER_1_14 = _object({**_PROVIDER_NAME, "uuid": _UUID, **_PARENT}, "name")
PROVIDERS_1_0 = _object({"name": _TEXT, "uuid": _UUID})
PROVIDERS_1_3 = _object({**PROVIDERS_1_0["properties"], "member_of": _TEXT})
PROVIDERS_1_4 = _object({**PROVIDERS_1_3["properties"], "resources": _TEXT})
PROVIDERS_1_14 = _object({**PROVIDERS_1_4["properties"], "in_tree": _UUID})
PROVIDERS_1_18 = _object({**PROVIDERS_1_14["properties"], "required": _TEXT})

# -- inventories --------------------------------------------------------------------------------------------------


def _number(smallest: int) -> _Json:
    return {"type": "integer", "maximum": LARGEST, "minimum": smallest}


_NUMBERS: _Json = {
    "resource_provider_generation": _INTEGER,
    "total": _number(1),
    "reserved": _number(0),
    "min_unit": _number(1),
    "max_unit": _number(1),
    "step_size": _number(1),
    "allocation_ratio": {"type": "number", "maximum": _LARGEST_RATIO},
}
INVENTORY = _object(_NUMBERS, "total", "resource_provider_generation")
NEW_INVENTORY = _object({**_NUMBERS, "resource_class": {"type": "string", "pattern": _NAME}}, "total", "resource_class")
INVENTORIES = _object(
    {
        "resource_provider_generation": _INTEGER,
        "inventories": _mapping(_NAME, _object(_NUMBERS, "total")),
    },
    "resource_provider_generation",
    "inventories",
)

# -- aggregates, traits, classes, usages --------------------------------------------------------------------------

AGGREGATES_1_1: _Json = {"type": "array", "items": _UUID, "uniqueItems": True}
AGGREGATES_1_19 = _object(
    {"aggregates": AGGREGATES_1_1, "resource_provider_generation": _INTEGER},
    "aggregates",
    "resource_provider_generation",
)
PROVIDER_TRAITS = _object(
    {"traits": {"type": "array", "items": _IDENTITY}, "resource_provider_generation": _INTEGER},
    "traits",
    "resource_provider_generation",
)
TRAITS = _object({"name": _TEXT, "associated": _TEXT})
RESOURCE_CLASS = _object({"name": CUSTOM_NAME}, "name")
USAGES_1_9 = _object({"project_id": _IDENTITY, "user_id": _IDENTITY}, "project_id")
USAGES_1_38 = _object(
    {
        **USAGES_1_9["properties"],
        "consumer_type": {**_IDENTITY, "pattern": f"{_NAME}|^all|^unknown$"},
    },
    "project_id",
)

# -- allocations --------------------------------------------------------------------------------------------------

_RESOURCES = _mapping(_NAME, {"type": "integer", "minimum": 1}, minProperties=1)
_LISTED: _Json = {
    "type": "array",
    "minItems": 1,
    "items": _object(
        {"resource_provider": _object({"uuid": _UUID}, "uuid"), "resources": _RESOURCES},
        "resource_provider",
        "resources",
    ),
}
_OF_PROVIDERS = _mapping(_UUID_KEY, _object({"generation": _INTEGER, "resources": _RESOURCES}, "resources"))
_OWNER: _Json = {"project_id": _IDENTITY, "user_id": _IDENTITY}
_NEEDED = ("allocations", "project_id", "user_id")
_CONSUMER_GENERATION: _Json = {"consumer_generation": {**_INTEGER, "type": ["integer", "null"]}}
_MAPPINGS: _Json = {
    "mappings": {
        "type": "object",
        "minProperties": 1,
        "patternProperties": {"[a-zA-Z0-9_-]{1,64}": {"type": "array", "minItems": 1, "items": _UUID}},
    }
}
ALLOCATIONS_1_0 = _object({"allocations": _LISTED}, "allocations")
ALLOCATIONS_1_8 = _object({"allocations": _LISTED, **_OWNER}, *_NEEDED)
ALLOCATIONS_1_12 = _object({"allocations": {**_OF_PROVIDERS, "minProperties": 1}, **_OWNER}, *_NEEDED)
_ALLOCATIONS_1_13 = _object({"allocations": _OF_PROVIDERS, **_OWNER}, *_NEEDED)
ALLOCATIONS_1_28 = _object(
    {"allocations": _OF_PROVIDERS, **_OWNER, **_CONSUMER_GENERATION}, *_NEEDED, "consumer_generation"
)
ALLOCATIONS_1_34 = _object({**ALLOCATIONS_1_28["properties"], **_MAPPINGS}, *_NEEDED, "consumer_generation")
ALLOCATIONS_1_38 = _object(
    {**ALLOCATIONS_1_34["properties"], "consumer_type": {**_IDENTITY, "pattern": _NAME}},
    *_NEEDED,
    "consumer_generation",
    "consumer_type",
)
MANY_ALLOCATIONS_1_13 = _mapping(_UUID_KEY, _ALLOCATIONS_1_13, minProperties=1)
MANY_ALLOCATIONS_1_28 = _mapping(_UUID_KEY, ALLOCATIONS_1_28, minProperties=1)
MANY_ALLOCATIONS_1_34 = _mapping(_UUID_KEY, ALLOCATIONS_1_34, minProperties=1)
MANY_ALLOCATIONS_1_38 = _mapping(_UUID_KEY, ALLOCATIONS_1_38, minProperties=1)


def _reshape(of_consumers: _Json) -> _Json:
    return _object(
        {
            "inventories": _mapping(_UUID_KEY, INVENTORIES, minProperties=1),
            "allocations": _mapping(_UUID_KEY, of_consumers),
        },
        "inventories",
        "allocations",
    )


RESHAPE_1_30 = _reshape(ALLOCATIONS_1_28)
RESHAPE_1_34 = _reshape(ALLOCATIONS_1_34)
RESHAPE_1_38 = _reshape(ALLOCATIONS_1_38)

# -- candidates ---------------------------------------------------------------------------------------------------

_LIMIT: _Json = {
    "limit": {
        "type": ["integer", "string"],
        "pattern": "^[1-9][0-9]*$",
        "minimum": 1,
        "minLength": 1,
        "maxLength": 100,
    },
}
_POLICY: _Json = {"group_policy": {"type": "string", "enum": ["none", "isolate"]}}
#: Suffixes of groups: numbers, from 1.33 on names.
_NUMBERED, _NAMED = "[1-9][0-9]*", "[a-zA-Z0-9_-]{1,64}"


def _grouped(suffix: str, names: tuple[str, ...], **properties: _Json) -> _Json:
    return _object(
        {**_LIMIT, **_POLICY, **properties},
        patternProperties={f"^{name}({suffix})?$": _TEXT for name in names},
    )


_GROUP = ("resources", "required", "member_of")
#: First microversion of it -> the query of GET /allocation_candidates, in order.
CANDIDATES: dict[tuple[int, int], _Json] = {
    (1, 10): _object({"resources": _TEXT}, "resources"),
    (1, 16): _object({"resources": _TEXT, **_LIMIT}, "resources"),
    (1, 17): _object({"resources": _TEXT, **_LIMIT, "required": _TEXT}, "resources"),
    (1, 21): _object({"resources": _TEXT, **_LIMIT, "required": _TEXT, "member_of": _TEXT}, "resources"),
    (1, 25): _grouped(_NUMBERED, _GROUP),
    (1, 31): _grouped(_NUMBERED, (*_GROUP, "in_tree")),
    (1, 33): _grouped(_NAMED, (*_GROUP, "in_tree")),
    (1, 35): _grouped(_NAMED, (*_GROUP, "in_tree"), root_required=_TEXT),
    (1, 36): _grouped(_NAMED, (*_GROUP, "in_tree"), root_required=_TEXT, same_subtree=_TEXT),
}
