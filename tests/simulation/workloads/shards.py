# SPDX-License-Identifier: Apache-2.0
"""Plans of shards that several appliers carry out and take back, while nodes are edited and appliers die."""

from __future__ import annotations

from typing import Any, ClassVar

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors
from moorage.control_plane.sharding_factories import open_mover
from moorage.db import Database
from moorage.fleet.interface import NodeSpec, uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.sharding.interface import STRATEGIES
from moorage.sharding.plans import PlanRequest, Plans
from moorage_plugins.compute.instances import ComputeInstances
from tests.simulation.kernel import Process
from tests.simulation.workloads.base import Workload

__all__ = ["Shards"]

NODES = tuple(f"node-{number:02}" for number in range(12))


class Shards(Workload):
    """Three appliers, one editor."""

    points: ClassVar[int] = 80
    steps: ClassVar[int] = 300
    seconds: ClassVar[float] = 5.0
    jumps: ClassVar[bool] = False

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        store = NodeStore(database)
        with database.write() as tx:
            for number, name in enumerate(NODES):
                store.insert(tx, NodeSpec(uuid_of_name(name), name, shard=("a", None)[number % 2]))

    @override
    def begin(self) -> None:
        #: Node in use -> the shard in which it must stay.
        self.edits: dict[str, tuple[str | None]] = {}
        #: Plans that were taken back, or are being taken back.
        self.undone: set[str] = set()

    @override
    def begin_clients(self) -> None:
        for number in (1, 2, 3):
            self.client(f"applier-{number}", self._applier, victim=True)
        self.client("editor", self._editor, victim=True)

    def _plans(self, process: Process) -> tuple[Plans, Any]:
        platform = self.world.platform(process, "api", beats=False)
        database = platform.database

        def strategy(name: str | None) -> tuple[str, Any]:
            loaded = STRATEGIES.load(name or "balanced")
            return loaded.name, loaded.plugin()

        mover = open_mover(ComputeInstances(conf=None, database=database, clock=platform.clock))
        return Plans(database, NodeStore(database), strategy, mover, batch=3, keep=50), database

    def _applier(self, process: Process) -> None:
        plans, _ = self._plans(process)
        for _ in range(self.random.randint(1, 3)):
            try:
                known = [each.uuid for each in plans.list()]
                if not known or self.random.random() < 0.4:
                    made = plans.make(PlanRequest(shards=self.random.choice((["a", "b"], ["a", "b", "c"], ["b"]))))
                    known.append(made.uuid)
                uuid = self.random.choice(known)
                advance = plans.rollback if self.random.random() < 0.3 else plans.apply
                for _ in range(8):
                    if not advance(uuid, self.random.choice((2, 5))).remaining:
                        break
            except errors.MoorageError:
                continue

    def _editor(self, process: Process) -> None:
        _, database = self._plans(process)
        nodes = NodeStore(database)
        for _ in range(self.random.randint(2, 8)):
            name = self.random.choice(NODES)
            uuid = uuid_of_name(name)
            try:
                generation = nodes.get(uuid).generation
                taken = self.random.random() < 0.6
                changes = {"instance_uuid": f"{uuid[:-1]}1"} if taken else {"properties": {"n": self.random.random()}}
                database.run(lambda tx, of=uuid, at=generation, what=changes: self._edit(nodes, tx, of, at, what))
                if taken:
                    self._take(uuid)
            except errors.MoorageError:
                continue

    @staticmethod
    def _edit(nodes: NodeStore, tx: sa.Connection, uuid: str, generation: int, changes: dict[str, Any]) -> None:
        if not nodes.change(tx, uuid, generation, changes):
            raise errors.Conflict("somebody else wrote the node")

    def _take(self, uuid: str) -> None:
        """From now on an instance is on the node, so it must stay in its shard."""
        self.edits[uuid] = self.rows("SELECT shard FROM nodes WHERE uuid = ?", uuid)[0]

    # -- checks ---------------------------------------------------------------------------------------------------

    @override
    def check_step(self) -> None:
        for uuid, (shard,) in self.edits.items():
            found = self.rows("SELECT shard FROM nodes WHERE uuid = ?", uuid)[0][0]
            # A node without a shard may get one, and a plan that gave it one may take it back.
            if found is None or shard is None:
                self.edits[uuid] = (found,)
                continue
            self.require(found == shard, f"node {uuid} is in use and moved from shard {shard} to {found}")
        self.check_undone()

    def check_undone(self) -> None:
        """A plan that was taken back is not carried out again."""
        for uuid, status in self.rows("SELECT uuid, status FROM shard_plans"):
            if status in ("undoing", "undone"):
                self.undone.add(uuid)
            self.require(
                uuid not in self.undone or status in ("undoing", "undone"),
                f"plan {uuid} was taken back and is {status} again",
            )

    @override
    def quiet(self) -> str:
        return ""

    @override
    def check(self) -> None:
        count = self.rows("SELECT count(*) FROM nodes")[0][0]
        self.require(count == len(NODES), f"{count} of {len(NODES)} nodes are left")
        wrong = self.rows(
            "SELECT p.uuid, p.status, m.status, count(*) FROM shard_plans p JOIN shard_moves m ON m.plan_id = p.id"
            " WHERE (p.status = 'applied' AND m.status = 'pending') OR (p.status = 'undone' AND m.status = 'moved')"
            " GROUP BY 1, 2, 3"
        )
        self.require(not wrong, f"plans that have ended have moves to do: {wrong}")
        self._check_journal()

    def _check_journal(self) -> None:
        """A node whose moves all belong to one plan is where the journal says."""
        rows = self.rows(
            "SELECT m.node_uuid, m.source, m.target, m.status, n.shard FROM shard_moves m JOIN nodes n ON n.uuid = m.node_uuid"
            " WHERE m.node_uuid IN (SELECT node_uuid FROM shard_moves GROUP BY 1 HAVING count(*) = 1)"
        )
        for node, source, target, status, shard in rows:
            wanted = target if status in ("moved", "stuck") else source
            self.require(
                shard == wanted, f"node {node}: its only move is {status}, it is in {shard} and not in {wanted}"
            )
