# SPDX-License-Identifier: Apache-2.0
"""Operations and their leases: the right to do one piece of work on one resource, and its fenced end.

An :class:`Operation` is a row of ``workers``: one operation in progress on one resource. Its :class:`Lease` is the right, and the
duty, to do it::

    with lease.finish() as tx:      # one transaction: the row's end and the last write of the work
        instances.set_status(tx, uuid, "active", lease.token)
"""

from __future__ import annotations

import abc
import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from moorage import errors
from moorage.context import RequestContext, from_text

__all__ = [
    "ANY_SCHEDULER",
    "Disposition",
    "ExistedBefore",
    "Lease",
    "OnlyIf",
    "Operation",
    "OperationStore",
    "Phase",
    "Renewer",
    "Right",
    "Transactions",
    "by_status_and_token",
]

T = TypeVar("T")


class ExistedBefore(errors.Conflict):
    """A resource that shall be created had an operation before: it exists, or was deleted."""


class Phase(enum.StrEnum):
    """Where an operation stands.

    WAITING: it has no owner. WORKING: a service does it. CLEANING: a cleaner has taken it over. RETRYING: a cleaner failed, another
    try comes at ``next_try_at``. QUARANTINED: no more tries until a person says so.
    """

    WAITING = "waiting"
    WORKING = "working"
    CLEANING = "cleaning"
    RETRYING = "retrying"
    QUARANTINED = "quarantined"


class Disposition(enum.Enum):
    """What became of one try to do a piece of work.

    DONE: it is finished. CONTINUES: another owner of the lease goes on with it. RETRY: it was released, and is done again later.
    STALE: nothing is left to do here, since a later owner has it or the resource does not need it any more.
    """

    DONE = "done"
    CONTINUES = "continues"
    RETRY = "retry"
    STALE = "stale"


#: Operations that any scheduler may go on with are addressed to this name, which no host has. No service takes them.
ANY_SCHEDULER = "scheduler:*"


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of ``workers``, as it was read.

    :param status: of the resource while the operation is in progress.
    :param target_host: the host whose service shall do the operation.
    :param owner: uuid of the service that does it, None while nobody does; ``epoch`` is that of the owner.
    :param token: the fence that the row carries now.
    :param attempts: how often it was taken; from the first cleaner on, one more than cleaners have tried.
    :param worker: uuid of the service that began the work last, with ``worker_epoch``; a cleaner does not count.
    :param expires_at: when the owner's lease ends, ``next_try_at`` when a failed cleanup is tried again (of one that waits: until
        when a living service has announced that it has it in its queue); ``created_at`` and ``updated_at`` say when it was
        requested and last changed hands. Microseconds since the Unix epoch, of the database's clock.
    :param request: the request that asked for it, for :func:`moorage.context.from_text`.
    :param project_id: of the resource; None when it was not said.
    """

    resource_type: str
    resource_id: str
    operation: str
    status: str
    target_host: str
    owner: str | None
    epoch: int
    token: int
    attempts: int
    phase: str
    worker: str | None
    worker_epoch: int
    expires_at: int
    next_try_at: int
    last_error: str
    created_at: int
    updated_at: int
    request: str | None = None
    project_id: str | None = None


class Transactions(Protocol):
    """Runs transactions, as :class:`moorage.db.Database` does."""

    def write(self) -> AbstractContextManager[Any]:
        """One transaction."""

    def run(self, work: Callable[[Any], T]) -> T:
        """One transaction, which is tried again when it loses a race."""


class Right(abc.ABC):
    """The right, and the duty, to do one piece of work: what an operation's lease and a tick's lease have in common.

    :ivar token: goes into every write of the work, and into the names of what lies outside of the store.
    """

    __slots__ = ("_transactions", "token")

    def __init__(self, transactions: Transactions, token: int) -> None:
        self._transactions = transactions
        self.token = token

    @abc.abstractmethod
    def check(self) -> None:
        """Ask whether it is still held, before something expensive. Only a fenced write is sure.

        :raises Fenced: another owner has the work, or the work is over.
        """

    @abc.abstractmethod
    def end(self, transaction: Any) -> None:
        """End it inside the caller's transaction, which may end several.

        :raises Fenced: it is no longer this owner's; the whole transaction must be rolled back.
        """

    def confirm(self) -> None:  # noqa: B027  (an operation's lease needs none)
        """Called after the last write of the work, before the commit; raises as :meth:`check` does. Nothing by itself."""

    @contextlib.contextmanager
    def finish(self) -> Iterator[Any]:
        """One transaction for the last, fenced writes of the work and the end of the right; gives the transaction.

        :raises Fenced: it is no longer this owner's; everything was rolled back.
        :raises StoreBusy: the transaction lost a race; it is still held. :meth:`finish_with` tries again by itself.
        """
        with self._transactions.write() as tx:
            self.end(tx)
            yield tx
            self.confirm()

    def finish_with(self, work: Callable[[Any], T]) -> T:
        """As :meth:`finish`, with the retry rule: ``work(transaction)`` may run several times.

        :raises Fenced: it is no longer this owner's; everything was rolled back.
        """

        def whole(tx: Any) -> T:
            self.end(tx)
            result = work(tx)
            self.confirm()
            return result

        return self._transactions.run(whole)


class Lease(Right):
    """What an owner of an operation holds.

    ``attempts`` counts the owners that the operation has had, this one included. ``ended``: its owner has ended it, in a
    transaction that may have been rolled back. ``cause``: of a cleaner's lease, a sentence for people that says why it is cleaned;
    empty otherwise. ``request``: the request that asked for the operation, as text. ``taken_at``:
    when this owner took it, in microseconds since the Unix epoch, of the database's clock; 0 where it is not known. ``project_id``:
    of the resource; empty where it is not known. ``told_at``: when the message that asked for it arrived, in microseconds since the
    Unix epoch, of the clock of the owner's host; 0 when the owner found it by itself.
    """

    __slots__ = (
        "_context", "attempts", "cause", "ended", "operation", "project_id", "request", "resource_id", "resource_type",
        "status", "taken_at", "told_at",
    )  # fmt: skip

    def __init__(
        self,
        transactions: Transactions,
        resource_type: str,
        resource_id: str,
        operation: str,
        status: str,
        token: int,
        attempts: int,
        request: str | None = None,
        taken_at: int = 0,
        project_id: str = "",
    ) -> None:
        super().__init__(transactions, token)
        self.resource_type = resource_type
        self.resource_id = resource_id
        self.operation = operation
        self.status = status
        self.attempts = attempts
        self.ended = False
        self.cause = ""
        self.request = request
        self.taken_at = taken_at
        self.project_id = project_id
        self.told_at = 0

    @property
    def context(self) -> RequestContext | None:
        """The request that asked for the operation; None when no request did."""
        return from_text(self.request)

    @abc.abstractmethod
    def renew(self) -> None:
        """Keep it for another lease; one transaction.

        :raises Fenced: another owner has the work.
        """

    @abc.abstractmethod
    def advance(self, transaction: Any, status: str) -> None:
        """Say that the resource has another cleanable status from now on, in the transaction that writes that status.

        :raises Fenced: the row is no longer this owner's; the whole transaction must be rolled back.
        """

    @abc.abstractmethod
    def release(self, reason: str) -> None:
        """Let it go unfinished, so that it is taken again; harmless when somebody else has it already."""


class Renewer(abc.ABC):
    """Keeps leases while their work goes on, so that who works need not think of it. Safe for use by several threads.

    A lease that is found lost is not renewed again; only its fenced write is sure to notice.
    """

    @abc.abstractmethod
    def keep(self, leases: Iterable[Lease]) -> None:
        """Renew these from now on; one of a resource takes the place of an earlier one of it."""

    @abc.abstractmethod
    def forget(self, leases: Iterable[Lease]) -> None:
        """Their work is over; harmless for what is not kept."""

    @contextlib.contextmanager
    def keeping(self, leases: Sequence[Lease]) -> Iterator[None]:
        """Keep them while the block runs."""
        self.keep(leases)
        try:
            yield
        finally:
            self.forget(leases)

    @abc.abstractmethod
    def keeps(self, resource_type: str, resource_id: str, token: int | None = None) -> bool:
        """Whether a lease of the resource is kept, even one that is lost; with ``token``, the lease that has this token."""

    @abc.abstractmethod
    def lost(self, lease: Lease) -> bool:
        """Whether the lease was found lost when it was renewed last, or a later one is kept; asks nobody."""

    @abc.abstractmethod
    def stop(self, patience: float | None = None) -> None:
        """Return when all has been forgotten, or after so many seconds; what is left then is left to its leases."""


@dataclass(frozen=True, slots=True)
class OnlyIf:
    """A condition on rows of other tables, which decides in SQL whether an operation begins.

    :param clause: the condition (an SQLAlchemy expression), built once: statements are kept by it.
    :param values: its parameters.
    :param refuse: called in the transaction when nothing was written; raises why, or returns when the condition holds by now.
    """

    clause: Any
    values: Mapping[str, Any]
    refuse: Callable[[Any], None]


class OperationStore(abc.ABC):
    """The part of the worker rows that services use. Safe for use by several threads."""

    #: How long an owner keeps a row without renewing, in seconds.
    lease_seconds: float

    @abc.abstractmethod
    def take_many(
        self,
        resource_type: str,
        resource_ids: Sequence[str],
        identity: Any,
        stamp_token: Callable[[Any, Mapping[str, Lease]], None] | None = None,
    ) -> Mapping[str, Lease]:
        """Become the owner of several in one transaction of two or three statements; what cannot be taken is absent.

        :param identity: the :class:`moorage.services.interface.ServiceIdentity` that takes them.
        :param stamp_token: writes the tokens into the resources, in the same transaction. Needed where the work writes its resource
            before it finishes: from then on an earlier owner's writes are refused.
        """

    @abc.abstractmethod
    def begin_many(
        self, transaction: Any, resource_type: str, tokens: Mapping[str, int], identity: Any
    ) -> Mapping[str, Lease]:
        """Become the owner of new operations with the tokens of their creation, in the caller's transaction.

        Operations that have another token by now, or had an owner already, are absent. The last write of the work must show in the
        resource, so that an outcome that was lost is known: nothing has written the token into the resource before, or the work
        removes the resource.

        :param tokens: by resource id, as messages said.
        """

    @abc.abstractmethod
    def get(self, resource_type: str, resource_id: str) -> Operation | None:
        """The operation in progress on a resource, if there is one; one read."""

    @abc.abstractmethod
    def renew_many(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """Keep several in one transaction; those that are lost."""

    def end_many(self, transaction: Any, leases: Sequence[Lease]) -> None:
        """End several operations inside the caller's transaction, as :meth:`Right.end` does each of them.

        :raises Fenced: at least one is no longer its owner's; the whole transaction must be rolled back.
        """
        for held in leases:
            held.end(transaction)

    @abc.abstractmethod
    def renewer(self, name: str) -> Renewer:
        """One that keeps leases by renewing all of them at a third of :attr:`lease_seconds`; ``name`` is for its thread."""

    @abc.abstractmethod
    def pending(self, resource_type: str, identity: Any, *, after: str = "", limit: int = 500) -> Sequence[Operation]:
        """Rows addressed to the service's host that it may take: unowned, of an earlier epoch of itself, or expired.

        Ordered by resource id, a page of ``limit`` after the given one.
        """

    @abc.abstractmethod
    def start_many(
        self,
        transaction: Any,
        resource_type: str,
        resource_ids: Sequence[str],
        identity: Any,
    ) -> Mapping[str, Lease]:
        """Become the owner of those that nobody has, in the caller's transaction; what somebody has or had is absent.

        For services that never do an operation a second time: what a dead owner left is a cleaner's.
        """

    @abc.abstractmethod
    def create(
        self,
        transaction: Any,
        resource_type: str,
        resource_id: str,
        operation: str,
        status: str,
        *,
        target_host: str,
        force: bool = False,
        first: bool = False,
        only_if: OnlyIf | None = None,
        project_id: str = "",
    ) -> int:
        """Record an operation that is wanted, in the transaction that writes the resource; the token to write it with.

        :param status: of the resource while the operation is in progress.
        :param target_host: host, or cluster, whose service shall do it.
        :param first: the operation creates the resource. A uuid that had an operation before is refused, for as long as
            ``[cleanup] history_days``.
        :param only_if: a condition on other rows that the insert of the operation carries.
        :param project_id: of the resource: its members see the events of the operation, whoever asked for it. Empty: those of the
            project that asks.
        :raises ExistedBefore: ``first`` is given, and the resource existed before, or exists.
        :raises InUse: an operation on the resource is in progress and ``force`` is not given; says which and whose. The
            caller's transaction must be rolled back, as after any error in it.
        """

    @abc.abstractmethod
    def waiting(
        self, resource_type: str, names: Sequence[str], *, after: str = "", limit: int = 500, transaction: Any = None
    ) -> Sequence[Operation]:
        """Reads operations without an owner that are addressed to one of the names (a host, a cluster), by pages.

        :param transaction: to read in, where the caller has one.
        """

    @abc.abstractmethod
    def announce(self, resource_type: str, resource_ids: Sequence[str]) -> None:
        """Announces that a living service has these operations in its queue, so that no cleaner takes them for one lease from now.

        Services whose operations may wait for long call it periodically, for the operations that they can begin. One statement. It
        skips operations that have begun, and those that a service announced recently.
        """

    @abc.abstractmethod
    def reset(self, transaction: Any, resource_type: str, resource_id: str) -> int:
        """What ``reset-state`` does: whatever is being done to the resource ends here; a token that fences all of it off.

        The caller writes the resource with the token in the same transaction.
        """

    @abc.abstractmethod
    def tracked(
        self,
        resource_type: str,
        resource_id: str,
        operation: str,
        status: str,
        identity: Any,
        begin: Callable[[Any, int], None] | None = None,
        *,
        project_id: str = "",
    ) -> AbstractContextManager[Lease]:
        """An operation that is done right here, by the block.

        Its row is created and taken in one transaction, the lease is renewed while the block runs, and the row ends with it (or
        with the ``lease.finish`` of the block, which is better: it is one transaction with the last write). When the block raises,
        the operation is released with the error. Another service takes it, or a cleaner ends it.

        :param begin: writes the resource's status and token in the first transaction: ``begin(transaction, token)``.
        :param project_id: as in :meth:`create`.
        :raises InUse: an operation on the resource is in progress; says whose.
        """

    @abc.abstractmethod
    def token_of(self, resource_type: str, resource_id: Any) -> Any:
        """An SQL expression for the last token of the resource that a column names, for statements on whole sets.

        :param resource_id: the column of the resource's table. Good for a lease's token only in a transaction that has taken or
            ended the lease.
        """

    @abc.abstractmethod
    def tokens(self, transaction: Any, resource_type: str, resource_ids: Sequence[str]) -> Mapping[str, int]:
        """Returns the last token of each resource; a resource that never had an operation in this database is absent.

        Tokens outlive their resources: what lies outside of the store under a token that was never given belongs to others.
        """


def by_status_and_token(leases: Iterable[Lease]) -> Mapping[tuple[str, int], Sequence[str]]:
    """Ids, in order, by (status, token): those that one statement can write with one fence.

    Tokens are counted for each resource, so that those of many that had as many owners are the same.
    """
    found: dict[tuple[str, int], list[str]] = {}
    for held in sorted(leases, key=lambda each: each.resource_id):
        found.setdefault((held.status, held.token), []).append(held.resource_id)
    return found
