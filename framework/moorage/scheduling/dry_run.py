# SPDX-License-Identifier: Apache-2.0
"""Where instances would go, and why nodes are refused; claims nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moorage import errors
from moorage.scheduling.filter_and_weigh import Ranking
from moorage.scheduling.interface import InstanceRecord, NodeState, RequestSpec
from moorage.scheduling.ranker import Ranker
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage.scheduling.snapshot import Snapshot

__all__ = ["dry_run", "reasons_of_node"]

#: The most nodes for which a dry run reports which filter removed them.
_EXPLAINED = 100


def dry_run(
    ranker: Ranker,
    policy: SchedulingPolicy,
    spec: RequestSpec,
    count: int,
    *,
    record: Callable[[RequestSpec, NodeState], InstanceRecord],
    explain: bool = False,
) -> dict[str, Any]:
    """Returns where ``count`` instances alike would go, each on top of the ones before, with reasons on demand.

    :param record: makes the instance of a request on a node.
    """
    fleet = first = ranker.fleet()
    selections = []
    ranking: Ranking | None = None
    for number in range(count):
        one = ranker.with_members(spec, [f"dry-run-{other}" for other in range(number)])
        ranking = ranker.run(policy, one, fleet)
        if not len(ranking.rows):
            break
        node = fleet.nodes[int(ranking.rows[0])]
        others = [fleet.nodes[row] for row in ranking.rows[1 : 1 + policy.alternates]]
        selections.append(
            {
                "host": node.host,
                "node": node.name,
                "weight": round(float(ranking.weights[0]), 6),
                "alternates": [{"host": other.host, "node": other.name} for other in others],
            }
        )
        if number + 1 < count:
            row = int(ranking.rows[0])
            propose = fleet.proposal(row, one)
            holds = None if propose is None else propose(frozenset())
            fleet = fleet.with_placed(replace(record(one, node), uuid=f"dry-run-{number}", holds=holds), row)
    answer: dict[str, Any] = {"selections": selections, "asked": count, "found": len(selections)}
    if ranking is not None and (explain or len(selections) < count):
        answer["considered"] = ranking.considered
        answer["passed"] = ranking.passed
        answer["removed"] = ranking.removed
    if explain:
        one = ranker.with_members(spec, ())
        answer["refused_nodes"] = {
            first.nodes[row].name: why
            for row in range(min(first.size, _EXPLAINED))
            if (why := policy.pipeline.explain(policy.guard, first, row, one))
        }
    return answer


def reasons_of_node(
    ranker: Ranker, policy: SchedulingPolicy, spec: RequestSpec, fleet: Snapshot, node: str
) -> dict[str, str]:
    """Returns what each filter says of one node.

    :param node: its name or uuid.
    :raises InvalidInput: there is no such node.
    """
    rows = [row for row, each in enumerate(fleet.nodes) if node in (each.name, each.uuid)]
    if not rows:
        raise errors.InvalidInput(f"There is no node {node}; moorage host list shows all.")
    spec = ranker.with_members(spec, ())
    return policy.pipeline.explain(policy.guard, fleet, rows[0], spec)
