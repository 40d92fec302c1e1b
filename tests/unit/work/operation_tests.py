# SPDX-License-Identifier: Apache-2.0
"""What worker rows promise, on any database; a mix-in for the tests of each."""

from __future__ import annotations

import threading
import unittest
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import sqlalchemy as sa
from typing_extensions import override

from moorage import context, errors, threads
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.db.schema import core_metadata
from moorage.db.tables import events
from moorage.services.interface import ServiceIdentity
from moorage.testing.database import empty_tables
from moorage.work import lease
from moorage.work.fences import FLOOR
from moorage.work.interface import ANY_SCHEDULER, Lease, OnlyIf, Operation, Phase
from moorage.work.operations import OperationLease, SqlOperationStore
from moorage.work.tables import fences, workers
from tests.servers import wait_until

metadata = sa.MetaData()
#: A resource that workers guard.
things = sa.Table(
    "things",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("status", sa.String(40), nullable=False),
    sa.Column("writes", sa.Integer, nullable=False),
    sa.Column("fence", sa.BigInteger, nullable=False),
)
MINUTE = 60.0
#: A lease that has expired when it is next looked at.
MOMENT = 0.000001
TYPE = "thing"


def identity(name: str = "a", epoch: int = 1, host: str = "here") -> ServiceIdentity:
    return ServiceIdentity(f"service-{name}", host, "agent", None, epoch)


def write(tx: sa.Connection, uuid: str, status: str, token: int) -> bool:
    """The fenced write of the work."""
    statement = lease.WRITE.update(things, things.c.id == uuid, {"token": token})
    return tx.execute(statement.values(status=status, writes=things.c.writes + 1)).rowcount == 1


def in_threads(*works: Callable[[], object]) -> list[object]:
    """All at once; results, or the errors of the project that they ended with."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> object:
        barrier.wait(60)
        try:
            return work()
        except errors.MoorageError as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


class ImpatientClock(SystemClock):
    """Waits a thousandth of what it is asked to, and remembers what that was."""

    def __init__(self) -> None:
        self.asked: list[float | None] = []

    @override
    def wait(self, event: threads.Event, seconds: float | None) -> bool:
        self.asked.append(seconds)
        return super().wait(event, None if seconds is None else seconds / 1000)


class WorkerCase(unittest.TestCase):
    """Subclasses give ``url``."""

    url: str
    #: The name under which events are recorded; None: none are.
    service: str | None = None

    def setUp(self) -> None:
        self.database = self.open_database()
        with self.database.write() as tx:
            empty_tables(tx, core_metadata, metadata)
        self.store = SqlOperationStore(self.database, lease_seconds=MINUTE)

    def open_database(self) -> Database:
        database = Database(self.url, service=self.service)
        self.addCleanup(database.close)
        return database

    def create(
        self, uuid: str = "one", operation: str = "build", status: str = "building", *, host: str = "here",
        force: bool = False, project_id: str = "",
    ) -> int:  # fmt: skip
        """The operation and its resource, in one transaction."""

        def work(tx: sa.Connection) -> int:
            token = self.store.create(
                tx, TYPE, uuid, operation, status, target_host=host, force=force, project_id=project_id
            )
            if not write(tx, uuid, status, token):
                tx.execute(sa.insert(things).values(id=uuid, status=status, writes=0, fence=token))
            return token

        return self.database.run(work)

    def taken(self, uuid: str = "one", who: ServiceIdentity | None = None, seconds: float = MINUTE) -> OperationLease:
        held = SqlOperationStore(self.database, lease_seconds=seconds).take(TYPE, uuid, who or identity())
        assert held is not None
        return held

    def thing(self, uuid: str = "one") -> sa.Row:
        with self.database.read() as tx:
            return tx.execute(sa.select(things).where(things.c.id == uuid)).one()

    def fence(self, uuid: str = "one") -> int:
        with self.database.read() as tx:
            return tx.execute(sa.select(fences.c.token).where(fences.c.resource_id == uuid)).scalar_one()

    def put(self, uuid: str = "one", **values: object) -> Operation | None:
        """Set columns of a row, past every statement of the store; the row afterwards."""
        with self.database.write() as tx:
            tx.execute(sa.update(workers).where(workers.c.resource_id == uuid).values(**values))
        return self.store.get(TYPE, uuid)

    def others(self, uuid: str) -> list[tuple[object, ...]]:
        """Every row and fence but those of one resource."""
        with self.database.read() as tx:
            return [
                tuple(row)
                for table in (workers, fences)
                for row in tx.execute(sa.select(table).order_by(table.c.resource_type, table.c.resource_id))
                if (row.resource_type, row.resource_id) != (TYPE, uuid)
            ]

    def finish(self, held: Lease, status: str = "active") -> None:
        with held.finish() as tx:
            self.assertTrue(write(tx, held.resource_id, status, held.token))


class OperationTests(WorkerCase):
    """Subclasses give ``url``."""

    # -- the life of a row ----------------------------------------------------------------------------------------

    def test_an_operation_is_created_taken_and_finished(self) -> None:
        self.create()
        held = self.taken()
        self.assertEqual((held.operation, held.status, held.attempts), ("build", "building", 1))
        held.check()
        self.finish(held)
        self.assertIsNone(self.store.get(TYPE, "one"))
        self.assertEqual((self.thing().status, self.thing().fence), ("active", held.token))

    def test_events_are_for_the_project_of_the_resource_and_name_who_asked(self) -> None:
        """Without a project of the resource they are for the project that asked."""
        self.database = Database(self.url, service="agent:here")
        self.addCleanup(self.database.close)
        self.store = SqlOperationStore(self.database, lease_seconds=MINUTE)
        asked = context.RequestContext(user_id="operator", project_id="theirs", overwrite=False)
        with context.acting_for(asked):
            self.create(project_id="blue")
            self.create("two", project_id="red")
            self.create("two", "delete", "deleting", project_id="blue", force=True)
            self.create("three")
            with self.database.write() as tx:
                tx.execute(sa.insert(things).values(id="four", status="new", writes=0, fence=0))
            here = self.store.tracked(TYPE, "four", "build", "building", identity(), project_id="blue")
            with self.assertRaises(ZeroDivisionError), here:
                raise ZeroDivisionError
        for uuid in ("one", "two", "three", "four"):
            if uuid != "four":
                (held,) = self.store.take_many(TYPE, [uuid], identity()).values()
                held.release("the driver is away")
            (held,) = self.store.take_many(TYPE, [uuid], identity()).values()
            held.told_at = 7
            self.finish(held)
        with self.database.read() as tx:
            columns = (events.c.kind, events.c.subject, events.c.project_id, events.c.actor)
            found = [tuple(row) for row in tx.execute(sa.select(*columns).order_by(events.c.id))]
            states = tx.execute(sa.select(events.c.kind, events.c.state).order_by(events.c.id)).all()
        told = [(kind, state.get("told_at")) for kind, state in states if kind != "operation.take"]
        self.assertEqual({("operation.release", None): 4, ("operation.end", 7): 4}, Counter(told))
        kinds = ("operation.release", "operation.take", "operation.end")
        for subject, project in (
            ("thing/one", "blue"),
            ("thing/two", "blue"),
            ("thing/three", "theirs"),
            ("thing/four", "blue"),
        ):
            expected = [(kind, subject, project, "operator") for kind in kinds]
            self.assertEqual(expected, [row for row in found if row[1] == subject])

    def first(self, uuid: str, only_if: OnlyIf | None = None) -> int:
        return self.database.run(
            lambda tx: self.store.create(
                tx, TYPE, uuid, "build", "building", target_host="here", first=True, only_if=only_if
            )
        )

    def test_the_first_operation_of_a_resource_that_existed_before_is_refused(self) -> None:
        self.assertEqual(1, self.first("one"))
        with self.assertRaisesRegex(errors.Conflict, "Thing one existed before"):
            self.first("one")
        self.taken().finish_with(lambda tx: None)
        with self.assertRaisesRegex(errors.Conflict, "Thing one existed before"):
            self.first("one")
        self.assertEqual(2, self.fence())

    def test_an_operation_begins_only_if_the_condition_on_other_rows_holds(self) -> None:
        self.create("other")
        refused: list[int] = []

        def refuse(tx: sa.Connection) -> None:
            refused.append(1)
            if len(refused) < 3:
                raise errors.ConstraintViolated("the other thing is not ready")
            # It holds by the time that it is explained.
            tx.execute(sa.update(things).where(things.c.id == "other").values(status="ready"))

        clause = sa.exists().where(things.c.id == sa.bindparam("of_other"), things.c.status == "ready")
        only_if = OnlyIf(clause, {"of_other": "other"}, refuse)
        for first in (True, False):
            with self.assertRaisesRegex(errors.ConstraintViolated, "not ready"):
                self.database.run(
                    lambda tx, first=first: self.store.create(  # type: ignore[misc]
                        tx, TYPE, "one", "build", "building", target_host="here", first=first, only_if=only_if
                    )
                )
            self.assertIsNone(self.store.get(TYPE, "one"))
        self.assertEqual(1, self.first("one", only_if))
        self.assertEqual(3, len(refused))
        self.assertEqual(1, self.first("two", only_if))

    def test_a_new_fence_that_missed_the_floor_is_lifted_above_it(self) -> None:
        def work(tx: sa.Connection) -> int:
            token = self.store.create(tx, TYPE, "one", "build", "building", target_host="here")
            tx.execute(sa.delete(workers).where(workers.c.resource_id == "one"))
            # As if the floor had been committed while the fence was being inserted.
            tx.execute(sa.insert(fences).values(resource_type=TYPE, resource_id=FLOOR, token=7, raised_at=0))
            self.assertEqual(1, token)
            return self.store.create(tx, TYPE, "one", "build", "building", target_host="here")

        self.assertEqual(8, self.database.run(work))
        self.assertEqual(8, self.fence())
        held = self.taken()
        self.assertEqual(9, held.token)

    def test_tokens_rise_for_ever(self) -> None:
        tokens = []
        for _ in range(3):
            tokens.append(self.create())
            held = self.taken()
            tokens.append(held.token)
            self.finish(held)
        self.assertEqual(tokens, [1, 2, 3, 4, 5, 6])

    def test_who_was_paused_since_an_earlier_life_of_the_resource_writes_nothing_of_the_next(self) -> None:
        self.create()
        paused = self.taken()
        self.create(operation="delete", force=True)
        with self.taken().finish() as tx:
            tx.execute(sa.delete(things))
        # With the uuid of the one that is gone, which a client may give.
        self.create()
        self.finish(self.taken())
        with self.database.write() as tx:
            self.assertFalse(write(tx, "one", "error", paused.token))
        self.assertEqual(self.thing().status, "active")

    def test_a_second_operation_is_refused_and_names_the_first(self) -> None:
        self.create()
        with self.assertRaisesRegex(errors.InUse, "its operation build waits for here"):
            self.create(operation="delete")
        self.taken()
        before = self.fence()
        with self.assertRaisesRegex(errors.InUse, "its operation build is carried out by service service-a") as caught:
            self.create(operation="delete")
        self.assertEqual(caught.exception.details["holder"], "service-a")
        self.assertEqual(self.fence(), before)

    def test_a_forced_operation_takes_the_work_away(self) -> None:
        self.create()
        zombie = self.taken()
        token = self.create(operation="delete", status="deleting", host="there", force=True)
        self.assertGreater(token, zombie.token)
        row = self.store.get(TYPE, "one")
        assert row is not None
        self.assertEqual(
            (row.operation, row.status, row.target_host, row.owner, row.attempts),
            ("delete", "deleting", "there", None, 0),
        )
        with self.assertRaises(errors.Fenced):
            zombie.check()
        with self.assertRaises(errors.Fenced):
            zombie.renew()
        with self.assertRaises(errors.Fenced):
            self.finish(zombie)
        self.assertEqual(self.thing().status, "deleting")

    def test_a_live_lease_is_not_taken(self) -> None:
        self.create()
        held = self.taken()
        for who in (identity(), identity("b"), identity("b", 9)):
            self.assertIsNone(self.store.take(TYPE, "one", who))
        held.check()

    def test_the_next_incarnation_takes_over_at_once(self) -> None:
        self.create()
        zombie = self.taken(who=identity(epoch=1))
        held = self.taken(who=identity(epoch=2))
        self.assertGreater(held.token, zombie.token)
        self.assertEqual(held.attempts, 2)
        self.assertIsNone(self.store.take(TYPE, "one", identity(epoch=1)))

    def test_anybody_takes_over_when_the_lease_has_expired(self) -> None:
        self.create()
        zombie = self.taken(seconds=MOMENT)
        wait_until(lambda: self.store.take(TYPE, "one", identity("b")), "the lease has expired", 60)
        with self.assertRaises(errors.Fenced):
            self.finish(zombie)

    def test_who_renews_keeps_it(self) -> None:
        self.create()
        held = self.taken(seconds=MOMENT)
        self.assertEqual(self.store.renew_many([held]), [])
        self.assertIsNone(self.store.take(TYPE, "one", identity("b")))

    def test_an_operation_that_is_done_right_here_is_renewed_by_the_clock_that_was_given(self) -> None:
        clock = ImpatientClock()
        store = SqlOperationStore(self.database, lease_seconds=MINUTE, clock=clock)
        with store.tracked(TYPE, "one", "build", "building", identity()) as held:
            first = self.store.get(TYPE, "one")
            assert first is not None
            wait_until(lambda: self.expires("one") > first.expires_at, "it is renewed", 20)
            held.check()
        self.assertEqual((set(clock.asked), self.store.get(TYPE, "one")), ({MINUTE / 3}, None))

    def expires(self, uuid: str) -> int:
        row = self.store.get(TYPE, uuid)
        return 0 if row is None else row.expires_at

    def test_renewing_many_tells_which_are_lost(self) -> None:
        for uuid in ("one", "two", "three"):
            self.create(uuid)
        held = [self.taken(uuid) for uuid in ("one", "two", "three")]
        self.create("two", "delete", "deleting", force=True)
        self.assertEqual([each.resource_id for each in self.store.renew_many(held)], ["two"])

    def start(self, *uuids: str, who: ServiceIdentity | None = None) -> list[str]:
        return sorted(self.database.run(lambda tx: self.store.start_many(tx, TYPE, uuids, who or identity("b"))))

    def test_what_somebody_had_is_not_started_again(self) -> None:
        for uuid in ("free", "live", "mine-before", "expired", "back"):
            self.create(uuid)
        self.taken("live", identity("a"))
        self.taken("mine-before", identity("b", epoch=0))
        self.taken("expired", identity("a"), MOMENT)
        self.taken("back").release("it is stopping")
        every = ("free", "live", "mine-before", "expired", "back")
        self.assertEqual([each.resource_id for each in self.store.waiting(TYPE, ["there", "here"])], ["back", "free"])
        self.assertEqual(self.start(*every), ["back", "free"])
        self.assertEqual(self.start(*every), [])
        self.assertEqual(self.start(), [])

    def test_what_is_given_back_is_taken_again(self) -> None:
        self.create()
        held = self.taken()
        with self.assertLogs("moorage.work.operations", "WARNING") as logs:
            held.release("the disk is full")
        self.assertIn("the disk is full", logs.output[0])
        again = self.taken(who=identity("b"))
        self.assertEqual(again.attempts, 2)
        kept = self.store.get(TYPE, "one")
        held.release("too late")
        self.assertEqual(kept, self.store.get(TYPE, "one"))
        again.check()

    # -- guards: see test_guards, which takes out each of them ----------------------------------------------------

    def create_other(self, kind: str, uuid: str) -> None:
        """An operation of another type."""
        with self.database.write() as tx:
            self.store.create(tx, kind, uuid, "build", "building", target_host="here")

    def test_what_is_done_to_a_resource_leaves_every_other_one_as_it_is(self) -> None:
        run, store = self.database.run, self.store

        def seen(uuid: str) -> Operation:
            found = store.get(TYPE, uuid)
            assert found is not None
            return found

        def readdress(found: Operation) -> int:
            return run(lambda tx: store.readdress(tx, found, "there"))

        def begin(tokens: Mapping[str, int]) -> Mapping[str, Lease]:
            return run(lambda tx: store.begin_many(tx, TYPE, tokens, identity()))

        waiting: dict[str, Callable[[str], object]] = {
            "take": lambda uuid: store.take(TYPE, uuid, identity()),
            "start": lambda uuid: run(lambda tx: store.start_many(tx, TYPE, [uuid], identity())),
            "begin": lambda uuid: begin({uuid: seen(uuid).token}),
            "announce": lambda uuid: store.announce(TYPE, [uuid]),
            "force": lambda uuid: self.create(uuid, "delete", "deleting", force=True),
            "readdress": lambda uuid: readdress(seen(uuid)),
            "reset": lambda uuid: run(lambda tx: store.reset(tx, TYPE, uuid)),
        }
        taken: dict[str, Callable[[OperationLease], object]] = {
            "renew": lambda held: store.renew_many([held]),
            "advance": lambda held: run(lambda tx: held.advance(tx, "copying")),
            "release": lambda held: held.release("it is stopping"),
            "finish": lambda held: run(held.end),
        }
        for name in (*waiting, *taken):
            with self.subTest(name):
                neighbour = f"{name} next"
                self.create(name)
                self.create(neighbour)
                self.create_other("other", name)
                if name in waiting:
                    before = self.others(name)
                    waiting[name](name)
                else:
                    # All of them have the same owner and token.
                    for kind, uuid in (("other", name), (TYPE, neighbour)):
                        assert store.take(kind, uuid, identity()) is not None
                    held = self.taken(name)
                    before = self.others(name)
                    taken[name](held)
                self.assertEqual(before, self.others(name))

    def test_a_lease_is_lost_only_with_its_own_row(self) -> None:
        """Rows of other resources may carry the token too."""
        self.create_other("other", "one")
        for uuid in ("one", "two"):
            self.create(uuid)
        stranger = self.store.take("other", "one", identity())
        held, other = self.taken("one"), self.taken("two")
        assert stranger is not None
        self.assertEqual(1, len({held.token, other.token, stranger.token}))
        found = self.store.get(TYPE, "one")
        assert found is not None
        self.assertEqual(TYPE, found.resource_type)
        self.database.run(held.end)
        self.assertEqual([held], self.store.renew_many([held, other]))

    def test_several_end_together_and_no_other(self) -> None:
        for uuid in ("one", "two", "three", "four"):
            self.create(uuid)
        self.create_other("other", "one")
        # All of the first have the same token, and so have those that go on.
        held = [self.taken(uuid) for uuid in ("one", "two")]
        kept, stranger = self.taken("four"), self.store.take("other", "one", identity())
        assert stranger is not None
        self.taken("three").release("it is taken again")
        later = self.taken("three")
        self.assertEqual(1, len({each.token for each in (*held, kept, stranger)}))
        self.assertGreater(later.token, kept.token)
        self.database.run(lambda tx: self.store.end_many(tx, [later, *held]))
        self.assertEqual([True, True, True], [each.ended for each in (later, *held)])
        left = [self.store.get(kind, uuid) for kind in (TYPE, "other") for uuid in ("one", "two", "three", "four")]
        self.assertEqual([False] * 3 + [True, True] + [False] * 3, [each is not None for each in left])

    def test_of_several_that_end_together_none_ends_without_the_others(self) -> None:
        for uuid in ("one", "two", "three"):
            self.create(uuid)
        held = [self.taken(uuid) for uuid in ("one", "two", "three")]
        held[1].release("it is taken again")
        self.taken("two", identity("b"))
        before = [self.store.get(TYPE, uuid) for uuid in ("one", "two", "three")]
        with self.assertRaises(errors.Fenced):
            self.database.run(lambda tx: self.store.end_many(tx, held))
        self.assertEqual(before, [self.store.get(TYPE, uuid) for uuid in ("one", "two", "three")])

    def test_a_step_of_who_was_overtaken_changes_nothing(self) -> None:
        self.create()
        zombie = self.taken(who=identity(epoch=1))
        self.taken(who=identity(epoch=2))
        kept = self.store.get(TYPE, "one")
        with self.assertRaises(errors.Fenced):
            self.database.run(lambda tx: zombie.advance(tx, "copying"))
        self.assertEqual((kept, "building"), (self.store.get(TYPE, "one"), zombie.status))

    def test_what_has_changed_since_it_was_read_is_not_readdressed(self) -> None:
        self.create()
        seen = self.store.get(TYPE, "one")
        assert seen is not None
        self.taken()
        kept = self.store.get(TYPE, "one")
        with self.assertRaises(errors.Conflict):
            self.database.run(lambda tx: self.store.readdress(tx, seen, "there"))
        self.assertEqual(kept, self.store.get(TYPE, "one"))

    def test_what_another_operation_has_changed_is_not_readdressed(self) -> None:
        self.create()
        seen = self.store.get(TYPE, "one")
        assert seen is not None
        self.create("one", "delete", "deleting", force=True)
        kept = self.store.get(TYPE, "one")
        with self.assertRaises(errors.Conflict):
            self.database.run(lambda tx: self.store.readdress(tx, seen, "there"))
        self.assertEqual(kept, self.store.get(TYPE, "one"))

    def test_what_has_begun_with_its_first_token_is_not_readdressed(self) -> None:
        token = self.create()
        seen = self.store.get(TYPE, "one")
        assert seen is not None
        self.told({"one": token})
        kept = self.store.get(TYPE, "one")
        with self.assertRaises(errors.Conflict):
            self.database.run(lambda tx: self.store.readdress(tx, seen, "there"))
        self.assertEqual(kept, self.store.get(TYPE, "one"))

    def test_only_what_waits_is_announced_and_once_in_a_while(self) -> None:
        for uuid in ("waits", "owned", "cleaned"):
            self.create(uuid)
        kept = [
            self.put("owned", owner="service-a", phase=Phase.WAITING.value),
            self.put("cleaned", phase=Phase.RETRYING.value),
        ]
        self.store.announce(TYPE, ["waits", "owned", "cleaned"])
        announced = self.store.get(TYPE, "waits")
        assert announced is not None
        self.assertGreater(announced.next_try_at, 0)
        kept.append(self.put("waits", next_try_at=2**60))
        self.store.announce(TYPE, ["waits"])
        self.assertEqual(kept, [self.store.get(TYPE, uuid) for uuid in ("owned", "cleaned", "waits")])

    def test_what_is_not_there_to_be_taken_is_neither_taken_nor_started(self) -> None:
        """Of what has become of the other rows, each is forbidden by one condition alone."""
        far = 2**60
        rows: dict[str, dict[str, object]] = {
            "in quarantine": {"phase": Phase.QUARANTINED.value},
            "of the schedulers": {"target_host": ANY_SCHEDULER},
            "of a cleaner": {"phase": Phase.RETRYING.value},
            "owned": {"owner": "service-c", "epoch": 1, "expires_at": far},
            "created after the fences": {"token": far},
            "free": {"attempts": 0},
        }
        # As if their fences had been raised with those of the others.
        not_asked_for: dict[str, object] = {"token": 0}
        for verb in ("start", "take"):
            for uuid, values in rows.items():
                self.create(f"{verb} {uuid}")
                self.put(f"{verb} {uuid}", **values)
            self.create(f"{verb} not asked for")
            self.put(f"{verb} not asked for", **not_asked_for)
            self.create_other("other", f"{verb} free")
        with self.database.write() as tx:
            tx.execute(sa.update(workers).where(workers.c.resource_type == "other").values(**not_asked_for))
        before = [self.store.get("other", f"{verb} free") for verb in ("start", "take")]
        self.assertEqual(["start free", "start of the schedulers"], self.start(*(f"start {uuid}" for uuid in rows)))
        taken = self.store.take_many(TYPE, [f"take {uuid}" for uuid in rows], identity("b"))
        self.assertEqual(["take free", "take of a cleaner"], sorted(taken))
        self.assertEqual(before, [self.store.get("other", f"{verb} free") for verb in ("start", "take")])
        for verb in ("start", "take"):
            found = self.store.get(TYPE, f"{verb} not asked for")
            assert found is not None
            self.assertEqual((None, 0), (found.owner, found.token))

    def test_what_is_pending_and_what_waits_is_what_was_asked_for(self) -> None:
        for uuid in ("before", "one", "owned", "quarantined", "started"):
            self.create(uuid)
        self.create("there", host="there")
        for kind in ("other", "third"):
            self.create_other(kind, "two")
        self.put("owned", owner="service-c", epoch=1, expires_at=2**60)
        self.put("quarantined", phase=Phase.QUARANTINED.value)
        self.put("started", phase=Phase.WORKING.value, expires_at=2**60)
        found = self.store.pending(TYPE, identity(), after="before")
        self.assertEqual(["one"], [each.resource_id for each in found])
        found = self.store.waiting(TYPE, ["here"], after="before")
        self.assertEqual(["one"], [each.resource_id for each in found])

    # -- finishing ------------------------------------------------------------------------------------------------

    def test_an_error_in_the_last_write_undoes_all(self) -> None:
        self.create()
        held = self.taken()
        with self.assertRaises(ZeroDivisionError), held.finish() as tx:
            write(tx, "one", "active", held.token)
            raise ZeroDivisionError
        self.assertEqual(self.thing().status, "building")
        held.check()
        held.finish_with(lambda tx: write(tx, "one", "active", held.token))
        self.assertEqual(self.thing().status, "active")

    def test_a_zombie_ends_no_row_of_another_and_writes_nothing(self) -> None:
        self.create()
        zombie = self.taken()
        held = self.taken(who=identity(epoch=2))
        with self.assertRaises(errors.Fenced):
            zombie.finish_with(lambda tx: write(tx, "one", "error", zombie.token))
        self.assertEqual(self.thing().status, "building")
        held.check()

    def test_after_adoption_not_even_a_single_statement_of_a_zombie_is_accepted(self) -> None:
        self.create()
        zombie = self.taken()

        def stamp_token(tx: sa.Connection, leases: Mapping[str, Lease]) -> None:
            for uuid, held in leases.items():
                write(tx, uuid, held.status, held.token)

        adopted = self.store.take_many(TYPE, ["one"], identity(epoch=2), stamp_token)
        with self.database.write() as tx:
            self.assertFalse(write(tx, "one", "error", zombie.token))
            self.assertTrue(write(tx, "one", "working", adopted["one"].token))

    def test_several_are_ended_in_one_transaction_or_none(self) -> None:
        for uuid in ("one", "two"):
            self.create(uuid)
        held = self.store.take_many(TYPE, ["one", "two"], identity())
        self.create("two", "delete", "deleting", force=True)
        with self.assertRaises(errors.Fenced), self.database.write() as tx:
            for each in held.values():
                each.end(tx)
        held["one"].check()

    # -- taking many ----------------------------------------------------------------------------------------------

    def test_of_many_those_are_taken_that_are_free(self) -> None:
        for uuid in ("one", "two", "three"):
            self.create(uuid)
        self.taken("two", identity("b"))
        taken = self.store.take_many(TYPE, ["three", "one", "two", "nothing", "one"], identity())
        self.assertEqual(sorted(taken), ["one", "three"])
        self.assertEqual(self.store.take_many(TYPE, ["one", "three"], identity()), {})
        self.assertEqual(self.store.take_many(TYPE, [], identity()), {})

    def told(self, tokens: Mapping[str, int], who: ServiceIdentity | None = None) -> Mapping[str, Lease]:
        """Takes operations as an agent does of which messages said the tokens."""
        who = who or identity()
        begun = self.database.run(lambda tx: self.store.begin_many(tx, TYPE, tokens, who))
        return begun | self.store.take_many(TYPE, [uuid for uuid in tokens if uuid not in begun], who)

    def test_a_new_operation_is_taken_with_the_token_of_its_creation(self) -> None:
        token = self.create()
        (held,) = self.told({"one": token}).values()
        found = self.store.get(TYPE, "one")
        assert found is not None
        self.assertEqual(
            (token, "service-a", 1, "service-a", 1, Phase.WORKING, 1),
            (found.token, found.owner, found.epoch, found.worker, found.worker_epoch, found.phase, found.attempts),
        )
        self.assertGreater(found.expires_at, found.updated_at)
        self.assertEqual((token, 1, "build", "building"), (held.token, held.attempts, held.operation, held.status))
        self.assertGreater(held.taken_at, 0)
        self.database.run(held.end)
        self.assertIsNone(self.store.get(TYPE, "one"))

    def test_the_token_of_a_creation_is_given_once(self) -> None:
        token = self.create()

        def begin(who: ServiceIdentity) -> Mapping[str, Lease]:
            return self.told({"one": token}, who)

        first = begin(identity())["one"]
        # The message is doubled.
        self.assertEqual({}, begin(identity()))
        second = begin(identity(epoch=2))["one"]
        self.assertGreater(second.token, first.token)
        second.release("it is stopping")
        third = begin(identity(epoch=2))["one"]
        self.assertGreater(third.token, second.token)
        with self.assertRaises(errors.Fenced):
            self.database.run(first.end)

    def test_a_released_operation_is_taken_with_a_new_token(self) -> None:
        token = self.create()
        (first,) = self.told({"one": token}).values()
        first.release("it is stopping")
        (second,) = self.told({"one": token}).values()
        self.assertGreater(second.token, token)
        with self.assertRaises(errors.Fenced):
            self.database.run(first.end)

    def test_a_late_message_gives_no_other_operation_its_token(self) -> None:
        token = self.create()
        later = self.create("one", "delete", "deleting", force=True)
        (held,) = self.told({"one": token}).values()
        self.assertEqual("delete", held.operation)
        self.assertGreater(held.token, later)

    def test_new_ones_begin_where_others_end(self) -> None:
        tokens = {uuid: self.create(uuid) for uuid in ("new", "newer", "begun", "waits")}
        ending = self.taken("begun", identity("b"))
        told = {"new": tokens["new"], "newer": tokens["newer"], "begun": tokens["begun"], "gone": 1}

        def work(tx: sa.Connection) -> Mapping[str, Lease]:
            ending.end(tx)
            return self.store.begin_many(tx, TYPE, told, identity())

        taken = self.database.run(work)
        self.assertEqual(["new", "newer"], sorted(taken))
        self.assertEqual({uuid: tokens[uuid] for uuid in taken}, {uuid: held.token for uuid, held in taken.items()})
        left = [each.resource_id for each in self.store.pending(TYPE, identity())]
        self.assertEqual((["waits"], None), (left, self.store.get(TYPE, "begun")))

    def test_a_hundred_new_ones_are_taken_by_one_statement(self) -> None:
        told = {f"{number:03d}": self.create(f"{number:03d}") for number in range(100)}
        statements: list[str] = []

        def count(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
            statements.append(statement)

        sa.event.listen(sa.Engine, "before_cursor_execute", count)
        self.addCleanup(sa.event.remove, sa.Engine, "before_cursor_execute", count)
        begun = self.database.run(lambda tx: self.store.begin_many(tx, TYPE, told, identity()))
        self.assertEqual(100, len(begun))
        wanted = 2 if self.database.dialect == "mysql" else 1
        self.assertEqual(wanted, len([each for each in statements if each.startswith(("UPDATE", "SELECT"))]))

    def test_taking_a_hundred_costs_as_many_statements_as_taking_one(self) -> None:
        uuids = [f"{number:03d}" for number in range(100)]
        for uuid in uuids:
            self.create(uuid)
        statements: list[str] = []

        def count(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
            statements.append(statement)

        sa.event.listen(sa.Engine, "before_cursor_execute", count)
        self.addCleanup(sa.event.remove, sa.Engine, "before_cursor_execute", count)
        self.assertEqual(len(self.store.take_many(TYPE, uuids, identity())), 100)
        wanted = 3 if self.database.dialect == "mysql" else 2
        self.assertEqual(len([each for each in statements if each.startswith(("UPDATE", "SELECT"))]), wanted)

    def test_pending_are_those_of_the_host_that_may_be_taken(self) -> None:
        for uuid in ("free", "live", "mine-before", "expired"):
            self.create(uuid)
        self.create("elsewhere", host="there")
        self.taken("live", identity("b"))
        self.taken("mine-before", identity(epoch=1))
        self.taken("expired", identity("b"), MOMENT)
        wait_until(lambda: len(self.pending(epoch=1)) == 2, "the lease has expired", 60)
        self.assertEqual(self.pending(epoch=1), ["expired", "free"])
        self.assertEqual(self.pending(epoch=2), ["expired", "free", "mine-before"])
        page = self.store.pending(TYPE, identity(epoch=2), after="expired", limit=1)
        self.assertEqual([each.resource_id for each in page], ["free"])

    def pending(self, *, epoch: int) -> list[str]:
        return [each.resource_id for each in self.store.pending(TYPE, identity(epoch=epoch))]

    # -- races ----------------------------------------------------------------------------------------------------

    def test_of_many_who_take_the_same_each_row_goes_to_one(self) -> None:
        uuids = [f"{number:03d}" for number in range(40)]
        for uuid in uuids:
            self.create(uuid)

        def take_all(name: str, order: list[str]) -> list[str]:
            store = SqlOperationStore(self.open_database(), lease_seconds=MINUTE)
            taken: list[str] = []
            for start in range(0, len(order), 5):
                taken += store.take_many(TYPE, order[start : start + 5], identity(name))
            return taken

        results = in_threads(
            lambda: take_all("a", uuids), lambda: take_all("b", uuids[::-1]), lambda: take_all("c", uuids)
        )
        taken = [uuid for result in results for uuid in result]  # type: ignore[attr-defined]
        self.assertEqual(sorted(taken), uuids)

    def test_of_many_who_were_told_of_new_ones_one_gets_each(self) -> None:
        """Messages are doubled; some services take, delete and release without having been told."""
        uuids = [f"{number:03d}" for number in range(40)]
        told = {uuid: self.create(uuid) for uuid in uuids}
        given: list[tuple[str, int]] = []

        def take_all(name: str, order: list[str], new: Mapping[str, int]) -> None:
            store = SqlOperationStore(self.open_database(), lease_seconds=MINUTE)
            for start in range(0, len(order), 5):
                part = order[start : start + 5]
                tokens = {uuid: new[uuid] for uuid in part if uuid in new}
                begun = store._database.run(
                    lambda tx, tokens=tokens: store.begin_many(tx, TYPE, tokens, identity(name))  # type: ignore[misc]
                )
                taken = store.take_many(TYPE, [uuid for uuid in part if uuid not in begun], identity(name))
                for uuid, held in [*begun.items(), *taken.items()]:
                    given.append((uuid, held.token))
                    if uuid.endswith("7"):
                        held.release("it is stopping")

        in_threads(
            lambda: take_all("a", uuids, told),
            lambda: take_all("b", uuids[::-1], told),
            lambda: take_all("c", uuids[20:] + uuids[:20], {}),
            lambda: take_all("d", uuids[10:] + uuids[:10], told),
        )
        self.assertEqual(set(uuids), {uuid for uuid, _ in given})
        self.assertEqual([], [each for each, times in Counter(given).items() if times > 1])
        once = Counter(uuid for uuid, _ in given if not uuid.endswith("7"))
        self.assertEqual({1}, set(once.values()))

    def test_of_two_who_create_at_once_one_is_refused(self) -> None:
        for number in range(10):
            uuid = str(number)
            with self.database.write() as tx:
                tx.execute(sa.insert(things).values(id=uuid, status="new", writes=0, fence=0))
            results = in_threads(*[lambda uuid=uuid: self.create(uuid) for _ in range(3)])
            self.assertEqual(sorted(type(each).__name__ for each in results), ["InUse", "InUse", "int"])

    def test_of_an_owner_and_one_who_takes_over_one_finishes(self) -> None:
        for number in range(15):
            uuid = str(number)
            self.create(uuid)
            owner = self.taken(uuid, identity(epoch=1))

            def take_over(uuid: str = uuid) -> None:
                held = self.store.take(TYPE, uuid, identity(epoch=2))
                if held is not None:
                    held.finish_with(lambda tx: write(tx, uuid, "over", held.token))

            def finish(owner: Lease = owner, uuid: str = uuid) -> None:
                owner.finish_with(lambda tx: write(tx, uuid, "owner", owner.token))

            results = in_threads(finish, take_over)
            fenced = [each for each in results if isinstance(each, errors.Fenced)]
            self.assertEqual([each for each in results if each is not None], fenced)
            self.assertEqual(self.thing(uuid).writes, 1)
            self.assertEqual(self.thing(uuid).status, "over" if fenced else "owner")
            self.assertIsNone(self.store.get(TYPE, uuid))

    def test_forcing_at_the_moment_of_the_end_leaves_no_thing_stuck(self) -> None:
        for number in range(15):
            uuid = str(number)
            self.create(uuid)
            owner = self.taken(uuid)

            def end(owner: Lease = owner, uuid: str = uuid) -> None:
                owner.finish_with(lambda tx: write(tx, uuid, "active", owner.token))

            def force(uuid: str = uuid) -> None:
                self.create(uuid, "delete", "deleting", force=True)

            in_threads(end, force)
            busy = self.store.get(TYPE, uuid) is not None
            self.assertEqual(self.thing(uuid).status, "deleting" if busy else "active")
