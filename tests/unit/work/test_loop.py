# SPDX-License-Identifier: Apache-2.0
"""The work loop on SQLite: what it promises to a service's :class:`moorage.work.job.Work`."""

from __future__ import annotations

import tempfile
import threading
import unittest
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import sqlalchemy as sa
from oslo_context import context as oslo_context
from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.context import RequestContext
from moorage.db import Database
from moorage.db.schema import core_metadata
from moorage.rpc.interface import Message
from moorage.rpc.server import Dispatcher
from moorage.services.interface import ServiceIdentity
from moorage.testing.database import empty_tables
from moorage.work.interface import Phase
from moorage.work.job import Job, Work
from moorage.work.loop import WorkLoop
from moorage.work.operations import SqlOperationStore
from moorage.work.tables import workers
from tests.servers import wait_until

SOON = 30.0
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


def ask(loop: WorkLoop[str], uuid: str, user: str) -> None:
    """Has the operation of a resource asked for by a message of a user's request."""
    context = RequestContext(user_id=user, overwrite=False).to_dict()
    Dispatcher({"ask": loop.ask})(Message("ask", {"resource_type": "thing", "resource_id": uuid}, context=context))


class LoopTests(unittest.TestCase):
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
                token = self.store.create(tx, "thing", each, "make", "making", addressed_to="here", force=force)
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
        wait_until(lambda: not loop.busy and self.rows() == rows, f"{rows} operations are left", SOON)

    def swept(self, loop: WorkLoop[str]) -> int:
        loop.sweep()
        return self.rows()

    def held(self, job: Job[str]) -> str:
        self.gate.wait(SOON)
        return "late"

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
        self.assertFalse(loop.busy)
        wait_until(lambda: self.swept(loop) == 0, "the pause is over", SOON)
        self.assertEqual(self.work.calls["one"], 2)

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

    @staticmethod
    def _raise_next(fails: Any) -> str:
        error = next(fails, None)
        if error is not None:
            raise error
        return ""

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

    def test_beyond_the_queue_a_sweep_finds_the_rest(self) -> None:
        names = [f"t{number}" for number in range(6)]
        self.want(*names)
        loop = self.loop(queue=2)
        with self.assertLogs("moorage.work.loop", "WARNING"):
            for each in names:
                loop.ask("thing", each)
        loop.start()
        wait_until(lambda: self.swept(loop) == 0, "all are done", SOON)
        self.assertEqual(self.writes(), dict.fromkeys(names, 1))

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

    def ended_together(self, loop: WorkLoop[str], *ids: str) -> None:
        """Has the operations end in one batch."""
        self.want(*ids)
        together = threading.Event()
        loop.in_order(lambda: together.wait(SOON))
        loop.sweep()
        wait_until(lambda: loop._done.qsize() == len(ids), "all of them are done", SOON)
        together.set()

    def phases(self) -> dict[str, Phase]:
        with self.database.read() as tx:
            return {row.resource_id: Phase(row.phase) for row in tx.execute(sa.select(workers))}

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
        self.want("one", "two")
        loop = self.started(operations=1, ahead=1)
        both = threading.Event()
        loop.in_order(lambda: both.wait(SOON))
        ask(loop, "one", "alice")
        ask(loop, "two", "bob")
        wait_until(lambda: loop._done.qsize() == 2, "both are done, by one thread", SOON)
        both.set()
        self.wait_for(loop)
        # The message comes twice; the second one finds nothing to do.
        ask(loop, "one", "alice")
        wait_until(lambda: not loop.busy, "there was nothing to do", SOON)
        self.want("one")
        loop.sweep()
        self.wait_for(loop)
        expected = [("one", "alice"), ("two", "bob"), ("one", None)]
        calls = [(uuid, method, user) for uuid, user in expected for method in ("do", "ended")]
        self.assertEqual(Counter(work.requests), Counter(calls))

    def test_the_next_try_has_the_request_that_asked_for_the_operation(self) -> None:
        self.work = work = Tidying(self.database, self.store)
        self.want("one")
        loop = self.started()
        fails = iter([LookupError("once")])
        work.on_do = lambda job: self._raise_next(fails)
        ask(loop, "one", "alice")
        self.wait_for(loop, rows=1)
        wait_until(lambda: self.swept(loop) == 0, "the pause is over", SOON)
        self.wait_for(loop)
        self.assertEqual({user for _, _, user in work.requests}, {"alice"})
