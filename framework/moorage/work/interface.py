# SPDX-License-Identifier: Apache-2.0
"""Defines operations and their leases: the right to do one piece of work on one resource, and its fenced end.

An :class:`Operation` is a row of ``workers``: one operation in progress on one resource. Its :class:`Lease` is the right, and the
duty, to do it::

    with lease.finish() as tx:      # one transaction: ends the operation, and does the last write of the work
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
    """A resource cannot be created, because it had an operation before: it exists, or was deleted."""


class Phase(enum.StrEnum):
    """The phase of an operation.

    WAITING: it has no owner. WORKING: a service does it. CLEANING: a cleaner has taken it over. RETRYING: a cleaner failed; the
    next try is at ``next_try_at``. QUARANTINED: no more tries until an operator requests one.
    """

    WAITING = "waiting"
    WORKING = "working"
    CLEANING = "cleaning"
    RETRYING = "retrying"
    QUARANTINED = "quarantined"


class Disposition(enum.Enum):
    """The outcome of one try to do a piece of work.

    DONE: it is finished. CONTINUES: another owner continues it. RETRY: it was released, and is tried again later. STALE: there is
    nothing to do, because a later owner has it, or the resource does not need it any more.
    """

    DONE = "done"
    CONTINUES = "continues"
    RETRY = "retry"
    STALE = "stale"


#: The target host of operations that any scheduler may continue. No host has this name, and no service takes them.
ANY_SCHEDULER = "scheduler:*"


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of ``workers``, as it was read.

    :param status: the status of the resource while the operation is in progress.
    :param target_host: the host whose service has to do the operation.
    :param owner: the uuid of the service that does it, None without one; ``epoch`` is the owner's epoch.
    :param token: the present token of the row.
    :param attempts: how often a service or cleaner took it; from the first cleaner on, one more than cleaners have tried.
    :param worker: the uuid of the service that last began the work, with ``worker_epoch``; cleaners do not count.
    :param expires_at: when the owner's lease ends. ``next_try_at``: when a failed cleanup is tried again; while the operation
        waits: until when a live service has announced that its queue has the operation. ``created_at`` and ``updated_at``: when it
        was requested, and when its owner last changed. All in microseconds since the Unix epoch, by the database's clock.
    :param request: the request for the operation, for :func:`moorage.context.from_text`.
    :param project_id: the project of the resource; None: unknown.
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
        """Returns one transaction."""

    def run(self, work: Callable[[Any], T]) -> T:
        """Runs ``work`` in one transaction, and again in a new one when that loses a race."""


class Right(abc.ABC):
    """The right, and the duty, to do one piece of work. Leases of operations and of ticks are rights.

    :ivar token: every write of the work carries it, and the names of files and the like outside of the store contain it.
    """

    __slots__ = ("_transactions", "token")

    def __init__(self, transactions: Transactions, token: int) -> None:
        self._transactions = transactions
        self.token = token

    @abc.abstractmethod
    def check(self) -> None:
        """Checks that it is still held, before something expensive. Only a fenced write is certain.

        :raises Fenced: another owner has the work, or the work has ended.
        """

    @abc.abstractmethod
    def end(self, transaction: Any) -> None:
        """Ends it in the caller's transaction, which may end several.

        :raises Fenced: another owner has it; the whole transaction must be rolled back.
        """

    def confirm(self) -> None:  # noqa: B027  (an operation's lease needs none)
        """Checks once more, after the last write of the work and before the commit, as :meth:`check` does. Nothing by default."""

    @contextlib.contextmanager
    def finish(self) -> Iterator[Any]:
        """Opens a transaction that ends the right. The block does the last, fenced writes of the work in it.

        :raises Fenced: another owner has it; everything was rolled back.
        :raises StoreBusy: the transaction lost a race; the right is still held. :meth:`finish_with` tries again by itself.
        """
        with self._transactions.write() as tx:
            self.end(tx)
            yield tx
            self.confirm()

    def finish_with(self, work: Callable[[Any], T]) -> T:
        """Does what :meth:`finish` does, and tries again when the transaction loses a race: ``work(transaction)`` may run often.

        :raises Fenced: another owner has it; everything was rolled back.
        """

        def whole(tx: Any) -> T:
            self.end(tx)
            result = work(tx)
            self.confirm()
            return result

        return self._transactions.run(whole)


class Lease(Right):
    """The lease of one owner on one operation.

    :ivar attempts: how many owners the operation has had, this one included.
    :ivar ended: the owner has ended it, in a transaction that may have been rolled back.
    :ivar cause: a sentence for people that says why a cleaner has it; empty in other leases.
    :ivar request: the request for the operation, as text.
    :ivar taken_at: when the owner took it, in microseconds since the Unix epoch, by the database's clock; 0: unknown.
    :ivar project_id: the project of the resource; empty: unknown.
    :ivar told_at: when the message about the operation arrived, in microseconds since the Unix epoch, by the clock of the owner's
        host; 0: the owner found the operation in the store.
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
        """The context of the request for the operation; None: no request asked for it."""
        return from_text(self.request)

    @abc.abstractmethod
    def renew(self) -> None:
        """Extends the lease by its full length, in one transaction.

        :raises Fenced: another owner has the work.
        """

    @abc.abstractmethod
    def advance(self, transaction: Any, status: str) -> None:
        """Writes another status of the resource into the operation, in the transaction that writes it into the resource.

        :raises Fenced: another owner has the operation; the whole transaction must be rolled back.
        """

    @abc.abstractmethod
    def release(self, reason: str) -> None:
        """Gives the operation up unfinished, so that a service takes it again. Does nothing if another owner has it."""


class Renewer(abc.ABC):
    """Renews leases in the background while their work is in progress. Safe for use by several threads.

    A lease that was found lost is not renewed again. Only its fenced write is certain to fail.
    """

    @abc.abstractmethod
    def keep(self, leases: Iterable[Lease]) -> None:
        """Begins to renew leases. A lease replaces an earlier lease on the same resource."""

    @abc.abstractmethod
    def forget(self, leases: Iterable[Lease]) -> None:
        """Ends the renewal of leases. Leases that are not renewed are ignored."""

    @contextlib.contextmanager
    def keeping(self, leases: Sequence[Lease]) -> Iterator[None]:
        """Renews leases while the block runs."""
        self.keep(leases)
        try:
            yield
        finally:
            self.forget(leases)

    @abc.abstractmethod
    def keeps(self, resource_type: str, resource_id: str, token: int | None = None) -> bool:
        """Returns whether a lease of the resource is renewed, even a lost one; with ``token``, whether the lease has this token."""

    @abc.abstractmethod
    def lost(self, lease: Lease) -> bool:
        """Returns whether the last renewal found the lease lost, or a later lease replaced it. Does not read the store."""

    @abc.abstractmethod
    def stop(self, patience: float | None = None) -> None:
        """Waits until no lease is renewed any more, at most ``patience`` seconds. The leases that are left expire by themselves."""


@dataclass(frozen=True, slots=True)
class OnlyIf:
    """A condition on rows of other tables that decides in SQL whether an operation begins.

    :param clause: the condition (an SQLAlchemy expression), built once, because compiled statements are cached by it.
    :param values: the parameters of the clause.
    :param refuse: called in the transaction if nothing was written. It raises the reason, or returns if the condition holds by now.
    """

    clause: Any
    values: Mapping[str, Any]
    refuse: Callable[[Any], None]


class OperationStore(abc.ABC):
    """Stores operations. This is the part that services use. Safe for use by several threads."""

    #: The length of a lease in seconds.
    lease_seconds: float

    @abc.abstractmethod
    def take_many(
        self,
        resource_type: str,
        resource_ids: Sequence[str],
        identity: Any,
        stamp_token: Callable[[Any, Mapping[str, Lease]], None] | None = None,
    ) -> Mapping[str, Lease]:
        """Takes several operations in one transaction of two or three statements. Returns the leases by resource id.

        Operations that cannot be taken are absent.

        :param identity: the :class:`moorage.services.interface.ServiceIdentity` that takes them.
        :param stamp_token: writes the tokens into the resources, in the transaction. It is needed if the work writes the resource
            before it finishes: the writes of earlier owners are refused from then on.
        """

    @abc.abstractmethod
    def begin_many(
        self, transaction: Any, resource_type: str, tokens: Mapping[str, int], identity: Any
    ) -> Mapping[str, Lease]:
        """Takes new operations that have the tokens of their creation, in the caller's transaction. Returns leases by resource id.

        Operations that have another token now, or had an owner, are absent. The last write of the work must be visible in the
        resource, so that a lost outcome of the commit can be found: nothing has written the token into the resource before, or the
        work removes the resource.

        :param tokens: the tokens by resource id, from messages.
        """

    @abc.abstractmethod
    def get(self, resource_type: str, resource_id: str) -> Operation | None:
        """Returns the operation in progress on a resource, or None; one read."""

    @abc.abstractmethod
    def renew_many(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """Renews leases in one transaction. Returns those that are lost."""

    def end_many(self, transaction: Any, leases: Sequence[Lease]) -> None:
        """Ends operations in the caller's transaction, as :meth:`Right.end` ends each of them.

        :raises Fenced: another owner has at least one of them; the whole transaction must be rolled back.
        """
        for held in leases:
            held.end(transaction)

    @abc.abstractmethod
    def renewer(self, name: str) -> Renewer:
        """Returns a renewer that renews leases each third of :attr:`lease_seconds`; ``name`` is the name of its thread."""

    @abc.abstractmethod
    def pending(self, resource_type: str, identity: Any, *, after: str = "", limit: int = 500) -> Sequence[Operation]:
        """Returns operations for the service's host that it may take: without owner, of its own earlier epoch, or expired.

        :returns: ordered by resource id, at most ``limit`` of them after the id ``after``.
        """

    @abc.abstractmethod
    def start_many(
        self,
        transaction: Any,
        resource_type: str,
        resource_ids: Sequence[str],
        identity: Any,
    ) -> Mapping[str, Lease]:
        """Takes operations that never had an owner, in the caller's transaction. Returns the leases by resource id.

        Other operations are absent. For services that never do an operation a second time: cleaners take the operations of dead
        owners.
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
        """Creates an operation in the transaction that writes the resource. Returns the token to write into the resource.

        :param status: the status of the resource while the operation is in progress.
        :param target_host: the host, or cluster, whose service has to do it.
        :param force: replaces an operation in progress.
        :param first: the operation creates the resource. A uuid that had an operation in the last ``[cleanup] history_days`` is
            refused.
        :param only_if: a condition on other rows, which the INSERT of the operation contains.
        :param project_id: the project of the resource. Its members see the events of the operation, even if another project
            requested it. Empty: the project of the request.
        :raises ExistedBefore: ``first`` is given, and the resource existed before, or exists.
        :raises InUse: an operation on the resource is in progress, and ``force`` is not given. The text says which and whose. The
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
        """Ends the operation in progress on a resource, for ``reset-state``. Returns a token that fences its owner off.

        The caller writes the token into the resource in the same transaction.
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
        """Creates an operation that the block does, and gives its lease to the block.

        One transaction creates and takes the operation. The lease is renewed while the block runs. The operation ends with the
        block, or with ``lease.finish`` in the block, which is better: it ends in the transaction of the last write. If the block
        raises, the operation is released with the error. Then another service takes it, or a cleaner ends it.

        :param begin: writes the resource's status and token in the first transaction: ``begin(transaction, token)``.
        :param project_id: as in :meth:`create`.
        :raises InUse: an operation on the resource is in progress. The text says whose.
        """

    @abc.abstractmethod
    def token_of(self, resource_type: str, resource_id: Any) -> Any:
        """Returns an SQL expression for the last token of a resource, for statements on sets of resources.

        It is the token of a lease only in a transaction that has taken or ended that lease.

        :param resource_id: the column with the ids of the resources.
        """

    @abc.abstractmethod
    def tokens(self, transaction: Any, resource_type: str, resource_ids: Sequence[str]) -> Mapping[str, int]:
        """Returns the last token of each resource; a resource that never had an operation in this database is absent.

        Tokens are kept after their resources. Anything outside of the store with a token that was never given belongs to others.
        """


def by_status_and_token(leases: Iterable[Lease]) -> Mapping[tuple[str, int], Sequence[str]]:
    """Groups resource ids by (status, token), in order: one statement with one fence can write each group.

    Tokens are counted for each resource, so many resources have equal tokens.
    """
    found: dict[tuple[str, int], list[str]] = {}
    for held in sorted(leases, key=lambda each: each.resource_id):
        found.setdefault((held.status, held.token), []).append(held.resource_id)
    return found
