# SPDX-License-Identifier: Apache-2.0
"""Operations on a few resources: asked for, taken, released, taken over and ended by owners that die or stand still."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors
from moorage.cleanup.conditions import OrphansOfService
from moorage.cleanup.orphans import LAST, OrphanStore
from moorage.db import Database
from moorage.work import lease
from moorage.work.fences import FencePurge
from moorage.work.interface import Lease
from moorage.work.operations import SqlOperationStore, fenced
from tests.simulation.kernel import Process
from tests.simulation.workloads.base import Workload

__all__ = ["Leases"]

KIND = "simulated"
RESOURCES = ("r1", "r2", "r3")
LEASE = 2.0
_METADATA = sa.MetaData()
_THINGS = sa.Table(
    "simulated_things", _METADATA, sa.Column("id", sa.String(10), primary_key=True), sa.Column("fence", sa.BigInteger)
)
#: What was asked for (0; 2: in the place of another operation) and what was done (1), in the order in which that became true.
_LOG = sa.Table(
    "simulated_log",
    _METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("resource", sa.String(10)),
    sa.Column("done", sa.Integer),
    sa.Column("operation", sa.String(50)),
    sa.Column("token", sa.BigInteger),
)


class Leases(Workload):
    """Three owners, who clean after each other too, and one that ends what is left."""

    points: ClassVar[int] = 200
    steps: ClassVar[int] = 600
    seconds: ClassVar[float] = 10.0
    jumps: ClassVar[bool] = False

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        with database.write() as tx:
            _METADATA.create_all(tx)
            tx.execute(sa.insert(_THINGS), [{"id": each, "fence": 0} for each in RESOURCES])

    @override
    def begin(self) -> None:
        #: Tokens that were given, by resource and number: to requests and to owners.
        self._given: dict[tuple[str, int], str] = {}
        #: Those that an owner has got as its request gave them.
        self._begun: set[tuple[str, int]] = set()
        #: Messages of requests: resource and token. They may be lost, doubled and late.
        self._messages: list[tuple[str, int]] = []

    @override
    def begin_clients(self) -> None:
        for number in (1, 2, 3):
            self.client(f"owner-{number}", self._owner, victim=True)
        self.client("purger", self._purger)
        self.client("last", self._last)

    # -- clients --------------------------------------------------------------------------------------------------

    def _store(self, process: Process) -> tuple[Any, SqlOperationStore]:
        platform = self.world.platform(process, "owner", beats=False)
        while True:
            try:
                # Evicted owners go on: that their writes are refused is what is looked at.
                platform = dataclasses.replace(
                    platform, identity=platform.registry.enlist("owner", process.name, rpc_version="1.0")
                )
                return platform, SqlOperationStore(platform.database, lease_seconds=LEASE, clock=platform.clock)
            except errors.MoorageError:
                platform.clock.sleep(1.0)

    def _owner(self, process: Process) -> None:
        platform, store = self._store(process)
        for number in range(self.random.randint(4, 9)):
            what = self.random.choice(("ask", "ask", "take", "begin", "begin", "start", "clean"))
            try:
                if what == "ask":
                    self._ask(platform, store, f"{process.name}/{number}")
                elif what == "take":
                    self._do(platform, store, store.take_many(KIND, self._some(), platform.identity))
                elif what == "begin":
                    self._begin(platform, store)
                elif what == "start":
                    some = self._some()
                    begun = platform.database.run(lambda tx, of=some: store.start_many(tx, KIND, of, platform.identity))
                    self._do(platform, store, begun)
                else:
                    self._clean(platform, store)
            except errors.MoorageError as error:
                self.kernel.note("refused", f"{what}: {type(error).__name__}")

    def _purger(self, process: Process) -> None:
        """Remove fences that no operation uses, however young they are."""
        platform, _ = self._store(process)
        for _ in range(self.random.randint(3, 8)):
            platform.clock.sleep(self.random.uniform(0, 2))
            try:
                FencePurge(platform.database, platform.clock).step(0.0)
            except errors.MoorageError as error:
                self.kernel.note("refused", f"purge: {type(error).__name__}")

    def _some(self) -> list[str]:
        return self.random.sample(RESOURCES, self.random.randint(1, 3))

    def _ask(self, platform: Any, store: SqlOperationStore, name: str) -> None:
        resource, force = self.random.choice(RESOURCES), self.random.random() < 0.4

        def work(tx: sa.Connection) -> int:
            token = store.create(tx, KIND, resource, name, "wanted", target_host="anybody", force=force)
            tx.execute(
                sa.insert(_LOG), {"resource": resource, "done": 2 if force else 0, "operation": name, "token": token}
            )
            return token

        token = platform.database.run(work)
        self._give(resource, token, f"the request {name}")
        self._messages.append((resource, token))

    def _begin(self, platform: Any, store: SqlOperationStore) -> None:
        """Take what some messages say."""
        told = dict(self.random.sample(self._messages[-6:], min(len(self._messages), self.random.randint(1, 3))))
        begun = platform.database.run(lambda tx: store.begin_many(tx, KIND, told, platform.identity))
        taken = {**begun, **store.take_many(KIND, [*told.keys() - begun.keys(), *self._some()], platform.identity)}
        for resource, held in taken.items():
            if held.token == told.get(resource):
                key = resource, held.token
                self.require(key not in self._begun, f"token {held.token} of {resource} was given to two owners")
                self._begun.add(key)
                self.facts["begun"] = self.facts.get("begun", 0) + 1
        self._work(platform, store, taken)

    def _do(self, platform: Any, store: SqlOperationStore, leases: Any) -> None:
        for held in leases.values():
            self._give(held.resource_id, held.token, f"{platform.identity.host} for {held.operation}")
        self._work(platform, store, leases)

    def _work(self, platform: Any, store: SqlOperationStore, leases: Any) -> None:
        if len(leases) > 1 and self.random.random() < 0.5:
            platform.clock.sleep(self.random.choice((0.0, 0.3, 3.0)))
            platform.database.run(lambda tx: self._finish_together(tx, store, list(leases.values())))
            return
        for held in leases.values():
            platform.clock.sleep(self.random.choice((0.0, 0.0, 0.0, 0.3, 3.0)))
            if self.random.random() < 0.5:
                store.renew_many([held])
            if self.random.random() < 0.2:
                held.release("simulated")
            else:
                platform.database.run(lambda tx, of=held: self._finish(tx, of))

    def _give(self, resource: str, token: int, to: str) -> None:
        before = self._given.setdefault((resource, token), to)
        self.require(before == to, f"token {token} of {resource} was given twice: to {before}, and to {to}")

    def _finish(self, tx: sa.Connection, held: Lease) -> None:
        self._write(tx, held)
        held.end(tx)
        self._log(tx, held)

    def _finish_together(self, tx: sa.Connection, store: SqlOperationStore, leases: Sequence[Lease]) -> None:
        for held in leases:
            self._write(tx, held)
        store.end_many(tx, leases)
        for held in leases:
            self._log(tx, held)
        self.facts["together"] = self.facts.get("together", 0) + len(leases)

    @staticmethod
    def _write(tx: sa.Connection, held: Lease) -> None:
        values = {"token": held.token}
        if tx.execute(lease.WRITE.update(_THINGS, _THINGS.c.id == held.resource_id, values)).rowcount != 1:
            raise fenced(held)

    @staticmethod
    def _log(tx: sa.Connection, held: Lease) -> None:
        row = {"resource": held.resource_id, "done": 1, "operation": held.operation, "token": held.token}
        tx.execute(sa.insert(_LOG), row)

    def _clean(self, platform: Any, store: SqlOperationStore) -> None:
        """Declare another owner dead, which may be wrong, and finish what it has begun."""
        others = [each for each in platform.registry.list() if each.uuid != platform.identity.uuid]
        if not others:
            return
        dead = self.random.choice(others)
        platform.registry.evict(dead.uuid, dead.epoch, dead.beat)
        wanted = OrphansOfService(dead.uuid, platform.registry.get(dead.uuid).epoch)
        orphans = OrphanStore(platform.database, store, platform.identity, platform.clock)
        alone = self.random.random() < 0.3
        found = orphans.claim(KIND, None, wanted, after="", last=LAST, limit=5, alone=alone)
        self._do(platform, store, found.leases)

    def _last(self, process: Process) -> None:
        """Do what is left once the others have ended."""
        platform, store = self._store(process)
        while self._running != {"last"} or self.rows("SELECT id FROM workers"):
            platform.clock.sleep(1.0)
            if self._running == {"last"}:
                try:
                    for held in store.take_many(KIND, RESOURCES, platform.identity).values():
                        platform.database.run(lambda tx, of=held: self._finish(tx, of))
                except errors.MoorageError as error:
                    self.kernel.note("refused", type(error).__name__)

    # -- checks ---------------------------------------------------------------------------------------------------

    @override
    def check_step(self) -> None:
        twice = self.rows("SELECT operation FROM simulated_log WHERE done = 1 GROUP BY 1 HAVING count(*) > 1")
        self.require(not twice, f"operations had two effects: {twice}")
        late = self.rows(
            "SELECT a.resource, a.operation, a.token, b.operation, b.token FROM simulated_log a JOIN simulated_log b"
            " ON a.resource = b.resource AND a.id < b.id"
            " WHERE b.token < a.token OR (b.token = a.token AND (a.done = 1 OR b.done <> 1))"
        )
        self.require(not late, f"a change came after one of a later or of its own token: {late}")
        replaced = self.rows(
            "SELECT a.operation, b.operation FROM simulated_log a JOIN simulated_log b ON b.id ="
            " (SELECT max(c.id) FROM simulated_log c WHERE c.resource = a.resource AND c.id < a.id)"
            " WHERE a.done = 0 AND b.done <> 1"
        )
        self.require(not replaced, f"operations took the place of others that had not ended: {replaced}")
        fences = self.rows(
            "SELECT t.id, t.fence, max(l.token) FROM simulated_things t JOIN simulated_log l ON l.resource = t.id"
            " WHERE l.done = 1 GROUP BY 1, 2 HAVING t.fence <> max(l.token)"
        )
        self.require(not fences, f"resources have another fence than the token of their last change: {fences}")
        above = self.rows(
            "SELECT w.resource_id, w.token, f.token FROM workers w LEFT JOIN fences f"
            " ON f.resource_type = w.resource_type AND f.resource_id = w.resource_id"
            " WHERE f.token IS NULL OR f.token < w.token"
        )
        self.require(not above, f"operations have a later token than their resource's fence: {above}")

    @override
    def quiet(self) -> str:
        return ""

    @override
    def check(self) -> None:
        self.check_step()
        forgotten = self.rows(
            "SELECT a.operation FROM simulated_log a WHERE a.done <> 1 AND NOT EXISTS"
            " (SELECT 1 FROM simulated_log b WHERE b.resource = a.resource AND b.id > a.id)"
        )
        self.require(not forgotten, f"operations ended without an effect: {forgotten}")
