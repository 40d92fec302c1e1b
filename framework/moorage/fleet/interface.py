# SPDX-License-Identifier: Apache-2.0
"""Nodes as plain data."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from moorage import errors
from moorage.inventory import InventoryItem

__all__ = [
    "DETAILS",
    "STATES",
    "Along",
    "FleetWriter",
    "InventoryItem",
    "Node",
    "NodeSpec",
    "ShardMove",
    "check_shard",
    "check_states",
    "describe_states",
    "inventory_of_class",
    "merged",
    "merged_inventories",
    "uuid_of_name",
]

#: Nodes of files that give no uuid get one that follows from the name, so that an import can be repeated.
_NAMESPACE = uuid.UUID("6ddc1d1c-2b80-5d0a-9e4e-5f3a1f6f0c53").bytes
#: Digit of the digest -> digit of the uuid, whose two upper bits say its variant (RFC 9562).
_VARIANT = {digit: "89ab"[int(digit, 16) % 4] for digit in "0123456789abcdef"}


#: Further columns of a node. Schedulers act on the flags of :data:`STATES` (see :mod:`moorage.fleet.states`); the core stores the
#: others and acts on none. All are texts, except ``driver_info``, ``instance_info`` and ``extra`` (objects) and the flags.
DETAILS = frozenset(
    {
        *("driver", "driver_info", "conductor_group", "owner", "lessee", "description", "extra"),
        *("instance_uuid", "instance_info", "reservation", "provision_state", "target_provision_state", "power_state"),
        *(
            "target_power_state",
            "maintenance",
            "maintenance_reason",
            "disabled",
            "disabled_reason",
            "draining",
            "draining_reason",
            "fault",
            "last_error",
        ),
    }
)
#: The states of a node that keep new instances away, and how sentences name them. Each is a column, with three more for its reason,
#: since when, and who began it.
STATES: Mapping[str, str] = {"maintenance": "in maintenance", "disabled": "disabled", "draining": "draining"}
#: How "no shard" is written in queries; in no case of letters a shard's name.
_NO_SHARD = frozenset({"none", "null"})
_LONGEST = 255


def check_shard(value: object, path: str = "shard") -> str:
    """Returns a name that a shard can have, and that every query can ask for. Names are compared exactly, case included.

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


def check_states(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of a request that changes states. A flag that is cleared clears its reason.

    :raises InvalidInput: a reason comes without its flag, or with a flag that is cleared.
    """
    found: dict[str, Any] = {}
    for flag in STATES:
        reason = given.get(f"{flag}_reason")
        if flag in given:
            found |= {flag: given[flag], f"{flag}_reason": reason if given[flag] else None}
        if reason is not None and not given.get(flag):
            raise errors.InvalidInput(
                f"{flag}_reason is given, but {flag} is not true. Send both: {flag}: true and {flag}_reason.",
                path=f"{flag}_reason",
            )
    return found


def describe_states(node: Any) -> str:
    """Why a node gets no new instances; empty when no flag is set.

    :param node: has the flags and reasons of :data:`STATES` as attributes.
    """
    found = []
    for flag, said in STATES.items():
        if getattr(node, flag):
            reason = getattr(node, f"{flag}_reason")
            found.append(f"{said} ({reason})" if reason else said)
    return " and ".join(found)


def inventory_of_class(resource_class: str) -> InventoryItem:
    """What a machine of a resource class has to give when it is given away whole: one ``CUSTOM_<CLASS>``, as nova reports it."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in resource_class.upper())
    name = letters if letters.startswith("CUSTOM_") else f"CUSTOM_{letters}"
    return InventoryItem(name, total=1, max_unit=1)


def uuid_of_name(name: str) -> str:
    """Returns the uuid of a node whose specification gives none: version 5 of RFC 9562, from the name.

    It is the result of ``uuid.uuid5`` for a third of its processor time: a large import calls it for each node.
    """
    digest = hashlib.sha1(_NAMESPACE + name.encode(), usedforsecurity=False).hexdigest()
    return f"{digest[:8]}-{digest[8:12]}-5{digest[13:16]}-{_VARIANT[digest[16]]}{digest[17:20]}-{digest[20:32]}"


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """Describes a node that is enrolled, or brought up to date. What a specification does not give stays as it is.

    :param host: None: a node that exists keeps its agent; another one is given an agent.
    :param properties: merged into those of the node; the value None removes a property.
    :param inventories: merged into those of the node, class by class.
    :param inventory_fields: resource class -> the fields of its inventory that were given; the other fields of an inventory that
        exists stay. A class without an entry gives all fields.
    :param removed_inventories: resource classes that the node shall not have any more.
    :param details: some of :data:`DETAILS`. ``extra`` is merged as ``properties`` are.
    :param keep_host: a node that exists must have this host already, or none.
    :param traits: traits that its provider gets; ``removed_traits``: that it loses. The others stay.
    """

    uuid: str
    name: str
    host: str | None = None
    shard: str | None = None
    resource_class: str | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    inventories: tuple[InventoryItem, ...] = ()
    inventory_fields: Mapping[str, frozenset[str]] = field(default_factory=dict)
    removed_inventories: frozenset[str] = frozenset()
    details: Mapping[str, Any] = field(default_factory=dict)
    keep_host: bool = False
    traits: frozenset[str] = frozenset()
    removed_traits: frozenset[str] = frozenset()


def merged(present: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the members of both objects; given members win, and a given None removes a member."""
    return {key: value for key, value in {**present, **given}.items() if value is not None}


def merged_inventories(spec: NodeSpec, present: Mapping[str, InventoryItem]) -> list[InventoryItem]:
    """Returns the inventories that a node has after ``spec`` was merged into its present inventories."""
    found = {name: item for name, item in present.items() if name not in spec.removed_inventories}
    for item in spec.inventories:
        old, given = present.get(item.resource_class), spec.inventory_fields.get(item.resource_class)
        found[item.resource_class] = (
            item if old is None or given is None else replace(old, **{name: getattr(item, name) for name in given})
        )
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: a row of ``nodes``. Timestamps are microseconds since the Unix epoch.

    :param disabled: an operator wants no new instances on it; ``maintenance``: it is being repaired; ``draining``: it is being
        emptied. Each keeps new instances and moves away; the instances on the node stay. Each has a reason, the time since when,
        and who began it (the user's id; None: not known).
    """

    uuid: str
    name: str
    host: str | None
    shard: str | None
    resource_class: str | None
    properties: Mapping[str, Any]
    generation: int
    created_at: int
    updated_at: int
    disabled: bool = False
    disabled_reason: str | None = None
    disabled_since: int | None = None
    maintenance: bool = False
    maintenance_reason: str | None = None
    maintenance_since: int | None = None
    disabled_by: str | None = None
    maintenance_by: str | None = None
    draining: bool = False
    draining_reason: str | None = None
    draining_since: int | None = None
    draining_by: str | None = None


@dataclass(frozen=True, slots=True)
class ShardMove:
    """Asks that a node goes from one shard to another. None: no shard.

    :param undoes: the move takes back an earlier move out of no shard, so it needs no more permission than that one.
    """

    node: str
    source: str | None
    target: str | None
    undoes: bool = False


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
        :raises InUse: something is on it, moves to it or holds resources of it; says what, and what to do.
        """
