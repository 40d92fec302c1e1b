# SPDX-License-Identifier: Apache-2.0
"""Defines the interface of cleanup handlers: plugins that clean up one type of resource after dead services.

A :class:`CleanupHandler` finishes or undoes the operations that a dead service left on its type of resource. The kit
:mod:`moorage.testing.cleanup` tests the contract.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from oslo_config import cfg

from moorage.clock import Clock
from moorage.extensions import ExtensionPoint
from moorage.services.interface import ServiceIdentity
from moorage.work.interface import Disposition, Lease, OperationStore

if TYPE_CHECKING:
    # Programs that use the family as a library import it without a database.
    from moorage.db import Database

__all__ = [
    "API_VERSION",
    "CLEANUP_HANDLERS",
    "CONTINUES",
    "DONE",
    "STALE",
    "CleanupHandler",
    "CleanupTools",
    "Disposition",
    "Outcome",
    "SetCleanupHandler",
    "retry",
]

API_VERSION = (1, 0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of cleaning one orphan; ``reason`` is a sentence for operators."""

    result: Disposition
    reason: str = ""


#: The resource is in its documented state, and the operation has ended (``lease.finish``).
DONE = Outcome(Disposition.DONE)
#: Another service has the lease now, and will end the operation. If it fails, the expired lease is cleaned again.
CONTINUES = Outcome(Disposition.CONTINUES)
#: The resource does not need cleaning any more. The operation ends, and nothing else is written.
STALE = Outcome(Disposition.STALE)


def retry(reason: str) -> Outcome:
    """Returns the outcome of a failed try.

    The pauses between tries grow. After ``[cleanup] max_attempts`` tries the operation is quarantined.
    """
    return Outcome(Disposition.RETRY, reason)


class CleanupTools(Protocol):
    """Holds what the constructor of a handler gets. An agent's :class:`moorage.control_plane.interface.AgentTools` has more."""

    @property
    def conf(self) -> cfg.ConfigOpts:
        """The configuration."""

    @property
    def clock(self) -> Clock:
        """The clock of the process."""

    @property
    def database(self) -> Database:
        """The database of the resources and operations."""

    @property
    def identity(self) -> ServiceIdentity:
        """The identity of the cleaner's service."""

    @property
    def workers(self) -> OperationStore:
        """The leases of operations."""


class CleanupHandler(abc.ABC):
    """Finishes what dead services left of one type of resource. The name of its entry point is the type.

    Each cleaner builds it once, as ``plugin(tools)``; several threads call it. It may run several times on one resource, because a
    cleaner can die, or be paused and declared dead. So every write carries ``lease.token``. Effects outside of the store have the
    token in their names, or can be repeated. The last write is in ``lease.finish()``.
    """

    api_version: ClassVar[tuple[int, int]]
    #: The statuses of resources that a dead service may have left.
    cleanable: ClassVar[frozenset[str]]
    #: Whether a service that starts again cleans up after its earlier epoch. False: it continues the operations itself, and only
    #: other services clean up after it.
    cleans_own: ClassVar[bool] = True
    #: How many resources one cleaner cleans at the same time; ``[cleanup] limits`` overrides it.
    concurrency: ClassVar[int] = 4
    #: Seconds after which a call counts as hanging: its lease is released, the operation is tried again, and all later writes of
    #: the first call are refused. The call counts for ``concurrency`` until it ends. None: no limit.
    deadline: ClassVar[float | None] = 600.0

    def __init__(self, tools: CleanupTools) -> None:
        self.tools = tools

    @abc.abstractmethod
    def read(self, transaction: Any, resource_ids: Sequence[str]) -> Mapping[str, Any]:
        """Reads resources, each with ``status``. Returns them by id, without absent ones. One statement.

        Called in the transaction that takes the operations, which holds locks: it must not wait for anything outside of the store.
        After ``deadline`` seconds it counts as hanging, as a call of :meth:`cleanup` does. But the locks are freed only when it
        ends, or when the database server ends the transaction (SQLite never does).
        """

    @abc.abstractmethod
    def cleanup(self, lease: Lease, resource: Any) -> Outcome:
        """Brings a resource into its documented state. It may block; the lease is renewed meanwhile.

        An error counts as ``retry``, with the error as reason; Fenced means that another service has the operation.

        :param resource: as :meth:`read` returned it in the transaction that took the operation; its status is the operation's.
        """

    def stamp_token(self, transaction: Any, leases: Mapping[str, Lease]) -> None:  # noqa: B027  (most need none)
        """Writes the tokens into the resources, in the transaction that takes the operations. Earlier owners cannot write then.

        Needed if operations write their resource before they finish. It must not wait for anything outside of the store, as
        :meth:`read` must not. Does nothing by default.
        """


class SetCleanupHandler(CleanupHandler):
    """A handler that finishes many resources in one transaction, and removes what is outside of the store after it."""

    @abc.abstractmethod
    def finish_batch(self, transaction: Any, leases: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
        """Brings all resources into their documented state. The transaction has ended their operations.

        It may run several times: a lost race, or one lost lease, undoes the whole transaction.
        """

    def after_commit(self, leases: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
        """Removes what is outside of the store, after the commit. Does nothing by default.

        If the cleaner dies after the commit, it never runs. So its work must be found in another way too.
        """

    def cleanup(self, lease: Lease, resource: Any) -> Outcome:
        """Cleans one resource alone, if the set failed."""
        leases, resources = {lease.resource_id: lease}, {lease.resource_id: resource}
        lease.finish_with(lambda tx: self.finish_batch(tx, leases, resources))
        self.after_commit(leases, resources)
        return DONE


#: Chosen by ``[cleanup] enabled_handlers``.
CLEANUP_HANDLERS: ExtensionPoint[CleanupHandler] = ExtensionPoint(
    "moorage.cleanup_handlers", CleanupHandler, API_VERSION, "[cleanup] enabled_handlers"
)
