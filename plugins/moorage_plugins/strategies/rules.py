# SPDX-License-Identifier: Apache-2.0
"""Shards by the operator's own rules, tried in order; what no rule takes is left alone or balanced."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.sharding.interface import NodePlacer, ShardNode, ShardStrategy
from moorage_plugins.strategies import params as reading
from moorage_plugins.strategies.balanced import level_by_count

__all__ = ["RulesStrategy"]

PARAMS = ("fallback", "pins", "rules")
_FALLBACKS = ("stay", "balanced")


class RulesStrategy(ShardStrategy, NodePlacer):
    """The first match decides.

    Parameters: ``pins``, name or uuid of a node -> shard, before all rules; ``rules``, a list of
    ``{"match": {path: wanted, ...}, "shard": name}`` in which all of ``match`` must hold. A wanted text is a regular expression
    for the whole value (``"name": "rack1-.*"``), any other JSON value is compared as it is (``"properties.gpus": 8``).
    ``fallback`` is for the nodes that nothing matches: ``stay`` (the default) leaves them where they are, ``balanced`` spreads
    them over the shards that no rule and no pin names, or over all when there is none, with the fewest moves.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    @override
    def assign(
        self,
        nodes: Sequence[ShardNode],
        shards: Sequence[str],
        current: Mapping[str, str | None],
        locked: Set[str],
        params: Mapping[str, Any],
    ) -> Mapping[str, str | None]:
        table = _Table(params)
        strange = sorted(table.named - set(shards))
        if strange:
            raise errors.InvalidInput(
                f"The rules put nodes into {', '.join(strange)}, which is not among the shards; name it too.",
                path="params",
            )
        found: dict[str, str | None] = {}
        unmatched = []
        for node in nodes:
            shard = table.match(node)
            if shard is not None:
                found[node.uuid] = shard
            else:
                unmatched.append(node.uuid)
        if table.fallback == "balanced":
            free = sorted(set(shards) - table.named)
            if free:
                found |= level_by_count(unmatched, free, current, locked)
            else:
                # Those that rules have placed count, and stay.
                everyone = {**current, **{uuid: shard for uuid, shard in found.items() if uuid not in locked}}
                uuids = [node.uuid for node in nodes]
                found |= level_by_count(uuids, sorted(shards), everyone, locked | found.keys())
        return found

    @override
    def place_one(self, node: ShardNode, loads: Mapping[str, int], params: Mapping[str, Any]) -> str | None:
        table = _Table(params)
        shard = table.match(node)
        if shard is not None or table.fallback == "stay":
            return shard
        free = {name: load for name, load in loads.items() if name not in table.named} or loads
        return min(free, key=lambda name: (free[name], name)) if free else None

    @override
    def explain(self, node: ShardNode, shard: str | None, params: Mapping[str, Any]) -> str:
        return _Table(params).why(node)


@dataclass(frozen=True, slots=True)
class _Rule:
    tests: tuple[tuple[str, Callable[[Any], bool]], ...]
    shard: str

    def takes(self, node: ShardNode) -> bool:
        return all(test(node.attribute(path)) for path, test in self.tests)


class _Table:
    def __init__(self, params: Mapping[str, Any]) -> None:
        reading.known("rules", params, PARAMS)
        pins = params.get("pins", {})
        if not isinstance(pins, dict) or not all(isinstance(shard, str) and shard for shard in pins.values()):
            raise errors.InvalidInput("pins must be an object: name or uuid of a node -> shard.", path="params/pins")
        rules = params.get("rules", [])
        if not isinstance(rules, list):
            raise errors.InvalidInput("rules must be a list.", path="params/rules")
        self._pins: Mapping[str, str] = pins
        self._rules = [_rule(number, rule) for number, rule in enumerate(rules)]
        self.fallback = reading.text(params, "fallback", "stay")
        if self.fallback not in _FALLBACKS:
            raise errors.InvalidInput(
                f"fallback is {self.fallback!r}; it must be one of {', '.join(_FALLBACKS)}.", path="params/fallback"
            )
        self.named = set(pins.values()) | {rule.shard for rule in self._rules}

    def match(self, node: ShardNode) -> str | None:
        pinned = self._pins.get(node.uuid) or self._pins.get(node.name)
        if pinned:
            return pinned
        return next((rule.shard for rule in self._rules if rule.takes(node)), None)

    def why(self, node: ShardNode) -> str:
        if self._pins.get(node.uuid) or self._pins.get(node.name):
            return "it is pinned"
        number = next((number for number, rule in enumerate(self._rules, start=1) if rule.takes(node)), None)
        return "" if number is None else f"rule {number} matches it"


def _rule(number: int, given: Any) -> _Rule:
    path = f"params/rules/{number}"
    if not isinstance(given, dict) or set(given) != {"match", "shard"} or not isinstance(given["match"], dict):
        raise errors.InvalidInput(
            f'{path} must be an object like {{"match": {{"name": "rack1-.*"}}, "shard": "rack1"}}.', path=path
        )
    if not isinstance(given["shard"], str) or not given["shard"]:
        raise errors.InvalidInput(f"{path}/shard must be the name of a shard.", path=f"{path}/shard")
    return _Rule(
        tuple((str(key), _test(f"{path}/match/{key}", value)) for key, value in given["match"].items()), given["shard"]
    )


def _test(path: str, wanted: Any) -> Callable[[Any], bool]:
    if not isinstance(wanted, str):
        return lambda value: type(value) is type(wanted) and bool(value == wanted)
    try:
        match = re.compile(wanted).fullmatch
    except re.error as error:
        raise errors.InvalidInput(f"{path} is no regular expression: {error}.", path=path) from error
    return lambda value: isinstance(value, str) and match(value) is not None
