# SPDX-License-Identifier: Apache-2.0
"""Nodes as plain data."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from moorage import errors
from moorage.inventory import InventoryItem

__all__ = [
    "DETAILS",
    "Along",
    "FleetWriter",
    "InventoryItem",
    "Node",
    "NodeSpec",
    "ShardMove",
    "check_shard",
    "inventory_of_class",
    "uuid_of_name",
]

#: Nodes of files that give no uuid get one that follows from the name, so that an import can be repeated.
_NAMESPACE = uuid.UUID("6ddc1d1c-2b80-5d0a-9e4e-5f3a1f6f0c53")


#: What more a node may have, and is kept for whoever asks: the core itself acts on none of it. Texts but for ``driver_info``,
#: ``instance_info`` and ``extra`` (objects) and ``maintenance`` (true or false).
DETAILS = frozenset(
    {
        *("driver", "driver_info", "conductor_group", "owner", "lessee", "description", "extra"),
        *("instance_uuid", "instance_info", "reservation", "provision_state", "target_provision_state", "power_state"),
        *("target_power_state", "maintenance", "maintenance_reason", "fault", "last_error"),
    }
)
#: How "no shard" is written in queries; in no case of letters a shard's name.
_NO_SHARD = frozenset({"none", "null"})
_LONGEST = 255


def check_shard(value: object, path: str = "shard") -> str:
    """A name that a shard can have, and that every query can ask for. Names are compared exactly, case included.

    :raises InvalidInput: it is no text, empty, longer than 255 characters, means "no shard", has a comma (queries list names with
        commas) or blanks at its ends (which some databases do not see).
    """
    if not isinstance(value, str):
        raise errors.InvalidInput(f"{path} is {value!r}; the name of a shard must be a text.", path=path)
    problem = ""
    if not value:
        problem = "is empty"
    elif len(value) > _LONGEST:
        problem = f"has {len(value)} characters, and {_LONGEST} are allowed"
    elif value.lower() in _NO_SHARD:
        problem = "means 'no shard' in queries"
    elif "," in value:
        problem = "has a comma, which separates shards in queries"
    elif value != value.strip():
        problem = "begins or ends with a blank"
    if problem:
        raise errors.InvalidInput(
            f"{path} {value[:80]!r} {problem}; choose another name, or leave it out for a node without a shard.",
            path=path,
        )
    return value


def inventory_of_class(resource_class: str) -> InventoryItem:
    """What a machine of a resource class has to give when it is given away whole: one ``CUSTOM_<CLASS>``, as nova reports it."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in resource_class.upper())
    name = letters if letters.startswith("CUSTOM_") else f"CUSTOM_{letters}"
    return InventoryItem(name, total=1, max_unit=1)


def uuid_of_name(name: str) -> str:
    """The uuid of a node that was given none."""
    return str(uuid.uuid5(_NAMESPACE, name))


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What an operator says of a node. ``host`` None: some live agent is chosen, or the present one kept.

    :param details: some of :data:`DETAILS`; what is left out stays as it is.
    """

    uuid: str
    name: str
    host: str | None = None
    shard: str | None = None
    resource_class: str | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    inventories: tuple[InventoryItem, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: a row of ``nodes``. Timestamps are microseconds since the Unix epoch."""

    uuid: str
    name: str
    host: str | None
    shard: str | None
    resource_class: str | None
    properties: Mapping[str, Any]
    generation: int
    created_at: int
    updated_at: int


@dataclass(frozen=True, slots=True)
class ShardMove:
    """A node shall go from one shard to another, if it is still in the first, unused and not reserved. None: no shard."""

    node: str
    source: str | None
    target: str | None


#: Writes that shall happen in the same transaction (an SQLAlchemy connection); may be called again for a retried one.
Along = Callable[[Any], None]


class FleetWriter(Protocol):
    """Writes nodes and their providers, always together; what plugins of the API are given."""

    def create(self, spec: NodeSpec) -> None:
        """Enrol a new node.

        :raises AlreadyExists: uuid, name or instance belong to another one.
        """

    def change(
        self,
        uuid: str,
        generation: int,
        changes: Mapping[str, Any],
        inventories: Sequence[InventoryItem] | None = None,
        *,
        along: Along | None = None,
    ) -> bool:
        """Change a node that still has this generation; False when it has not, and nothing was written.

        :param changes: column -> value; of ``name``, ``shard``, ``resource_class``, ``properties`` and :data:`DETAILS`.
        :param inventories: what its provider shall have from now on; None: what it has.
        :raises AlreadyExists: the name or the instance belongs to another node.
        :raises InUse: an inventory would vanish of which something is allocated.
        """

    def remove(self, uuid: str, *, along: Along | None = None) -> None:
        """Remove a node and its provider.

        :raises NotFound: there is none.
        :raises InUse: something is allocated of it.
        """
