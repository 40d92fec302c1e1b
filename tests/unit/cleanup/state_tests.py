# SPDX-License-Identifier: Apache-2.0
"""Random histories of operations, kills, cleaners, forced operations and resets, compared with a model of a few lines.

The model knows of each resource its status, the newest token and whether there is a row. The law: a lease's last write is accepted
if and only if the row still carries its token; what is accepted has tokens that never fall; a resource in transition has a row; and
who lives keeps what he has, though the database's clock jumps.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moorage import errors
from moorage.cleanup.cleaner import Cleaner, Policy
from moorage.cleanup.conditions import ExpiredLease, NeverStarted, OrphansOfService
from moorage.cleanup.orphans import LAST, OrphanStore
from moorage.cleanup.tables import cleanup_history
from moorage.clock import Clock, SystemClock
from moorage.db import MICROSECONDS, Database
from moorage.db.schema import core_metadata
from moorage.services.interface import ServiceIdentity
from moorage.testing.clock import ManualClock
from moorage.work.interface import Lease, Phase
from moorage.work.operations import SqlOperationStore
from moorage.work.tables import fences, workers
from tests import cases
from tests.unit.cleanup.cleaner_tests import ThingHandler, Tools
from tests.unit.work.operation_tests import (
    TYPE,
    metadata,
    things,
    write,
)

RESOURCES = ("one", "two")
SERVICES = ("a", "b")
#: Seconds, and how far the database's clock jumps.
LEASE, JUMP = 60, 3600


class Worlds(RuleBasedStateMachine):
    """Subclasses give ``database``."""

    database: ClassVar[Database]

    @initialize()
    def begin(self) -> None:
        with self.database.write() as tx:
            for table in (workers, fences, cleanup_history, things):
                tx.execute(sa.delete(table))
        self.store = SqlOperationStore(self.database, lease_seconds=LEASE)
        self.epochs = dict.fromkeys(SERVICES, 1)
        #: Each service's machine, and its cleaner, as long as it lives.
        self.clock = ManualClock()
        self.judges: dict[ServiceIdentity, tuple[OrphanStore, ThingHandler]] = {}
        #: Resource -> token of its row; absent without a row.
        self.rows: dict[str, int] = {}
        self.statuses: dict[str, str] = {}
        self.accepted: dict[str, int] = {}
        #: Every lease that anybody was ever given, with what it writes at its end.
        self.leases: list[tuple[Lease, str]] = []
        self.effects = 0
        for uuid, name in zip(RESOURCES, SERVICES, strict=True):
            self._operate(uuid, force=False)
            self._start(uuid, name)

    def identity(self, name: str, epoch: int | None = None) -> ServiceIdentity:
        return ServiceIdentity(f"service-{name}", "here", "agent", None, epoch or self.epochs[name])

    def given(self, lease: Lease, becomes: str) -> None:
        assert lease.token > self.rows.get(lease.resource_id, 0), "tokens rise with every transfer"
        self.rows[lease.resource_id] = lease.token
        self.leases.append((lease, becomes))

    @rule(uuid=st.sampled_from(RESOURCES), force=st.booleans(), name=st.sampled_from((None, *SERVICES)))
    def operation(self, uuid: str, force: bool, name: str | None) -> None:
        """Asked for, and perhaps started at once."""
        self._operate(uuid, force)
        if name is not None:
            self._start(uuid, name)

    def _operate(self, uuid: str, force: bool) -> None:
        def work(tx: sa.Connection) -> int:
            token = self.store.create(tx, TYPE, uuid, "build", "building", target_host="here", force=force)
            if not write(tx, uuid, "building", token):
                tx.execute(sa.insert(things).values(id=uuid, status="building", writes=0, fence=token))
            return token

        if uuid in self.rows and not force:
            try:
                self.database.run(work)
            except errors.InUse:
                return
            raise AssertionError("a second operation was not refused")
        token = self.database.run(work)
        assert token > self.rows.get(uuid, 0) and token > self.accepted.get(uuid, 0)
        self.rows[uuid], self.statuses[uuid], self.accepted[uuid] = token, "building", token

    @precondition(lambda self: self.rows)
    @rule(uuid=st.sampled_from(RESOURCES), name=st.sampled_from(SERVICES))
    def start(self, uuid: str, name: str) -> None:
        self._start(uuid, name)

    def _start(self, uuid: str, name: str) -> None:
        for lease in self.database.run(
            lambda tx: self.store.start_many(tx, TYPE, [uuid], self.identity(name))
        ).values():
            self.given(lease, "active")

    @precondition(lambda self: self.rows)
    @rule(uuid=st.sampled_from(RESOURCES), name=st.sampled_from(SERVICES))
    def resume(self, uuid: str, name: str) -> None:
        for lease in self.store.take_many(TYPE, [uuid], self.identity(name)).values():
            self.given(lease, "active")

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        lease, becomes = data.draw(st.sampled_from(self.leases))
        current = self.rows.get(lease.resource_id) == lease.token

        def work(tx: sa.Connection) -> None:
            if not write(tx, lease.resource_id, becomes, lease.token):
                raise errors.Fenced("overtaken")

        try:
            lease.finish_with(work)
        except errors.Fenced:
            assert not current, "the owner was fenced off"
            return
        assert current, "a stale finish was accepted"
        del self.rows[lease.resource_id]
        self.statuses[lease.resource_id] = becomes
        self.accepted[lease.resource_id] = lease.token
        self.effects += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), what=st.sampled_from(("renew", "give back", "early write")))
    def meanwhile(self, data: st.DataObject, what: str) -> None:
        lease, _ = data.draw(st.sampled_from(self.leases))
        current = self.rows.get(lease.resource_id) == lease.token
        if what == "renew":
            assert bool(self.store.renew_many([lease])) != current
        elif what == "give back":
            lease.release("for the test")
        else:
            with self.database.write() as tx:
                written = write(tx, lease.resource_id, self.statuses[lease.resource_id], lease.token)
            assert written == (lease.token >= self.accepted[lease.resource_id])
            if written:
                self.accepted[lease.resource_id] = lease.token

    @rule(name=st.sampled_from(SERVICES))
    def die(self, name: str) -> None:
        self.epochs[name] += 1

    @precondition(lambda self: self.rows)
    @rule(uuid=st.sampled_from(RESOURCES))
    def expire(self, uuid: str) -> None:
        with self.database.write() as tx:
            held = workers.c.resource_id == uuid, workers.c.owner.is_not(None)
            tx.execute(sa.update(workers).where(*held).values(expires_at=1))

    @precondition(lambda self: self.rows)
    @rule(name=st.sampled_from(SERVICES))
    def jump(self, name: str) -> None:
        """The database's clock goes forward; those who live soon write by it. A service looks before, in between and after."""
        me = self.identity(name)
        self.judges.setdefault(me, self.orphans(name, self.clock))
        with self.database.read() as tx:
            rows = tx.execute(sa.select(workers)).all()
        lives = {row.resource_id for row in rows if row.phase == Phase.WORKING and row.expires_at > 1}
        self.store.announce(TYPE, RESOURCES)
        lives |= {row.resource_id for row in rows if row.phase == Phase.WAITING}
        cleaned = {row.resource_id for row in rows if row.phase == Phase.CLEANING}
        for back in (0, JUMP, -JUMP):
            self._shift(back, cleaned)
            for _ in range(2):
                for wanted in (ExpiredLease(me.uuid, me.epoch, LEASE), NeverStarted(("here",), LEASE)):
                    self._judge(me, wanted, lives)
                self.clock.advance(LEASE / 3)

    def _shift(self, seconds: int, but: set[str]) -> None:
        values = {
            each.name: sa.case((each > 1, each - seconds * MICROSECONDS), else_=each)
            for each in (workers.c.expires_at, workers.c.next_try_at, workers.c.updated_at)
        }
        with self.database.write() as tx:
            tx.execute(sa.update(workers).where(workers.c.resource_id.not_in(but)).values(values))

    def _judge(self, me: ServiceIdentity, wanted: ExpiredLease | NeverStarted, lives: set[str]) -> None:
        store, handler = self.judges[me]
        store.types(wanted)
        claimed = store.claim(TYPE, handler, wanted, after="", last=LAST, limit=2)
        assert not lives & claimed.leases.keys(), "somebody who lives lost what he had"
        for uuid, lease in claimed.leases.items():
            self.given(lease, "error")
            if lease.status == self.statuses[uuid]:
                self.accepted[uuid] = lease.token

    def orphans(self, cleaner: str, clock: Clock | None = None) -> tuple[OrphanStore, ThingHandler]:
        who = self.identity(cleaner)
        handler = ThingHandler(Tools(self.database, who))
        return OrphanStore(self.database, self.store, who, clock or SystemClock()), handler

    @precondition(lambda self: self.rows)
    @rule(dead=st.sampled_from(SERVICES), cleaner=st.sampled_from(SERVICES), evict=st.booleans())
    def claim(self, dead: str, cleaner: str, evict: bool) -> None:
        """A cleaner takes what it finds, and may do anything with it later."""
        self.epochs[dead] += evict
        store, handler = self.orphans(cleaner)
        with self.database.read() as tx:
            before = {row.resource_id: row for row in tx.execute(sa.select(workers))}
        target = OrphansOfService(f"service-{dead}", self.epochs[dead])
        claimed = store.claim(TYPE, handler, target, after="", last=LAST, limit=2)
        for uuid, lease in claimed.leases.items():
            row = before[uuid]
            over = row.phase == "working" and row.epoch < self.epochs[dead]
            assert row.worker == target.service and (over or row.expires_at <= 1), "a live lease was taken"
            self.given(lease, "error")
            if lease.status == self.statuses[uuid]:
                self.accepted[uuid] = lease.token

    @precondition(lambda self: self.rows)
    @rule(dead=st.sampled_from(SERVICES), cleaner=st.sampled_from(SERVICES), evict=st.booleans(), twice=st.booleans())
    def clean(self, dead: str, cleaner: str, evict: bool, twice: bool) -> None:
        """A whole pass, perhaps asked for twice: the second finds nothing."""
        self.epochs[dead] += evict
        store, handler = self.orphans(cleaner)
        made = Cleaner(store, {TYPE: handler}, SystemClock(), random.Random(1), Policy(max_attempts=10**6))
        target = OrphansOfService(f"service-{dead}", self.epochs[dead])
        made.clean(target)
        if twice:
            assert not made.clean(target)
        made.stop()
        for uuid, token in handler.calls:
            del self.rows[uuid]
            self.statuses[uuid], self.accepted[uuid] = "error", token
            self.effects += 1
        with self.database.read() as tx:
            left = set(tx.execute(sa.select(workers.c.resource_id)).scalars())
        # What was in no cleanable status has ended without a write.
        for uuid in self.rows.keys() - left:
            assert self.statuses[uuid] != "building"
            del self.rows[uuid]

    @precondition(lambda self: self.rows)
    @rule(uuid=st.sampled_from(RESOURCES))
    def reset_state(self, uuid: str) -> None:
        if uuid not in self.statuses:
            return

        def work(tx: sa.Connection) -> int:
            token = self.store.reset(tx, TYPE, uuid)
            assert write(tx, uuid, "active", token)
            return token

        self.accepted[uuid] = self.database.run(work)
        self.statuses[uuid] = "active"
        self.rows.pop(uuid, None)

    @invariant()
    def store_and_model_agree(self) -> None:
        if not hasattr(self, "rows"):
            return
        with self.database.read() as tx:
            rows = {row.resource_id: row.token for row in tx.execute(sa.select(workers))}
            found = {row.id: (row.status, row.fence) for row in tx.execute(sa.select(things))}
        assert rows == self.rows, (rows, self.rows)
        assert found == {uuid: (status, self.accepted[uuid]) for uuid, status in self.statuses.items()}, (
            found,
            self.statuses,
        )
        for uuid, status in self.statuses.items():
            assert status != "building" or uuid in rows, f"{uuid} is stuck"


def machine_for(url: str, quick: int) -> tuple[Any, Database]:
    """A test case of the machine on a database, and the database, to be closed."""
    database = Database(url)
    with database.write() as tx:
        for tables in (core_metadata, metadata):
            tables.drop_all(tx)
            tables.create_all(tx)
    machine: Any = type("World", (Worlds,), {"database": database})
    case = machine.TestCase
    case.settings = settings(max_examples=cases(quick), stateful_step_count=40, deadline=None)
    return case, database
