# SPDX-License-Identifier: Apache-2.0
"""Reads files of nodes.

What a line does not give stays as it is when the node exists: an import adds to a node and changes it, and removes only what is
named. Objects (``properties``, ``extra``, ``inventories``) are merged; the value ``null`` removes a member.

* JSON lines as the openb data set has them: ``{"uuid", "name", "cluster", "vcpus", "memory_mb", "gpus", "gpu_model"}``; the cluster
  becomes the shard.
* JSON lines of our own: ``{"name": ..., "uuid"?, "host"?, "shard"?, "resource_class"?, "properties"?: {},
  "inventories"?: {"VCPU": 8, "MEMORY_MB": {"total": 4096, "reserved": 512, "allocation_ratio": 1.5}, "PGPU": null}}``.
  Further fields: ``driver``, ``conductor_group``, ``owner``, ``lessee``, ``description``, ``extra`` (an object),
  ``driver_info`` (an object, which replaces the present one: where the driver finds the machine, and with which password).
* CSV with a header: ``name``, and any of ``uuid, host, shard, resource_class, vcpus, memory_mb, disk_gb, gpus``; every other column
  in upper case is a resource class. An empty field gives nothing; 0 removes the inventory of that class.

``.gz`` files are read too.
"""

from __future__ import annotations

import csv
import functools
import gzip
import io
import itertools
import json
import uuid as uuid_module
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from moorage import errors
from moorage.fleet.interface import InventoryItem, NodeSpec, check_shard, uuid_of_name

__all__ = ["from_json", "read_nodes", "to_json", "to_pages"]

_SHORT = {"vcpus": "VCPU", "memory_mb": "MEMORY_MB", "disk_gb": "DISK_GB", "gpus": "PGPU"}
_NAMED = {"uuid", "name", "host", "shard", "resource_class"}
_DETAILS = ("driver", "conductor_group", "owner", "lessee", "description")
_OBJECTS = ("driver_info", "extra")
_FURTHER = (*_DETAILS, *_OBJECTS)
_TEXTS = ("host", "shard", "resource_class")
_TOTAL = frozenset({"total"})
_KNOWN = frozenset({*_NAMED, *_FURTHER, "properties", "inventories"})
_INVENTORY = {each.name for each in fields(InventoryItem)} - {"resource_class"}
_LARGEST = 2**31 - 1
#: Nodes that one request imports. The API takes 1,000, but [api] max_body_bytes leaves each of them only 4 KiB then.
_PAGE = 500


def read_nodes(path: Path) -> Iterator[NodeSpec]:
    """Returns the nodes of a file.

    :raises InvalidInput: the file cannot be read, or a line is wrong or repeats a name or uuid; says which and what.
    """
    seen: dict[str, int] = {}
    try:
        with _open(path) as stream:
            for number, spec in _parse(path, stream):
                for key in (spec.name, spec.uuid):
                    if seen.setdefault(key, number) != number:
                        raise errors.InvalidInput(f"{path}, line {number}: {key} stands in line {seen[key]} already.")
                yield spec
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise errors.InvalidInput(f"{path} cannot be read: {error}.") from error


def from_json(data: Any) -> NodeSpec:
    """Returns the specification of a node in our own JSON format.

    :raises ValueError: says what is wrong.
    """
    if not isinstance(data, dict):
        raise ValueError("a node must be an object")
    _refuse_unknown("", data, _KNOWN)
    given = data.get("inventories", {})
    if not isinstance(given, dict):
        raise ValueError("inventories must be an object")
    properties = data.get("properties") or {}
    if not isinstance(properties, dict):
        raise ValueError("properties must be an object")
    return _spec(data, properties, given)


def to_pages(specs: Iterable[NodeSpec]) -> Iterator[list[dict[str, Any]]]:
    """Yields specifications in our own JSON format, in the order of their uuids, as many at a time as one request imports.

    The nodes of a request are neighbours in the store's indexes of uuids, which costs the API a quarter less processor time.
    """
    ordered = iter(sorted(specs, key=lambda spec: spec.uuid))
    while page := list(itertools.islice(ordered, _PAGE)):
        yield [to_json(spec) for spec in page]


def to_json(spec: NodeSpec) -> dict[str, Any]:
    """Returns a specification in our own JSON format: what it gives, and nothing else."""
    data = {name: getattr(spec, name) for name in ("uuid", "name", "host", "shard", "resource_class")} | dict(
        spec.details
    )
    if spec.properties:
        data["properties"] = dict(spec.properties)
    inventories: dict[str, Any] = {
        each.resource_class: {
            name: getattr(each, name) for name in spec.inventory_fields.get(each.resource_class, _INVENTORY)
        }
        for each in spec.inventories
    }
    inventories |= dict.fromkeys(spec.removed_inventories)
    if inventories:
        data["inventories"] = inventories
    return {key: value for key, value in data.items() if value is not None}


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8", newline="")
    return open(path, encoding="utf-8", newline="")


def _parse(path: Path, stream: TextIO) -> Iterator[tuple[int, NodeSpec]]:
    first = stream.readline()
    if first.lstrip().startswith("{"):
        lines = enumerate([first, *stream], start=1)
        for number, line in lines:
            if line.strip():
                yield number, _checked(path, number, lambda line=line: _json_line(line))
        return
    header = [name.strip() for name in first.strip().split(",")]
    if "name" not in header:
        raise errors.InvalidInput(f"{path}, line 1: neither JSON nor a CSV header with a column 'name'.")
    strange = [name for name in header if name not in _NAMED and name not in _SHORT and not name.isupper()]
    if strange:
        raise errors.InvalidInput(f"{path}, line 1: unknown column {', '.join(strange)}.")
    for number, row in enumerate(csv.DictReader(stream, fieldnames=header), start=2):
        yield number, _checked(path, number, lambda row=row: _csv_row(row))


def _checked(path: Path, number: int, parse: Any) -> NodeSpec:
    try:
        spec: NodeSpec = parse()
    except (ValueError, TypeError) as error:
        raise errors.InvalidInput(f"{path}, line {number}: {error}.") from error
    return spec


def _json_line(line: str) -> NodeSpec:
    data = json.loads(line)
    if isinstance(data, dict) and "vcpus" in data:
        properties = {key: data[key] for key in ("gpu_model", "source") if data.get(key)}
        inventories = {name: data[key] or None for key, name in _SHORT.items() if key in data}
        return _spec({**data, "shard": data.get("cluster")}, properties, inventories)
    return from_json(data)


def _csv_row(row: Mapping[str, Any]) -> NodeSpec:
    if None in row or None in row.values():
        raise ValueError("the line has not as many fields as the header")
    named = {key: (row[key].strip() or None) for key in _NAMED if key in row}
    inventories = {
        _SHORT.get(key, key): _whole(key, value) or None
        for key, value in row.items()
        if key not in _NAMED and value.strip()
    }
    return _spec(named, {}, inventories)


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, which is not a whole number") from None


def _spec(data: Mapping[str, Any], properties: Mapping[str, Any], inventories: Mapping[str, Any]) -> NodeSpec:
    name = data.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= 255 or name != name.strip():
        raise ValueError("name must be a text of 1 to 255 characters without blanks around it")
    uuid = data.get("uuid")
    try:
        uuid = str(uuid_module.UUID(uuid)) if uuid else uuid_of_name(name)
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"uuid {uuid!r} is not a uuid") from None
    texts: dict[str, Any] = {key: data[key] for key in _TEXTS if data.get(key) is not None}
    for key, value in texts.items():
        if not isinstance(value, str) or not 0 < len(value) <= 255:
            raise ValueError(f"{key} must be a text of 1 to 255 characters")
    if "shard" in texts:
        try:
            check_shard(texts["shard"])
        except errors.InvalidInput as error:
            raise ValueError(error.message.rstrip(".")) from None
    given = {key: value for key, value in inventories.items() if value is not None}
    return NodeSpec(
        uuid,
        name,
        properties=dict(properties),
        inventories=tuple([_inventory(key, value) for key, value in given.items()]),
        inventory_fields={key: frozenset(value) if isinstance(value, dict) else _TOTAL for key, value in given.items()},
        removed_inventories=frozenset([_checked_class(key) for key, value in inventories.items() if value is None]),
        details=_details(data),
        **texts,
    )


def _details(data: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: data[key] for key in _FURTHER if data.get(key) is not None}
    for key, value in found.items():
        if key in _OBJECTS:
            if not isinstance(value, dict):
                raise ValueError(f"{key} must be an object")
        elif not isinstance(value, str) or not 0 < len(value) <= 255:
            raise ValueError(f"{key} must be a text of 1 to 255 characters")
    return found


def _checked_class(name: str) -> str:
    if not name.replace("_", "").isalnum() or not name.isupper():
        raise ValueError(f"{name!r} is no resource class: upper case letters, digits and _ are allowed")
    return name


def _refuse_unknown(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    if unknown := set(given).difference(known):
        raise ValueError(f"{where}unknown field {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")


#: The inventories of most nodes of a fleet are alike.
@functools.lru_cache(4096, typed=True)
def _inventory_of_total(resource_class: str, total: int) -> InventoryItem:
    return _checked_inventory(resource_class, total)


def _inventory(resource_class: str, value: Any) -> InventoryItem:
    alike = type(value) is int
    return _inventory_of_total(resource_class, value) if alike else _checked_inventory(resource_class, value)


def _checked_inventory(resource_class: str, value: Any) -> InventoryItem:
    settings = dict(value) if isinstance(value, dict) else {"total": value}
    _refuse_unknown(f"{resource_class}: ", settings, _INVENTORY)
    _checked_class(resource_class)
    if "total" not in settings:
        raise ValueError(f"{resource_class}: total is missing")
    for key, number in settings.items():
        least = 0 if key == "reserved" else 1
        if key == "allocation_ratio":
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 10_000:
                raise ValueError(f"{resource_class}: allocation_ratio must be more than 0")
        elif isinstance(number, bool) or not isinstance(number, int) or not least <= number <= _LARGEST:
            raise ValueError(f"{resource_class}: {key} is {number!r}; it must be a whole number of {least} or more")
    inventory = InventoryItem(resource_class, **settings)
    if inventory.reserved > inventory.total:
        raise ValueError(f"{resource_class}: reserved is more than total")
    return inventory
