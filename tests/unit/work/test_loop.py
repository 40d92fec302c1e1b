# SPDX-License-Identifier: Apache-2.0
"""The work loop on SQLite: what it promises to a service's :class:`moorage.work.job.Work`."""

from __future__ import annotations

import tempfile
import threading
import time
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from unittest import mock

import sqlalchemy as sa
from oslo_context import context as oslo_context
from typing_extensions import override

from moorage import errors, threads
from moorage.clock import SystemClock
from moorage.context import RequestContext, acting_for
from moorage.db import Database
from moorage.db.schema import core_metadata
from moorage.rpc.interface import Message
from moorage.rpc.server import RpcDispatcher
from moorage.services.interface import ServiceIdentity
from moorage.testing.clock import ManualClock
from moorage.testing.database import empty_tables
from moorage.work import waiting
from moorage.work.interface import Phase
from moorage.work.job import Job, Work, WorkObserver, WorkReport
from moorage.work.operations import SqlOperationStore
from moorage.work.tables import workers
from moorage.work.work_loop import WorkLoop
from tests.servers import wait_until

SOON = 60.0
ME = ServiceIdentity("11111111-1111-4111-8111-111111111111", "here", "agent", None, 1)
OTHER = ServiceIdentity("22222222-2222-4222-8222-222222222222", "here", "agent", None, 9)
things = sa.Table(
    "things_of_the_loop",
    sa.MetaData(),
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("fence", sa.BigInteger, nullable=False),
    sa.Column("writes", sa.Integer, nullable=False, default=0),
)


class Things(Work[str]):
    """Counts its calls; tests replace ``on_do``, ``on_finish``, ``on_order`` and ``on_overtaken``."""

    types = ("thing",)

    def __init__(self, database: Database, store: SqlOperationStore) -> None:
        super().__init__(database, store, ME)
        self.calls: Counter[str] = Counter()
        self.told: list[str] = []
        self.gone: list[str] = []
        self.transactions = 0
        self.on_do: Callable[[Job[str]], str] = lambda job: job.lease.operation
        self.on_finish: Callable[[Job[str]], None] = lambda job: None
        self.on_order: Callable[[], None] = lambda: None
        self.on_overtaken: Callable[[], None] = lambda: None
        self.instead: str | None = None

    @override
    def do(self, job: Job[str]) -> str:
        self.calls[job.key[1]] += 1
        return self.on_do(job)

    @override
    def failed(self, job: Job[str], error: Exception) -> str | None:
        return self.instead

    @override
    def commit(self, batch: Sequence[tuple[Job[str], str]], write: Callable[[Any], None]) -> None:
        self.transactions += 1
        super().commit(batch, write)

    @override
    def finish(self, transaction: Any, job: Job[str], result: str) -> None:
        if result != "given up":
            self.on_finish(job)
        token = job.lease.token
        change = sa.update(things).where(things.c.id == job.key[1], things.c.fence <= token)
        if transaction.execute(change.values(fence=token, writes=things.c.writes + 1)).rowcount != 1:
            raise errors.Fenced("A later owner has written it.")

    @override
    def order(self, job: Job[str], result: str) -> tuple[str, ...]:
        self.on_order()
        return super().order(job, result)

    @override
    def overtaken(self, job: Job[str], result: str) -> Sequence[tuple[Job[str], str]]:
        self.gone.append(job.key[1])
        self.on_overtaken()
        return ()

    @override
    def after_commit(self, written: Sequence[tuple[Job[str], str]]) -> None:
        self.told += [job.key[1] for job, _ in written]


class Tidying(Things):
    """Notes with which request each method is called."""

    def __init__(self, database: Database, store: SqlOperationStore) -> None:
        super().__init__(database, store)
        self.requests: list[tuple[str, str, str | None]] = []

    def note(self, method: str, job: Job[str]) -> None:
        current = oslo_context.get_current()
        self.requests.append((job.key[1], method, None if current is None else current.user_id))

    @override
    def do(self, job: Job[str]) -> str:
        self.note("do", job)
        return super().do(job)

    @override
    def ended(self, job: Job[str]) -> None:
        self.note("ended", job)


class Recorder(WorkObserver):
    """Records what the loop reports."""

    def __init__(self) -> None:
        self.reports: list[WorkReport] = []
        self.given_up: list[str] = []

    @override
    def report(self, report: WorkReport) -> None:
        self.reports.append(report)

    @override
    def hung(self, job: Job[Any], seconds: float) -> None:
        self.given_up.append(job.key[1])

    def total(self) -> dict[str, int]:
        """What was reported so far, together."""
        found = Counter(taken=sum(each.taken for each in self.reports), hung=sum(each.hung for each in self.reports))
        for each in self.reports:
            found.update(each.ended)
        return {name: number for name, number in found.items() if number}


def ask(loop: WorkLoop[str], uuid: str, user: str) -> None:
    """Has the operation of a resource asked for by a message of another user's request, as later messages are."""
    context = RequestContext(user_id=user, overwrite=False).to_dict()
    RpcDispatcher({"ask": loop.ask})(Message("ask", {"resource_type": "thing", "resource_id": uuid}, context=context))


def request_of(user: str) -> RequestContext:
    return RequestContext(user_id=user, request_id=f"req-{user}", overwrite=False)


class LoopCase(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.database = Database(f"sqlite:///{folder.name}/test.sqlite", lock_timeout=30)
        self.addCleanup(self.database.close)
        with self.database.write() as tx:
            empty_tables(tx, core_metadata)
            things.metadata.create_all(tx)
        self.store = SqlOperationStore(self.database, lease_seconds=60)
        self.work = Things(self.database, self.store)
        #: The calls of ``do`` that wait for it.
        self.gate = threading.Event()
        self.addCleanup(self.gate.set)

    def loop(self, **settings: Any) -> WorkLoop[str]:
        made = WorkLoop("things", self.work, SystemClock(), **{"operations": 2, **settings})
        self.addCleanup(made.stop)
        self.addCleanup(self.gate.set)
        return made

    def started(self, **settings: Any) -> WorkLoop[str]:
        made = self.loop(**settings)
        made.start()
        return made

    def want(self, *ids: str, force: bool = False) -> None:
        def create(tx: sa.Connection) -> None:
            for each in ids:
                token = self.store.create(tx, "thing", each, "make", "making", target_host="here", force=force)
                if tx.execute(sa.update(things).where(things.c.id == each).values(fence=token)).rowcount == 0:
                    tx.execute(sa.insert(things).values(id=each, fence=token, writes=0))

        self.database.run(create)

    def writes(self) -> dict[str, int]:
        with self.database.read() as tx:
            return {row.id: row.writes for row in tx.execute(sa.select(things))}

    def rows(self) -> int:
        with self.database.read() as tx:
            return tx.execute(sa.select(sa.func.count()).select_from(workers)).scalar_one()

    def wait_for(self, loop: WorkLoop[str], rows: int = 0) -> None:
        wait_until(lambda: not any(loop.depth) and self.rows() == rows, f"{rows} operations are left", SOON)

    def swept(self, loop: WorkLoop[str]) -> int:
        loop.sweep()
        return self.rows()

    def held(self, job: Job[str]) -> str:
        self.gate.wait(SOON)
        return "late"

    def phases(self) -> dict[str, Phase]:
        with self.database.read() as tx:
            return {row.resource_id: Phase(row.phase) for row in tx.execute(sa.select(workers))}

    def last_error(self, uuid: str) -> str:
        row = self.store.get("thing", uuid)
        return "" if row is None else row.last_error or ""

    @staticmethod
    def _raise_next(fails: Any) -> str:
        error = next(fails, None)
        if error is not None:
            raise error
        return ""


class LoopTests(LoopCase):
    """What becomes of operations."""

    def test_an_operation_is_done_once_however_often_it_is_asked_for(self) -> None:
        self.want("one", "two")
        loop = self.started(batch=8)
        for _ in range(20):
            loop.ask("thing", "one")
            loop.sweep()
        self.wait_for(loop)
        self.assertEqual((self.writes(), self.work.calls), ({"one": 1, "two": 1}, {"one": 1, "two": 1}))
        self.assertEqual(sorted(self.work.told), ["one", "two"])

    def test_what_ends_together_is_written_together(self) -> None:
        names = [f"t{number:02}" for number in range(16)]
        self.want(*names)
        loop = self.started(operations=16, batch=16, ahead=16)
        self.work.on_do = self.held
        loop.sweep()
        wait_until(lambda: len(self.work.calls) == 16, "all are being done", SOON)
        with self.database.write():
            # Nobody writes while all of them end.
            self.gate.set()
            wait_until(lambda: self.work.transactions == 1, "the first ones want to be written", SOON)
        self.wait_for(loop)
        self.assertEqual(sum(self.writes().values()), 16)
        self.assertLess(self.work.transactions, 8)

    def test_few_are_taken_ahead_of_long_operations(self) -> None:
        names = [f"t{number:03}" for number in range(100)]
        self.want(*names)
        loop = self.started(operations=2, batch=64, ahead=64)
        self.work.on_do = self.held
        loop.sweep()
        wait_until(lambda: len(self.work.calls) == 2, "two are being done", SOON)
        wait_until(lambda: loop.depth[1] >= 16, "others are taken", SOON)
        # Another host may do those that wait still.
        begun = [each for each, phase in self.phases().items() if phase is Phase.WORKING]
        self.assertLessEqual(len(begun), 2 + 16)
        self.gate.set()
        self.wait_for(loop)
        self.assertEqual(self.writes(), dict.fromkeys(names, 1))

    def test_as_many_are_taken_ahead_as_end_in_a_second(self) -> None:
        clock = ManualClock(0.0)
        loop = WorkLoop("things", self.work, clock, operations=2, batch=64, ahead=64)
        self.addCleanup(loop.stop)
        found = []
        for seconds, ended in ((0.0, 10), (0.5, 20), (0.7, 0), (1.0, 10), (1.0, 60), (1.0, 5), (2.0, 0)):
            clock.now += seconds
            loop._count_ended(ended)
            found.append(loop._ahead_now())
        self.assertEqual(found, [16, 30, 30, 16, 60, 60, 16])

    def test_an_error_releases_it_and_a_sweep_takes_it_again_after_a_pause(self) -> None:
        self.want("one")
        loop = self.started()

        def fail(job: Job[str]) -> str:
            raise errors.Unavailable("The hypervisor is away.")

        self.work.on_do = fail
        with self.assertLogs("moorage.work", "WARNING") as logs:
            loop.sweep()
            self.wait_for(loop, rows=1)
        self.assertIn("The hypervisor is away.", "".join(logs.output))
        row = self.store.get("thing", "one")
        assert row is not None
        self.assertEqual((row.phase, row.last_error), (Phase.WAITING, "The hypervisor is away."))
        self.work.on_do = lambda job: ""
        # The pause has not passed.
        loop.sweep()
        self.assertEqual(loop.depth, (0, 0))
        wait_until(lambda: self.swept(loop) == 0, "the pause is over", SOON)
        self.assertEqual(self.work.calls["one"], 2)

    def test_one_for_which_no_thread_can_be_started_is_released_and_done_later(self) -> None:
        self.want("one")
        loop = self.started()
        with mock.patch.object(threads, "start", side_effect=RuntimeError("can't start new thread")):
            loop.ask("thing", "one")
            wait_until(lambda: self.last_error("one") != "", "it is released", SOON)
            self.wait_for(loop, rows=1)
        self.assertIn("No thread can be started", self.last_error("one"))
        self.assertEqual((0, {"one": Phase.WAITING}), (self.work.calls["one"], self.phases()))
        loop.ask("thing", "one")
        self.wait_for(loop)
        self.assertEqual((self.writes(), self.work.calls["one"]), ({"one": 1}, 1))

    def test_an_operation_knows_when_its_message_arrived(self) -> None:
        """What a sweep has found knows of none."""
        self.want("one", "two")
        loop = self.started()
        told: dict[str, int] = {}

        def note(job: Job[str]) -> str:
            told[job.key[1]] = job.lease.told_at
            return ""

        self.work.on_do = note
        before = time.time()
        loop.ask("thing", "one")
        self.wait_for(loop, rows=1)
        loop.sweep()
        self.wait_for(loop)
        self.assertGreaterEqual(told["one"], int(before * 1_000_000))
        self.assertEqual(0, told["two"])

    def test_a_message_does_not_wait_for_the_pause(self) -> None:
        self.want("one")
        loop = self.started()
        fails = iter([LookupError("once")])
        self.work.on_do = lambda job: self._raise_next(fails)
        loop.sweep()
        self.wait_for(loop, rows=1)
        loop.ask("thing", "one")
        self.wait_for(loop)
        self.assertEqual(self.writes(), {"one": 1})

    def test_one_that_cannot_be_written_holds_up_no_other_of_its_batch(self) -> None:
        self.want("bad", "good", "other")
        loop = self.started(operations=3, batch=3, ahead=3)

        def refuse(job: Job[str]) -> None:
            if job.key[1] == "bad":
                raise LookupError("cannot be written")

        self.work.on_finish = refuse
        loop.sweep()
        self.wait_for(loop, rows=1)
        self.assertEqual(self.writes(), {"bad": 0, "good": 1, "other": 1})
        self.work.instead = "given up"
        loop.ask("thing", "bad")
        self.wait_for(loop)
        self.assertEqual(self.writes()["bad"], 1)

    def test_a_call_that_was_overtaken_is_told_and_writes_nothing(self) -> None:
        self.want("one")
        loop = self.started()
        checked: list[BaseException] = []

        def look(job: Job[str]) -> str:
            self.gate.wait(SOON)
            try:
                job.check()
            except errors.Fenced as error:
                checked.append(error)
            return "late"

        self.work.on_do = look
        loop.sweep()
        wait_until(lambda: self.work.calls["one"] == 1, "it is being done", SOON)
        # A forced operation; its call does not wait for the one that hangs.
        self.work.on_do = lambda job: "forced"
        self.want("one", force=True)
        loop.ask("thing", "one")
        wait_until(lambda: self.rows() == 0, "the forced one is done", SOON)
        self.assertEqual(self.writes(), {"one": 1})
        self.gate.set()
        self.wait_for(loop)
        self.assertEqual((self.writes(), self.work.gone), ({"one": 1}, ["one"]))
        self.assertEqual(len(checked), 1)

    def test_stopping_ends_what_runs_and_releases_what_has_not_begun(self) -> None:
        self.want(*(f"t{number}" for number in range(5)))
        loop = self.started(operations=1, batch=3, ahead=3)
        self.work.on_do = self.held
        loop.sweep()
        wait_until(lambda: len(self.work.calls) == 1, "the first is being done", SOON)
        stopping = threading.Thread(target=loop.stop)
        stopping.start()
        wait_until(loop._stopping.is_set, "it is stopping", SOON)
        self.gate.set()
        stopping.join(SOON)
        self.assertFalse(stopping.is_alive())
        self.assertEqual((sum(self.writes().values()), sum(self.work.calls.values()), self.rows()), (1, 1, 4))
        self.assertEqual(len(self.store.pending("thing", OTHER)), 4)

    def test_beyond_the_queue_the_rest_is_taken_from_the_store_without_a_sweep(self) -> None:
        names = [f"t{number:02}" for number in range(25)]
        self.want(*names)
        loop = self.loop(queue=4)
        with self.assertLogs("moorage.work.waiting", "WARNING") as said:
            for each in names:
                loop.ask("thing", each)
            loop.sweep()
        self.assertEqual(1, len(said.records))
        self.assertTrue(loop.is_behind)
        loop.start()
        wait_until(lambda: self.rows() == 0 and not loop.is_behind, "all are done", SOON)
        self.assertEqual(self.writes(), dict.fromkeys(names, 1))

    def test_a_full_queue_reads_no_more_than_one_page_of_each_type(self) -> None:
        self.want(*(f"t{number:02}" for number in range(40)))
        loop = self.loop(queue=4)
        loop.sweep()
        page = mock.patch.object(waiting, "_PAGE", 5)
        reading = mock.patch.object(self.work, "source", side_effect=self.work.source)
        with page, reading as source, self.assertNoLogs("moorage.work", "WARNING"):
            loop.sweep()
        self.assertEqual(1, source.call_count)

    def test_operations_that_the_queue_has_no_room_for_take_turns(self) -> None:
        types = ("thing", "other")
        wanted = {(kind, f"t{number:02}") for kind in types for number in range(12)}

        def create(tx: sa.Connection) -> None:
            for kind, name in wanted:
                self.store.create(tx, kind, name, "make", "making", target_host="here")

        self.database.run(create)
        loop = self.loop(queue=5)
        seen: list[set[tuple[str, str]]] = []
        with mock.patch.object(waiting, "_PAGE", 2), mock.patch.object(Things, "types", types):
            for _ in range(12):
                loop.sweep()
                seen.append(set(loop._waiting._told_at))
                # As if they had been tried in vain: they wait still, and the others have their turn.
                loop._waiting._told_at.clear()
        self.assertEqual({"thing", "other"}, {kind for kind, _ in seen[0]})
        self.assertEqual(wanted, set().union(*seen))

    def test_calls_come_after_what_was_committed_before(self) -> None:
        self.want("one")
        loop = self.started()
        self.work.on_do = self.held
        loop.sweep()
        seen: list[list[str]] = []
        wait_until(lambda: self.work.calls["one"] == 1, "it is being done", SOON)
        self.gate.set()
        self.wait_for(loop)
        loop.in_order(lambda: seen.append(list(self.work.told)))
        wait_until(lambda: bool(seen), "it was called", SOON)
        self.assertEqual(seen, [["one"]])

    def paused_finishing(self, loop: WorkLoop[str]) -> threading.Event:
        """The loop finishes nothing from now on until the event is set."""
        paused, go_on = threading.Event(), threading.Event()

        def pause() -> None:
            paused.set()
            go_on.wait(SOON)

        loop.in_order(pause)
        # What ends before the finishing thread is here would be in one batch with the pause, and be written before it.
        self.assertTrue(paused.wait(SOON))
        self.addCleanup(go_on.set)
        return go_on

    def ended_together(self, loop: WorkLoop[str], *ids: str) -> None:
        """Has the operations end in one batch."""
        self.want(*ids)
        together = self.paused_finishing(loop)
        loop.sweep()
        wait_until(lambda: loop._done.qsize() == len(ids), "all of them are done", SOON)
        together.set()

    def test_a_message_about_another_type_is_refused_and_takes_no_room(self) -> None:
        self.want("one")
        loop = self.started(operations=1)
        with self.assertRaisesRegex(errors.InvalidInput, "things does no operations on resources of the type other"):
            loop.ask("other", "one")
        loop.ask("thing", "one")
        self.wait_for(loop)
        self.assertEqual(self.writes(), {"one": 1})

    def test_an_operation_without_a_result_is_finished(self) -> None:
        self.want("one")
        loop = self.started()
        self.work.on_do = lambda job: cast("str", None)
        loop.sweep()
        self.wait_for(loop)
        self.assertEqual(self.writes(), {"one": 1})

    def test_what_is_raised_for_an_overtaken_operation_holds_up_no_other_of_its_batch(self) -> None:
        loop = self.started(operations=3, batch=3, ahead=3)

        def refuse(job: Job[str]) -> None:
            if job.key[1] == "bad":
                raise errors.Fenced("A later owner has written it.")

        def fail() -> None:
            raise LookupError("nothing is left")

        self.work.on_finish, self.work.on_overtaken = refuse, fail
        self.ended_together(loop, "bad", "good", "other")
        self.wait_for(loop, rows=1)
        self.assertEqual((self.writes(), self.work.gone), ({"bad": 0, "good": 1, "other": 1}, ["bad"]))
        self.assertEqual(sorted(self.work.told), ["good", "other"])

    def test_an_end_that_would_end_the_process_holds_up_no_other_of_its_batch(self) -> None:
        loop = self.started(operations=3, batch=3, ahead=3)

        def leave(job: Job[str]) -> None:
            if job.key[1] == "bad":
                raise SystemExit(1)

        self.work.on_finish = leave
        self.ended_together(loop, "bad", "good", "other")
        self.wait_for(loop, rows=1)
        self.assertEqual(self.writes(), {"bad": 0, "good": 1, "other": 1})
        self.assertEqual(self.phases(), {"bad": Phase.WAITING})

    def test_an_end_that_is_not_possible_now_holds_up_no_other_of_its_batch(self) -> None:
        loop = self.started(operations=3, batch=3, ahead=3)

        def refuse(job: Job[str]) -> None:
            if job.key[1] == "bad":
                raise errors.TransportError("nobody answers")

        self.work.on_finish = refuse
        self.ended_together(loop, "bad", "good", "other")
        self.wait_for(loop, rows=1)
        self.assertEqual(self.writes(), {"bad": 0, "good": 1, "other": 1})
        row = self.store.get("thing", "bad")
        assert row is not None
        self.assertEqual((row.phase, row.last_error), (Phase.WAITING, "nobody answers"))

    def test_a_result_is_released_when_the_store_is_away_for_as_long_as_a_lease(self) -> None:
        self.store.lease_seconds = 0.01
        self.want("one")
        loop = self.started()

        def away(job: Job[str]) -> None:
            raise errors.StoreUnavailable("The store is away.")

        self.work.on_finish = away
        with self.assertLogs("moorage.work.work_loop", "WARNING"):
            loop.sweep()
            self.wait_for(loop, rows=1)
        self.assertEqual(self.phases(), {"one": Phase.WAITING})
        self.work.on_finish = lambda job: None
        wait_until(lambda: self.swept(loop) == 0, "the store is back", SOON)
        self.assertEqual(self.writes(), {"one": 1})

    def test_a_result_that_can_never_be_written_is_replaced_a_few_times(self) -> None:
        loop = self.started()
        tried: list[str] = []

        def never(job: Job[str]) -> None:
            tried.append(job.key[1])
            raise LookupError("cannot be written")

        self.work.on_finish, self.work.instead = never, "another"
        self.want("one")
        loop.sweep()
        self.wait_for(loop, rows=1)
        self.assertEqual((tried, self.phases()), (["one"] * 3, {"one": Phase.WAITING}))

    def test_operations_that_were_taken_before_an_error_are_done(self) -> None:
        self.want("one", "three", "two")
        real = self.work.take

        def take(kind: str, ids: Sequence[str]) -> Iterator[Job[str]]:
            for each in ids:
                if each == "three":
                    raise errors.StoreBusy("not this one")
                yield from real(kind, [each])

        loop = self.loop(operations=3, batch=3, ahead=3)
        with mock.patch.object(self.work, "take", take), self.assertLogs("moorage.work.work_loop", "WARNING"):
            loop.sweep()
            loop.start()
            self.wait_for(loop, rows=2)
        self.assertEqual(self.writes(), {"one": 1, "three": 0, "two": 0})
        wait_until(lambda: self.swept(loop) == 0, "the next sweep takes them", SOON)

    def test_a_sweep_names_the_operations_that_wait_in_the_queue(self) -> None:
        self.want("one", "two")
        waiting: list[str] = []
        loop = self.loop()
        loop.ask("thing", "two")
        with mock.patch.object(
            self.work, "waits", lambda kind, found: waiting.extend(each.resource_id for each in found)
        ):
            loop.sweep()
            loop.sweep()
        self.assertEqual(waiting, ["two", "one", "two"])

    def test_a_batch_that_cannot_be_sorted_is_released(self) -> None:
        loop = self.started(operations=2, batch=2, ahead=2)
        fails = iter([LookupError("no order")])

        def fail() -> None:
            self._raise_next(fails)

        self.work.on_order = fail
        self.ended_together(loop, "one", "two")
        self.wait_for(loop, rows=2)
        self.assertEqual(self.phases(), {"one": Phase.WAITING, "two": Phase.WAITING})
        for each in ("one", "two"):
            loop.ask("thing", each)
        self.wait_for(loop)
        self.assertEqual(self.writes(), {"one": 1, "two": 1})

    def test_a_sweep_finds_a_forced_operation_while_the_earlier_call_hangs(self) -> None:
        self.want("one")
        loop = self.started()
        self.work.on_do = self.held
        loop.sweep()
        wait_until(lambda: self.work.calls["one"] == 1, "it is being done", SOON)
        self.work.on_do = lambda job: "forced"
        self.want("one", force=True)
        loop.sweep()
        wait_until(lambda: self.rows() == 0, "the forced one is done", SOON)
        self.assertEqual(self.writes(), {"one": 1})

    def test_an_overtaken_call_that_fails_delays_no_later_operation(self) -> None:
        self.want("one")
        loop = self.started()

        def fail(job: Job[str]) -> str:
            self.gate.wait(SOON)
            raise LookupError("late")

        self.work.on_do = fail
        loop.sweep()
        wait_until(lambda: self.work.calls["one"] == 1, "it is being done", SOON)
        self.work.on_do = lambda job: "forced"
        self.want("one", force=True)
        loop.ask("thing", "one")
        wait_until(lambda: self.rows() == 0, "the forced one is done", SOON)
        self.gate.set()
        self.wait_for(loop)
        self.want("one")
        loop.sweep()
        self.wait_for(loop)
        self.assertEqual(self.work.calls["one"], 3)

    def test_each_call_has_the_request_of_its_own_operation(self) -> None:
        self.work = work = Tidying(self.database, self.store)
        for uuid, user in (("one", "alice"), ("two", "bob")):
            with acting_for(request_of(user)):
                self.want(uuid)
        loop = self.started(operations=1, ahead=1)
        both = self.paused_finishing(loop)
        ask(loop, "one", "carol")
        # A sweep finds what no message told of.
        loop.sweep()
        wait_until(lambda: loop._done.qsize() == 2, "both are done, by one thread", SOON)
        both.set()
        self.wait_for(loop)
        # The message comes twice; the second one finds nothing to do.
        ask(loop, "one", "carol")
        wait_until(lambda: not any(loop.depth), "there was nothing to do", SOON)
        self.want("one")
        loop.sweep()
        self.wait_for(loop)
        expected = [("one", "alice"), ("two", "bob"), ("one", None)]
        calls = [(uuid, method, user) for uuid, user in expected for method in ("do", "ended")]
        self.assertEqual(Counter(work.requests), Counter(calls))

    def test_the_next_try_has_the_request_that_asked_for_the_operation(self) -> None:
        self.work = work = Tidying(self.database, self.store)
        with acting_for(request_of("alice")):
            self.want("one")
        loop = self.started()
        fails = iter([LookupError("once")])
        work.on_do = lambda job: self._raise_next(fails)
        ask(loop, "one", "carol")
        self.wait_for(loop, rows=1)
        wait_until(lambda: self.swept(loop) == 0, "the pause is over", SOON)
        self.wait_for(loop)
        self.assertEqual({user for _, _, user in work.requests}, {"alice"})


class HangTests(LoopCase):
    """Calls that do not return, or take long."""

    def setUp(self) -> None:
        super().setUp()
        self.seen = Recorder()

    def watched(self, **settings: Any) -> WorkLoop[str]:
        # What does not hang has that long, on a machine that runs many other tests.
        return self.started(**{"deadline": 1.0, "observer": self.seen, **settings})

    def hang_first(self, job: Job[str]) -> str:
        return self.held(job) if self.work.calls[job.key[1]] == 1 else "again"

    def swept_until_given_up(self, loop: WorkLoop[str], *ids: str) -> None:
        def given_up() -> bool:
            loop.sweep()
            return sorted(self.seen.given_up) == sorted(ids)

        wait_until(given_up, f"{ids} are given up", SOON)

    def test_an_operation_whose_call_hangs_is_done_again_by_another_thread(self) -> None:
        self.want("one")
        loop = self.watched(operations=1)
        self.work.on_do = self.hang_first
        with self.assertLogs("moorage.work.work_loop", "ERROR"):
            self.swept_until_given_up(loop, "one")
        row = self.store.get("thing", "one")
        assert row is not None
        self.assertEqual((row.phase, row.last_error), (Phase.WAITING, "it showed no progress for 1 seconds"))
        wait_until(lambda: self.swept(loop) == 0, "it is done again", SOON)
        self.assertEqual((self.writes(), self.work.gone), ({"one": 1}, []))
        self.gate.set()
        wait_until(lambda: self.work.gone == ["one"], "the first call's result is refused", SOON)
        self.assertEqual((self.writes(), self.seen.given_up), ({"one": 1}, ["one"]))

    def test_the_result_of_a_call_that_returns_after_all_is_written(self) -> None:
        self.want("one")
        loop = self.watched(operations=1)
        self.work.on_do = self.hang_first
        self.swept_until_given_up(loop, "one")
        self.gate.set()
        wait_until(lambda: self.rows() == 0, "the late result is written", SOON)
        self.assertEqual((self.writes(), self.work.calls), ({"one": 1}, {"one": 1}))

    def test_an_operation_whose_end_hangs_is_given_up(self) -> None:
        self.want("one")
        loop = self.watched(operations=1)

        def hang() -> None:
            self.gate.wait(SOON)

        self.work.on_order = hang
        self.swept_until_given_up(loop, "one")
        wait_until(lambda: loop.depth == (0, 0), "what a sweep asked for before is not taken again", SOON)
        self.assertEqual(self.phases(), {"one": Phase.WAITING})
        self.gate.set()
        wait_until(lambda: self.rows() == 0, "the end goes on", SOON)
        self.assertEqual((self.writes(), self.work.calls), ({"one": 1}, {"one": 1}))

    def test_tidying_up_that_hangs_holds_up_no_other_operation(self) -> None:
        self.work = work = Tidying(self.database, self.store)
        self.want("one", "two")
        loop = self.watched(operations=1)
        with mock.patch.object(work, "ended", lambda job: self.held(job) if job.key[1] == "one" else None):
            loop.ask("thing", "one")
            self.swept_until_given_up(loop, "one")
            loop.ask("thing", "two")
            wait_until(lambda: self.swept(loop) == 0, "the other operation is done", SOON)
            self.assertFalse(self.gate.is_set())
            self.gate.set()
        self.assertEqual(self.writes(), {"one": 1, "two": 1})

    def test_a_call_that_was_given_up_learns_it(self) -> None:
        self.want("one")
        loop = self.watched(operations=1)
        refused: list[str] = []

        def look(job: Job[str]) -> str:
            self.gate.wait(SOON)
            try:
                job.check()
            except errors.Fenced as error:
                refused.append(error.message)
                raise
            return "late"

        self.work.on_do = look
        self.swept_until_given_up(loop, "one")
        self.gate.set()
        wait_until(lambda: bool(refused), "the call has looked", SOON)
        self.assertEqual(refused, ["The make of thing one was given up: it took too long."])

    def test_a_call_that_shows_progress_is_not_given_up(self) -> None:
        self.want("one")
        loop = self.watched(operations=1)
        checks: list[float] = []

        def progress(job: Job[str]) -> str:
            while not self.gate.wait(0.001):
                job.check()
                checks.append(SystemClock().monotonic())
            return "late"

        self.work.on_do = progress

        def long_ago() -> bool:
            loop.sweep()
            return len(checks) > 1 and checks[-1] - checks[0] > 3.0

        wait_until(long_ago, "the call has taken three times its deadline", SOON)
        self.gate.set()
        self.wait_for(loop)
        self.assertEqual((self.seen.given_up, self.writes()), ([], {"one": 1}))

    def test_stopping_does_not_wait_for_a_call_that_hangs(self) -> None:
        self.want("one", "two")
        loop = self.watched(operations=2, deadline=3600.0, grace=0.1)
        self.work.on_do = self.held
        loop.sweep()
        wait_until(lambda: len(self.work.calls) == 2, "both hang", SOON)
        loop.stop()
        self.assertFalse(self.gate.is_set())
        self.assertEqual(self.phases(), {"one": Phase.WAITING, "two": Phase.WAITING})

    def test_nothing_is_taken_while_too_many_calls_hang(self) -> None:
        names = [f"t{number:02}" for number in range(16)]
        self.want(*names)
        loop = self.watched(operations=16, deadline=0.05)
        self.work.on_do = self.hang_first
        self.swept_until_given_up(loop, *names)
        self.want("later")
        loop.ask("thing", "later")
        for _ in range(3):
            loop.sweep()
        self.assertEqual((self.work.calls["later"], loop.depth[1]), (0, 0))
        self.gate.set()
        wait_until(lambda: self.swept(loop) == 0, "the calls have returned", SOON)
        self.assertEqual(self.work.calls["later"], 1)

    def test_what_became_of_the_operations_is_reported_once(self) -> None:
        self.want("one", "two", "three")
        loop = self.watched(operations=3, deadline=3600.0)
        fails = iter([LookupError("once")])
        self.work.on_do = lambda job: self._raise_next(fails) if job.key[1] == "one" else ""
        loop.sweep()
        self.wait_for(loop, rows=1)
        loop.ask("thing", "one")
        self.wait_for(loop)
        loop.sweep()
        self.assertEqual(self.seen.total(), {"taken": 4, "done": 3, "retry": 1})
        number = len(self.seen.reports)
        loop.sweep()
        loop.sweep()
        self.assertEqual(len(self.seen.reports), number)
        last = self.seen.reports[-1]
        self.assertEqual((last.waiting, last.running, last.longest), (0, 0, 0.0))

    def test_a_report_says_what_waits_and_what_runs(self) -> None:
        self.want("one", "two", "three")
        loop = self.watched(operations=1, deadline=3600.0)
        self.work.on_do = self.held
        loop.sweep()
        wait_until(lambda: loop.depth == (2, 1) and bool(self.work.calls), "one runs, two wait", SOON)
        loop.sweep()
        last = self.seen.reports[-1]
        self.assertEqual((last.waiting, last.running), (2, 1))
        self.assertGreater(last.longest, 0.0)
