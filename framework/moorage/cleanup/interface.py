# SPDX-License-Identifier: Apache-2.0
"""Handlers that clean up one type of resource after dead services.

A :class:`CleanupHandler` finishes or undoes the operations that a dead service left on its type of resource. The kit
:mod:`moorage.testing.cleanup` tests its contract.
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
    """What became of one orphan; ``reason`` is a sentence for operators."""

    result: Disposition
    reason: str = ""


#: The resource is in its documented state and the row has ended (``lease.finish``).
DONE = Outcome(Disposition.DONE)
#: Another service has the lease now, renews it and will end the row; should that fail, the expired lease is cleaned again.
CONTINUES = Outcome(Disposition.CONTINUES)
#: The resource does not need it any more; the row is ended and nothing is written.
STALE = Outcome(Disposition.STALE)


def retry(reason: str) -> Outcome:
    """It cannot be done now: later again, at growing distances, until ``[cleanup] max_attempts`` puts it into quarantine."""
    return Outcome(Disposition.RETRY, reason)


class CleanupTools(Protocol):
    """What a handler may rely on to be given; an agent's :class:`moorage.control_plane.interface.AgentTools` has more."""

    @property
    def conf(self) -> cfg.ConfigOpts:
        """The configuration."""

    @property
    def clock(self) -> Clock:
        """The clock of the process."""

    @property
    def database(self) -> Database:
        """The database of the resources and of the worker rows."""

    @property
    def identity(self) -> ServiceIdentity:
        """Who the cleaner is."""

    @property
    def workers(self) -> OperationStore:
        """The leases of operations."""


class CleanupHandler(abc.ABC):
    """Finishes what dead services left of one type of resource; the name of its entry point is the type.

    Built once per cleaner as ``plugin(tools)`` and called by several threads. It may run several times on one resource (a cleaner
    can die, or be paused and taken for dead): every write carries ``lease.token``, effects outside of the store lie under names
    with the token or are harmless when repeated, and the last write is in ``lease.finish()``.
    """

    api_version: ClassVar[tuple[int, int]]
    #: Statuses of the resource in which an operation may have been left.
    cleanable: ClassVar[frozenset[str]]
    #: Whether a service that starts again has what its earlier incarnation left cleaned. False: it goes on with it by itself, and
    #: only others clean after it.
    cleans_own: ClassVar[bool] = True
    #: How many are cleaned at the same time by one cleaner, unless ``[cleanup] limits`` says otherwise.
    concurrency: ClassVar[int] = 4
    #: Seconds after which a call that has not ended is left to itself: its lease is let go and the row is tried again; from then
    #: on whatever the first one writes is refused. It goes on counting as one of ``concurrency`` until it ends. None: for ever.
    deadline: ClassVar[float | None] = 600.0

    def __init__(self, tools: CleanupTools) -> None:
        self.tools = tools

    @abc.abstractmethod
    def read(self, transaction: Any, resource_ids: Sequence[str]) -> Mapping[str, Any]:
        """The resources by id; each has ``status``. Absent ones are left out. One statement.

        In the transaction that takes the rows, which holds locks that others wait for: nothing outside of the store may be asked
        here. After ``deadline`` seconds it is left behind, as a call of :meth:`cleanup` is, but only its end frees the locks, or
        that of the transaction by the database server (SQLite never ends one).
        """

    @abc.abstractmethod
    def cleanup(self, lease: Lease, resource: Any) -> Outcome:
        """Bring the resource into its documented state. It may block; the lease is renewed meanwhile.

        What it raises counts as ``retry`` with the error as reason; Fenced means that another service has it.

        :param resource: as :meth:`read` gave it in the transaction that took the row; its status is the row's.
        """

    def stamp_token(self, transaction: Any, leases: Mapping[str, Lease]) -> None:  # noqa: B027  (most need none)
        """Write the tokens into the resources, in the transaction that takes the rows: the earlier owner can write nothing more.

        It must not wait for anything outside of the store, as :meth:`read` must not.
        Needed where operations write their resource before they finish. Nothing by itself.
        """


class SetCleanupHandler(CleanupHandler):
    """One whose last write is done for a whole set in one transaction, and what lies outside of the store after it."""

    @abc.abstractmethod
    def finish_batch(self, transaction: Any, leases: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
        """Bring all of them into their documented state; the rows have been ended in this transaction.

        It may run several times: a lost race, or one lease of the set that was lost, undoes the whole transaction.
        """

    def after_commit(self, leases: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
        """After that was committed: remove what lies outside of the store. Nothing by itself.

        It may never run, when the cleaner dies in that moment: what it would have done must be found otherwise too.
        """

    def cleanup(self, lease: Lease, resource: Any) -> Outcome:
        """One alone, when the set could not be done."""
        leases, resources = {lease.resource_id: lease}, {lease.resource_id: resource}
        lease.finish_with(lambda tx: self.finish_batch(tx, leases, resources))
        self.after_commit(leases, resources)
        return DONE


#: Chosen by ``[cleanup] enabled_handlers``.
CLEANUP_HANDLERS: ExtensionPoint[CleanupHandler] = ExtensionPoint(
    "moorage.cleanup_handlers", CleanupHandler, API_VERSION, "[cleanup] enabled_handlers"
)
