# SPDX-License-Identifier: Apache-2.0
"""What a service declares of its work for :mod:`moorage.work.work_loop`: :class:`Work`, and the :class:`Job` of its methods."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from oslo_context import context as oslo_context

from moorage.context import acting_for
from moorage.services.interface import ServiceIdentity
from moorage.work.interface import Lease, Operation, OperationStore

__all__ = ["Finished", "Job", "Key", "Stopped", "Work", "WorkObserver", "WorkReport"]

R = TypeVar("R")
#: Resource type and id.
Key = tuple[str, str]


class Stopped(Exception):
    """The loop is stopping: the operation is released, and its next owner begins it again."""


class Job(Generic[R]):
    """Operations that the service holds and does as one.

    :param leases: the lease of each operation, in the order in which they end; the last belongs to the resource that was asked for.
    :param item: what :meth:`Work.take` read together with the leases.
    :ivar lease: the lease of the resource that was asked for. ``key``: type and id of that resource.
    """

    __slots__ = ("_check", "context", "item", "key", "lease", "leases", "unknown")

    def __init__(self, leases: Sequence[Lease], item: Any = None) -> None:
        self.leases = tuple(leases)
        self.lease = self.leases[-1]
        self.key: Key = self.lease.resource_type, self.lease.resource_id
        self.item = item
        self.context: oslo_context.RequestContext | None = None
        #: An earlier commit has an unknown outcome, so that the job may be written already.
        self.unknown = False
        self._check: Callable[[Job[Any]], None] = lambda job: None

    def check(self) -> None:
        """Returns while the work may go on; cheap, asks no server. Only the fenced finish is certain.

        Each call is a sign of progress: see :attr:`Work.deadline`.

        :raises Fenced: a lease is lost, or the loop has given the job up.
        :raises Stopped: the loop is stopping.
        """
        self._check(self)

    def of(self, leases: Sequence[Lease]) -> Job[R]:
        """Returns a job with only some of its leases."""
        part: Job[R] = Job(leases, self.item)
        part.context, part.unknown, part._check = self.context, self.unknown, self._check
        return part


#: A job with its result.
Finished = tuple[Job[R], R]


@dataclass(frozen=True, slots=True)
class WorkReport:
    """What a loop did since its last report, and what it has to do.

    :param taken: jobs that were begun. :param ended: jobs by :class:`moorage.work.interface.Disposition`.
    :param hung: jobs that were given up. :param seconds: how long those that ended took, together.
    :param waiting: operations in the queue. :param running: jobs that are held. :param longest: the age of the oldest, in seconds.
    """

    taken: int
    ended: Mapping[str, int]
    hung: int
    seconds: float
    waiting: int
    running: int
    longest: float


class WorkObserver:
    """Observes a loop. Does nothing by default. Must not wait."""

    def report(self, report: WorkReport) -> None:
        """Called by each sweep after which there is something to tell, and at the end."""

    def hung(self, job: Job[Any], seconds: float) -> None:
        """A job was given up, because its call showed no progress for so many seconds."""


class Work(abc.ABC, Generic[R]):
    """Describes what a service does with operations of its resource types.

    Methods without a word about threads are called by one thread at a time.

    :param database: the :class:`moorage.db.Database` of the default :meth:`commit`; its ``shared_read`` is around :meth:`source`.
    :param store: the operations; ``identity`` is the service that takes them.
    """

    #: Resource types, in the order in which a sweep looks for their operations.
    types: ClassVar[Sequence[str]]
    #: Seconds that :meth:`do` may take from one ``job.check()`` to the next before the loop gives the job up. None: what the loop
    #: was given, which is ``[agent] operation_deadline`` in agents. ``math.inf``: for ever.
    deadline: ClassVar[float | None] = None

    def __init__(self, database: Any, store: OperationStore, identity: ServiceIdentity) -> None:
        self.database = database
        self.store = store
        self.identity = identity

    @abc.abstractmethod
    def do(self, job: Job[R]) -> R:
        """Does the work outside of the store; several threads call it. It may block, and should call ``job.check()`` now and then.

        Effects carry ``job.lease.token`` in their names, or are harmless when repeated: any call may be a repetition, and any call
        may have lost its lease.

        :raises Exception: see :meth:`failed`.
        """

    @abc.abstractmethod
    def finish(self, transaction: Any, job: Job[R], result: R) -> None:
        """Writes the result, fenced by the token. The same transaction has ended the operation. It may run several times.

        :raises Fenced: a later owner has written the resource; the transaction is rolled back.
        """

    def finish_many(self, transaction: Any, batch: Sequence[Finished[R]]) -> None:
        """Writes the results of several jobs that end in one transaction, as :meth:`finish` does each of them.

        A service may use statements for sets here. The row counts of such a statement must add up to the number of jobs.

        :raises Fenced: the result of at least one job was refused. The transaction is rolled back, and each job ends alone.
        """
        for job, result in batch:
            with acting_for(job.context):
                self.finish(transaction, job, result)

    # -- taking -----------------------------------------------------------------------------------------------------

    def source(self, resource_type: str, after: str, limit: int) -> Sequence[Operation]:
        """Returns a page of operations that this service may take, ordered by resource id."""
        return self.store.pending(resource_type, self.identity, after=after, limit=limit)

    def take(self, resource_type: str, resource_ids: Sequence[str]) -> Iterable[Job[R]]:
        """Takes operations and returns their jobs; an operation that cannot be taken is left out.

        A generator may take them one by one: the work on a job begins when the job is yielded.
        """
        taken = self.store.take_many(resource_type, resource_ids, self.identity, stamp_token=self.stamp_token)
        return [Job([held]) for held in taken.values()]

    def told_of(self, resource_type: str, resource_ids: Sequence[str]) -> Mapping[str, Any]:
        """Returns, by resource id, what messages have said of operations that :meth:`begin_told` can take; and forgets it."""
        return {}

    def begin_told(self, transaction: Any, resource_type: str, told: Mapping[str, Any]) -> Sequence[Job[R]]:
        """Takes new operations and returns their jobs, in a transaction that ends other operations too. It may run several times.

        The loop has :meth:`take` take those that are left out.

        :param told: what :meth:`told_of` has returned.
        """
        return ()

    def stamp_token(self, transaction: Any, leases: Mapping[str, Lease]) -> None:
        """Writes the tokens into the resources in the transaction that takes the operations.

        Needed where :meth:`do` writes the resource before it ends.
        """

    def waits(self, resource_type: str, operations: Sequence[Operation]) -> None:
        """Called by each sweep with the operations that wait in this service's queue. Several threads call it."""

    # -- finishing --------------------------------------------------------------------------------------------------

    def failed(self, job: Job[R], error: Exception) -> R | None:
        """The result to finish with after :meth:`do` or :meth:`finish` raised; None releases the operation for a later sweep.

        Called by several threads. Not called when the lease was found lost at the finish (:meth:`overtaken`).
        """

    def order(self, job: Job[R], result: R) -> tuple[str, ...]:
        """Sorts a batch, so that transactions that write the same rows write them in the same order."""
        return job.key

    def is_alone(self, job: Job[R], result: R) -> bool:
        """Returns whether the job needs a transaction of its own."""
        return False

    def commit(self, batch: Sequence[Finished[R]], write: Callable[[Any], None]) -> None:
        """Runs ``write(transaction)`` in one transaction, which may run several times."""
        self.database.run(write)

    def is_written(self, job: Job[R], result: R) -> bool:
        """Returns whether an earlier commit with an unknown outcome has written this result. False when it cannot be known."""
        return False

    def overtaken(self, job: Job[R], result: R) -> Sequence[Finished[R]]:
        """Removes what a job left whose finish was refused; what shall be finished in its place.

        With ``job.unknown`` the job may have been written.
        """
        return ()

    def after_commit(self, written: Sequence[Finished[R]]) -> None:
        """Tells others what was committed, in the order of the commits."""

    def ended(self, job: Job[R]) -> None:
        """Tidies up after a job, also one that failed; several threads call it."""
