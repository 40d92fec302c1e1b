# SPDX-License-Identifier: Apache-2.0
"""The interface of observers, and the events that they get.

An observer is told of events after they have happened, and can change nothing. It is told in a thread of its own: whatever it does,
raise, hang or be slow, and no service waits for it. What comes faster than it takes it is dropped, and counted.

Events are told at most once, by the process in which they happen, and those of different processes in no order. They are no
journal: a process that is killed takes with it what it has not told yet. Some are seen by several processes and told by each of
them (that a service is down). An instance's whole truth is in the store. An observer that must not miss a change implements
:meth:`Observer.follow`, which gets the journal itself.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moorage.extensions import ExtensionPoint

if TYPE_CHECKING:
    # Programs that use the family as a library import it without a database.
    from moorage.db import RecordedEvent

__all__ = [
    "API_VERSION",
    "EVENTS",
    "OBSERVERS",
    "ClaimRefused",
    "ClaimWon",
    "CleanupFinished",
    "CleanupRequested",
    "ObserverEvent",
    "InstanceCreated",
    "InstanceDeleted",
    "InstanceFailed",
    "InstanceMoved",
    "InstanceRebuilt",
    "Notice",
    "Observer",
    "ObserverTools",
    "OperationHung",
    "RequestDecided",
    "RequestRefused",
    "RingChanged",
    "ServiceDown",
    "ServiceFenced",
    "ServiceUp",
    "ShardReassigned",
    "ProcessIdentity",
    "WorkReported",
]

#: 1.1: instance.rebuilt; an instance's end is told also by who cleans after its agent, and by the API where it is on no host.
#: 1.2: operation.hung, work.reported.
#: 1.3: Observer.follow.
API_VERSION = (1, 3)


class ObserverEvent:
    """Something that has happened. Fields are text, numbers, and mappings of text to numbers."""

    __slots__ = ()
    #: Its name, which stays the same from release to release; a release may add events, and fields at the end.
    kind: ClassVar[str]


@dataclass(frozen=True, slots=True)
class RequestDecided(ObserverEvent):
    """A scheduler has chosen a node for an instance and claimed it.

    :param attempts: how many claims were tried, the one that held included.
    :param considered: nodes that were looked at; ``passed`` those that no filter removed.
    """

    kind = "request.decided"
    request_id: str
    instance: str
    project: str
    host: str
    node: str
    attempts: int
    considered: int
    passed: int


@dataclass(frozen=True, slots=True)
class RequestRefused(ObserverEvent):
    """A scheduler has found no node for an instance.

    :param summary: why, for a person. :param reasons: filter -> nodes that it removed.
    """

    kind = "request.refused"
    request_id: str
    instance: str
    project: str
    summary: str
    considered: int
    reasons: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ClaimWon(ObserverEvent):
    """Resources of a provider (a node's uuid) are an instance's now.

    :param together: how many claims the transaction made.
    """

    kind = "claim.won"
    request_id: str
    instance: str
    provider: str
    resources: Mapping[str, int]
    together: int = 1


@dataclass(frozen=True, slots=True)
class ClaimRefused(ObserverEvent):
    """The store refused a claim: another one was faster, or it can never be there. ``reason`` is the error's code."""

    kind = "claim.refused"
    request_id: str
    instance: str
    provider: str
    reason: str


@dataclass(frozen=True, slots=True)
class InstanceCreated(ObserverEvent):
    """An agent has built an instance, or brought back one that was shelved."""

    kind = "instance.created"
    instance: str
    project: str
    flavor: str
    host: str
    node: str


@dataclass(frozen=True, slots=True)
class InstanceDeleted(ObserverEvent):
    """An instance was deleted, or shelved: it occupies the host no more. ``host`` is empty where a shelved one was deleted."""

    kind = "instance.deleted"
    instance: str
    host: str


@dataclass(frozen=True, slots=True)
class InstanceMoved(ObserverEvent):
    """An instance is on another node, or has another size; ``source`` is the host that it was on."""

    kind = "instance.moved"
    instance: str
    source: str
    host: str
    node: str
    flavor: str


@dataclass(frozen=True, slots=True)
class InstanceRebuilt(ObserverEvent):
    """An agent has rebuilt an instance where it is, of another image or the same."""

    kind = "instance.rebuilt"
    instance: str
    host: str
    node: str


@dataclass(frozen=True, slots=True)
class InstanceFailed(ObserverEvent):
    """An operation was not done: its agent could not, or has died and was cleaned after. ``fault`` says why.

    :param host: whose agent had to do it. :param operation: ``build``, ``resize``, ...
    """

    kind = "instance.failed"
    instance: str
    host: str
    operation: str
    fault: str


@dataclass(frozen=True, slots=True)
class CleanupRequested(ObserverEvent):
    """What a service left shall be cleaned. ``cause``: manual, automatic, or leftovers (of a service that has come back)."""

    kind = "cleanup.requested"
    request: str
    service: str
    epoch: int
    cause: str
    requested_by: str


@dataclass(frozen=True, slots=True)
class CleanupFinished(ObserverEvent):
    """Nothing of what the request asks for is left, but what is in quarantine."""

    kind = "cleanup.finished"
    request: str
    service: str
    epoch: int


@dataclass(frozen=True, slots=True)
class OperationHung(ObserverEvent):
    """An agent has given up an operation, because the call of its service showed no progress for so many seconds.

    :param service: the name of the service's work loop.
    """

    kind = "operation.hung"
    service: str
    resource_type: str
    resource: str
    operation: str
    seconds: int


@dataclass(frozen=True, slots=True)
class WorkReported(ObserverEvent):
    """What one work loop of an agent did since its last report; told every ``[agent] sweep_interval`` seconds while it has work.

    :param service: the name of the loop. :param taken: operations that were begun.
    :param ended: operations by what became of them: done, retry (released, for later), stale (another owner was faster).
    :param hung: operations that were given up. :param milliseconds: how long those that ended took, together.
    :param waiting: operations in the queue. :param running: operations that are held, and ``longest_milliseconds`` the age of the
        oldest.
    """

    kind = "work.reported"
    service: str
    taken: int
    ended: Mapping[str, int]
    hung: int
    milliseconds: int
    waiting: int
    running: int
    longest_milliseconds: int


@dataclass(frozen=True, slots=True)
class ServiceUp(ObserverEvent):
    """A service is ready; told by itself. Schedulers tell it of one that was silent and beats again."""

    kind = "service.up"
    service: str
    binary: str
    host: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ServiceDown(ObserverEvent):
    """A service beats no more; told by every scheduler that sees it. ``reason``: stopped (in good order), or silent."""

    kind = "service.down"
    service: str
    binary: str
    host: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class ServiceFenced(ObserverEvent):
    """An epoch of a service is over before its end: told by who declared it dead, and by itself when it finds out."""

    kind = "service.fenced"
    service: str
    binary: str
    host: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class RingChanged(ObserverEvent):
    """An engine works under another ring. ``member`` is its own id, ``members`` how many there are."""

    kind = "ring.changed"
    group: str
    token: int
    member: str
    members: int


@dataclass(frozen=True, slots=True)
class ShardReassigned(ObserverEvent):
    """Nodes have another shard. ``plan`` is empty where they were named one by one; ``conflicts`` stayed where they were."""

    kind = "shard.reassigned"
    plan: str
    moved: int
    conflicts: int


#: All there are, by kind.
EVENTS: Mapping[str, type[ObserverEvent]] = {
    each.kind: each
    for each in (
        RequestDecided, RequestRefused, ClaimWon, ClaimRefused, InstanceCreated, InstanceDeleted, InstanceMoved, InstanceRebuilt,
        InstanceFailed, CleanupRequested, CleanupFinished, ServiceUp, ServiceDown, ServiceFenced, RingChanged, ShardReassigned,
        OperationHung, WorkReported,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """The process that tells: its service, and the epoch of it.

    The processes of a WSGI server tell like the others and are no services: their uuid is in no list, their binary ``api-all`` or
    ``api-`` and the dialect, their host the machine's name and the process's number.
    """

    service: str
    binary: str
    host: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Notice:
    """An event as an observer is told it.

    :param sequence: rises within a source; a number that is missing was dropped, or is an event that the observer does not want.
    :param at: seconds since the Unix epoch by this machine's clock; for people to read, and orders nothing.
    :param dropped: how many notices this observer has lost so far in this process.
    """

    event: ObserverEvent
    source: ProcessIdentity
    sequence: int
    at: float
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class ObserverTools:
    """What an observer is given.

    :param conf: the configuration (an oslo.config ``ConfigOpts``).
    :param clock: :class:`moorage.clock.Clock`.
    """

    conf: Any
    clock: Any
    source: ProcessIdentity


class Observer(abc.ABC):
    """Is told what happens. Built as ``plugin(tools)`` in every role's process, again with each reload; used by one thread.

    What it raises is told in the log, and ends nothing; after ``[observers] max_errors`` in a row, or when one call takes longer
    than ``[observers] deadline`` seconds (in which the process was not stopped), it is told nothing more, which the log says with
    its name.
    """

    api_version: ClassVar[tuple[int, int]]
    #: The kinds of events that it is told; None: all. With none at all, it is built in engines only, and for :meth:`follow`.
    kinds: ClassVar[frozenset[str] | None] = None

    def __init__(self, tools: ObserverTools) -> None:
        """Keep the tools. Raises ConfigError for options that cannot be used; must not block."""
        self.tools = tools

    @abc.abstractmethod
    def observe(self, notice: Notice) -> None:
        """Something has happened. It may block for a while: ``[observers] queue`` notices wait meanwhile."""

    def follow(self, events: Sequence[RecordedEvent], missed: int) -> None:  # noqa: B027  (most follow nothing)
        """Take the next events of the journal, in the order of their numbers: every one, at least once.

        An observer that implements it is built once more in each engine, for nothing else. One engine at a time calls it, in one
        thread. The cursor is kept in the store under the plugin's name, and begins with the events after its first start. When
        the call raises, or does not return within ``[observers] deadline``, the same events come again later, and none of the
        later ones before. Events may come again after later ones: their numbers say so.

        :param events: at most 100.
        :param missed: how many events were purged, so far, before they were delivered.
        :raises Exception: they were not taken. Administrators see the text, so it must not contain secrets.
        """

    def flush(self) -> None:  # noqa: B027  (most have nothing to write later)
        """Nothing waits, for now: the moment to write what was collected. Nothing by itself."""

    def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """The last call: the process ends, or a reload has made another one. Nothing by itself."""


#: Chosen by ``[observers] enabled``.
OBSERVERS: ExtensionPoint[Observer] = ExtensionPoint("moorage.observers", Observer, API_VERSION, "[observers] enabled")
