# SPDX-License-Identifier: Apache-2.0
"""Workers and their leases, as those see them who do the work.

A worker row records one operation in progress on one resource. Its lease is the right, and the duty, to do it::

    with lease.finish() as tx:      # one transaction: the row's end and the last write of the work
        instances.set_status(tx, uuid, "active", lease.token)
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["Lease", "Worker", "Workers"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Worker:
    """A row of ``workers``, as it was read.

    :param status: of the resource while the operation is in progress.
    :param addressed_to: the host whose service shall do the operation.
    :param owner: uuid of the service that does it, None while nobody does; ``epoch`` is that of the owner.
    :param token: the fence that the row carries now.
    :param attempts: how often it was taken.
    """

    resource_type: str
    resource_id: str
    operation: str
    status: str
    addressed_to: str
    owner: str | None
    epoch: int
    token: int
    attempts: int


class Lease(abc.ABC):
    """What an owner holds.

    ``token`` goes into every write of the work, and into the names of what lies outside of the store. ``attempts`` counts the
    owners that the operation has had, this one included.
    """

    __slots__ = ("attempts", "operation", "resource_id", "resource_type", "status", "token")

    def __init__(
        self, resource_type: str, resource_id: str, operation: str, status: str, token: int, attempts: int
    ) -> None:
        self.resource_type = resource_type
        self.resource_id = resource_id
        self.operation = operation
        self.status = status
        self.token = token
        self.attempts = attempts

    @abc.abstractmethod
    def renew(self) -> None:
        """Keep it for another lease; one transaction.

        :raises Fenced: somebody else has it.
        """

    @abc.abstractmethod
    def check(self) -> None:
        """Ask whether it is still held, before something expensive; one read. Only a fenced write is sure.

        :raises Fenced: somebody else has it, or the work is over.
        """

    @abc.abstractmethod
    def finish(self) -> AbstractContextManager[Any]:
        """One transaction for the last, fenced writes of the work and the end of its row; gives the transaction.

        :raises Fenced: the row is no longer this owner's; everything was rolled back.
        :raises StoreBusy: the transaction lost a race; the lease is still held. :meth:`finish_with` tries again by itself.
        """

    @abc.abstractmethod
    def finish_with(self, work: Callable[[Any], T]) -> T:
        """As :meth:`finish`, with the retry rule: ``work(transaction)`` may run several times.

        :raises Fenced: the row is no longer this owner's; everything was rolled back.
        """

    @abc.abstractmethod
    def end(self, transaction: Any) -> None:
        """The end of the row alone, inside the caller's transaction, which may end several.

        :raises Fenced: it is no longer this owner's; the whole transaction must be rolled back.
        """

    @abc.abstractmethod
    def give_back(self, reason: str) -> None:
        """Let it go unfinished, so that it is taken again; harmless when somebody else has it already."""


class Workers(abc.ABC):
    """The part of the worker rows that services use. Safe for use by several threads."""

    #: How long an owner keeps a row without renewing, in seconds.
    lease_seconds: float

    @abc.abstractmethod
    def take_many(
        self,
        resource_type: str,
        resource_ids: Sequence[str],
        identity: Any,
        adopt: Callable[[Any, Mapping[str, Lease]], None] | None = None,
    ) -> Mapping[str, Lease]:
        """Become the owner of several in one transaction of three statements; what cannot be taken is absent.

        :param identity: the :class:`moorage.services.interface.ServiceIdentity` that takes them.
        :param adopt: writes the tokens into the resources, in the same transaction. Needed where the work writes its resource
            before it finishes: from then on an earlier owner's writes are refused.
        """

    @abc.abstractmethod
    def renew_many(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """Keep several in one transaction; those that are lost."""

    @abc.abstractmethod
    def pending(self, resource_type: str, identity: Any, *, after: str = "", limit: int = 500) -> Sequence[Worker]:
        """Rows addressed to the service's host that it may take: unowned, of an earlier epoch of itself, or expired.

        Ordered by resource id, a page of ``limit`` after the given one.
        """
