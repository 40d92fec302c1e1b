# SPDX-License-Identifier: Apache-2.0
"""The interface of shard strategies, and the plain data that they exchange with the core.

A strategy only says where nodes should be. The core decides what of that happens: it keeps locked nodes in place, withholds what
is above the allowed number of moves, counts, journals, and writes each move on the condition that the node still is where the
plan found it.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar, NamedTuple

from moorage.extensions import ExtensionPoint

__all__ = ["API_VERSION", "STRATEGIES", "NodePlacer", "ShardNode", "ShardStrategy"]

API_VERSION = (1, 0)

_TEXTS = ("uuid", "name", "host", "resource_class", "conductor_group", "owner")


class ShardNode(NamedTuple):
    """A node as a strategy sees it. ``properties`` and ``extra`` are JSON texts: they are read only by those who ask."""

    uuid: str
    name: str
    host: str | None = None
    resource_class: str | None = None
    conductor_group: str = ""
    owner: str | None = None
    properties: str = "{}"
    extra: str = "{}"

    def attribute(self, path: str) -> Any:
        """A field (``conductor_group``), or something inside of one (``properties.rack``, ``extra.place.row``); None: not there.

        Costs nothing for fields, and the reading of the JSON for what lies inside.
        """
        field, *inside = path.split(".")
        if not inside:
            return getattr(self, field) if field in _TEXTS else None
        if field not in ("properties", "extra"):
            return None
        found: Any = json.loads(getattr(self, field) or "{}")
        for part in inside:
            if not isinstance(found, dict):
                return None
            found = found.get(part)
        return found


class ShardStrategy(abc.ABC):
    """Says which node belongs to which shard. Built once for each plan as ``plugin()``; never used by two threads at once."""

    api_version: ClassVar[tuple[int, int]]

    @abc.abstractmethod
    def assign(
        self,
        nodes: Sequence[ShardNode],
        shards: Sequence[str],
        current: Mapping[str, str | None],
        locked: Set[str],
        params: Mapping[str, Any],
    ) -> Mapping[str, str | None]:
        """Where nodes should be: uuid -> one of ``shards``; a node that is not in the answer stays where it is.

        Pure and deterministic: the same arguments give the same answer on every machine and in every run, whatever the order of
        ``nodes`` and ``shards``. It must not block, and should take no more than a second for 100,000 nodes.

        :param shards: the shards that shall be there in the end; at least one, no two alike. Nodes may be in others, or in none.
        :param current: uuid -> the present shard of every node; None: it has none.
        :param locked: uuids of nodes that stay where they are. The core keeps them there whatever the answer says; a strategy
            that balances counts them in.
        :param params: what the operator gave for this strategy (JSON data).
        :raises InvalidInput: a parameter is unknown or wrong, or what is asked cannot be.  Any other error refuses the plan,
            naming the plugin.
        """

    def explain(self, node: ShardNode, shard: str | None, params: Mapping[str, Any]) -> str:
        """Why the node belongs to the shard, in one short clause for the operator; an empty text: for no reason of its own.

        Asked after :meth:`assign`, for some of the nodes that move.
        """
        return ""


class NodePlacer(abc.ABC):
    """A further power of strategies that can place a new node without looking at the whole fleet."""

    @abc.abstractmethod
    def place_one(self, node: ShardNode, loads: Mapping[str, int], params: Mapping[str, Any]) -> str | None:
        """Returns the shard of a node that is being enrolled; None leaves it without one.

        :param loads: shard -> how many nodes are in it, for all shards that may be chosen.
        :raises InvalidInput: as for ``assign``.
        """


#: Chosen by ``[sharding] strategy``, and for a single plan by its request.
STRATEGIES: ExtensionPoint[ShardStrategy] = ExtensionPoint(
    "moorage.shard_strategies", ShardStrategy, API_VERSION, "[sharding] strategy"
)
