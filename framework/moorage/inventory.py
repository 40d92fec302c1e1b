# SPDX-License-Identifier: Apache-2.0
"""Inventories: the amounts of a resource class that a node declares, and that a provider has."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["InventoryItem"]


@dataclass(frozen=True, slots=True)
class InventoryItem:
    """How much of one resource class a node or another provider has, in the class's units (MEMORY_MB: MiB, DISK_GB: GiB)."""

    resource_class: str
    total: int
    reserved: int = 0
    min_unit: int = 1
    max_unit: int = 2**31 - 1
    step_size: int = 1
    allocation_ratio: float = 1.0

    @property
    def capacity(self) -> float:
        """What may be used in all: (total - reserved) * allocation_ratio."""
        return (self.total - self.reserved) * self.allocation_ratio
