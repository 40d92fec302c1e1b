# SPDX-License-Identifier: Apache-2.0
"""JSON Patch as Ironic takes it: add, replace and remove of known fields, each of a known type."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jsonpatch

from moorage import errors
from moorage.fleet.interface import check_shard
from moorage.http.routes import Version
from moorage_plugins.api.baremetal.collection import is_uuid
from moorage_plugins.api.baremetal.failures import needs_version

__all__ = [
    "Value",
    "apply",
    "fields_of",
    "flag",
    "json_object",
    "mac",
    "name",
    "resource_class",
    "shard",
    "text",
    "uuid",
]

_NAME = re.compile(r"[A-Za-z0-9._~-]{1,255}")
_MAC = re.compile(r"([0-9a-f]{2}:){5}[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Value:
    """A field that clients may write.

    :param check: from what was given to what is stored; raises InvalidInput.
    :param empty: what a removed field becomes.
    """

    since: Version
    check: Callable[[str, Any], Any]
    empty: Any = None


def text(longest: int = 255, *, nullable: bool = True) -> Callable[[str, Any], Any]:
    """Returns a text of at most so many characters."""

    def check(name: str, value: Any) -> Any:
        if value is None and nullable:
            return None
        if not isinstance(value, str):
            raise _wrong(name, value, "'string', 'null'" if nullable else "'string'")
        if len(value) > longest:
            raise errors.InvalidInput(f"{name} has {len(value)} characters; {longest} are allowed.", path=name)
        return value

    return check


def json_object(name: str, value: Any) -> Any:
    """Returns an object; null empties it."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(name, value, "'object', 'null'")
    return value


def flag(name: str, value: Any) -> bool:
    """True or false, or one of the words that clients write for it."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise _wrong(name, value, "'boolean'")


def name(field: str, value: Any) -> str | None:
    """Returns a name that can stand in a path beside uuids."""
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise _wrong(field, value, "'string', 'null'")
    if not _NAME.fullmatch(value) or is_uuid(value):
        raise errors.InvalidInput(
            f"{value[:80]!r} is no {field}: letters, digits and . _ ~ - are allowed, up to 255, and no uuid.",
            path=field,
        )
    return value


def uuid(field: str, value: Any) -> str | None:
    """Returns a uuid."""
    if value is None:
        return None
    if not isinstance(value, str) or not is_uuid(value):
        raise errors.InvalidInput(f"Expected a UUID for {field}, but received {value!r}.", path=field)
    return value.lower()


def mac(field: str, value: Any) -> str:
    """Returns a MAC address, in lower case."""
    if not isinstance(value, str) or not _MAC.fullmatch(value.lower()):
        raise errors.InvalidInput(f"Expected a MAC address for {field}, but received {value!r}.", path=field)
    return value.lower()


def resource_class(field: str, value: Any) -> str | None:
    """Returns a resource class; its name is part of a longer one."""
    found: str | None = text(80)(field, value)
    return found or None


def shard(field: str, value: Any) -> str | None:
    """Returns a shard that queries can ask for."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise _wrong(field, value, "'string', 'null'")
    return check_shard(value, field)


def fields_of(body: Any, known: Mapping[str, Value], version: Version, what: str) -> dict[str, Any]:
    """Returns the checked fields of the body of a POST.

    :raises InvalidInput: it is no object, or a field is unknown or wrong.
    :raises NotAcceptable: a field is not there yet in this microversion.
    """
    if not isinstance(body, dict):
        raise errors.InvalidInput(f"Schema error for {what}: the body must be an object", path="body")
    unknown = sorted(set(body) - set(known))
    if unknown:
        raise errors.InvalidInput(
            f"Schema error for {what}: Additional properties are not allowed ({', '.join(map(repr, unknown))}; kept are "
            f"{', '.join(sorted(known))})",
            path=unknown[0],
        )
    for field in body:
        if known[field].since > version:
            raise needs_version(known[field].since, field)
    return {field: known[field].check(field, value) for field, value in body.items()}


def apply(patch: Any, before: Mapping[str, Any], known: Mapping[str, Value], version: Version) -> dict[str, Any]:
    """Returns the fields that the patch changes, checked.

    :param before: all fields of ``known`` as they are.
    :raises InvalidInput: it is no such patch, cannot be applied, or a value is wrong.
    :raises NotAcceptable: a field is not there yet in this microversion.
    """
    touched = touched_by(patch, known, version)
    try:
        after = jsonpatch.apply_patch(dict(before), patch)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, TypeError, KeyError, ValueError) as error:
        raise errors.InvalidInput(f"Couldn't apply patch '{_short(patch)}'. Reason: {error}", path="body") from None
    checked = {
        field: known[field].check(field, after[field]) if field in after else known[field].empty for field in touched
    }
    return {field: value for field, value in checked.items() if value != before[field]}


def touched_by(patch: Any, known: Mapping[str, Value], version: Version) -> set[str]:
    """Returns the fields that a patch names."""
    if not isinstance(patch, list):
        raise errors.InvalidInput("Schema error for patch: the body must be a list of operations", path="body")
    touched = set()
    for operation in patch:
        if not isinstance(operation, dict) or not isinstance(operation.get("path"), str):
            raise errors.InvalidInput(f"Schema error for patch: {_short(operation)} has no path", path="body")
        if operation.get("op") not in ("add", "replace", "remove"):
            raise errors.InvalidInput(
                f"Schema error for patch: {_short(operation.get('op'))} is not one of ['add', 'replace', 'remove']",
                path="body",
            )
        if operation["op"] != "remove" and "value" not in operation:
            raise errors.InvalidInput(f"Schema error for patch: {_short(operation)} has no value", path="body")
        _, _, field = operation["path"].partition("/")
        field = field.partition("/")[0]
        if field not in known:
            raise errors.InvalidInput(f"Cannot patch {operation['path'][:100]}", path=operation["path"])
        if known[field].since > version:
            raise needs_version(known[field].since, field)
        touched.add(field)
    return touched


def _wrong(field: str, value: Any, kinds: str) -> errors.InvalidInput:
    return errors.InvalidInput(f"Schema error for patch: {_short(value)} is not of type {kinds} ({field})", path=field)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else shown[:197] + "..."
