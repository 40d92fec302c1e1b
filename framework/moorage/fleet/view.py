# SPDX-License-Identifier: Apache-2.0
"""Nodes as the API shows them: their columns, whether their agent is down, and how many instances are on one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields
from typing import Any

from moorage.fleet.interface import Node
from moorage.fleet.nodes import NodeStore

__all__ = ["FIELDS", "NodeView"]

_DEAD = "dead"
#: What a list of nodes can show.
FIELDS = (*(each.name for each in fields(Node)), _DEAD)


@dataclass(frozen=True, slots=True)
class NodeView:
    """Shows nodes.

    ``dead`` says that the agent of the node is down, by the rule of claims and schedulers; null for a node without an agent.

    :param down: of several hosts, those without an agent that is up.
    :param counts: how many ``instances`` are on a node or move to it, and how many ``departures`` it has, by its uuid.
    """

    nodes: NodeStore
    down: Callable[[Collection[str]], Set[str]]
    counts: Callable[[str], Mapping[str, int]]

    def many(self, found: Sequence[Node], names: Collection[str] = FIELDS) -> list[dict[str, Any]]:
        """Shows some fields of nodes; one statement where ``dead`` is among them."""
        down: Set[str] = frozenset()
        if _DEAD in names:
            down = self.down({node.host for node in found if node.host is not None})
        shown = [{**asdict(node), _DEAD: None if node.host is None else node.host in down} for node in found]
        return [{name: value for name, value in each.items() if name in names} for each in shown]

    def one(self, name_or_uuid: str) -> dict[str, Any]:
        """Shows a node with the numbers of its instances and departures.

        :raises NotFound: there is none of that uuid or name.
        """
        node = self.nodes.get(name_or_uuid)
        (shown,) = self.many([node])
        return {**shown, **self.counts(node.uuid)}
