# SPDX-License-Identifier: Apache-2.0
"""What the purge of fences promises, on any database; a mix-in for the tests of each."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import sqlalchemy as sa

from moorage import errors
from moorage.clock import SystemClock
from moorage.db import Database, Duplicate
from moorage.testing.clock import ManualClock
from moorage.work import fences as fences_module
from moorage.work.fences import FLOOR, PAUSE, FencePurge, _purge, last_tokens, lift_above_floor, raise_fences
from moorage.work.operations import NewOperation, OperationLease, SqlOperationStore
from moorage.work.tables import fences, workers
from tests.unit.work.operation_tests import (
    MINUTE,
    TYPE,
    WorkerCase,
    identity,
    things,
    write,
)

#: Seconds for which threads create, take, finish and purge at the same time.
RACE = 4.0
IDS = ("one", "two", "three")


def purge(database: Database, days: float = 0, batch: int = 2) -> int:
    """A whole walk; how many steps it took."""
    walk, steps = FencePurge(database, SystemClock(), batch=batch), 1
    while walk.step(days):
        steps += 1
    return steps


def _new(uuid: str) -> NewOperation:
    return NewOperation(uuid, "here", "", None)


class Race:
    """Operations on a few resources and purges, at the same time, by threads of several databases (nodes of one store).

    A life: a thread makes a resource, takes the operation, finishes it, and tries to write with a token of an earlier life.
    """

    def __init__(self, databases: Sequence[Database], seconds: float) -> None:
        self.databases = databases
        self.until = time.monotonic() + seconds
        #: All tokens of operations by resource.
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self._lock = threading.Lock()

    def run(self) -> dict[str, list[int]]:
        with ThreadPoolExecutor(len(self.databases) * (len(IDS) + 1)) as pool:
            lives = [
                pool.submit(self.live, database, uuid, f"{number}-{uuid}")
                for number, database in enumerate(self.databases)
                for uuid in IDS
            ]
            walks = [pool.submit(self.purge, database) for database in self.databases]
            for each in lives:
                each.result()
            if not all(each.result() for each in walks):
                raise AssertionError("nothing was purged")
        return self.tokens

    def live(self, database: Database, uuid: str, who: str) -> None:
        while time.monotonic() < self.until:
            self.one_life(database, uuid, who)

    def purge(self, database: Database) -> int:
        walks = 0
        while time.monotonic() < self.until:
            purge(database)
            walks += 1
        return walks

    def one_life(self, database: Database, uuid: str, who: str) -> None:
        store = SqlOperationStore(database, lease_seconds=MINUTE)
        with self._lock:
            last = max(self.tokens[uuid], default=0)

        def begin(tx: sa.Connection) -> int:
            if last % 2:
                return store.create(tx, TYPE, uuid, "build", "building", target_host="here")
            tokens = store.create_many(tx, TYPE, "build", "building", [_new(uuid)])
            if tokens is None:
                raise errors.Conflict("An operation is in progress.")
            return tokens[uuid]

        def make(tx: sa.Connection) -> int:
            token = begin(tx)
            tx.execute(sa.delete(things).where(things.c.id == uuid, things.c.fence <= token))
            tx.execute(sa.insert(things).values(id=uuid, status="building", writes=0, fence=token))
            return token

        try:
            token = database.run(make)
        except (errors.Conflict, Duplicate):
            return
        if token <= last:
            raise AssertionError(f"{uuid} got token {token} after {last}")
        held = self.take(database, store, uuid, who)
        with self._lock:
            self.tokens[uuid] += [token, held.token]
        held.finish_with(lambda tx: write(tx, uuid, "active", held.token))
        if last and database.run(lambda tx: write(tx, uuid, "stale", last)):
            raise AssertionError(f"{uuid} was written with the old token {last}")

    def take(self, database: Database, store: SqlOperationStore, uuid: str, who: str) -> OperationLease:
        """Takes the operation of a resource. It has no owner, and no other thread takes it."""
        held = store.take(TYPE, uuid, identity(who))
        if held is None:
            with database.read() as tx:
                rows = [tx.execute(sa.select(table)).all() for table in (workers, fences)]
            raise AssertionError(f"the operation of {uuid} cannot be taken: its fence is gone; {rows}")
        return held


class FenceTests(WorkerCase):
    """Subclasses give ``url``."""

    def lived(self, uuid: str = "one", kind: str = TYPE) -> int:
        """An operation that has ended; the last token of its resource."""

        def work(tx: sa.Connection) -> None:
            self.store.create(tx, kind, uuid, "build", "building", target_host="here")

        self.database.run(work)
        held = self.store.take(kind, uuid, identity())
        assert held is not None
        held.finish_with(lambda tx: None)
        return held.token

    def tokens(self, kind: str = TYPE) -> dict[str, int]:
        with self.database.read() as tx:
            rows = tx.execute(sa.select(fences.c.resource_id, fences.c.token).where(fences.c.resource_type == kind))
            return {row.resource_id: row.token for row in rows}

    def test_floors_and_tokens_are_of_one_type(self) -> None:
        tokens = {
            ("other", FLOOR): 100,
            ("other", "one"): 1,
            (TYPE, FLOOR): 10,
            (TYPE, "one"): 1,
            (TYPE, "two"): 7,
            ("zone", "one"): 1,
        }
        with self.database.write() as tx:
            for (kind, uuid), token in tokens.items():
                tx.execute(sa.insert(fences).values(resource_type=kind, resource_id=uuid, token=token, raised_at=1))
            self.assertEqual(11, lift_above_floor(tx, TYPE, "one", 1))
            self.assertEqual({"one": 11}, last_tokens(tx, TYPE, ["one"]))
            here = (fences.c.resource_type == "other", fences.c.resource_id == "one")
            self.assertEqual(1, tx.execute(sa.select(fences.c.token).where(*here)).scalar_one())
            tx.execute(sa.update(fences).where(*here).values(token=11))
            _purge(tx, TYPE, {"one": 11})
            found = {(row.resource_type, row.resource_id): row.token for row in tx.execute(sa.select(fences))}
        self.assertEqual(
            {("other", FLOOR): 100, ("other", "one"): 11, (TYPE, FLOOR): 11, (TYPE, "two"): 7, ("zone", "one"): 1},
            found,
        )

    def test_no_token_comes_twice_and_no_old_writer_returns(self) -> None:
        self.create()
        old = self.taken()
        self.finish(old)
        purge(self.database)
        self.assertEqual(self.tokens(), {FLOOR: old.token})
        # The resource goes, and comes back under the same uuid.
        self.database.run(lambda tx: tx.execute(sa.delete(things)) and None)
        self.assertEqual(self.create(), old.token + 1)
        self.assertFalse(self.database.run(lambda tx: write(tx, "one", "stale", old.token)))
        with self.assertRaises(errors.Fenced):
            old.renew()
        new = self.taken()
        self.assertEqual((new.token, self.thing().status), (old.token + 2, "building"))

    def test_new_resources_start_above_the_floor_of_their_type(self) -> None:
        for _ in range(4):
            last = self.lived("one")
        self.lived("two")
        self.lived("other", "gadget")
        purge(self.database)
        self.assertEqual((self.tokens(), self.tokens("gadget")), ({FLOOR: last}, {FLOOR: 2}))
        self.assertEqual(self.create("three"), last + 1)
        self.assertEqual(self.lived("more", "gadget"), 4)
        token = self.database.run(lambda tx: self.store.reset(tx, TYPE, "four"))
        self.assertEqual(token, last + 1)

    def test_a_set_of_fences_is_raised_above_the_floor_of_its_type(self) -> None:
        def rows(tx: sa.Connection) -> dict[tuple[str, str], int]:
            return {(row.resource_type, row.resource_id): row.token for row in tx.execute(sa.select(fences))}

        kept = {(TYPE, FLOOR): 5, (TYPE, "beside"): 2, ("other", "low"): 3, ("other", "high"): 4, ("other", FLOOR): 1}
        with self.database.write() as tx:
            for (kind, uuid), token in {**kept, (TYPE, "low"): 2, (TYPE, "high"): 9}.items():
                tx.execute(sa.insert(fences).values(resource_type=kind, resource_id=uuid, token=token, raised_at=0))
            raised = {"low": 6, "high": 10, "new": 6}
            self.assertEqual(raised, raise_fences(tx, TYPE, ["new", "low", "high"]))
            self.assertEqual({**kept, **{(TYPE, uuid): token for uuid, token in raised.items()}}, rows(tx))

    def test_a_fence_that_is_inserted_after_the_raise_of_a_set_is_not_its_own(self) -> None:
        if self.database.dialect == "sqlite":
            self.skipTest("SQLite: no transaction inserts a fence while another one writes")
        another, lived = self.open_database(), list[int]()
        store = SqlOperationStore(another, lease_seconds=MINUTE)

        def read(tx: sa.Connection, *of: Any) -> dict[str, int]:
            if not lived:
                another.run(lambda tx: store.create(tx, TYPE, "one", "build", "building", target_host="here"))
                held = store.take(TYPE, "one", identity())
                assert held is not None
                held.finish_with(lambda tx: None)
                lived.append(held.token)
            return last_tokens(tx, *of)

        with mock.patch.object(fences_module, "last_tokens", read), self.assertRaisesRegex(Duplicate, "inserted"):
            self.database.run(
                lambda tx: self.store.create_many(tx, TYPE, "build", "building", [_new("one"), _new("two")])
            )
        self.assertEqual({"one": lived[0]}, self.tokens())
        self.database.run(lambda tx: self.store.create_many(tx, TYPE, "build", "building", [_new("one"), _new("two")]))
        self.assertEqual({"one": lived[0] + 1, "two": 1}, self.tokens())

    def test_a_floor_never_falls(self) -> None:
        for _ in range(3):
            high = self.lived("one")
        purge(self.database)
        with self.database.write() as tx:
            tx.execute(sa.insert(fences).values(resource_type=TYPE, resource_id="low", token=1, raised_at=0))
        purge(self.database)
        self.assertEqual(self.tokens(), {FLOOR: high})

    def test_what_is_in_progress_or_was_raised_lately_stays(self) -> None:
        self.create("busy")
        self.lived("idle")
        purge(self.database, days=1)
        self.assertEqual(set(self.tokens()), {"busy", "idle"})
        purge(self.database)
        self.assertEqual(set(self.tokens()), {"busy", FLOOR})
        self.finish(self.taken("busy"))

    def test_a_fence_that_is_raised_after_the_look_stays(self) -> None:
        last, run = self.lived("one"), self.database.run

        def raised(work: Any) -> Any:
            with mock.patch.object(self.database, "run", run):
                self.create("one")
            return run(work)

        with mock.patch.object(self.database, "run", raised):
            FencePurge(self.database, SystemClock()).step(0)
        self.assertEqual(self.tokens(), {"one": last + 1, FLOOR: last})
        self.assertEqual(self.taken("one").token, last + 2)

    def test_a_walk_takes_pages_and_the_next_one_waits(self) -> None:
        clock = ManualClock(0.0)
        for kind, number in (("a", 5), ("b", 0), ("c", 4)):
            for each in range(number):
                self.lived(f"{kind}-{each}", kind)
        walk, steps = FencePurge(self.database, clock, batch=2), 1
        while walk.step(0):
            steps += 1
        self.assertEqual((self.tokens("a"), self.tokens("c"), steps), ({FLOOR: 2}, {FLOOR: 2}, 6))
        self.lived("more", "a")
        self.assertFalse(walk.step(0))
        self.assertIn("more", self.tokens("a"))
        clock.now += PAUSE + 1
        self.assertTrue(walk.step(0))
        self.assertNotIn("more", self.tokens("a"))

    def test_operations_that_race_with_purges_never_get_a_token_twice(self) -> None:
        databases = [self.open_database() for _ in range(2)]
        tokens = Race(databases, RACE).run()
        for uuid in IDS:
            found = tokens[uuid]
            self.assertGreater(len(found), 4)
            self.assertEqual(len(set(found)), len(found), uuid)
        print(f"{self.database.dialect}: {sum(map(len, tokens.values()))} tokens, floor {self.tokens().get(FLOOR)}")  # noqa: T201
        with self.database.read() as tx:
            self.assertEqual(tx.execute(sa.select(sa.func.count()).select_from(workers)).scalar_one(), 0)


__all__ = ["FenceTests", "Race"]
