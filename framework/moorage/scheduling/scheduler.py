# SPDX-License-Identifier: Apache-2.0
"""Selecting nodes from memory, and claiming them one by one until one holds."""

from __future__ import annotations

import collections
import random as random_module
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from oslo_log import log as logging

from moorage import errors
from moorage.clock import Clock
from moorage.scheduling.fleet_view import FleetView, Snapshot
from moorage.scheduling.guard import Guard
from moorage.scheduling.interface import (
    Claimer,
    ClaimResult,
    FleetSource,
    InstanceRecord,
    NodeState,
    RequestSpec,
    Rows,
)
from moorage.scheduling.pipeline import Pipeline, Ranking

__all__ = ["Decision", "Scheduler", "Selection"]

LOG = logging.getLogger(__name__)

#: A refusal is not believed when the view is older than this many seconds: it is read anew first.
_REFUSAL_AGE = 1.0
#: How often ``max_attempts`` nodes are tried for one request, with the fleet ranked anew in between.
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Selection:
    """A node that was claimed for an instance. ``repeated``: an earlier try of the same request had done it."""

    record: InstanceRecord
    node_uuid: str
    repeated: bool
    attempts: int


@dataclass(slots=True)
class Decision:
    """What was decided of a request, for later questions."""

    request_id: str
    instance_uuid: str
    outcome: str
    considered: int = 0
    removed: dict[str, int] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    refusals: list[dict[str, Any]] = field(default_factory=list)
    host: str = ""
    node: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "request_id": self.request_id,
            "instance_uuid": self.instance_uuid,
            "outcome": self.outcome,
            "considered": self.considered,
            "removed": dict(self.removed),
            "skipped": list(self.skipped),
            "claims_refused": list(self.refusals),
            "host": self.host,
            "node": self.node,
        }


@dataclass(frozen=True, slots=True)
class Policy:
    """What a reload may change, taken once for each request."""

    pipeline: Pipeline
    guard: Guard
    host_subset_size: int
    max_attempts: int


class Scheduler:
    """Selects nodes. Safe for use by several threads; no method reads a store but to repair a stale refusal.

    :param policy: gives the policy in force; called once for each request.
    :param placed: puts what was claimed into the view.
    :param freshen: called with the hosts before each ranking: reads the instances of those that do not tell of theirs.
    """

    def __init__(
        self,
        view: FleetView,
        source: FleetSource,
        claimer: Claimer,
        policy: Callable[[], Policy],
        clock: Clock,
        random: random_module.Random,
        *,
        decisions: int = 2000,
        placed: Callable[[InstanceRecord], None] | None = None,
        freshen: Callable[[Mapping[str, object]], object] | None = None,
    ) -> None:
        self.view = view
        self._put = placed or view.put
        self._freshen = freshen
        self._source = source
        self._claimer = claimer
        self._policy = policy
        self._clock = clock
        self._random = random
        self._refreshing = threading.Lock()
        self._refreshed_at = -1e9
        self._decisions: collections.OrderedDict[str, Decision] = collections.OrderedDict()
        self._decisions_kept = decisions
        self._decisions_lock = threading.Lock()

    def refresh(self, *, older_than: float = 0.0) -> bool:
        """Read the nodes anew, unless that was done within ``older_than`` seconds; True when it was done now."""
        asked_at = self._clock.monotonic()
        with self._refreshing:
            if self._refreshed_at > asked_at - older_than or self._refreshed_at > asked_at:
                return False
            began = self._clock.monotonic()
            held = self.view.held()
            self.view.set_nodes(sorted(self._source.nodes(), key=lambda node: node.uuid), held=held)
            self._refreshed_at = began
            return True

    def place(self, spec: RequestSpec, request_id: str) -> Selection:
        """Select a node and claim it; the next best when a claim is refused, a bounded number of times.

        :raises NoValidHost: no node can take it; says why.
        :raises PluginFailed: a plugin raised.
        :raises PluginTimeout: a plugin hung; this process is about to end.
        """
        policy = self._policy()
        return policy.guard.request(lambda: self._place(policy, spec, request_id))

    def select(self, spec: RequestSpec, count: int, *, explain: bool = False) -> dict[str, Any]:
        """Where ``count`` instances alike would go, without claiming anything; with reasons on demand.

        Each is placed on top of the ones before.
        """
        policy = self._policy()
        return policy.guard.request(lambda: self._dry_run(policy, spec, count, explain))

    def decision(self, request_id: str) -> dict[str, Any]:
        """What this scheduler decided of a request.

        :raises NotFound: it was not asked, or has forgotten.
        """
        with self._decisions_lock:
            found = self._decisions.get(request_id)
        if found is None:
            raise errors.NotFound(f"This scheduler knows of no decision on request {request_id}.")
        return found.to_json()

    # -- deciding -------------------------------------------------------------------------------------------------

    def _place(self, policy: Policy, spec: RequestSpec, request_id: str) -> Selection:
        decision = Decision(request_id, spec.instance_uuid, "refused")
        self._remember(decision)
        refused: set[str] = set()
        while True:
            # Ranked anew after each round of refusals: what others claimed has come to be known meanwhile.
            spec = self._with_members(spec)
            fleet, ranking = self._rank(policy, spec, refused)
            decision.considered, decision.removed, decision.skipped = (
                ranking.considered,
                ranking.removed,
                ranking.skipped,
            )
            candidates = self._candidates(policy, ranking)
            for row in candidates:
                node = fleet.nodes[row]
                try:
                    result = self._claimer.claim(spec, node.uuid, node.host, request_id)
                except (errors.CapacityExceeded, errors.ConstraintViolated) as error:
                    decision.refusals.append({"node": node.name, **error.details})
                    refused.add(node.uuid)
                    continue
                return self._placed(spec, node, result, decision)
            if not candidates or len(refused) >= policy.max_attempts * _ROUNDS:
                raise self._refusal(fleet, ranking, spec, decision)

    def _placed(self, spec: RequestSpec, node: NodeState, result: ClaimResult, decision: Decision) -> Selection:
        if result.node_uuid != node.uuid:
            # An earlier try of the same request had claimed another node.
            fleet = self.view.snapshot()
            row = fleet.row_of_node.get(result.node_uuid)
            node = node if row is None else fleet.nodes[row]
        flavor = spec.flavor
        record = InstanceRecord(
            spec.instance_uuid,
            node.host,
            node.name,
            flavor.flavorid,
            flavor.resources,
            spec.project_id,
            busy=True,
            server_group="" if spec.server_group is None else spec.server_group.name,
        )
        self._put(record)
        decision.outcome, decision.host, decision.node = "placed", node.host, node.name
        return Selection(record, node.uuid, result.repeated, len(decision.refusals) + 1)

    def _rank(self, policy: Policy, spec: RequestSpec, refused: Collection[str]) -> tuple[Snapshot, Ranking]:
        """Rank without the nodes that refused this request; a fleet without any candidate is read anew first."""
        fleet = self._fleet()
        ranking = self._run(policy, fleet, spec, refused)
        if not len(ranking.rows) and self.refresh(older_than=_REFUSAL_AGE):
            fleet = self.view.snapshot()
            ranking = self._run(policy, fleet, spec, refused)
        return fleet, ranking

    def _run(self, policy: Policy, fleet: Snapshot, spec: RequestSpec, refused: Collection[str] = ()) -> Ranking:
        rows = self._asked_for(fleet, spec, refused)
        return policy.pipeline.run(
            policy.guard, fleet, rows, spec, most=max(policy.max_attempts, policy.host_subset_size)
        )

    def _fleet(self) -> Snapshot:
        """The fleet as a request may see it: also what nobody tells of is not too old."""
        fleet = self.view.snapshot()
        if self._freshen is not None and self._freshen(fleet.rows_of_host):
            fleet = self.view.snapshot()
        return fleet

    def _candidates(self, policy: Policy, ranking: Ranking) -> list[int]:
        """Rows to try, best first; the first ``host_subset_size`` in random order."""
        rows = [int(row) for row in ranking.rows[: policy.max_attempts]]
        size = min(policy.host_subset_size, len(rows))
        if size > 1:
            head = rows[:size]
            self._random.shuffle(head)
            rows = head + rows[size:]
        return rows

    def _asked_for(self, fleet: Snapshot, spec: RequestSpec, refused: Collection[str] = ()) -> Rows:
        """The rows that the request itself allows.

        :raises InvalidInput: it names hosts or nodes that do not exist.
        """
        rows: Rows = fleet.all_rows
        hosts = [*spec.force_hosts, *([spec.requested_host] if spec.requested_host else [])]
        nodes = [*spec.force_nodes, *([spec.requested_node] if spec.requested_node else [])]
        if hosts:
            unknown = [host for host in hosts if host not in fleet.rows_of_host]
            if unknown:
                raise errors.InvalidInput(f"There is no host {', '.join(unknown)}; moorage host list shows all.")
            rows = np.intersect1d(rows, np.concatenate([fleet.rows_of_host[host] for host in hosts]))
        if nodes:
            wanted = set(nodes)
            named = [row for row in rows if fleet.nodes[row].name in wanted or fleet.nodes[row].uuid in wanted]
            if not named:
                raise errors.InvalidInput(f"There is no node {', '.join(nodes)} on the hosts that were asked for.")
            rows = np.array(named, dtype=np.intp)
        if refused:
            gone = [row for uuid in refused if (row := fleet.row_of_node.get(uuid)) is not None]
            rows = np.setdiff1d(rows, np.array(gone, dtype=np.intp), assume_unique=True)
        ignored = [fleet.rows_of_host[host] for host in spec.ignore_hosts if host in fleet.rows_of_host]
        if ignored:
            rows = np.setdiff1d(rows, np.concatenate(ignored), assume_unique=True)
        return rows

    def _refusal(self, fleet: Snapshot, ranking: Ranking, spec: RequestSpec, decision: Decision) -> errors.NoValidHost:
        reasons = {name: count for name, count in ranking.removed.items() if count}
        refused = [refusal["provider"] for refusal in decision.refusals if "provider" in refusal]
        short = _shortest(fleet, spec, refused)
        if not fleet.size:
            summary = "the fleet has no nodes"
        elif len(ranking.rows):
            summary = "others claimed every node that was tried first"
        elif short:
            summary = f"no node has enough {short} free"
        else:
            last = max(reasons, key=lambda name: reasons[name], default="the request's own hosts and nodes")
            summary = f"filter {last} removed most nodes"
        if decision.refusals:
            reasons["refused claims"] = len(decision.refusals)
        decision.outcome = f"refused: {summary}"
        return errors.NoValidHost(
            f"No node of {ranking.considered} can take the instance: {summary}.",
            reasons=reasons,
            summary=summary,
            considered=ranking.considered,
            request_id=decision.request_id,
        )

    def _with_members(self, spec: RequestSpec) -> RequestSpec:
        """The request with those members of its server group added that the view knows."""
        group = spec.server_group
        if group is None:
            return spec
        known = self.view.group_members(spec.project_id, group.name) | set(group.members)
        members = tuple(sorted(known - {spec.instance_uuid}))
        return replace(spec, server_group=replace(group, members=members))

    def _dry_run(self, policy: Policy, spec: RequestSpec, count: int, explain: bool) -> dict[str, Any]:
        spec = self._with_members(spec)
        fleet = first = self._fleet()
        selections = []
        ranking: Ranking | None = None
        for number in range(count):
            ranking = self._run(policy, fleet, spec)
            if not len(ranking.rows):
                break
            node = fleet.nodes[int(ranking.rows[0])]
            selections.append({"host": node.host, "node": node.name, "weight": round(float(ranking.weights[0]), 6)})
            record = InstanceRecord(
                f"dry-run-{number}",
                node.host,
                node.name,
                spec.flavor.flavorid,
                spec.flavor.resources,
                spec.project_id,
            )
            fleet = fleet.with_placed(record, int(ranking.rows[0]))
            if spec.server_group is not None:
                group = spec.server_group
                spec = replace(spec, server_group=replace(group, members=(*group.members, record.uuid)))
        answer: dict[str, Any] = {"selections": selections, "asked": count, "found": len(selections)}
        if ranking is not None and (explain or len(selections) < count):
            answer["considered"] = ranking.considered
            answer["removed"] = ranking.removed
        if explain:
            answer["refused_nodes"] = {
                first.nodes[row].name: why
                for row in range(min(first.size, 100))
                if (why := policy.pipeline.explain(policy.guard, first, row, spec))
            }
        return answer

    def _remember(self, decision: Decision) -> None:
        with self._decisions_lock:
            self._decisions[decision.request_id] = decision
            while len(self._decisions) > self._decisions_kept:
                self._decisions.popitem(last=False)


def _shortest(fleet: Snapshot, spec: RequestSpec, refused: Collection[str]) -> str:
    """Resource classes of which no node that is available has enough free, or no node has all of them together."""
    if not fleet.size:
        return ""
    usable = fleet.available.copy()
    usable[[fleet.row_of_node[uuid] for uuid in refused if uuid in fleet.row_of_node]] = False
    enough = {name: (fleet.free(name) >= amount) & usable for name, amount in spec.flavor.resources.items()}
    lacking = sorted(name for name, rows in enough.items() if not rows.any())
    if lacking:
        return " and ".join(lacking)
    together: Any = np.logical_and.reduce(list(enough.values()))
    return "" if together.any() else " and ".join(sorted(enough)) + " together"


def hosts_json(fleet: Snapshot, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Nodes as the API shows them."""
    shown = []
    for row in rows:
        node = fleet.nodes[row]
        state = fleet.host_state(row)
        capacity = state.capacity
        free = state.free
        shown.append(
            {
                "host": node.host,
                "node": node.name,
                "uuid": node.uuid,
                "up": node.up,
                "enabled": node.enabled,
                "can_host": node.can_host,
                "instances": state.num_instances,
                "capacity": capacity,
                "used": {name: capacity[name] - free[name] for name in capacity},
            }
        )
    return shown
