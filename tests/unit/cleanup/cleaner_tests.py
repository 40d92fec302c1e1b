# SPDX-License-Identifier: Apache-2.0
"""What cleaners promise, on any database; a mix-in for the tests of each."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors, threads
from moorage.cleanup import totals
from moorage.cleanup.cleaner import Cleaner, Policy
from moorage.cleanup.conditions import (
    ExpiredLease,
    NeverStarted,
    OrphansOfService,
    QueuedForDead,
)
from moorage.cleanup.interface import (
    CONTINUES,
    DONE,
    STALE,
    CleanupHandler,
    Outcome,
    SetCleanupHandler,
    retry,
)
from moorage.cleanup.orphans import Claimed, OrphanStore
from moorage.cleanup.tables import cleanup_history
from moorage.cleanup.totals import ClaimCounts, TakeOutcome
from moorage.clock import Clock, SystemClock
from moorage.db import MICROSECONDS, Database
from moorage.services.interface import ServiceIdentity
from moorage.testing.clock import ManualClock
from moorage.work.interface import Lease, Phase
from moorage.work.operations import SqlOperationStore
from moorage.work.tables import workers
from tests.servers import wait_until
from tests.unit.work import operation_tests
from tests.unit.work.operation_tests import (
    MINUTE,
    MOMENT,
    TYPE,
    identity,
    things,
    write,
)

DEAD = identity("dead")
#: What the dead service left, after it was evicted.
AFTER_DEAD = OrphansOfService(DEAD.uuid, DEAD.epoch + 1)


class Tools:
    conf: Any = None
    clock = SystemClock()
    workers: Any = None

    def __init__(self, database: Database, who: ServiceIdentity) -> None:
        self.database = database
        self.identity = who


class ThingHandler(CleanupHandler):
    """Things that were being built get the status error. ``answers`` says what else shall happen, by id."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    cleanable = frozenset({"building", "deleting"})

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        self.answers: dict[str, Any] = {}
        self.calls: list[tuple[str, int]] = []

    @override
    def read(self, transaction: sa.Connection, resource_ids: Sequence[str]) -> Mapping[str, Any]:
        rows = transaction.execute(sa.select(things).where(things.c.id.in_(resource_ids)))
        return {row.id: row for row in rows}

    @override
    def stamp_token(self, transaction: sa.Connection, leases: Mapping[str, Lease]) -> None:
        for uuid in sorted(leases):
            write(transaction, uuid, leases[uuid].status, leases[uuid].token)

    @override
    def cleanup(self, lease: Lease, resource: Any) -> Outcome:
        self.calls.append((lease.resource_id, lease.token))
        answer = self.answers.get(lease.resource_id)
        if callable(answer):
            answer = answer(lease)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Outcome):
            return answer
        lease.finish_with(lambda tx: self._write(tx, lease))
        return DONE

    @staticmethod
    def _write(tx: sa.Connection, lease: Lease) -> None:
        if not write(tx, lease.resource_id, "error", lease.token):
            raise errors.Fenced("The thing was written by a later operation.")


class ThingSetHandler(SetCleanupHandler, ThingHandler):
    """The same in sets."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        self.tidied: list[str] = []

    @override
    def stamp_token(self, transaction: sa.Connection, leases: Mapping[str, Lease]) -> None:
        """Nothing writes early."""

    @override
    def cleanup(self, lease: Lease, resource: Any) -> Outcome:
        answer = self.answers.get(lease.resource_id)
        if isinstance(answer, Exception):
            raise answer
        return super(SetCleanupHandler, self).cleanup(lease, resource)

    @override
    def finish_batch(
        self, transaction: sa.Connection, leases: Mapping[str, Lease], resources: Mapping[str, Any]
    ) -> None:
        for uuid, held in leases.items():
            if isinstance(self.answers.get(uuid), Exception):
                raise self.answers[uuid]
            self._write(transaction, held)

    @override
    def after_commit(self, leases: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
        assert leases.keys() == resources.keys()
        self.tidied += sorted(leases)


class Most:
    """How many a handler is at, at most; it lets two meet."""

    def __init__(self, handler: ThingHandler) -> None:
        self.most = self.now = 0
        self._changed = threading.Condition()
        self._clean = handler.cleanup
        handler.cleanup = self.cleanup  # type: ignore[method-assign]
        if isinstance(handler, ThingSetHandler):
            self._settle = handler.finish_batch
            handler.finish_batch = self.finish_batch  # type: ignore[method-assign]

    def finish_batch(self, transaction: Any, leases: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
        self.most = max(self.most, len(leases))
        self._settle(transaction, leases, resources)

    def cleanup(self, lease: Lease, resource: Any) -> Outcome:
        with self._changed:
            self.now += 1
            self.most = max(self.most, self.now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= 2, 20)
        try:
            return self._clean(lease, resource)
        finally:
            with self._changed:
                self.now -= 1


class _Killed(Exception):
    """What stands for the death of a cleaner."""


class LateClock(ManualClock):
    """Time passes once something hangs, so that nothing that is only slow is late."""

    def __init__(self, hangs: threading.Event) -> None:
        super().__init__()
        self._hangs = hangs

    @override
    def wait(self, event: threads.Event, seconds: float | None) -> bool:
        while not event.wait(0.01):
            if self._hangs.is_set():
                self.advance(seconds or 0)
                return False
        return True


class CleanerCase(operation_tests.WorkerCase):
    """Subclasses give ``url``."""

    def cleaner(
        self,
        who: ServiceIdentity | None = None,
        *,
        handler: type[ThingHandler] = ThingHandler,
        lease: float = MINUTE,
        seed: int = 1,
        clock: Clock | None = None,
        **policy: Any,
    ) -> tuple[Cleaner, ThingHandler]:
        who = who or identity("cleaner")
        database = self.open_database()
        store = OrphanStore(database, SqlOperationStore(database, lease_seconds=lease), who, clock or SystemClock())
        made = handler(Tools(database, who))
        settings = Policy(**{"backoff": 0.01, "backoff_longest": 0.01, **policy})
        cleaner = Cleaner(store, {TYPE: made}, clock or SystemClock(), random.Random(seed), settings)
        self.addCleanup(cleaner.stop)
        return cleaner, made

    def orphan(self, uuid: str = "one", status: str = "building", who: ServiceIdentity = DEAD) -> Lease:
        """An operation whose owner will not end it."""
        self.create(uuid, "build", status)
        return self.taken(uuid, who)

    def rows(self) -> dict[str, sa.Row]:
        with self.database.read() as tx:
            return {row.resource_id: row for row in tx.execute(sa.select(workers))}

    def history(self) -> list[sa.Row]:
        with self.database.read() as tx:
            return list(tx.execute(sa.select(cleanup_history).order_by(cleanup_history.c.id)))

    def outcomes(self) -> Counter[str]:
        return Counter(row.outcome for row in self.history())


class CleanerTests(CleanerCase):
    """Subclasses give ``url``."""

    # -- what is cleaned ------------------------------------------------------------------------------------------

    def test_what_a_dead_service_left_is_cleaned_and_told(self) -> None:
        for uuid in ("one", "two", "three"):
            self.orphan(uuid)
        for handler in (ThingHandler, ThingSetHandler):
            with self.subTest(handler.__name__):
                cleaner, _ = self.cleaner(handler=handler)
                self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 3})
                self.assertEqual(self.rows(), {})
                self.assertEqual({self.thing(uuid).status for uuid in ("one", "two", "three")}, {"error"})
                last = self.history()[-1]
                told = (last.worker, last.worker_epoch, last.cleaner, last.outcome, last.status, last.attempts)
                self.assertEqual(told, (DEAD.uuid, 1, "service-cleaner", "done", "building", 2))
                for uuid in ("one", "two", "three"):
                    self.orphan(uuid)

    def test_nothing_of_a_living_service_is_cleaned_though_its_lease_has_expired(self) -> None:
        self.create()
        self.taken("one", DEAD, MOMENT)
        wait_until(lambda: self.store.pending(TYPE, identity("b")), "the lease has expired", 60)
        cleaner, _ = self.cleaner()
        self.assertEqual(cleaner.clean(OrphansOfService(DEAD.uuid, DEAD.epoch)), {})
        self.assertEqual(cleaner.clean(NeverStarted(("here",), 0)), {})
        self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 1})

    def test_rows_touched_after_the_request_are_left_alone(self) -> None:
        self.orphan()
        cleaner, _ = self.cleaner()
        self.assertEqual(cleaner.clean(OrphansOfService(DEAD.uuid, 2, until=1)), {})
        self.assertEqual(cleaner.clean(OrphansOfService(DEAD.uuid, 2)), {"done": 1})

    def test_one_resource_alone_can_be_named(self) -> None:
        for uuid in ("one", "two"):
            self.orphan(uuid)
        cleaner, handler = self.cleaner()
        self.assertEqual(cleaner.clean(OrphansOfService(DEAD.uuid, 2, resource_type="other", resource_id="two")), {})
        self.assertEqual(
            cleaner.clean(OrphansOfService(DEAD.uuid, 2, resource_type=TYPE, resource_id="two")), {"done": 1}
        )
        self.assertEqual([uuid for uuid, _ in handler.calls], ["two"])

    def test_an_operation_that_nobody_came_for_is_cleaned_after_a_time(self) -> None:
        self.create()
        self.create("elsewhere", host="there")
        cleaner, _ = self.cleaner()
        self.assertEqual(cleaner.clean(NeverStarted(("here",), 3600)), {})
        self.assertEqual(cleaner.clean(NeverStarted(("here",), 0)), {"done": 1})
        self.assertEqual(list(self.rows()), ["elsewhere"])

    def test_what_a_living_service_has_in_its_queue_is_not_unclaimed(self) -> None:
        for uuid in ("queued", "forgotten", "begun"):
            self.create(uuid)
        begun = self.taken("begun")
        unclaimed = NeverStarted(("here",), 0)
        self.store.announce(TYPE, ["queued", "begun", "unknown"])
        cleaner, handler = self.cleaner()
        self.assertEqual(cleaner._orphans.types(unclaimed), {TYPE})
        self.assertEqual(cleaner.clean(unclaimed), {"done": 1})
        self.assertEqual([uuid for uuid, _ in handler.calls], ["forgotten"])
        begun.check()
        self.assertEqual(cleaner._orphans.types(unclaimed), set())
        # Nobody says it any more.
        with self.database.write() as tx:
            tx.execute(sa.update(workers).where(workers.c.resource_id == "queued").values(next_try_at=1))
        self.assertEqual(cleaner.clean(unclaimed), {"done": 1})

    def test_what_is_queued_is_announced_with_few_writes_and_can_be_begun(self) -> None:
        self.create()
        store = SqlOperationStore(self.database, lease_seconds=MINUTE)
        said = set()
        for _ in range(3):
            store.announce(TYPE, ["one"])
            said.add(self.rows()["one"].next_try_at)
        self.assertEqual(len(said), 1)
        self.assertEqual(list(store.take_many(TYPE, ["one"], identity())), ["one"])

    def jump(self, seconds: float) -> None:
        """The database's clock goes forward by so much: all that was written lies so much further back."""
        back = int(seconds * MICROSECONDS)
        columns = (workers.c.expires_at, workers.c.next_try_at, workers.c.updated_at, workers.c.created_at)
        with self.database.write() as tx:
            tx.execute(
                sa.update(workers).values({each.name: sa.case((each > 0, each - back), else_=0) for each in columns})
            )

    def test_a_jump_of_the_databases_clock_takes_nothing_from_those_who_live(self) -> None:
        me = identity("cleaner")
        for uuid in ("begun", "lost", "queued", "forgotten"):
            self.create(uuid)
        begun, _ = self.taken("begun", me), self.taken("lost", me)
        self.store.announce(TYPE, ["queued"])
        clock = ManualClock()
        cleaner, handler = self.cleaner(me, clock=clock)
        lapsed, unclaimed = ExpiredLease(me.uuid, me.epoch, MINUTE), NeverStarted(("here",), MINUTE)
        self.jump(3600)
        for second in range(0, 120, 20):
            for wanted in (lapsed, unclaimed):
                left = cleaner._orphans.types(wanted)
                done = cleaner.clean(wanted)
                self.assertEqual((left, done), ({TYPE}, {"done": 1}) if second == 60 else (set(), {}), (second, wanted))
            clock.advance(20)
            # Those who live show it, when their turn comes.
            self.assertEqual(self.store.renew_many([begun]), [])
            self.store.announce(TYPE, ["queued"])
        # Who has shown no life for a minute of the machine's is not waited for any longer.
        self.assertEqual({uuid for uuid, _ in handler.calls}, {"lost", "forgotten"})

    def test_looks_begin_anew_when_the_store_was_away(self) -> None:
        me, clock = identity("cleaner"), ManualClock()
        self.orphan(who=me)
        self.jump(3600)
        cleaner, _ = self.cleaner(me, clock=clock)
        for seconds, found in ((0, set()), (30, set()), (30, {TYPE})):
            clock.advance(seconds)
            self.assertEqual(cleaner._orphans.types(ExpiredLease(me.uuid, me.epoch, MINUTE)), found)
        cleaner._orphans.forget_looks()
        for seconds, found in ((0, set()), (60, {TYPE})):
            clock.advance(seconds)
            self.assertEqual(cleaner._orphans.types(ExpiredLease(me.uuid, me.epoch, MINUTE)), found)

    def test_what_a_dead_service_left_needs_no_time(self) -> None:
        self.orphan()
        self.create("queued", host="its-host")
        cleaner, _ = self.cleaner(clock=ManualClock())
        self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 1})
        self.assertEqual(cleaner.clean(QueuedForDead("its-host", DEAD.uuid, 2)), {"done": 1})

    def test_a_dead_services_queue_is_cleaned_though_it_had_announced_it(self) -> None:
        self.create("one", host="its-host")
        self.store.announce(TYPE, ["one"])
        cleaner, _ = self.cleaner()
        self.assertEqual(cleaner.clean(QueuedForDead("its-host", DEAD.uuid, 2)), {"done": 1})

    def test_a_cleaner_knows_why_it_cleans(self) -> None:
        causes: list[str] = []
        cleaner, handler = self.cleaner()
        handler.answers["one"] = lambda held: causes.append(held.cause)
        for who, wanted in (
            (DEAD, AFTER_DEAD), (None, QueuedForDead("here", DEAD.uuid, 2)), (None, NeverStarted(("here",), 0)),
            (identity("cleaner"), ExpiredLease("service-cleaner", 1, 0.0)),
        ):  # fmt: skip
            self.create()
            if who is not None:
                self.assertEqual(self.taken("one", who).cause, "")
                with self.database.write() as tx:
                    tx.execute(sa.update(workers).values(expires_at=1))
            self.assertEqual(cleaner.clean(wanted), {"done": 1})
        told = (
            "The service that did it died.",
            "The service that was to do it, on here, died.",
            "No service has begun it within 0",
        )
        for cause, begin in zip(causes, (*told, "The service that had it did not know of it"), strict=True):
            self.assertTrue(cause.startswith(begin), cause)

    def test_own_leftovers_of_a_service_that_goes_on_by_itself_are_left_to_it(self) -> None:
        self.orphan()
        cleaner, handler = self.cleaner()
        type(handler).cleans_own = False
        self.addCleanup(setattr, type(handler), "cleans_own", True)
        self.assertEqual(cleaner.clean(AFTER_DEAD, own=True), {})
        self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 1})

    def test_a_paused_type_waits(self) -> None:
        self.orphan()
        for name in (TYPE, "*"):
            cleaner, _ = self.cleaner(paused=frozenset({name}))
            self.assertEqual(cleaner.clean(AFTER_DEAD), {})
        cleaner.policy = Policy()
        self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 1})

    # -- what is counted ------------------------------------------------------------------------------------------

    def claims(self) -> dict[str, int]:
        with self.database.read() as tx:
            return {result: count for (kind, result), count in totals.claims(tx).items() if kind == TYPE}

    def test_claims_are_counted_once_for_a_pass(self) -> None:
        for uuid in ("one", "two", "three"):
            self.orphan(uuid)
        killed, handler = self.cleaner(identity("killed"), lease=MOMENT)
        handler.answers["one"] = CONTINUES  # it never comes back
        self.assertEqual(self.claims(), {})
        self.assertEqual(killed.clean(AFTER_DEAD), {"continues": 1, "done": 2})
        self.assertEqual(self.claims(), {"won": 3})
        cleaner, _ = self.cleaner()
        wait_until(functools.partial(cleaner.clean, AFTER_DEAD), "the lease of the other has expired", 20)
        self.assertEqual(self.claims(), {"won": 3, "taken_over": 1})

    def test_claims_that_could_not_be_written_are_written_with_the_next(self) -> None:
        counts = ClaimCounts(self.database)
        counts.count(TYPE, TakeOutcome.WON, 2)
        with self.database.write() as tx:
            tx.exec_driver_sql("ALTER TABLE cleanup_totals RENAME TO elsewhere")
        try:
            with self.assertLogs("moorage.cleanup.totals", "WARNING"):
                counts.flush()
        finally:
            with self.database.write() as tx:
                tx.exec_driver_sql("ALTER TABLE elsewhere RENAME TO cleanup_totals")
        counts.count(TYPE, TakeOutcome.LOST, 1)
        counts.flush()
        counts.flush()
        self.assertEqual(self.claims(), {"won": 2, "lost": 1})

    def test_several_processes_add_to_the_same_totals(self) -> None:
        each = [ClaimCounts(self.open_database()) for _ in range(4)]
        for counts in each:
            counts.count(TYPE, TakeOutcome.WON, 5)
            counts.count(TYPE, TakeOutcome.LOST, 1)
        self.assertEqual(operation_tests.in_threads(*(counts.flush for counts in each)), [None] * 4)
        self.assertEqual(self.claims(), {"won": 20, "lost": 4})

    def test_no_more_are_cleaned_at_the_same_time_than_the_limit_says(self) -> None:
        for handler in (ThingHandler, ThingSetHandler):
            with self.subTest(handler.__name__):
                for number in range(9):
                    self.orphan(f"{number}")
                cleaner, made = self.cleaner(handler=handler, limits={TYPE: 2})
                at_once = Most(made)
                self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 9})
                self.assertEqual(at_once.most, 2)

    # -- what needs nothing ---------------------------------------------------------------------------------------

    def test_rows_of_resources_that_are_gone_or_changed_end_without_a_write(self) -> None:
        for uuid in ("gone", "changed", "kept", "done"):
            self.orphan(uuid)
        with self.database.write() as tx:
            tx.execute(sa.delete(things).where(things.c.id == "gone"))
            tx.execute(sa.update(things).where(things.c.id == "changed").values(status="active"))
        cleaner, handler = self.cleaner()
        handler.answers["kept"] = CONTINUES
        self.assertEqual(cleaner.clean(AFTER_DEAD), {"stale": 2, "done": 1, "continues": 1})
        self.assertEqual(list(self.rows()), ["kept"])
        self.assertEqual(self.thing("changed").status, "active")
        self.assertEqual({row.reason for row in self.history() if row.outcome == "stale"},
                         {"the resource is gone", "the resource is active, the operation was of building"})  # fmt: skip

    def test_a_handler_may_find_that_there_is_nothing_to_do(self) -> None:
        self.orphan()
        cleaner, handler = self.cleaner()
        handler.answers["one"] = STALE
        self.assertEqual(cleaner.clean(AFTER_DEAD), {"stale": 1})
        self.assertEqual((self.rows(), self.thing().status), ({}, "building"))

    # -- failures -------------------------------------------------------------------------------------------------

    def test_one_that_fails_stops_no_other(self) -> None:
        for uuid in ("one", "two", "three"):
            self.orphan(uuid)
        for handler in (ThingHandler, ThingSetHandler):
            cleaner, made = self.cleaner(handler=handler, backoff=1000, backoff_longest=1000)
            made.answers["two"] = ValueError("broken")
            with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
                self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 2, "retry": 1})
            row = self.rows()["two"]
            self.assertEqual((row.phase, row.owner, row.last_error), ("retrying", None, "ValueError: broken"))
            self.assertEqual(cleaner.clean(AFTER_DEAD), {}, "its time has not come")
            with self.database.write() as tx:
                tx.execute(sa.delete(workers))
            for uuid in ("one", "two", "three"):
                self.orphan(uuid)

    def test_after_max_attempts_it_is_put_into_quarantine(self) -> None:
        self.orphan()
        cleaner, handler = self.cleaner(max_attempts=3)
        handler.answers["one"] = retry("the disk is full")
        seen: list[str] = []
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):

            def given_up() -> bool:
                seen.extend(cleaner.clean(AFTER_DEAD))
                return "quarantined" in seen

            wait_until(given_up, "it is given up", 20)
        self.assertEqual(seen, ["retry", "retry", "quarantined"])
        self.assertEqual((self.rows()["one"].phase, len(handler.calls)), (Phase.QUARANTINED, 3))
        self.assertIsNone(self.store.take(TYPE, "one", identity("b", 9)))
        self.assertEqual(self.store.pending(TYPE, identity("b", 9)), [])
        self.assertEqual(self.outcomes(), {"retry": 2, "quarantined": 1})

    def test_a_row_that_kills_its_cleaners_is_given_up_too(self) -> None:
        self.orphan()
        for number in range(2):
            killed, handler = self.cleaner(identity(f"killed-{number}"), lease=MOMENT, max_attempts=2)
            handler.answers["one"] = CONTINUES  # it never comes back
            wait_until(functools.partial(killed.clean, AFTER_DEAD), "the lease of the last has expired", 20)
        cleaner, handler = self.cleaner(max_attempts=2)
        with self.assertLogs("moorage.cleanup.cleaner", "ERROR"):
            wait_until(lambda: cleaner.clean(AFTER_DEAD), "the lease has expired", 20)
        self.assertEqual((self.rows()["one"].phase, handler.calls), (Phase.QUARANTINED, []))

    def test_a_handler_that_says_done_and_did_not_finish_is_not_believed(self) -> None:
        self.orphan()
        cleaner, handler = self.cleaner()
        handler.answers["one"] = DONE
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
            self.assertEqual(cleaner.clean(AFTER_DEAD), {"retry": 1})

    def test_a_handler_that_hangs_is_left_behind_and_stops_nothing(self) -> None:
        for uuid in ("one", "three", "two"):
            self.orphan(uuid)
        cleaner, handler = self.cleaner(limits={TYPE: 2}, backoff=1000.0, backoff_longest=1000.0)
        handler.deadline = 2.0  # type: ignore[misc]
        go_on = threading.Event()
        self.addCleanup(go_on.set)
        handler.answers["one"] = lambda _: go_on.wait(60) and None
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
            self.assertEqual(cleaner.clean(AFTER_DEAD), {"retry": 1, "done": 2})
        self.assertIn("has not ended after 2 seconds", self.rows()["one"].last_error)
        cleaner.policy = Policy(limits={TYPE: 1})
        self.orphan("four")
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
            self.assertEqual(cleaner.clean(AFTER_DEAD), {}, "no thread is left")
        go_on.set()
        wait_until(lambda: cleaner.clean(AFTER_DEAD), "the thread has ended", 20)
        # Nobody had taken it since: so it was still the one to end it.
        wait_until(lambda: not self.rows(), "it has ended, late", 20)
        self.assertEqual((self.thing("one").status, self.thing("four").status), ("error", "error"))

    def test_a_handler_that_comes_back_late_changes_nothing_that_another_has_cleaned(self) -> None:
        self.orphan()
        go_on, ended, hangs = threading.Event(), threading.Event(), threading.Event()
        self.addCleanup(go_on.set)
        first, handler = self.cleaner(identity("first"), clock=LateClock(hangs))

        def late(held: Lease) -> object:
            hangs.set()
            go_on.wait(60)
            try:
                held.check()
            except errors.Fenced:
                ended.set()
                raise
            return None

        handler.answers["one"] = late
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
            self.assertEqual(first.clean(AFTER_DEAD), {"retry": 1})
        second, _ = self.cleaner(identity("second"))
        wait_until(lambda: second.clean(AFTER_DEAD), "its time has come", 20)
        writes = self.thing().writes
        go_on.set()
        self.assertTrue(ended.wait(60))
        self.assertEqual((self.thing().writes, self.outcomes()["done"]), (writes, 1))

    def test_a_set_that_hangs_is_left_to_its_leases(self) -> None:
        self.orphan()
        go_on, hangs = threading.Event(), threading.Event()
        self.addCleanup(go_on.set)
        cleaner, handler = self.cleaner(handler=ThingSetHandler, lease=MOMENT, clock=LateClock(hangs))
        handler.after_commit = lambda *_: hangs.set() or go_on.wait(60)  # type: ignore[attr-defined,func-returns-value]
        with self.assertLogs("moorage.cleanup.cleaner", "ERROR"):
            self.assertEqual(cleaner.clean(AFTER_DEAD), {"overdue": 1})
        self.assertEqual(self.rows(), {}, "it had been committed")

    def test_a_handler_that_exits_stops_no_other_row_and_is_tried_again(self) -> None:
        for uuid in ("one", "three", "two"):
            self.orphan(uuid)
        cleaner, handler = self.cleaner(max_attempts=5)
        handler.answers["three"] = lambda lease: sys.exit(5)
        with self.assertLogs("moorage.cleanup.cleaner", "ERROR"):
            self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 2, "retry": 1})
        self.assertEqual(self.rows()["three"].last_error, "PluginExit: SystemExit(5) would have ended the process")

    def test_one_that_cannot_be_read_stops_no_other(self) -> None:
        for uuid in ("one", "three", "two"):
            self.orphan(uuid)
        cleaner, handler = self.cleaner(max_attempts=1)
        read = handler.read

        def broken(tx: sa.Connection, uuids: Sequence[str]) -> Mapping[str, Any]:
            if "three" in uuids:
                raise SystemExit("cannot be read")
            return read(tx, uuids)

        handler.read = broken  # type: ignore[method-assign,assignment]
        with self.assertLogs("moorage.cleanup.cleaner", "ERROR"):
            self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 2, "quarantined": 1})
        self.assertEqual(
            self.rows()["three"].last_error, "PluginExit: SystemExit('cannot be read') would have ended the process"
        )

    def test_a_handler_that_hangs_while_it_reads_holds_up_its_pass_no_longer_than_its_deadline(self) -> None:
        gate, reads = threading.Event(), threading.Event()
        self.addCleanup(gate.set)

        class Hanging(ThingHandler):
            @override
            def read(self, transaction: sa.Connection, resource_ids: Sequence[str]) -> Mapping[str, Any]:
                reads.set()
                assert gate.wait(60)
                return super().read(transaction, resource_ids)

        self.orphan()
        cleaner, _ = self.cleaner(handler=Hanging, clock=LateClock(reads))
        with self.assertLogs("moorage.cleanup.cleaner", "ERROR") as told:
            self.assertEqual(cleaner.clean(AFTER_DEAD), {})
        self.assertRegex(told.output[0], "Hanging has not read what it is to clean within 600 seconds")
        gate.set()
        # It comes back, and takes what nobody waits for any more: that is cleaned when its lease ends.
        wait_until(lambda: self.rows()["one"].phase == Phase.CLEANING, "it has come back", 60)
        with self.database.write() as tx:
            tx.execute(sa.update(workers).values(expires_at=1))
        other, _ = self.cleaner(identity("other"))
        self.assertEqual(other.clean(AFTER_DEAD), {"done": 1})

    def test_a_handler_that_answers_nonsense_is_named_and_its_rows_are_tried_again(self) -> None:
        for answer in (None, True, "done", Outcome("done")):  # type: ignore[arg-type]
            with self.subTest(repr(answer)):

                class Nonsense(ThingHandler):
                    finishes = False

                    @override
                    def cleanup(self, lease: Lease, resource: Any) -> Outcome:
                        if self.finishes:
                            lease.finish_with(lambda tx: self._write(tx, lease))
                        return answer  # type: ignore[return-value]  # noqa: B023

                self.orphan()
                cleaner, handler = self.cleaner(handler=Nonsense)
                with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
                    self.assertEqual(cleaner.clean(AFTER_DEAD), {"retry": 1})
                row = self.rows()["one"]
                self.assertEqual((row.phase, row.owner), ("retrying", None))
                self.assertIn(f"Nonsense answered {answer!r}, and not DONE", row.last_error)
                Nonsense.finishes = True
                # What it did counts, and not what it says.
                with self.assertLogs("moorage.cleanup.cleaner", "ERROR"):
                    done: Counter[str] = Counter()
                    again = functools.partial(cleaner.clean, AFTER_DEAD)
                    wait_until(lambda done=done, again=again: done.update(again()) or done, "it is tried again", 60)  # type: ignore[misc]
                self.assertEqual((done, self.rows()), ({"done": 1}, {}))

    def test_owners_that_gave_it_back_are_no_tries_to_clean_it(self) -> None:
        self.create()
        for number in range(8):
            self.taken("one", identity("b", number)).release("stopping")
        self.taken("one", DEAD)
        cleaner, handler = self.cleaner(max_attempts=2)
        handler.answers["one"] = retry("not now")
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
            self.assertEqual(cleaner.clean(AFTER_DEAD), {"retry": 1})
        handler.answers.clear()
        wait_until(lambda: cleaner.clean(AFTER_DEAD), "it is tried again", 60)
        self.assertEqual(self.outcomes(), {"retry": 1, "done": 1})

    def test_what_was_given_back_is_cleaned_when_nobody_comes_for_it(self) -> None:
        self.create()
        self.taken("one", DEAD).release("broken")
        cleaner, _ = self.cleaner()
        self.assertEqual(cleaner.clean(NeverStarted(("here",), 3600)), {})
        self.assertEqual(cleaner.clean(NeverStarted(("here",), 0)), {"done": 1})

    def test_one_that_kills_its_cleaners_takes_no_other_with_it(self) -> None:
        for uuid in ("one", "three", "two"):
            self.orphan(uuid)
        done: Counter[str] = Counter()
        for number in range(4):
            killed, handler = self.cleaner(identity(f"killed-{number}"), lease=MOMENT, max_attempts=2)

            def process(kind: str, handler: object, claimed: Any, real: Any = killed._process) -> Any:
                if "two" in claimed.leases:
                    raise _Killed
                return real(kind, handler, claimed)

            killed._process = process  # type: ignore[method-assign]
            with self.assertLogs("moorage.cleanup.cleaner", "ERROR"):
                wait_until(lambda killed=killed: self.dies(killed, done), "the lease of the last has ended", 20)  # type: ignore[misc]
        last, handler = self.cleaner(max_attempts=2)
        with self.assertLogs("moorage.cleanup.cleaner", "ERROR"):
            wait_until(lambda: done.update(last.clean(AFTER_DEAD)) or not self.left(), "it is given up", 20)
        self.assertEqual(done, {"done": 2, "quarantined": 1})
        self.assertEqual(list(self.rows()), ["two"])

    def dies(self, cleaner: Cleaner, done: Counter[str]) -> bool:
        """Whether it took the row that kills it."""
        before = self.rows()["two"].attempts
        done.update(cleaner.clean(AFTER_DEAD))
        return bool(self.rows()["two"].attempts > before)

    def left(self) -> list[str]:
        return [uuid for uuid, row in self.rows().items() if row.phase != Phase.QUARANTINED]

    def test_what_waited_for_a_dead_service_is_cleaned_and_counted_as_its_own(self) -> None:
        for uuid in ("one", "two"):
            self.create(uuid, host="its-host")
        self.create("elsewhere", host="other-host")
        cleaner, handler = self.cleaner(backoff=0.01)
        handler.answers["two"] = retry("not now")
        queued = QueuedForDead("its-host", DEAD.uuid, 2)
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
            self.assertEqual(cleaner.clean(queued), {"done": 1, "retry": 1})
        handler.answers.clear()
        wait_until(lambda: cleaner.clean(AFTER_DEAD), "it is tried again, as what it had begun", 20)
        self.assertEqual(list(self.rows()), ["elsewhere"])
        self.assertEqual({(row.worker, row.worker_epoch) for row in self.history()}, {(DEAD.uuid, 1)})

    def test_what_a_living_service_does_not_know_of_is_cleaned_by_itself(self) -> None:
        self.orphan(who=identity("cleaner"))
        cleaner, handler = self.cleaner()
        self.assertEqual(cleaner.clean(ExpiredLease("service-cleaner", 1, 0.0)), {}, "its lease has not ended")
        with self.database.write() as tx:
            tx.execute(sa.update(workers).values(expires_at=1))
        self.assertEqual(cleaner.clean(ExpiredLease("service-cleaner", 2, 0.0)), {}, "not of this incarnation")
        handler.answers["one"] = retry("not now")
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
            self.assertEqual(cleaner.clean(ExpiredLease("service-cleaner", 1, 0.0)), {"retry": 1})
        handler.answers.clear()
        wait_until(lambda: cleaner.clean(ExpiredLease("service-cleaner", 1, 0.0)), "it is tried again", 60)
        self.assertEqual((self.rows(), self.thing().status), ({}, "error"))

    def test_every_row_is_a_living_owners_or_of_one_kind_after_some_time(self) -> None:
        me, dead = identity("me"), DEAD
        kinds = (
            OrphansOfService(dead.uuid, 2),
            QueuedForDead("dead-host", dead.uuid, 2),
            ExpiredLease(me.uuid, 1, 0.0),
            NeverStarted(("here", "cluster"), 0.0),
        )
        cleaner, _ = self.cleaner()
        for phase in Phase:
            for worker, epoch in ((None, 0), (dead.uuid, 1), (me.uuid, 1)):
                for host in ("here", "cluster", "dead-host"):
                    owned = phase in (Phase.WORKING, Phase.CLEANING)
                    if (phase is Phase.WORKING and worker is None) or (phase is Phase.WAITING and worker is not None):
                        continue  # no such row is ever written
                    values = {
                        "phase": phase.value, "worker": worker, "worker_epoch": epoch, "target_host": host,
                        "owner": (worker or "x") if owned else None, "epoch": epoch, "expires_at": 1 if owned else 0,
                        "next_try_at": 1, "updated_at": 1,
                    }  # fmt: skip
                    announced = {**values, "next_try_at": 2**60} if phase is Phase.WAITING else None
                    if host == "dead-host" and worker is None and phase is not Phase.WAITING:
                        continue  # cleaners of what waits for a host note whose it was
                    self.create()
                    with self.database.write() as tx:
                        tx.execute(sa.update(workers).values(values))
                    found = [type(each).__name__ for each in kinds if cleaner._orphans.types(each)]
                    wanted = 0 if phase is Phase.QUARANTINED else 1
                    self.assertEqual(len(found), wanted, (values, found))
                    if announced is not None:
                        with self.database.write() as tx:
                            tx.execute(sa.update(workers).values(announced))
                        found = [type(each).__name__ for each in kinds if cleaner._orphans.types(each)]
                        # It is in a living service's queue, unless that was declared dead.
                        self.assertEqual(found, ["QueuedForDead"] if host == "dead-host" else [], announced)
                    self.database.run(lambda tx: self.store.reset(tx, TYPE, "one"))

    # -- zombies --------------------------------------------------------------------------------------------------

    def test_the_owner_that_was_taken_for_dead_writes_nothing_any_more(self) -> None:
        zombie = self.orphan()
        cleaner, _ = self.cleaner()
        cleaner.clean(AFTER_DEAD)
        with self.assertRaises(errors.Fenced):
            zombie.finish_with(lambda tx: write(tx, "one", "active", zombie.token))
        self.assertEqual(self.thing().status, "error")

    def test_a_cleaner_that_died_is_cleaned_after_by_another(self) -> None:
        self.orphan()
        paused = threading.Event()
        lost: list[object] = []
        second, _ = self.cleaner(identity("second"))

        def taken_over(held: Lease) -> object:
            # What a long pause looks like from outside: its lease has expired, another one has cleaned.
            wait_until(lambda: second.clean(AFTER_DEAD), "another cleaner takes it over", 20)
            paused.set()
            return None

        first, handler = self.cleaner(identity("first"), lease=MOMENT)
        handler.answers["one"] = taken_over
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
            self.assertEqual(first.clean(AFTER_DEAD), {"fenced": 1})
        self.assertTrue(paused.is_set())
        self.assertEqual(lost, [])
        self.assertEqual(self.outcomes(), {"done": 1, "fenced": 1})
        # One adoption by each cleaner, one end.
        self.assertEqual((self.thing().status, self.thing().writes), ("error", 3))

    def test_while_a_handler_works_its_lease_is_kept(self) -> None:
        self.orphan()
        second, _ = self.cleaner(identity("second"))
        first, handler = self.cleaner(identity("first"), lease=0.6)
        ends: set[int] = set()

        def long(held: Lease) -> object:
            def renewed() -> bool:
                ends.add(self.rows()["one"].expires_at)
                self.assertEqual(second.clean(AFTER_DEAD), {})
                return len(ends) > 2

            wait_until(renewed, "it was renewed twice", 30)
            return None

        handler.answers["one"] = long
        self.assertEqual(first.clean(AFTER_DEAD), {"done": 1})

    def test_a_forced_operation_is_not_ended_by_a_cleaner_that_wakes(self) -> None:
        self.orphan()
        cleaner, handler = self.cleaner()

        def forced(held: Lease) -> object:
            self.create("one", "delete", "deleting", force=True)
            return None

        handler.answers["one"] = forced
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
            self.assertEqual(cleaner.clean(AFTER_DEAD), {"fenced": 1})
        self.assertEqual((self.rows()["one"].operation, self.thing().status), ("delete", "deleting"))

    def test_reset_state_ends_whatever_is_in_progress(self) -> None:
        owner = self.orphan()

        def reset(tx: sa.Connection) -> None:
            token = self.store.reset(tx, TYPE, "one")
            assert write(tx, "one", "active", token)

        self.database.run(reset)
        self.assertEqual(self.rows(), {})
        with self.assertRaises(errors.Fenced):
            owner.finish_with(lambda tx: write(tx, "one", "gone", owner.token))
        with self.database.write() as tx:
            self.assertFalse(write(tx, "one", "late", owner.token))
        cleaner, _ = self.cleaner()
        self.assertEqual(cleaner.clean(AFTER_DEAD), {})

    # -- several --------------------------------------------------------------------------------------------------

    def test_several_cleaners_share_the_work_and_each_row_is_finished_once(self) -> None:
        uuids = [f"{number * 7919 % 256:02x}-{number}" for number in range(60)]
        for uuid in uuids:
            self.orphan(uuid)
        for handler in (ThingHandler, ThingSetHandler):
            cleaners = [self.cleaner(identity(f"cleaner-{n}"), seed=n, handler=handler, batch=10)[0] for n in range(4)]
            with ThreadPoolExecutor(4) as pool:
                counts = list(pool.map(lambda cleaner: cleaner.clean(AFTER_DEAD), cleaners))
            self.assertEqual(sum(counts, Counter()), {"done": len(uuids)})
            self.assertEqual(self.rows(), {})
            with self.database.write() as tx:
                tx.execute(sa.delete(things))
            for uuid in uuids:
                self.orphan(uuid)

    def test_of_a_set_those_are_finished_together_that_were_not_lost(self) -> None:
        for uuid in ("a", "b", "c", "d"):
            self.orphan(uuid)
        cleaner, handler = self.cleaner(handler=ThingSetHandler)
        assert isinstance(handler, ThingSetHandler)
        claim = cleaner._orphans.claim

        def late(*given: Any, **more: Any) -> Any:
            claimed = claim(*given, **more)
            if claimed.leases:
                self.create("b", "delete", "deleting", force=True)
            return claimed

        cleaner._orphans.claim = late  # type: ignore[method-assign]
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
            self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 3, "fenced": 1})
        self.assertEqual((handler.calls, handler.tidied), ([], ["a", "c", "d"]), "none was done alone")
        self.assertEqual(self.outcomes(), {"done": 3, "fenced": 1})
        self.assertEqual((self.rows()["b"].operation, self.thing("b").status), ("delete", "deleting"))

    def test_a_set_whose_resource_a_later_operation_has_written_ends_one_by_one(self) -> None:
        for uuid in ("a", "b"):
            self.orphan(uuid)
        cleaner, handler = self.cleaner(handler=ThingSetHandler)
        with self.database.write() as tx:
            tx.execute(sa.update(things).where(things.c.id == "b").values(fence=100))
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
            self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 1, "fenced": 1})
        self.assertEqual((self.thing("a").status, self.thing("b").status), ("error", "building"))
        # Threads do them side by side.
        self.assertEqual(sorted(uuid for uuid, _ in handler.calls), ["a", "b"])

    def sixteen_in_sets_of_two(self) -> tuple[Cleaner, ThingSetHandler]:
        """Makes sixteen orphans whose ids are spread evenly, and a cleaner that claims two at a time."""
        for number in range(16):
            self.orphan(f"{number:x}0")
        cleaner, handler = self.cleaner(handler=ThingSetHandler, batch=2)
        assert isinstance(handler, ThingSetHandler)
        return cleaner, handler

    def test_a_second_thread_cleans_from_the_opposite_place_when_a_set_is_full(self) -> None:
        cleaner, handler = self.sixteen_in_sets_of_two()
        after_commit, begins = handler.after_commit, set[str]()
        taken = threading.Event()
        claim = cleaner._orphans.claim

        def note(*given: Any, **more: Any) -> Any:
            claimed = claim(*given, **more)
            if claimed.leases:
                begins.add(more["after"])
            if len(begins) == 2:
                taken.set()
            return claimed

        def wait(leases: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
            self.assertTrue(taken.wait(30), "no second set was taken while the first one was cleaned")
            after_commit(leases, resources)

        cleaner._orphans.claim = note  # type: ignore[method-assign]
        handler.after_commit = wait  # type: ignore[method-assign]
        self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 16})
        self.assertEqual(sorted(handler.tidied), [f"{number:x}0" for number in range(16)], "each once")

    def test_what_each_of_two_threads_skips_because_of_the_other_is_cleaned_in_the_same_pass(self) -> None:
        cleaner, handler = self.sixteen_in_sets_of_two()
        claim, clean_round, rounds = cleaner._orphans.claim, cleaner._clean_round, list[int]()
        full = threading.Event()

        def count(*given: Any) -> None:
            rounds.append(given[4])
            clean_round(*given)

        def one_set(*given: Any, **more: Any) -> Any:
            """Claims one set, then nothing, as if the other thread had locked all, until both threads have ended."""
            if full.is_set() and len(rounds) < 3:
                return Claimed()
            claimed = claim(*given, **more)
            if claimed.leases:
                full.set()
            return claimed

        cleaner._clean_round = count  # type: ignore[assignment,method-assign]
        cleaner._orphans.claim = one_set  # type: ignore[method-assign]
        self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 16})
        self.assertEqual(sorted(handler.tidied), [f"{number:x}0" for number in range(16)], "each once")

    def test_what_stops_the_second_thread_stops_the_pass(self) -> None:
        cleaner, _ = self.sixteen_in_sets_of_two()
        clean_round, rounds = cleaner._clean_round, list[int]()

        def one_fails(*given: Any) -> None:
            rounds.append(given[4])
            if len(rounds) == 2:
                raise errors.StoreUnavailable("away")
            clean_round(*given)

        cleaner._clean_round = one_fails  # type: ignore[assignment,method-assign]
        with self.assertRaisesRegex(errors.StoreUnavailable, "away"):
            cleaner.clean(AFTER_DEAD)
        self.assertEqual(abs(rounds[0] - rounds[1]), 2**31)
        self.assertEqual(self.rows(), {}, "the first thread has cleaned all")

    def test_what_fails_outside_of_the_store_undoes_nothing(self) -> None:
        self.orphan()
        cleaner, handler = self.cleaner(handler=ThingSetHandler)
        handler.after_commit = lambda *_: 1 / 0  # type: ignore[attr-defined]
        with self.assertLogs("moorage.cleanup.cleaner", "ERROR"):
            self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 1})
        self.assertEqual(self.rows(), {})

    def test_rows_with_different_tokens_are_one_set(self) -> None:
        for number, uuid in enumerate(("a", "b", "c")):
            self.orphan(uuid)
            for _ in range(number):
                with self.database.write() as tx:
                    tx.execute(sa.update(workers).where(workers.c.resource_id == uuid).values(expires_at=1))
                self.taken(uuid, DEAD)
        cleaner, handler = self.cleaner(handler=ThingSetHandler)
        self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": 3})
        self.assertEqual(handler.calls, [])
        self.assertEqual(sorted(row.token for row in self.history()), [3, 4, 5])

    def test_a_hundred_cost_as_many_statements_as_one(self) -> None:
        counts = []
        for number in (1, 100):
            for each in range(number):
                self.orphan(f"{each:03d}")
            cleaner, handler = self.cleaner(handler=ThingSetHandler)
            assert isinstance(handler, ThingSetHandler)
            handler.finish_batch = lambda *_: None  # type: ignore[method-assign]
            statements: list[str] = []

            def count(_connection: object, _cursor: object, statement: str, *_rest: object, into=statements) -> None:
                into.append(statement)

            sa.event.listen(sa.Engine, "before_cursor_execute", count)
            self.assertEqual(cleaner.clean(AFTER_DEAD), {"done": number})
            sa.event.remove(sa.Engine, "before_cursor_execute", count)
            counts.append(len(statements))
            with self.database.write() as tx:
                tx.execute(sa.delete(things))
        self.assertLess(abs(counts[0] - counts[1]), 4)
