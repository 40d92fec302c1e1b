# SPDX-License-Identifier: Apache-2.0
"""Does the operations of one service: takes them, works under their leases, and finishes each once.

A service describes its work as a :class:`Work`; :class:`WorkLoop` owns everything around it. Three stages follow each other:

1. One thread takes waiting operations, up to ``batch`` in one transaction, when there is room for them. It hands an operation to
   the finishing thread if the message has said everything about it (:meth:`Work.told_of`).
2. Up to ``operations`` threads call :meth:`Work.do`. The leases are renewed meanwhile.
3. One thread ends up to ``batch`` operations in one transaction, which contains :meth:`Work.finish`, and then calls
   :meth:`Work.after_commit`, in the order of the commits. The same transaction takes the operations that were handed to this
   thread (:meth:`Work.begin_told`), so a busy loop commits once where it would commit twice. An operation is still recorded as
   begun before its work begins. By that record a scheduler knows what it must not have done elsewhere when this host is down.

The row of an operation decides whether there is something to do. A message makes the loop look earlier, and may say of a new
operation what its row says, which saves a read: it may be lost, doubled or late. A sweep finds the operations whose messages were
lost, and those of an earlier epoch or with an expired lease.

A job that shows no progress for its deadline, while it is done or finished, is given up by a sweep: its lease is renewed no longer,
it is released, and another thread takes the place of the one that hangs. Should the call return, its result is written if no other
owner has taken the operation meanwhile.

The store gives a resource to one owner at a time. A later operation on a resource does not wait for a call of :meth:`Work.do` that
has lost its lease, since that call may hang: :meth:`Job.check` refuses the earlier call, and so does every write with its token.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from moorage import errors, plugin_isolation, threads
from moorage.bounded_pool import BoundedPool, PooledCall
from moorage.clock import Clock
from moorage.context import acting_for, anonymous
from moorage.db import MICROSECONDS
from moorage.hang_detector import HangDetector, Progress
from moorage.work.interface import Disposition
from moorage.work.job import Finished, Job, Key, Stopped, Work, WorkObserver, WorkReport
from moorage.work.waiting import WaitingOperations, drain, drain_more

__all__ = ["WorkLoop"]

#: The adapter of oslo.log would take a fifth of the time of a line, and each operation has one.
LOG = logging.getLogger(__name__)
R = TypeVar("R")
#: Seconds before a transaction is tried again after the store was away.
_PAUSE = 0.5
_STOPPING = "the service is stopping"
#: How often a result that cannot be written is replaced by another one.
_REPLACEMENTS = 2
#: Seconds between two transactions of the finishing thread of a busy loop.
_INTERVAL = 0.02
#: Jobs that end within a second in a busy loop.
_MANY = 20
#: Operations that are taken ahead where few ended lately.
_FEW_AHEAD = 16
#: Calls that may hang before nothing more is taken.
_HANGING = 16


@dataclass(frozen=True, slots=True)
class _Beginning:
    """Operations for :meth:`Work.begin_told`.

    :param told: of :meth:`Work.told_of`. :param told_at: when the messages arrived.
    """

    kind: str
    told: Mapping[str, Any]
    told_at: Mapping[str, int]


class _Run:
    """What the loop knows of a job that it holds.

    :ivar progress: since when the present step of the job runs; None before the first.
    """

    __slots__ = ("began", "call", "detector", "disposition", "given_up", "progress")

    def __init__(self, clock: Clock, deadline: float) -> None:
        self.began = clock.monotonic()
        self.detector = HangDetector(clock, deadline)
        self.disposition = Disposition.RETRY
        self.progress: Progress = None
        self.call: PooledCall[None] | None = None
        self.given_up = False


class WorkLoop(Generic[R]):
    """Does the operations of one :class:`Work`. See the module.

    :param name: for threads and log lines.
    :param operations: how many calls of :meth:`Work.do` run at the same time.
    :param batch: how many operations are taken, and finished, in one transaction.
    :param ahead: how many operations are taken at most before a thread is free for them. 0 leaves them to other services
        meanwhile. A loop takes as many as ended in the last second, or 16: what is taken counts as begun, and is not done elsewhere
        if the host goes down, so a loop with long operations shall not hold many.
    :param queue: how many asked operations may wait; those beyond are read from the store when half of them are done.
    :param deadline: of works that declare none: seconds that a call may take without a sign of progress.
    :param grace: seconds that :meth:`stop` waits; None: until all calls have returned.
    """

    def __init__(
        self,
        name: str,
        work: Work[R],
        clock: Clock,
        *,
        operations: int,
        batch: int = 1,
        ahead: int = 0,
        queue: int = 10_000,
        deadline: float = math.inf,
        grace: float | None = None,
        observer: WorkObserver | None = None,
    ) -> None:
        self._name = name
        self._work = work
        self._clock = clock
        self._batch = batch
        self._operations, self._ahead = operations, ahead
        self._deadline = deadline if work.deadline is None else work.deadline
        self._grace = grace
        self._observer = observer or WorkObserver()
        self._tidies = type(work).ended is not Work.ended
        self._renewer = work.store.renewer(f"{name}-renew")
        self._waiting = WaitingOperations(name, work, clock, queue, self._renewer.keeps)
        self._done: threads.Queue[Finished[R] | _Beginning | Callable[[], object] | None] = threads.queue()
        #: Jobs that were taken and have not ended. Those that were given up are counted apart.
        self._held = self._given_up = 0
        #: Jobs that ended in the second that began at ``_second``, on the monotonic clock, and in the one before.
        self._ended = self._ended_before = 0
        self._second = float("-inf")
        self._runs: dict[Job[R], _Run] = {}
        #: Since the last report: jobs by what became of them, and the seconds that they took.
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._reported = (0, 0)
        #: When the finishing thread wrote last, on the monotonic clock.
        self._wrote_at = float("-inf")
        #: Guards the counts and the runs.
        self._changed = threads.condition()
        self._stopping = threads.event()
        self._pool = BoundedPool(f"{name}-operate", clock, operations, spare=_HANGING)
        self._taker = threads.thread(self._take, name=f"{name}-take")
        self._finisher = threads.thread(self._finish, name=f"{name}-finish")

    # -- what services call -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to take operations."""
        self._finisher.start()
        self._taker.start()

    def ask(self, resource_type: str, resource_id: str) -> None:
        """Has an operation taken soon. Called for a message; never waits.

        :raises InvalidInput: the service does no operations on resources of this type.
        """
        if resource_type not in self._work.types:
            raise errors.InvalidInput(f"{self._name} does no operations on resources of the type {resource_type}.")
        self._waiting.add((resource_type, resource_id), int(self._clock.wall() * MICROSECONDS))

    def sweep(self) -> None:
        """Finds operations whose message was lost, those of an earlier epoch, and those with an expired lease.

        Gives up calls that hang, and reports.
        """
        self._give_up_hung()
        self._report()
        self._waiting.look()

    @property
    def is_behind(self) -> bool:
        """Whether operations wait in the store for which the queue had no room. The loop takes them later."""
        return self._waiting.is_behind

    def in_order(self, call: Callable[[], object]) -> None:
        """Has a function called by the finishing thread: after what was committed before, and before what is committed later."""
        self._done.put(call)

    def run(self, job: Job[R]) -> None:
        """Does a job that was just taken in the calling thread, from its lease to its end."""
        with self._changed:
            self._held += 1
        self._prepare([job])
        done = self._do(job)
        if done is not None:
            self._finish_batch([done])
        self._conclude([job])

    @property
    def types(self) -> Sequence[str]:
        """The types of resources on which it does operations."""
        return self._work.types

    @property
    def depth(self) -> tuple[int, int]:
        """How many operations wait in the queue, and how many jobs are held."""
        waiting = len(self._waiting)
        with self._changed:
            return waiting, self._held

    def stop(self) -> None:
        """Waits for the calls that run, and releases what has not begun; the next owner begins it again.

        What does not end within the grace is given up.
        """
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        if not self._taker.ident:
            return
        end = None if self._grace is None else self._clock.monotonic() + self._grace
        self._waiting.end()
        self._taker.join(self._until(end))
        with self._changed:
            while self._held and self._until(end) != 0:
                self._changed.wait(self._until(end))
            left = [(job, run) for job, run in self._runs.items() if not run.given_up]
        for job, run in left:
            self._give_up(job, run, f"its service did not wait longer than {self._grace:g} seconds for its end")
        self._done.put(None)
        self._finisher.join(self._until(end))
        self._renewer.stop(self._until(end))
        self._pool.close()
        self._report()

    def _until(self, end: float | None) -> float | None:
        return None if end is None else max(0.0, end - self._clock.monotonic())

    # -- watching ---------------------------------------------------------------------------------------------------

    def _give_up_hung(self) -> None:
        with self._changed:
            runs = [(job, run) for job, run in self._runs.items() if run.call is not None and not run.given_up]
        for job, run in runs:
            if run.detector.look(run.progress):
                LOG.error(
                    "The %s of %s %s has shown no progress for %g seconds. It is given up; %d such calls of %s have not returned.",
                    job.lease.operation, *job.key, self._deadline, self._given_up + 1, self._name,
                )  # fmt: skip
                self._give_up(job, run, f"it showed no progress for {self._deadline:g} seconds")
                self._observer.hung(job, self._deadline)

    def _give_up(self, job: Job[R], run: _Run, reason: str) -> None:
        """Renews the leases no longer and releases the job. Its call has its slot no longer, whenever it returns."""
        with self._changed:
            if job not in self._runs or run.given_up:
                return
            run.given_up = True
            self._held -= 1
            self._given_up += 1
            self._counts["hung"] += 1
            self._changed.notify_all()
        if run.call is not None:
            self._pool.abandon(run.call)
        self._release(job, reason)

    def _report(self) -> None:
        """Tells the observer what happened since the last report, if anything did."""
        waiting, running = self.depth
        with self._changed:
            counts, seconds = self._counts, self._seconds
            self._counts, self._seconds = Counter(), 0.0
            oldest = min((run.began for run in self._runs.values()), default=None)
        if not counts and not running and (waiting, running) == self._reported:
            return
        self._reported = waiting, running
        longest = 0.0 if oldest is None else self._clock.monotonic() - oldest
        taken, hung = counts.pop("taken", 0), counts.pop("hung", 0)
        self._observer.report(WorkReport(taken, counts, hung, seconds, waiting, running, longest))

    # -- taking -----------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        while (told_at := self._next_keys()) is not None:
            for kind in self._work.types:
                wanted = [resource_id for each, resource_id in told_at if each == kind]
                if wanted:
                    self._take_many(kind, wanted, told_at)
            if self._waiting.should_look:
                self._logged(self._waiting.look)

    def _next_keys(self) -> Mapping[Key, int] | None:
        """Waits for operations, up to a batch, and for room for all of them.

        :returns: those that are due, as :meth:`WaitingOperations.leave` returns them; None when the loop stops.
        """
        keys, running = self._waiting.drain(self._most_taken)
        with self._changed:
            while self._is_full(len(keys)) and not self._stopping.is_set():
                self._changed.wait()
            if not running or self._stopping.is_set():
                return None
            # Held before they leave the queue, so that :attr:`depth` never shows neither.
            self._held += len(keys)
        due = self._waiting.leave(keys)
        self._free(len(keys) - len(due))
        return due

    def _most_taken(self) -> int:
        with self._changed:
            return min(self._batch, self._ahead_now() or self._operations)

    def _ahead_now(self) -> int:
        """Returns how many operations may be taken before a thread is free for them. The caller holds the lock."""
        self._count_ended(0)
        return min(self._ahead, max(_FEW_AHEAD, self._ended, self._ended_before))

    def _count_ended(self, number: int) -> None:
        now = self._clock.monotonic()
        if now - self._second >= 1:
            self._ended_before = self._ended if now - self._second < 2 else 0
            self._ended, self._second = 0, now
        self._ended += number

    def _is_full(self, more: int) -> bool:
        # The operations were drained when perhaps more could be taken ahead than now.
        ahead = max(self._ahead_now(), more) if self._ahead else 0
        return self._held + more > self._operations + ahead or self._given_up >= _HANGING

    def _take_many(self, kind: str, wanted: Sequence[str], told_at: Mapping[Key, int]) -> None:
        missing = {(kind, each) for each in wanted}
        try:
            with plugin_isolation.isolate_plugin_call(self._name):
                if told := self._work.told_of(kind, wanted):
                    missing.difference_update((kind, each) for each in told)
                    self._done.put(_Beginning(kind, told, {each: told_at.get((kind, each), 0) for each in told}))
                    wanted = [each for each in wanted if each not in told]
                for job in self._work.take(kind, wanted) if wanted else ():
                    missing.discard(job.key)
                    self._start([(job, told_at.get(job.key, 0))])
        except (errors.MoorageError, OSError) as error:
            LOG.warning("%d operations on %s are put off until the next sweep: %s", len(missing), kind, _text(error))
            self._free(len(missing))
            return
        except Exception:
            LOG.exception(
                "Operations on %s %s could not be taken.", kind, ", ".join(sorted(each for _, each in missing))
            )
        self._free(len(missing))

    def _start(self, taken: Sequence[tuple[Job[R], int]]) -> None:
        """Has jobs done that were just taken, each with the time when a message asked for it."""
        for job, told_at in taken:
            job.lease.told_at = told_at
        for (job, _), run in zip(taken, self._prepare([job for job, _ in taken]), strict=True):
            try:
                run.call = self._pool.start(functools.partial(self._operate, job))
            except errors.Unavailable as error:
                self._release(job, error.message)
                self._conclude([job])

    def _prepare(self, jobs: Sequence[Job[R]]) -> Sequence[_Run]:
        """Begins the lives of jobs."""
        self._renewer.keep([held for job in jobs for held in job.leases])
        runs = [_Run(self._clock, self._deadline) for _ in jobs]
        for job, run in zip(jobs, runs, strict=True):
            job.context = job.lease.context
            job._check = functools.partial(self._check, run)
        with self._changed:
            self._runs.update(zip(jobs, runs, strict=True))
            self._counts["taken"] += len(jobs)
        return runs

    # -- working ----------------------------------------------------------------------------------------------------

    def _check(self, run: _Run, job: Job[Any]) -> None:
        self._progress(run)
        if run.given_up:
            raise errors.Fenced(
                f"The {job.lease.operation} of {job.key[0]} {job.key[1]} was given up: it took too long."
            )
        for held in job.leases:
            if self._renewer.lost(held):
                raise errors.Fenced(
                    f"The {held.operation} of {held.resource_type} {held.resource_id} has been taken over, or is over."
                )
        if self._stopping.is_set():
            raise Stopped

    def _progress(self, run: _Run) -> None:
        now = self._clock.monotonic()
        run.progress = (now, now)

    def _operate(self, job: Job[R]) -> None:
        done = self._do(job)
        if done is None:
            self._conclude([job])
        else:
            self._done.put(done)

    def _do(self, job: Job[R]) -> Finished[R] | None:
        """Returns the job with its result, which may be None; None when it was released."""
        (job.context or anonymous()).update_store()
        held = job.lease
        if self._stopping.is_set():
            self._let_go(job, _STOPPING)
            return None
        LOG.debug("The %s of %s %s begins.", held.operation, held.resource_type, held.resource_id)
        run = self._runs[job]
        self._progress(run)
        try:
            with plugin_isolation.isolate_plugin_call(self._name):
                return job, self._work.do(job)
        except Stopped:
            self._let_go(job, _STOPPING)
            return None
        except Exception as error:  # noqa: BLE001  (logged there)
            instead = self._instead(job, error)
            return None if instead is None else (job, instead)
        finally:
            # What follows may hang too, and has as much time.
            self._progress(run)

    def _instead(self, job: Job[R], error: Exception) -> R | None:
        """Returns the result to finish with after an error; None when the job was released."""
        held = job.lease
        expected = isinstance(error, errors.MoorageError | OSError)
        LOG.log(
            logging.WARNING if expected else logging.ERROR, "The %s of %s %s failed: %s",
            held.operation, held.resource_type, held.resource_id, _text(error), exc_info=None if expected else error,
        )  # fmt: skip
        instead: R | None = None
        try:
            with plugin_isolation.isolate_plugin_call(self._name):
                instead = self._work.failed(job, error)
        except Exception:
            LOG.exception("What becomes of %s %s is not known.", held.resource_type, held.resource_id)
        if instead is None:
            self._release(job, _text(error))
        return instead

    def _release(self, job: Job[R], reason: str) -> None:
        """Lets another owner take the job, or this service after a pause."""
        lost = any(self._renewer.lost(held) for held in job.leases)
        self._renewer.forget(job.leases)
        if lost:
            # What waits on the resource now is a later operation.
            self._let_go(job, reason)
            self._became([job], Disposition.STALE)
            return
        # Before the row is released: the taker may have its key in the queue since before this job began.
        self._waiting.put_off(job.key, job.lease.attempts)
        self._let_go(job, reason)

    @staticmethod
    def _let_go(job: Job[R], reason: str) -> None:
        """Releases the operations of a job. Raises nothing: what made the job fail often fails here too."""
        for held in job.leases:
            try:
                held.release(reason)
            except errors.Unavailable as error:
                LOG.warning(
                    "The operation on %s %s stays until its lease ends: %s",
                    held.resource_type, held.resource_id, error.message,
                )  # fmt: skip
            except Exception:
                LOG.exception(
                    "The operation on %s %s stays until its lease ends.", held.resource_type, held.resource_id
                )

    # -- finishing --------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        running = True
        while running:
            batch: list[Finished[R]] = []
            calls: list[Callable[[], object]] = []
            new: list[_Beginning] = []
            found, running = self._gather()
            for each in found:
                if isinstance(each, tuple):
                    batch.append(each)
                elif isinstance(each, _Beginning):
                    new.append(each)
                else:
                    calls.append(each)
            if batch or new:
                self._logged(functools.partial(self._finish_batch, batch, new))
                self._wrote_at = self._clock.monotonic()
            self._conclude([job for job, _ in batch if not (self._tidies and self._tidy_later(job))])
            for call in calls:
                self._logged(call)

    def _tidy_later(self, job: Job[R]) -> bool:
        """Has a thread of the pool end the life of a job. Returns False if there is none."""
        run = self._runs[job]
        try:
            run.call = self._pool.start(functools.partial(self._conclude, [job]))
        except errors.Unavailable:
            return False
        return True

    def _gather(self) -> tuple[list[Any], bool]:
        """What waits for the finishing thread, at least one item; False ends the loop.

        In a busy loop transactions follow each other after :data:`_INTERVAL` seconds, and a transaction writes all that has come
        meanwhile.
        """
        found, running = drain(self._done, lambda: self._batch)
        left = self._wrote_at + _INTERVAL - self._clock.monotonic()
        if running and left > 0 and len(found) < self._batch and self._is_busy(found):
            self._clock.wait(self._stopping, left)
            running = drain_more(self._done, found, self._batch)
        return found, running

    def _is_busy(self, found: Sequence[Any]) -> bool:
        """Returns whether everything found is to be written, and the loop has other jobs or ended many lately."""
        number = sum(1 if isinstance(each, tuple) else len(each.told) for each in found if not callable(each))
        with self._changed:
            self._count_ended(0)
            many = max(self._ended, self._ended_before) >= _MANY
            busy = (many or self._held > number) and not self._stopping.is_set()
        return busy and not any(callable(each) for each in found)

    def _finish_batch(self, batch: Sequence[Finished[R]], new: Sequence[_Beginning] = ()) -> None:
        """Writes results in as few transactions as their jobs allow, then tells about those that were written.

        The first transaction takes the new operations too.

        A part that is refused is divided into its jobs. A job that is refused alone is replaced by what the service says, at most
        :data:`_REPLACEMENTS` times.
        """
        written: list[Finished[R]] = []
        try:
            with plugin_isolation.isolate_plugin_call(self._name):
                parts = self._parts(batch)
        except Exception as error:
            LOG.exception("%d operations that are done could not be written.", len(batch))
            for job, _ in batch:
                self._release(job, _text(error))
            parts = collections.deque()
        if new:
            # Jobs that are alone come last.
            shares = parts and not self._work.is_alone(*parts[0][0][0])
            if self._write_and_begin(parts[0][0] if shares else (), new) and shares:
                written += parts.popleft()[0]
        while parts:
            part, replaced = parts.popleft()
            try:
                with plugin_isolation.isolate_plugin_call(self._name):
                    if self._transact(part):
                        written += part
            except Exception as error:  # noqa: BLE001  (logged there)
                # One of several was taken over, or cannot be written. It shall not hold up the others.
                alone = len(part) == 1
                instead = self._replacements(*part[0], error, replaced) if alone else part
                parts.extendleft(([each], replaced + alone) for each in reversed(instead))
        if written:
            self._note_written([job for job, _ in written])
            self._logged(functools.partial(self._work.after_commit, written))

    def _note_written(self, jobs: Sequence[Job[R]]) -> None:
        self._became(jobs, Disposition.DONE)
        self._waiting.end_pauses([job.key for job in jobs])
        for job in jobs:
            held = job.lease
            with acting_for(job.context):
                LOG.info("The %s of %s %s has ended.", held.operation, held.resource_type, held.resource_id)

    def _write_and_begin(self, part: Sequence[Finished[R]], new: Sequence[_Beginning]) -> bool:
        """Writes results and takes new operations in one transaction, then has these done.

        False: the results are not written, as far as is known. What was not begun goes to the thread that takes operations.
        """
        begun: list[Job[R]] = []

        def write_and_begin(transaction: Any) -> None:
            begun.clear()
            self._write(part, transaction)
            for each in new:
                begun.extend(self._work.begin_told(transaction, each.kind, each.told))

        done = False
        if not self._stopping.is_set():
            try:
                with plugin_isolation.isolate_plugin_call(self._name):
                    self._work.commit(part, write_and_begin)
                done = True
            except Exception as error:  # noqa: BLE001  (each goes its own way now, and says what is wrong)
                begun.clear()
                LOG.debug("%d operations end, and %d begin, without each other: %s", len(part), len(new), _text(error))
                if isinstance(error, errors.MoorageError):
                    for job, _ in part:
                        job.unknown = job.unknown or error.is_outcome_unknown
        told_at = {(each.kind, uuid): at for each in new for uuid, at in each.told_at.items()}
        # A message that came twice counts twice.
        self._free(sum(len(each.told) for each in new) - len(begun))
        self._start([(job, told_at.pop(job.key)) for job in begun])
        for key, at in told_at.items():
            self._waiting.add(key, at)
        return done

    def _parts(self, batch: Sequence[Finished[R]]) -> collections.deque[tuple[Sequence[Finished[R]], int]]:
        """What is to be written in one transaction each, with how often it was replaced."""
        together: list[Finished[R]] = []
        alone: list[Finished[R]] = []
        for each in sorted(batch, key=lambda each: self._work.order(*each)):
            (alone if self._work.is_alone(*each) else together).append(each)
        return collections.deque((part, 0) for part in (together, *([each] for each in alone)) if part)

    def _replacements(self, job: Job[R], result: R, error: Exception, replaced: int) -> Sequence[Finished[R]]:
        """Returns the result to write in place of a refused one; empty when the job was released or has another owner."""
        instead: Sequence[Finished[R]] = ()
        if isinstance(error, errors.Fenced):
            LOG.warning("%s", error.message)
            self._became([job], Disposition.STALE)
            try:
                with plugin_isolation.isolate_plugin_call(self._name):
                    instead = self._work.overtaken(job, result)
            except Exception:
                LOG.exception("What is left of %s %s could not be removed.", *job.key)
        elif replaced < _REPLACEMENTS:
            another = self._instead(job, error)
            instead = () if another is None else [(job, another)]
        else:
            LOG.error("The end of %s %s could not be written.", *job.key, exc_info=error)
            self._release(job, _text(error))
        return instead if replaced < _REPLACEMENTS else ()

    def _transact(self, batch: Sequence[Finished[R]]) -> bool:
        """One transaction. Waits for a store that is away, for as long as a lease lasts; False when the jobs were released."""
        deadline = self._clock.monotonic() + self._work.store.lease_seconds
        while True:
            try:
                if len(batch) > 1 or not batch[0][0].unknown or not self._work.is_written(*batch[0]):
                    self._work.commit(batch, functools.partial(self._write, batch))
            except (errors.StoreUnavailable, errors.StoreBusy) as error:
                LOG.warning("%d operations are done but not written yet: %s", len(batch), error.message)
                for job, _ in batch:
                    job.unknown = job.unknown or error.is_outcome_unknown
                stopping = self._clock.wait(self._stopping, _PAUSE)
                if not stopping and self._clock.monotonic() < deadline:
                    continue
                # The store is most likely still away; what cannot be released is left to its leases.
                for job, _ in batch:
                    self._release(job, _STOPPING if stopping else error.message)
                return False
            return True

    def _write(self, batch: Sequence[Finished[R]], transaction: Any) -> None:
        if len(batch) > 1:
            self._work.store.end_many(transaction, [held for job, _ in batch for held in job.leases])
            self._work.finish_many(transaction, batch)
            return
        for job, result in batch:
            # The finishing thread works for the requests of many jobs.
            with acting_for(job.context):
                for held in job.leases:
                    held.end(transaction)
                self._work.finish(transaction, job, result)

    def _conclude(self, jobs: Sequence[Job[R]]) -> None:
        """Ends jobs in this process, those that failed or lost their lease included."""
        if not jobs:
            return
        self._renewer.forget([held for job in jobs for held in job.leases])
        if self._tidies:
            for job in jobs:
                with acting_for(job.context):
                    self._logged(functools.partial(self._work.ended, job))
        now = self._clock.monotonic()
        with self._changed:
            self._count_ended(len(jobs))
            for job in jobs:
                run = self._runs.pop(job)
                self._counts[run.disposition.value] += 1
                self._seconds += now - run.began
                if run.given_up:
                    self._given_up -= 1
                else:
                    self._held -= 1
            self._changed.notify_all()

    def _became(self, jobs: Sequence[Job[R]], disposition: Disposition) -> None:
        """Notes what became of jobs; a part of one has no run of its own."""
        with self._changed:
            for job in jobs:
                if job in self._runs:
                    self._runs[job].disposition = disposition

    def _free(self, number: int) -> None:
        with self._changed:
            self._held -= number
            self._changed.notify_all()

    def _logged(self, call: Callable[[], object]) -> None:
        try:
            with plugin_isolation.isolate_plugin_call(self._name):
                call()
        except (errors.MoorageError, OSError) as error:
            LOG.warning("%s: %s", self._name, _text(error))
        except Exception:
            LOG.exception("A part of the work of %s failed.", self._name)


def _text(error: BaseException) -> str:
    return error.message if isinstance(error, errors.MoorageError) else plugin_isolation.format_exception(error)
