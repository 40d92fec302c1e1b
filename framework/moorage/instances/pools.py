# SPDX-License-Identifier: Apache-2.0
"""What a node offers together with the pools that it shares, and which provider a claim on it takes each class of.

A class that a node has itself is taken of the node. Of a class that it lacks, the pool with the most room is shown to the
schedulers, with all that is used of it: so each of two nodes that share a pool offers what is left of the pool, and the pool is
counted once wherever providers are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moorage import errors
from moorage.allocation.interface import ProviderUsage

__all__ = ["EffectiveInventory", "claim_somewhere", "offer"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EffectiveInventory:
    """Capacity and use by class, and for each class of a pool the uuids of the pools that have it, the roomiest first."""

    capacity: Mapping[str, float]
    used: Mapping[str, int]
    pools: Mapping[str, tuple[str, ...]]


def offer(own: ProviderUsage, pools: Sequence[ProviderUsage] = ()) -> EffectiveInventory:
    """What a node offers with the pools that it may take of."""
    capacity = {item.resource_class: item.capacity for item in own.provider.inventories}
    used = dict(own.used)
    found: dict[str, list[tuple[float, str, float, int]]] = {}
    for pool in pools:
        for item in pool.provider.inventories:
            if item.resource_class not in capacity:
                taken = pool.used[item.resource_class]
                entry = (taken - item.capacity, pool.provider.uuid, item.capacity, taken)
                found.setdefault(item.resource_class, []).append(entry)
    for name, entries in found.items():
        _, _, capacity[name], used[name] = min(entries)
    return EffectiveInventory(
        capacity, used, {name: tuple(uuid for _, uuid, _, _ in sorted(each)) for name, each in found.items()}
    )


def claim_somewhere(
    node: str,
    wanted: Mapping[str, int],
    pools: Mapping[str, Sequence[str]],
    claim: Callable[[Mapping[str, Mapping[str, int]]], T],
) -> T:
    """Claim on a node: its own classes of itself, and each other class of the first pool that has room.

    :param pools: class -> pools, in the order in which they are tried.
    :param claim: takes provider -> class -> amount, all or nothing.
    :raises CapacityExceeded: no pool has room, or the node has not.
    """
    place = dict.fromkeys(wanted, 0)
    while True:
        resources: dict[str, dict[str, int]] = {}
        for name, amount in wanted.items():
            provider = pools[name][place[name]] if name in pools else node
            resources.setdefault(provider, {})[name] = amount
        try:
            return claim(resources)
        except (errors.CapacityExceeded, errors.ConstraintViolated, errors.NotFound) as error:
            refused = _refused(error, node, resources)
            further = [name for name in refused if place[name] + 1 < len(pools[name])]
            if not further:
                if refused and isinstance(error, errors.NotFound):
                    # A pool that was removed has no room; the next node may have another.
                    raise errors.CapacityExceeded(error.message, **error.details) from error
                raise
            for name in further:
                place[name] += 1


def _refused(error: errors.MoorageError, node: str, resources: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The classes that were asked of the pool that refused."""
    provider = str(error.details.get("provider", node))
    if provider == node or provider not in resources:
        return []
    name = str(error.details.get("resource_class"))
    return [name] if name in resources[provider] else list(resources[provider])
