# SPDX-License-Identifier: Apache-2.0
"""Does the operations of one service: takes them, works under their leases, and finishes each once.

A service describes its work as a :class:`Work`; :class:`WorkLoop` owns everything around it. Three stages follow each other:

1. One thread takes waiting operations, up to ``batch`` in one transaction, when there is room for them.
2. Up to ``operations`` threads call :meth:`Work.do`. The leases are renewed meanwhile.
3. One thread ends up to ``batch`` operations in one transaction, which contains :meth:`Work.finish`, and then calls
   :meth:`Work.after_commit`, in the order of the commits.

The row of an operation decides what there is to do. A message only makes the loop look earlier: it may be lost, doubled or late. A
sweep finds the operations whose messages were lost, and those of an earlier epoch or with an expired lease.

The store gives a resource to one owner at a time. A later operation on a resource does not wait for a call of :meth:`Work.do` that
has lost its lease, since that call may hang: :meth:`Job.check` refuses the earlier call, and so does every write with its token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from oslo_context import context as oslo_context
from oslo_log import log as logging

from moorage import errors, foreign, threads
from moorage.bounded_pool import BoundedPool
from moorage.clock import Clock
from moorage.context import anonymous
from moorage.rpc.server import incoming
from moorage.work.interface import Operation, Phase
from moorage.work.job import Job, Key, Stopped, Work

__all__ = ["WorkLoop"]

LOG = logging.getLogger(__name__)
R = TypeVar("R")
#: Seconds before a transaction is tried again after the store was away.
_PAUSE = 0.5
_STOPPING = "the service is stopping"
#: Operations that a sweep reads at a time.
_PAGE = 500
#: Seconds before a sweep takes a failed operation again: after its first owner, and at most. It doubles with each owner.
_FIRST_BACKOFF, _LONGEST_BACKOFF = 1.0, 300.0


class WorkLoop(Generic[R]):
    """Does the operations of one :class:`Work`. See the module.

    :param name: for threads and log lines.
    :param operations: how many calls of :meth:`Work.do` run at the same time.
    :param batch: how many operations are taken, and finished, in one transaction.
    :param ahead: how many operations are taken before a thread is free for them. 0 leaves them to other services meanwhile.
    :param queue: how many asked operations may wait; those beyond are left to the sweep.
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
    ) -> None:
        self._name = name
        self._work = work
        self._clock = clock
        self._batch = batch
        self._capacity = ahead + operations
        self._limit = queue
        self._tidies = type(work).ended is not Work.ended
        self._lock = threads.lock()
        self._queued: set[Key] = set()
        #: Tokens of waiting operations that could not be taken when their turn came. They are not announced.
        self._not_startable: dict[Key, int] = {}
        #: When a sweep may take a failed operation again, on the monotonic clock.
        self._not_before: dict[Key, float] = {}
        #: The requests of operations that were asked for, or that failed and wait for the next try.
        self._requests: dict[Key, oslo_context.RequestContext] = {}
        self._renewer = work.store.renewer(f"{name}-renew")
        self._keys: threads.Queue[Key | None] = threads.queue()
        self._done: threads.Queue[tuple[Job[R], R] | Callable[[], object] | None] = threads.queue()
        #: Jobs that were taken and have not ended.
        self._held = 0
        self._changed = threads.condition()
        self._stopping = threads.event()
        self._pool = BoundedPool(f"{name}-operate", clock, operations)
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
        key = (resource_type, resource_id)
        context = oslo_context.get_current() if incoming() is not None else None
        with self._lock:
            if context is not None:
                # Kept until the operation is taken, so that its lines in the log have the id of the request.
                self._requests[key] = context
                while len(self._requests) > self._limit:
                    del self._requests[next(iter(self._requests))]
            self._not_before.pop(key, None)
            if key in self._queued:
                return
            if len(self._queued) >= self._limit:
                LOG.warning("%d operations wait already; a sweep will find that of %s %s.", self._limit, *key)
                return
            self._queued.add(key)
        self._keys.put(key)

    def sweep(self) -> None:
        """Finds operations whose message was lost, those of an earlier epoch, and those with an expired lease."""
        with self._lock:
            gone = set(self._not_startable)
        for kind in self._work.types:
            for page in self._pages(kind):
                if self._work.announces:
                    self._announce(kind, page)
                for found in page:
                    if self._is_due(found):
                        self.ask(kind, found.resource_id)
                gone.difference_update((kind, each.resource_id) for each in page)
        with self._lock:
            for key in gone:
                self._not_startable.pop(key, None)

    def in_order(self, call: Callable[[], object]) -> None:
        """Has a function called by the finishing thread: after what was committed before, and before what is committed later."""
        self._done.put(call)

    def run(self, job: Job[R]) -> None:
        """Does a job that was just taken in the calling thread, from its lease to its end."""
        with self._changed:
            self._held += 1
        self._prepare(job)
        done = self._do(job)
        if done is not None:
            self._finish_batch([done])
        self._conclude(job)

    @property
    def busy(self) -> bool:
        """Whether operations wait in the queue or are held."""
        with self._lock:
            if self._queued:
                return True
        with self._changed:
            return self._held > 0

    def keeps(self, resource_type: str, resource_id: str) -> bool:
        """Whether an operation on the resource is held here."""
        return self._renewer.keeps(resource_type, resource_id)

    def stop(self) -> None:
        """Waits for the calls that run, and releases what has not begun; the next owner begins it again."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        if not self._taker.ident:
            return
        self._keys.put(None)
        self._taker.join()
        with self._changed:
            while self._held:
                self._changed.wait()
        self._done.put(None)
        self._finisher.join()
        self._renewer.stop()
        self._pool.close()

    # -- taking -----------------------------------------------------------------------------------------------------

    def _pages(self, kind: str) -> Iterator[Sequence[Operation]]:
        after = ""
        while True:
            page = self._work.source(kind, after, _PAGE)
            yield page
            if len(page) < _PAGE:
                return
            after = page[-1].resource_id

    def _announce(self, kind: str, page: Sequence[Operation]) -> None:
        with self._lock:
            keys = [((kind, each.resource_id), each.token) for each in page]
            waiting = [key[1] for key, token in keys if key in self._queued and self._not_startable.get(key) != token]
        if waiting:
            self._work.announce(kind, waiting)

    def _is_due(self, found: Operation) -> bool:
        key = (found.resource_type, found.resource_id)
        # Kept here, and yet to be had: its lease could not be renewed. The store decides when it finishes. With another token it is
        # a later operation, which does not wait for the call that has lost its lease.
        if self._renewer.keeps(*key, found.token):
            return False
        with self._lock:
            return self._clock.monotonic() >= self._not_before.get(key, float("-inf"))

    def _take(self) -> None:
        while (keys := self._next_keys()) is not None:
            for kind in self._work.types:
                wanted = [resource_id for each, resource_id in keys if each == kind]
                if wanted:
                    self._take_many(kind, wanted)

    def _next_keys(self) -> list[Key] | None:
        """Waits for operations, up to a batch, and for room for all of them. None when the loop stops."""
        keys, running = _drain(self._keys, min(self._batch, self._capacity))
        with self._changed:
            while self._held + len(keys) > self._capacity and not self._stopping.is_set():
                self._changed.wait()
            if not running or self._stopping.is_set():
                return None
            self._held += len(keys)
        with self._lock:
            # From here on a message for the same resource counts again: it may be of another operation.
            self._queued.difference_update(keys)
        return keys

    def _take_many(self, kind: str, wanted: Sequence[str]) -> None:
        jobs: Sequence[Job[R]] = ()
        missing: Sequence[str] = ()
        try:
            with foreign.isolate_plugin_call(self._name):
                jobs = self._work.take(kind, wanted)
        except (errors.MoorageError, OSError) as error:
            LOG.warning("%d operations on %s are put off until the next sweep: %s", len(wanted), kind, _text(error))
        except Exception:
            LOG.exception("Operations on %s %s could not be taken.", kind, ", ".join(wanted))
            missing = wanted
        else:
            found = {job.key for job in jobs}
            missing = [each for each in wanted if (kind, each) not in found]
        for job in jobs:
            self._prepare(job)
            self._pool.start(functools.partial(self._operate, job))
        self._free(len(wanted) - len(jobs))
        with self._lock:
            for key in {(kind, each) for each in missing} - self._queued:
                # The next operation on the resource is not of this request.
                self._requests.pop(key, None)
        self._logged(functools.partial(self._note_not_startable, kind, missing))

    def _prepare(self, job: Job[R]) -> None:
        self._renewer.keep(job.leases)
        with self._lock:
            job.context = self._requests.pop(job.key, None)
        job._check = self._check

    def _note_not_startable(self, kind: str, resource_ids: Sequence[str]) -> None:
        """Remembers operations that still wait although they could not be taken, so that a cleaner ends them some day."""
        if not self._work.announces:
            return
        for resource_id in resource_ids:
            try:
                row = self._work.store.get(kind, resource_id)
            except errors.MoorageError as error:
                LOG.info("Why %s %s could not be taken is not known: %s", kind, resource_id, error.message)
                continue
            if row is not None and row.phase == Phase.WAITING:
                with self._lock:
                    self._not_startable[kind, resource_id] = row.token

    # -- working ----------------------------------------------------------------------------------------------------

    def _check(self, job: Job[Any]) -> None:
        for held in job.leases:
            if self._renewer.lost(held):
                raise errors.Fenced(
                    f"The {held.operation} of {held.resource_type} {held.resource_id} has been taken over, or is over."
                )
        if self._stopping.is_set():
            raise Stopped

    def _operate(self, job: Job[R]) -> None:
        done = self._do(job)
        if done is None:
            self._conclude(job)
        else:
            self._done.put(done)

    def _do(self, job: Job[R]) -> tuple[Job[R], R] | None:
        """The job with its result, which may be None; None when it was released."""
        (job.context or anonymous()).update_store()
        held = job.lease
        if self._stopping.is_set():
            self._let_go(job, _STOPPING)
            return None
        LOG.info("The %s of %s %s begins.", held.operation, held.resource_type, held.resource_id)
        try:
            with foreign.isolate_plugin_call(self._name):
                return job, self._work.do(job)
        except Stopped:
            self._let_go(job, _STOPPING)
            return None
        except Exception as error:  # noqa: BLE001  (logged there)
            instead = self._instead(job, error)
            return None if instead is None else (job, instead)

    def _instead(self, job: Job[R], error: Exception) -> R | None:
        """The result to finish with after an error; None when the job was released."""
        held = job.lease
        expected = isinstance(error, errors.MoorageError | OSError)
        LOG.log(
            logging.WARNING if expected else logging.ERROR, "The %s of %s %s failed: %s",
            held.operation, held.resource_type, held.resource_id, _text(error), exc_info=None if expected else error,
        )  # fmt: skip
        instead: R | None = None
        try:
            with foreign.isolate_plugin_call(self._name):
                instead = self._work.failed(job, error)
        except Exception:
            LOG.exception("What becomes of %s %s is not known.", held.resource_type, held.resource_id)
        if instead is None:
            self._release(job, _text(error))
        return instead

    def _release(self, job: Job[R], reason: str) -> None:
        """Lets another owner take the job, or this service after a pause."""
        self._let_go(job, reason)
        if any(self._renewer.lost(held) for held in job.leases):
            # What waits on the resource now is a later operation.
            return
        pause = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2.0 ** min(job.lease.attempts - 1, 16))
        with self._lock:
            if job.context is not None:
                self._requests.setdefault(job.key, job.context)
            self._not_before[job.key] = self._clock.monotonic() + pause
            while len(self._not_before) > self._limit:
                del self._not_before[next(iter(self._not_before))]

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
            batch: list[tuple[Job[R], R]] = []
            calls: list[Callable[[], object]] = []
            found, running = _drain(self._done, self._batch)
            for each in found:
                if isinstance(each, tuple):
                    batch.append(each)
                else:
                    calls.append(each)
            if batch:
                self._logged(functools.partial(self._finish_batch, batch))
            for job, _ in batch:
                if self._tidies:
                    self._pool.start(functools.partial(self._conclude, job))
                else:
                    self._conclude(job)
            for call in calls:
                self._logged(call)

    def _finish_batch(self, batch: Sequence[tuple[Job[R], R]]) -> None:
        try:
            with foreign.isolate_plugin_call(self._name):
                written = self._commit(sorted(batch, key=lambda each: self._work.order(*each)))
        except Exception as error:
            LOG.exception("%d operations that are done could not be written.", len(batch))
            for job, _ in batch:
                self._release(job, _text(error))
            return
        for job, _ in written:
            (job.context or anonymous()).update_store()
            held = job.lease
            LOG.info("The %s of %s %s has ended.", held.operation, held.resource_type, held.resource_id)
            with self._lock:
                self._not_before.pop(job.key, None)
        anonymous().update_store()
        if written:
            self._logged(functools.partial(self._work.after_commit, written))

    def _commit(self, batch: Sequence[tuple[Job[R], R]], *, last: bool = False) -> list[tuple[Job[R], R]]:
        """Writes a batch in one transaction, or in as few as its jobs allow; what was written.

        :param last: the result stands for one that could not be written.
        """
        alone = [[each] for each in batch if self._work.is_alone(*each)]
        if alone and len(batch) > 1:
            together = [each for each in batch if not self._work.is_alone(*each)]
            return [written for part in ([together] if together else []) + alone for written in self._commit(part)]
        try:
            return self._transact(batch)
        except Exception as error:  # noqa: BLE001  (logged there)
            if len(batch) > 1:
                # One of the batch was taken over, or cannot be written. It shall not hold up the others.
                return [written for each in batch for written in self._commit([each])]
            ((job, result),) = batch
            return self._refused(job, result, error, last=last)

    def _refused(self, job: Job[R], result: R, error: Exception, *, last: bool) -> list[tuple[Job[R], R]]:
        """Decides what becomes of a job that could not be finished; what was written in its place."""
        if isinstance(error, errors.Fenced):
            LOG.warning("%s", error.message)
            others: Sequence[tuple[Job[R], R]] = ()
            try:
                with foreign.isolate_plugin_call(self._name):
                    others = self._work.overtaken(job, result)
            except Exception:
                LOG.exception("What is left of %s %s could not be removed.", *job.key)
            return [written for each in others for written in self._commit([each], last=True)]
        instead = None if last else self._instead(job, error)
        if instead is not None:
            return self._commit([(job, instead)], last=True)
        if last:
            LOG.error("The end of %s %s could not be written.", *job.key, exc_info=error)
            self._release(job, _text(error))
        return []

    def _transact(self, batch: Sequence[tuple[Job[R], R]]) -> list[tuple[Job[R], R]]:
        """One transaction. Waits for a store that is away until the loop stops; nothing was written then."""
        while True:
            try:
                with foreign.isolate_plugin_call(self._name):
                    if len(batch) > 1 or not batch[0][0].unknown or not self._work.is_written(*batch[0]):
                        self._work.commit(batch, functools.partial(self._write, batch))
                return list(batch)
            except errors.Unavailable as error:
                LOG.warning("%d operations are done but not written yet: %s", len(batch), error.message)
                for job, _ in batch:
                    job.unknown = job.unknown or error.details.get("outcome") == "unknown"
                if self._clock.wait(self._stopping, _PAUSE):
                    # The store is most likely still away; what cannot be released is left to its leases.
                    for job, _ in batch:
                        self._let_go(job, _STOPPING)
                    return []

    def _write(self, batch: Sequence[tuple[Job[R], R]], transaction: Any) -> None:
        for job, result in batch:
            for held in job.leases:
                held.end(transaction)
            self._work.finish(transaction, job, result)

    def _conclude(self, job: Job[R]) -> None:
        """Ends the life of a job, whatever became of it."""
        self._renewer.forget(job.leases)
        if self._tidies:
            # The thread may have done another job before.
            (job.context or anonymous()).update_store()
            self._logged(functools.partial(self._work.ended, job))
        self._free(1)

    def _free(self, number: int) -> None:
        with self._changed:
            self._held -= number
            self._changed.notify_all()

    def _logged(self, call: Callable[[], object]) -> None:
        try:
            with foreign.isolate_plugin_call(self._name):
                call()
        except (errors.MoorageError, OSError) as error:
            LOG.warning("%s: %s", self._name, _text(error))
        except Exception:
            LOG.exception("A part of the work of %s failed.", self._name)


def _text(error: BaseException) -> str:
    return error.message if isinstance(error, errors.MoorageError) else foreign.format_exception(error)


def _drain(source: threads.Queue[Any], limit: int) -> tuple[list[Any], bool]:
    """What waits in the queue, at least one and at most ``limit``; False ends the loop: None was in the queue."""
    found: list[Any] = []
    item = source.get()
    while item is not None:
        found.append(item)
        if len(found) == limit:
            return found, True
        try:
            item = source.get_nowait()
        except threads.Empty:
            return found, True
    return found, False
