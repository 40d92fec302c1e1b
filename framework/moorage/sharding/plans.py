# SPDX-License-Identifier: Apache-2.0
"""Keeps plans in the store, applies them and rolls them back; each move happens at most once.

A plan's journal lies beside the nodes. A batch of moves is one transaction. It writes the plan's row first, so processes that apply
the same plan take turns. Then it writes the nodes, each on the conditions of :mod:`moorage.sharding.moving`, then the journal. When
a process is killed, its batch happened or did not, and the journal says which. The next process goes on with pending moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any

import sqlalchemy as sa

from moorage import errors, randomness
from moorage.db import Database, JournalEvent, now, record
from moorage.fleet.interface import ShardMove, check_shard
from moorage.fleet.nodes import NodeStore
from moorage.fleet.tables import nodes
from moorage.sharding import planner
from moorage.sharding.interface import ShardNode, ShardStrategy
from moorage.sharding.moving import ShardMover
from moorage.sharding.tables import shard_moves, shard_plans

__all__ = ["LOCKS", "PlanRequest", "Plans", "Progress", "StoredPlan"]

#: What keeps a node where it is. A reservation always does; an instance does where the node has a shard (see
#: :mod:`moorage.sharding.moving`), and with ``instance`` or ``occupied`` also where the node has none.
LOCKS = ("instance", "reservation", "maintenance", "state", "occupied")
_SETTLED = frozenset({"available", "enroll", "manageable", "active"})
_FIELDS = len(ShardNode._fields)
_MOVES = (
    shard_moves.c.id, shard_moves.c.node_uuid, shard_moves.c.source, shard_moves.c.target,
)  # fmt: skip
_MARK = (
    sa.update(shard_moves)
    .where(shard_moves.c.id == sa.bindparam("of_id"))
    .values(status=sa.bindparam("to_status"), note=sa.bindparam("to_note"))
)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What an operator asks for.

    :param strategy: None: that of the configuration.
    :param shards: names, or how many there shall be, or None for those that exist. A number keeps the largest, and makes names
        (``shard-1``, ...) for the others.
    :param locks: kinds of :data:`LOCKS` that keep further nodes where they are.
    :param locked: names or uuids of nodes that stay.
    :param include_instances: also move nodes with instances from shard to shard while their agents live.
    """

    strategy: str | None = None
    shards: Sequence[str] | int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    locks: Sequence[str] = ()
    locked: Sequence[str] = ()
    max_moves: int | None = None
    threshold: float = 0.0
    include_instances: bool = False


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan as it is in the store. ``status``: planned, applying, applied, undoing, undone.

    :param summary: the numbers of :class:`moorage.sharding.planner.Plan`, without its moves.
    :param moves: how many moves there are in each state: pending, moved, conflict, undone, stuck.
    """

    uuid: str
    strategy: str
    status: str
    request: Mapping[str, Any]
    summary: Mapping[str, Any]
    created_at: int
    updated_at: int
    moves: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a plan is carried out, or taken back; ``remaining`` 0: it is done."""

    status: str
    done: int
    conflicts: int
    remaining: int


class Plans:
    """Makes plans and carries them out. Safe for use by several threads and processes.

    :param strategy: loads a strategy by name, or (None) the configured one; its name and an instance.
    :param mover: writes the shard of nodes.
    :param keep: how many plans are kept.
    """

    def __init__(
        self,
        database: Database,
        store: NodeStore,
        strategy: Callable[[str | None], tuple[str, ShardStrategy]],
        mover: ShardMover,
        *,
        batch: int,
        keep: int,
    ) -> None:
        self._database = database
        self._nodes = store
        self._strategy = strategy
        self._mover = mover
        self._batch = batch
        self._keep = keep

    # -- making ---------------------------------------------------------------------------------------------------

    def compute(self, request: PlanRequest) -> planner.Plan:
        """Returns the plan, without keeping it: a dry run. Reads all nodes once."""
        _check_locks(request.locks)
        name, strategy = self._strategy(request.strategy)
        rows = self._nodes.for_planning(
            self._mover.may_leave.label("may_leave"), self._mover.occupied.label("occupied")
        )
        fleet = [ShardNode._make(row[:_FIELDS]) for row in rows]
        current = {row[0]: row.shard for row in rows}
        counts: dict[str, int] = {}
        for shard in current.values():
            if shard is not None:
                counts[shard] = counts.get(shard, 0) + 1
        return planner.make_plan(
            name,
            strategy,
            fleet,
            _shards(request.shards, counts),
            current,
            locked=self._locked(rows, request),
            params=request.params,
            max_moves=request.max_moves,
            threshold=request.threshold,
        )

    def make(self, request: PlanRequest) -> StoredPlan:
        """Returns the plan, kept. Of many plans the oldest go."""
        plan = self.compute(request)
        uuid = randomness.new_uuid()
        summary = {key: value for key, value in asdict(plan).items() if key != "moves"} | {"needed": plan.needed}

        def work(tx: sa.Connection) -> None:
            tx.execute(
                sa.insert(shard_plans).values(
                    uuid=uuid, strategy=plan.strategy, status="planned", request=asdict(request), summary=summary,
                    generation=0, created_at=now(), updated_at=now(),
                )
            )  # fmt: skip
            number = tx.execute(sa.select(shard_plans.c.id).where(shard_plans.c.uuid == uuid)).scalar_one()
            rows = [
                {
                    "plan_id": number, "node_uuid": move.node, "source": move.source, "target": move.target,
                    "reason": move.reason, "status": "pending", "note": "",
                }
                for move in plan.moves
            ]  # fmt: skip
            if rows:
                tx.execute(sa.insert(shard_moves), rows)
            _record(tx, "create", uuid, 0, status="planned", strategy=plan.strategy, moves=len(rows))
            self._forget(tx)

        self._database.run(work)
        return self.get(uuid)

    def _forget(self, tx: sa.Connection) -> None:
        newest = (
            tx.execute(sa.select(shard_plans.c.id).order_by(shard_plans.c.id.desc()).offset(self._keep).limit(1))
        ).scalar()
        if newest is not None:
            tx.execute(sa.delete(shard_moves).where(shard_moves.c.plan_id <= newest))
            tx.execute(sa.delete(shard_plans).where(shard_plans.c.id <= newest))

    def _locked(self, rows: Sequence[Any], request: PlanRequest) -> Set[str]:
        kinds = set(request.locks)
        found = {row[0] for row in rows if row.reservation is not None}
        if not request.include_instances:
            found |= {row[0] for row in rows if row.shard is not None and not row.may_leave}
        if kinds & {"instance", "occupied"}:
            found |= {row[0] for row in rows if row.occupied}
        if "maintenance" in kinds:
            found |= {row[0] for row in rows if row.maintenance}
        if "state" in kinds:
            found |= {row[0] for row in rows if row.provision_state not in _SETTLED}
        names = set(request.locked)
        if names:
            found |= {row[0] for row in rows if row[0] in names or row[1] in names}
        return found

    # -- looking --------------------------------------------------------------------------------------------------

    def get(self, uuid: str) -> StoredPlan:
        """One plan.

        :raises NotFound: there is none.
        """
        with self._database.read() as tx:
            row = self._row(tx, uuid)
            return _stored(row, self._counts(tx, [row.id]))

    def list(self) -> Sequence[StoredPlan]:
        """All that are kept, the newest first."""
        with self._database.read() as tx:
            rows = tx.execute(sa.select(shard_plans).order_by(shard_plans.c.id.desc())).all()
            counts = self._counts(tx, [row.id for row in rows])
        return [_stored(row, counts) for row in rows]

    def moves(self, uuid: str, *, after: int = 0, limit: int = 1000, status: str | None = None) -> Sequence[Any]:
        """Returns the journal: rows (id, node_uuid, name, source, target, reason, status, note), a page after the given id."""
        with self._database.read() as tx:
            row = self._row(tx, uuid)
            query = (
                sa.select(
                    shard_moves.c.id, shard_moves.c.node_uuid, nodes.c.name, shard_moves.c.source, shard_moves.c.target,
                    shard_moves.c.reason, shard_moves.c.status, shard_moves.c.note,
                )
                .select_from(shard_moves.outerjoin(nodes, nodes.c.uuid == shard_moves.c.node_uuid))
                .where(shard_moves.c.plan_id == row.id, shard_moves.c.id > after)
                .order_by(shard_moves.c.id)
                .limit(limit)
            )  # fmt: skip
            if status is not None:
                query = query.where(shard_moves.c.status == status)
            return tx.execute(query).all()

    def verify(self, uuid: str) -> Mapping[str, Any]:
        """Compares the journal with the nodes.

        ``ok``: the plan is applied without conflicts, its nodes are where it moved them, and every node has a shard.
        ``elsewhere``: how many moved nodes are in another shard by now, with the first of them as ``examples``;
        ``without_shard``: how many nodes of the fleet have no shard.
        """
        with self._database.read() as tx:
            row = self._row(tx, uuid)
            strays = (
                sa.select(shard_moves.c.node_uuid, shard_moves.c.target, nodes.c.shard)
                .select_from(shard_moves.outerjoin(nodes, nodes.c.uuid == shard_moves.c.node_uuid))
                .where(
                    shard_moves.c.plan_id == row.id,
                    shard_moves.c.status == "moved",
                    sa.or_(nodes.c.uuid.is_(None), nodes.c.shard.is_distinct_from(shard_moves.c.target)),
                )
                .order_by(shard_moves.c.id)
            )
            found = tx.execute(strays).all()
            counts = self._counts(tx, [row.id]).get(row.id, {})
            total = tx.execute(sa.select(sa.func.count()).select_from(nodes)).scalar_one()
            without = sa.select(sa.func.count()).select_from(nodes).where(nodes.c.shard.is_(None))
            unsharded = int(tx.execute(without).scalar_one())
        return {
            "ok": not (unsharded or found or counts.get("conflict")) and row.status == "applied",
            "status": row.status,
            "moves": dict(counts),
            "elsewhere": len(found),
            "examples": [{"node": node, "planned": target, "found": shard} for node, target, shard in found[:10]],
            "nodes": total,
            "without_shard": unsharded,
        }

    def _row(self, tx: sa.Connection, uuid: str) -> Any:
        row = tx.execute(sa.select(shard_plans).where(shard_plans.c.uuid == uuid)).first()
        if row is None:
            raise errors.NotFound(f"There is no plan {uuid}; moorage shard show lists those that are kept.")
        return row

    def _counts(self, tx: sa.Connection, plans: Sequence[int]) -> dict[int, dict[str, int]]:
        found: dict[int, dict[str, int]] = {}
        columns = (shard_moves.c.plan_id, shard_moves.c.status)
        query = sa.select(*columns, sa.func.count()).where(shard_moves.c.plan_id.in_(plans)).group_by(*columns)
        for plan, status, count in tx.execute(query):
            found.setdefault(plan, {})[status] = count
        return found

    # -- doing ----------------------------------------------------------------------------------------------------

    def apply(self, uuid: str, limit: int) -> Progress:
        """Carry out up to ``limit`` pending moves; again and again until nothing remains.

        :raises Conflict: it was taken back, or is being taken back.
        """
        return self._advance(uuid, limit, _APPLY)

    def rollback(self, uuid: str, limit: int) -> Progress:
        """Take back up to ``limit`` moves that happened, the last ones first. What is pending will not happen any more."""
        return self._advance(uuid, limit, _UNDO)

    def _advance(self, uuid: str, limit: int, way: _Way) -> Progress:
        done = conflicts = 0
        while True:
            size = min(self._batch, limit - done - conflicts)
            moved, lost, remaining = self._database.run(lambda tx, size=size: self._step(tx, uuid, size, way))  # type: ignore[misc]
            done, conflicts = done + moved, conflicts + lost
            if not remaining or done + conflicts >= limit:
                return Progress(self.get(uuid).status, done, conflicts, remaining)

    def _step(self, tx: sa.Connection, uuid: str, size: int, way: _Way) -> tuple[int, int, int]:
        # The plan's row comes first: others who carry out the same plan wait here, and then see what was done.
        begun = tx.execute(
            sa.update(shard_plans)
            .where(shard_plans.c.uuid == uuid, shard_plans.c.status.in_(way.begins))
            .values(status=way.doing, generation=shard_plans.c.generation + 1, updated_at=now())
        )
        row = self._row(tx, uuid)
        if begun.rowcount != 1:
            if row.status == way.done:
                return 0, 0, 0
            raise errors.Conflict(f"Plan {uuid} is {row.status}, so it cannot be {way.done}.", status=row.status)
        mine = sa.and_(shard_moves.c.plan_id == row.id, shard_moves.c.status == way.takes)
        order = shard_moves.c.id.desc() if way.backwards else shard_moves.c.id
        taken = tx.execute(sa.select(*_MOVES).where(mine).order_by(order).limit(size)).all()
        include = bool(row.request.get("include_instances"))
        done = self._mover.move(tx, [way.move(move) for move in taken], include_instances=include)
        lost = [move for move, happened in zip(taken, done, strict=True) if not happened]
        if taken:
            self._journal(tx, mine, taken, lost, way)
        remaining = tx.execute(sa.select(sa.func.count()).select_from(shard_moves).where(mine)).scalar_one()
        if not remaining:
            tx.execute(sa.update(shard_plans).where(shard_plans.c.id == row.id).values(status=way.done))
        status = way.doing if remaining else way.done
        _record(
            tx,
            "change",
            uuid,
            row.generation,
            status=status,
            done=len(done) - len(lost),
            lost=len(lost),
            left=remaining,
        )
        return len(taken) - len(lost), len(lost), remaining

    def _journal(self, tx: sa.Connection, mine: Any, taken: Sequence[Any], lost: Sequence[Any], way: _Way) -> None:
        if lost:
            reasons = self._mover.reasons(tx, [way.move(move) for move in lost])
            tx.execute(
                _MARK,
                [
                    {
                        "of_id": move.id,
                        "to_status": way.lost,
                        "to_note": reasons[move.node_uuid],
                    }
                    for move in lost
                ],
            )
        numbers = [move.id for move in taken]
        within = shard_moves.c.id.between(min(numbers), max(numbers))
        # What was lost is not among "mine" any more.
        tx.execute(sa.update(shard_moves).where(mine, within).values(status=way.kept))


@dataclass(frozen=True, slots=True)
class _Way:
    """Carrying out, and taking back, differ in these words alone."""

    begins: tuple[str, ...]
    doing: str
    done: str
    takes: str
    kept: str
    lost: str
    backwards: bool

    def move(self, row: Any) -> ShardMove:
        if self.backwards:
            return ShardMove(row.node_uuid, row.target, row.source, undoes=row.source is None)
        return ShardMove(row.node_uuid, row.source, row.target)


_APPLY = _Way(("planned", "applying"), "applying", "applied", "pending", "moved", "conflict", False)
_UNDO = _Way(("planned", "applying", "applied", "undoing"), "undoing", "undone", "moved", "undone", "stuck", True)


def _record(tx: sa.Connection, what: str, uuid: str, generation: int, **state: object) -> None:
    record(tx, JournalEvent(f"shard_plan.{what}", f"shard_plan/{uuid}", generation, state))


def _stored(row: Any, counts: Mapping[int, Mapping[str, int]]) -> StoredPlan:
    return StoredPlan(
        row.uuid, row.strategy, row.status, row.request, row.summary, row.created_at, row.updated_at, counts.get(row.id, {})
    )  # fmt: skip


def _check_locks(locks: Sequence[str]) -> None:
    unknown = sorted(set(locks) - set(LOCKS))
    if unknown:
        raise errors.InvalidInput(f"{unknown[0]} is no kind of lock; there are {', '.join(LOCKS)}.", path="locks")


def _usable(shard: str) -> bool:
    """Returns whether queries can ask for a shard; nodes that are in another one are given a new shard."""
    try:
        check_shard(shard)
    except errors.InvalidInput:
        return False
    return True


def _shards(wanted: Sequence[str] | int | None, counts: Mapping[str, int]) -> Sequence[str]:
    largest = sorted(filter(_usable, counts), key=lambda shard: (-counts[shard], shard))
    if wanted is None:
        if not largest:
            raise errors.InvalidInput(
                "No node has a shard yet; name the shards, or how many there shall be.", path="shards"
            )
        return largest
    if not isinstance(wanted, int):
        return [check_shard(shard, "shards") for shard in wanted]
    if wanted < 1:
        raise errors.InvalidInput(f"There cannot be {wanted} shards.", path="shards")
    kept = largest[:wanted]
    number = 1
    while len(kept) < wanted:
        name = f"shard-{number}"
        if name not in counts:
            kept.append(name)
        number += 1
    return kept
