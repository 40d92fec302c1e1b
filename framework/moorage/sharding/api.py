# SPDX-License-Identifier: Apache-2.0
"""Serves shards in ``/scheduling/v1``: counts, assignment, plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from moorage import errors
from moorage.db import Database
from moorage.fleet.interface import ShardMove, check_shard
from moorage.fleet.nodes import NodeStore
from moorage.http.routes import PolicyRule, Request, Response, Route
from moorage.sharding.checks import agents_of_shards, problems
from moorage.sharding.moving import ShardMover
from moorage.sharding.plans import LOCKS, PlanRequest, Plans, Progress

__all__ = ["POLICIES", "routes"]

POLICIES = (
    PolicyRule("scheduling:shards:get", "rule:system_reader", "See shards, plans and journals.", ("system",)),
    PolicyRule("scheduling:shards:plan", "rule:system_member", "Make plans; changes no node.", ("system",)),
    PolicyRule("scheduling:shards:update", "rule:system_admin", "Change the shard of nodes.", ("system",)),
)

_NAME = {"type": "string", "minLength": 1, "maxLength": 255}
_PLAN = {
    "type": "object",
    "properties": {
        "strategy": _NAME,
        "shards": {
            "oneOf": [
                {"type": "integer", "minimum": 1, "maximum": 100_000},
                {"type": "array", "items": _NAME, "minItems": 1, "maxItems": 100_000},
            ]
        },
        "params": {"type": "object"},
        "locks": {"type": "array", "items": {"enum": list(LOCKS)}},
        "locked": {"type": "array", "items": _NAME, "maxItems": 100_000},
        "max_moves": {"type": "integer", "minimum": 0},
        "threshold": {"type": "number", "minimum": 0},
        "include_instances": {"type": "boolean"},
    },
    "additionalProperties": False,
}
_LIMIT = {
    "type": "object",
    "properties": {"limit": {"type": "integer", "minimum": 1, "maximum": 10_000}},
    "additionalProperties": False,
}
_JOURNAL = {
    "type": "object",
    "properties": {
        "status": {"enum": ["pending", "moved", "conflict", "undone", "stuck"]},
        "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
        "after": {"type": "integer", "minimum": 0},
    },
    "additionalProperties": False,
}
_ASSIGN = {
    "type": "object",
    "properties": {
        "assignments": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1000,
            "items": {
                "type": "object",
                "properties": {
                    "node": _NAME,
                    "shard": {"type": ["string", "null"]},
                    "was": {"type": ["string", "null"]},
                },
                "required": ["node", "shard"],
                "additionalProperties": False,
            },
        },
        "include_instances": {
            "type": "boolean",
            "description": "Also move nodes with instances from shard to shard while their agents live.",
        },
    },
    "required": ["assignments"],
    "additionalProperties": False,
}
_ANY = {"type": "object"}


class _Handlers:
    def __init__(
        self,
        database: Database,
        nodes: NodeStore,
        plans: Plans,
        mover: ShardMover,
        reassigned: Callable[[str, int, int], None],
    ) -> None:
        self._database = database
        self._mover = mover
        self._nodes = nodes
        self._plans = plans
        self._reassigned = reassigned

    def shards(self, request: Request) -> Response:
        """``GET /shards``."""
        with self._database.read() as tx:
            agents = agents_of_shards(tx)
        counts = self._nodes.shards()
        counts += [(name, 0) for name in sorted(filter(None, agents)) if name not in dict(counts)]
        shown = [
            {"name": name, "count": count, "agents": list(agents.get(name if name in agents else None, ()))}
            for name, count in counts
        ]
        return Response(200, {"shards": shown})

    def check(self, request: Request) -> Response:
        """``GET /shards/check``."""
        found = problems(self._database)
        return Response(200, {"ok": not found, "problems": found})

    def assign(self, request: Request) -> Response:
        """``POST /shards/assign``."""
        moves = _moves(self._nodes, request.body["assignments"])

        def work(tx: Any) -> list[dict[str, Any]]:
            happened = self._mover.move(tx, moves, include_instances=request.body.get("include_instances", False))
            lost = [move for move, done in zip(moves, happened, strict=True) if not done]
            return [{"node": node, "reason": reason} for node, reason in self._mover.reasons(tx, lost).items()]

        conflicts = self._database.run(work)
        self._reassigned("", len(moves) - len(conflicts), len(conflicts))
        return Response(200, {"moved": len(moves) - len(conflicts), "conflicts": conflicts})

    def make(self, request: Request) -> Response:
        """``POST /shards/plans``."""
        stored = self._plans.make(PlanRequest(**request.body))
        return Response(201, asdict(stored), {"Location": f"{request.prefix}/shards/plans/{stored.uuid}"})

    def list_plans(self, request: Request) -> Response:
        """``GET /shards/plans``."""
        return Response(200, {"plans": [asdict(each) for each in self._plans.list()]})

    def show(self, request: Request) -> Response:
        """``GET /shards/plans/{plan}``."""
        return Response(200, asdict(self._plans.get(request.path_params["plan"])))

    def journal(self, request: Request) -> Response:
        """``GET /shards/plans/{plan}/moves``."""
        query = dict(request.query)
        limit = query.pop("limit", 1000)
        found = self._plans.moves(request.path_params["plan"], limit=limit, **query)
        following = found[-1].id if len(found) == limit else None
        shown = [{**row._mapping, "node": row.node_uuid} for row in found]
        return Response(200, {"moves": shown, "next_after": following})

    def apply(self, request: Request) -> Response:
        """``POST /shards/plans/{plan}/apply``."""
        return self._carried_out(request, self._plans.apply)

    def rollback(self, request: Request) -> Response:
        """``POST /shards/plans/{plan}/rollback``."""
        return self._carried_out(request, self._plans.rollback)

    def _carried_out(self, request: Request, how: Callable[[str, int], Progress]) -> Response:
        progress = how(request.path_params["plan"], request.query.get("limit", 1000))
        self._reassigned(request.path_params["plan"], progress.done, progress.conflicts)
        return Response(200, asdict(progress))

    def verify(self, request: Request) -> Response:
        """``GET /shards/plans/{plan}/verify``."""
        return Response(200, dict(self._plans.verify(request.path_params["plan"])))


def routes(
    database: Database,
    nodes: NodeStore,
    plans: Plans,
    mover: ShardMover,
    reassigned: Callable[[str, int, int], None] = lambda plan, moved, conflicts: None,
) -> Sequence[Route]:
    """Returns the routes over the nodes and their plans.

    :param mover: writes the shard of nodes.
    :param reassigned: called after the shards of nodes were changed: ``reassigned(plan, moved, conflicts)``, an empty plan for
        nodes that were named one by one.
    """
    serve = _Handlers(database, nodes, plans, mover, reassigned)
    tags = ("shards",)
    get, plan, update = (rule.name for rule in POLICIES)
    one = "/shards/plans/{plan}"
    answer: Mapping[int, Any] = {200: _ANY}
    return (
        Route("GET", "/shards", serve.shards, get, "Shards and how many nodes each has.", answer, tags=tags),
        Route("GET", "/shards/check", serve.check, get, "What looks wrong with the shards of the fleet.", answer, tags=tags),
        Route(
            "POST", "/shards/assign", serve.assign, update, "Change the shard of nodes.", answer,
            body=_ASSIGN, tags=tags,
        ),
        Route("POST", "/shards/plans", serve.make, plan, "Make a plan and keep it.", {201: _ANY}, body=_PLAN, tags=tags),
        Route("GET", "/shards/plans", serve.list_plans, get, "Plans that are kept, the newest first.", answer, tags=tags),
        Route("GET", one, serve.show, get, "A plan in numbers.", answer, tags=tags),
        Route("GET", f"{one}/moves", serve.journal, get, "The journal of a plan.", answer, query=_JOURNAL, tags=tags),
        Route(
            "POST", f"{one}/apply", serve.apply, update, "Carry out some of a plan's moves.", answer, query=_LIMIT, tags=tags
        ),
        Route(
            "POST", f"{one}/rollback", serve.rollback, update, "Take back some of a plan's moves.", answer, query=_LIMIT,
            tags=tags,
        ),
        Route("GET", f"{one}/verify", serve.verify, get, "Compare a plan's journal with the nodes.", answer, tags=tags),
    )  # fmt: skip


def _moves(nodes: NodeStore, assignments: Sequence[Mapping[str, Any]]) -> list[ShardMove]:
    found = []
    known = nodes.find_many([each["node"] for each in assignments])
    for number, each in enumerate(assignments):
        shard = each["shard"]
        if shard is not None:
            check_shard(shard, f"body/assignments/{number}/shard")
        node = known.get(each["node"])
        if node is None:
            raise errors.NotFound(f"There is no node {each['node']}; moorage node list shows all.")
        found.append(ShardMove(node.uuid, each.get("was", node.shard), shard))
    if len({move.node for move in found}) < len(found):
        raise errors.InvalidInput("A node stands twice among the assignments.", path="body/assignments")
    return found
