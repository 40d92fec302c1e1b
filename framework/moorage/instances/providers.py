# SPDX-License-Identifier: Apache-2.0
"""What a node offers with the providers below it and the pools that it shares, and claims of several providers.

Schedulers see a node as one sum of its own provider and all below it. Of a class that none of them has, they see the pool with the
most room, with all that is used of it: so each of two nodes that share a pool offers what is left of the pool, and the pool is
counted once wherever providers are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from moorage import errors
from moorage.allocation.interface import AllocationStore, PoolSource, ProviderCatalogue, ProviderUsage, TreeSource
from moorage.read_only import frozen_mapping
from moorage.scheduling.interface import Holds, Propose, ProviderState

__all__ = ["claim_of_node", "no_proposal", "offer", "read_providers"]

T = TypeVar("T")
#: Providers that one statement names at most.
_AT_ONCE = 1000
#: How often the providers of one node are tried for one claim.
_TRIES = 16


def offer(providers: Sequence[ProviderState]) -> tuple[dict[str, float], dict[str, int]]:
    """Returns the capacity and use by class that a node offers with the providers below it and its pools.

    :param providers: the node's own one first.
    """
    capacity: dict[str, float] = {}
    used: dict[str, int] = {}
    pools: dict[str, list[tuple[float, str, float, int]]] = {}
    for each in providers:
        for item in each.inventories:
            name, taken = item.resource_class, each.used.get(item.resource_class, 0)
            if each.shared:
                pools.setdefault(name, []).append((taken - item.capacity, each.uuid, item.capacity, taken))
            else:
                capacity[name] = capacity.get(name, 0) + item.capacity
                used[name] = used.get(name, 0) + taken
    for name, entries in pools.items():
        if name not in capacity:
            _, _, capacity[name], used[name] = min(entries)
    return capacity, used


def read_providers(
    store: AllocationStore, nodes: Sequence[ProviderUsage], is_node: Callable[[str], bool] = lambda uuid: False
) -> Mapping[str, tuple[ProviderState, ...]]:
    """Reads the providers of nodes: the own one, those below it, and the pools that any of them takes of.

    :param nodes: the own providers. One that is no root of a tree has none below it.
    :param is_node: whether a provider below another is the one of another node, which has what is below it.
    """
    below: Mapping[str, tuple[ProviderUsage, ...]] = {}
    if isinstance(store, TreeSource):
        below = store.nested([each.provider.uuid for each in nodes])
    trees = {each.provider.uuid: [each, *_of_tree(below.get(each.provider.uuid, ()), is_node)] for each in nodes}
    uuids = [each.provider.uuid for tree in trees.values() for each in tree]
    shared: Mapping[str, Sequence[ProviderUsage]] = {}
    if isinstance(store, PoolSource):
        shared = _in_parts(store.pools, uuids)
    pools = {pool.provider.uuid: pool for found in shared.values() for pool in found}
    traits: Mapping[str, frozenset[str]] = {}
    if isinstance(store, ProviderCatalogue):
        traits = _in_parts(store.traits_of, [*uuids, *pools])
    common = {uuid: _state(pool, traits, shared=True) for uuid, pool in pools.items()}
    found = {}
    for uuid, tree in trees.items():
        own = {each.provider.uuid for each in tree}
        near = dict.fromkeys(pool.provider.uuid for each in own for pool in shared.get(each, ()))
        found[uuid] = (
            *(_state(each, traits) for each in tree),
            *(common[pool] for pool in sorted(near) if pool not in own),
        )
    return found


def _of_tree(below: Sequence[ProviderUsage], is_node: Callable[[str], bool]) -> list[ProviderUsage]:
    """Returns the providers below a node, without the subtrees of other nodes."""
    others = {each.provider.uuid for each in below if is_node(each.provider.uuid)}
    while others:
        more = {each.provider.uuid for each in below if each.provider.parent in others} - others
        if not more:
            break
        others |= more
    return [each for each in below if each.provider.uuid not in others]


def _state(usage: ProviderUsage, traits: Mapping[str, frozenset[str]], *, shared: bool = False) -> ProviderState:
    provider = usage.provider
    return ProviderState(
        provider.uuid,
        provider.parent,
        provider.inventories,
        frozen_mapping(usage.used),
        traits.get(provider.uuid, _NO_TRAITS),
        shared,
    )


_NO_TRAITS: frozenset[str] = frozenset()


def _in_parts(read: Callable[[Sequence[str]], Mapping[str, T]], uuids: Sequence[str]) -> Mapping[str, T]:
    found: dict[str, T] = {}
    for first in range(0, len(uuids), _AT_ONCE):
        found |= read(uuids[first : first + _AT_ONCE])
    return found


def claim_of_node(
    node: str,
    wanted: Mapping[str, int],
    propose: Propose | None,
    claim: Callable[[Holds], T],
) -> tuple[T, Holds | None]:
    """Claim on a node: all of its own provider, or what is proposed. Returns the answer, and which proposal was taken.

    What a provider refuses is not asked of that provider again; a bounded number of proposals is tried.

    :param claim: takes provider -> class -> amount, all or nothing.
    :raises CapacityExceeded: no proposal was taken.
    :raises ConstraintViolated: an amount is refused for its size, or no providers of the node can give what is asked for.
    """
    if propose is None:
        return claim({node: dict(wanted)}), None
    refused: set[tuple[str, str]] = set()
    last: errors.MoorageError = no_proposal(node)
    for _ in range(_TRIES):
        proposed = propose(frozenset(refused))
        if proposed is None:
            break
        try:
            return claim(proposed), proposed
        except (errors.CapacityExceeded, errors.ConstraintViolated, errors.NotFound) as error:
            pairs = _refused(error, node, proposed)
            if not pairs:
                raise
            refused |= pairs
            last = error
    if isinstance(last, errors.NotFound):
        # A provider that was removed has no room; the next node may have another.
        raise errors.CapacityExceeded(last.message, **last.details) from last
    raise last


def no_proposal(node: str) -> errors.ConstraintViolated:
    """Returns the error of a node whose providers do not have the requested resources."""
    return errors.ConstraintViolated(
        f"The providers of node {node} cannot give all request groups what they ask for.", provider=node
    )


def _refused(error: errors.MoorageError, node: str, proposed: Holds) -> set[tuple[str, str]]:
    """Returns the pairs of provider and class that the error is about; none when it is about the whole node."""
    provider, name = error.details.get("provider"), error.details.get("resource_class")
    taken = proposed.get(str(provider), {})
    if name in taken:
        return {(str(provider), str(name))}
    return set() if provider == node else {(str(provider), each) for each in taken}
