# SPDX-License-Identifier: Apache-2.0
"""Nodes as plain data."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Inventory", "Node", "NodeSpec", "uuid_of_name"]

#: Nodes of files that give no uuid get one that follows from the name, so that an import can be repeated.
_NAMESPACE = uuid.UUID("6ddc1d1c-2b80-5d0a-9e4e-5f3a1f6f0c53")


def uuid_of_name(name: str) -> str:
    """The uuid of a node that was given none."""
    return str(uuid.uuid5(_NAMESPACE, name))


@dataclass(frozen=True, slots=True)
class Inventory:
    """How much of a resource class a node has, in the class's units."""

    resource_class: str
    total: int
    reserved: int = 0
    min_unit: int = 1
    max_unit: int = 2**31 - 1
    step_size: int = 1
    allocation_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What an operator says of a node. ``host`` None: some live agent is chosen, or the present one kept."""

    uuid: str
    name: str
    host: str | None = None
    shard: str | None = None
    resource_class: str | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    inventories: tuple[Inventory, ...] = ()


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
