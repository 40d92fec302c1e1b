# SPDX-License-Identifier: Apache-2.0
"""Sharding alone: somebody else's nodes spread over shards, as few of them moved as can be."""

from __future__ import annotations

from moorage.sharding.interface import STRATEGIES, ShardNode
from moorage.sharding.planner import make_plan

nodes = [ShardNode(f"uuid-{number:03}", f"node-{number:03}") for number in range(100)]
current: dict[str, str | None] = {node.uuid: "east" if number < 60 else "west" for number, node in enumerate(nodes)}
in_use = {node.uuid for node in nodes[:10]}

plan = make_plan(
    "balanced",
    STRATEGIES.load("balanced").build(),
    nodes,
    ["east", "west", "north"],
    current,
    locked=in_use,
)
for line in plan.lines:
    print(f"{line.name}: {line.before} -> {line.after}")
print(f"{len(plan.moves)} nodes move, no plan could do with less than {plan.lower_bound}")
print(f"nodes in use that move: {len(in_use & {move.node for move in plan.moves})}")

current |= {move.node: move.target for move in plan.moves}
again = make_plan("balanced", STRATEGIES.load("balanced").build(), nodes, ["east", "west", "north"], current)
print(f"planned again: {len(again.moves)} moves")
