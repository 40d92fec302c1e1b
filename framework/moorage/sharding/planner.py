# SPDX-License-Identifier: Apache-2.0
"""Turns the result of a strategy into a plan: which nodes move, which stay, and how balanced the shards are.

It computes only. :mod:`moorage.sharding.moving` writes the shard of a node, :mod:`moorage.sharding.placing` chooses that of a
new one.

Vocabulary: a node is *homeless* when it has no shard or one that shall not be there in the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moorage import errors, plugin_isolation
from moorage.extensions import origin_of
from moorage.read_only import frozen_mapping
from moorage.sharding.interface import ShardNode, ShardStrategy

__all__ = ["Move", "Plan", "ShardLine", "imbalance", "level", "lower_bound", "make_plan"]


@dataclass(frozen=True, slots=True)
class Move:
    """A node that changes its shard. ``reason`` is one clause for a person."""

    node: str
    source: str | None
    target: str | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ShardLine:
    """A shard in numbers of nodes. ``name`` None: the nodes without a shard. ``locked`` of them cannot be moved."""

    name: str | None
    before: int
    after: int
    incoming: int
    outgoing: int
    locked: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a rebalance would do.

    :param shards: those that shall be there in the end, sorted.
    :param lower_bound: the fewest moves that any strategy needs to make the shards as level as the locked nodes let them be, in
        numbers of nodes. A strategy that keeps groups together, or hashes, may need more, and one that is not level, fewer.
    :param held: moves that the strategy asked for and that are not in ``moves``, because the node is locked.
    :param withheld: moves that are left out because there were more than allowed; plan again after this one.
    :param imbalance_before: largest shard / mean, over ``shards``; 1.0 is level.
    """

    strategy: str
    shards: tuple[str, ...]
    params: Mapping[str, Any]
    moves: tuple[Move, ...]
    lines: tuple[ShardLine, ...]
    lower_bound: int
    locked: int
    held: int
    withheld: int
    imbalance_before: float
    imbalance_after: float

    @property
    def needed(self) -> bool:
        """Something should change."""
        return bool(self.moves)


def make_plan(
    name: str,
    strategy: ShardStrategy,
    nodes: Sequence[ShardNode],
    shards: Iterable[str],
    current: Mapping[str, str | None],
    *,
    locked: Set[str] = frozenset(),
    params: Mapping[str, Any] | None = None,
    max_moves: int | None = None,
    threshold: float = 0.0,
) -> Plan:
    """Ask the strategy, and make a plan of what it may have.

    :param max_moves: no more than so many; the homeless first, then from the fullest shards.
    :param threshold: do nothing while no node is homeless and the largest shard is no more than this part above the mean.
    :raises InvalidInput: no or repeated shards, wrong parameters.
    :raises PluginFailed: the strategy raised, or named a node or shard that does not exist.
    """
    wanted = tuple(sorted(shards))
    _check_request(wanted, max_moves, threshold)
    given = dict(params or {})
    before = Counter(current.values())
    fixed = Counter(current[uuid] for uuid in locked)
    homeless = sum(count - fixed[shard] for shard, count in before.items() if shard not in wanted)
    if homeless or imbalance(before, wanted) > 1.0 + threshold:
        answer = _ask(name, strategy, nodes, wanted, current, locked, given)
    else:
        answer = {}
    moves, held = _moves(name, answer, wanted, current, locked)
    withheld = 0
    if max_moves is not None and len(moves) > max_moves:
        withheld = len(moves) - max_moves
        moves = _first(moves, before, wanted)[:max_moves]
    after = before.copy()
    after.subtract(move.source for move in moves)
    after.update(move.target for move in moves)
    return Plan(
        strategy=name,
        shards=wanted,
        params=given,
        moves=tuple(_explained(name, strategy, nodes, moves, before, wanted, given)),
        lines=_lines(moves, before, after, fixed, wanted),
        lower_bound=lower_bound(before, fixed, wanted),
        locked=len(locked),
        held=held,
        withheld=withheld,
        imbalance_before=imbalance(before, wanted),
        imbalance_after=imbalance(after, wanted),
    )


def imbalance(counts: Mapping[str | None, int], shards: Sequence[str]) -> float:
    """Largest shard / mean; 1.0 when there is nothing in them."""
    total = sum(counts.get(shard, 0) for shard in shards)
    return max(counts.get(shard, 0) for shard in shards) * len(shards) / total if total else 1.0


def level(fixed: Mapping[Any, int], sizes: Mapping[Any, int], shards: Sequence[str], total: int) -> dict[str, int]:
    """Sizes of the shards, in all ``total``, that are as level as can be while none falls below its fixed nodes.

    Water is filled into vessels with raised floors. Of the shards that get one node more than others, as the total seldom divides,
    those are taken that are largest now, so that the fewest nodes must leave. Costs a search by halves over the sizes.
    """
    low, high = 0, total
    while low < high:
        middle = (low + high + 1) // 2
        if sum(max(fixed.get(shard, 0), middle) for shard in shards) <= total:
            low = middle
        else:
            high = middle - 1
    targets = {shard: max(fixed.get(shard, 0), low) for shard in shards}
    rest = total - sum(targets.values())
    takers = sorted(
        (shard for shard in shards if fixed.get(shard, 0) <= low), key=lambda shard: (-sizes.get(shard, 0), shard)
    )
    for shard in takers[: max(rest, 0)]:
        targets[shard] += 1
    return targets


def lower_bound(before: Mapping[str | None, int], fixed: Mapping[str | None, int], shards: Sequence[str]) -> int:
    """Returns the fewest moves to level shards: all homeless nodes, and what each shard has above its level."""
    inside = sum(before.get(shard, 0) for shard in shards)
    homeless = sum(count - fixed.get(shard, 0) for shard, count in before.items() if shard not in shards)
    targets = level(fixed, before, shards, inside + homeless)
    return homeless + sum(max(0, before.get(shard, 0) - targets[shard]) for shard in shards)


def _check_request(shards: Sequence[str], max_moves: int | None, threshold: float) -> None:
    if not shards:
        raise errors.InvalidInput("A plan needs at least one shard; name them, or how many.", path="shards")
    if len(set(shards)) < len(shards):
        twice = next(shard for shard, count in Counter(shards).items() if count > 1)
        raise errors.InvalidInput(f"The shard {twice} is named twice.", path="shards")
    if max_moves is not None and max_moves < 0:
        raise errors.InvalidInput(f"max_moves is {max_moves}; it must be 0 or more.", path="max_moves")
    if not 0.0 <= threshold < float("inf"):
        raise errors.InvalidInput(f"threshold is {threshold}; it must be 0 or more, 0.05 is 5 %.", path="threshold")


def _ask(
    name: str,
    strategy: ShardStrategy,
    nodes: Sequence[ShardNode],
    shards: Sequence[str],
    current: Mapping[str, str | None],
    locked: Set[str],
    params: Mapping[str, Any],
) -> Mapping[str, str | None]:
    try:
        with plugin_isolation.isolate_plugin_call(name):
            # Read-only: the planner compares the answer with these afterwards.
            return strategy.assign(
                tuple(nodes), tuple(shards), MappingProxyType(current), frozenset(locked), frozen_mapping(params)
            )
    except errors.InvalidInput:
        raise
    except Exception as error:
        raise _failed(name, f"({origin_of(strategy)}) raised {plugin_isolation.format_exception(error)}") from error


def _moves(
    name: str,
    answer: Mapping[str, str | None],
    shards: Sequence[str],
    current: Mapping[str, str | None],
    locked: Set[str],
) -> tuple[list[Move], int]:
    known, held, moves = set(shards), 0, []
    for uuid, target in answer.items():
        if uuid not in current:
            raise _failed(name, f"placed node {uuid}, which does not exist")
        if current[uuid] == target:
            continue
        if target not in known:
            raise _failed(name, f"put node {uuid} into {target!r}, which is not among the shards")
        if uuid in locked:
            held += 1
        else:
            moves.append(Move(uuid, current[uuid], target))
    # By node, so that the plan does not depend on the order of a plugin's dictionary.
    moves.sort(key=lambda move: move.node)
    return moves, held


def _failed(name: str, what: str) -> errors.PluginFailed:
    return errors.PluginFailed(
        f"The shard strategy {name} {what}. Choose another one with --strategy, or report it to the plugin's author.",
        group="moorage.shard_strategies",
        plugin=name,
    )


def _first(moves: Sequence[Move], before: Mapping[str | None, int], shards: Sequence[str]) -> list[Move]:
    """The moves that help most first: the homeless, then always one from the shard that is the fullest by then."""
    left: Counter[str | None] = Counter()
    ranked: list[tuple[int, int, str, Move]] = []
    known = set(shards)
    for move in moves:
        if move.source not in known:
            ranked.append((0, 0, move.node, move))
            continue
        ranked.append((1, left[move.source] - before.get(move.source, 0), move.node, move))
        left[move.source] += 1
    ranked.sort(key=lambda entry: entry[:3])
    return [entry[3] for entry in ranked]


def _explained(
    name: str,
    strategy: ShardStrategy,
    nodes: Sequence[ShardNode],
    moves: Sequence[Move],
    before: Mapping[str | None, int],
    shards: Sequence[str],
    params: Mapping[str, Any],
) -> Iterable[Move]:
    if not moves:
        return []
    own = type(strategy).explain is not ShardStrategy.explain
    by_uuid = {node.uuid: node for node in nodes} if own else {}
    known = set(shards)
    general: dict[str | None, str] = {
        source: _reason(source, before.get(source, 0), known) for source in {move.source for move in moves}
    }
    return [
        Move(
            move.node,
            move.source,
            move.target,
            (own and _asked_why(name, strategy, by_uuid[move.node], move.target, params)) or general[move.source],
        )
        for move in moves
    ]


def _asked_why(
    name: str, strategy: ShardStrategy, node: ShardNode, target: str | None, params: Mapping[str, Any]
) -> str:
    try:
        with plugin_isolation.isolate_plugin_call(name):
            return strategy.explain(node, target, params)
    except Exception as error:
        raise _failed(name, f"({origin_of(strategy)}) raised {plugin_isolation.format_exception(error)}") from error


def _reason(source: str | None, size: int, known: Set[str]) -> str:
    if source is None:
        return "it has no shard"
    if source not in known:
        return f"shard {source} shall be empty"
    return f"shard {source} has {size} nodes and gives some up"


def _lines(
    moves: Sequence[Move],
    before: Mapping[str | None, int],
    after: Mapping[str | None, int],
    fixed: Mapping[str | None, int],
    shards: Sequence[str],
) -> tuple[ShardLine, ...]:
    incoming = Counter(move.target for move in moves)
    outgoing = Counter(move.source for move in moves)
    names = sorted({name for name in (*before, *shards) if name is not None})
    everyone: list[str | None] = [*names, *([None] if before.get(None) else [])]
    return tuple(
        ShardLine(name, before.get(name, 0), after.get(name, 0), incoming[name], outgoing[name], fixed.get(name, 0))
        for name in everyone
    )
