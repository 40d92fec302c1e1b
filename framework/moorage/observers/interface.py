# SPDX-License-Identifier: Apache-2.0
"""Defines the interface of observers, and the events that observers receive.

An observer receives events after they have happened, and cannot change anything. Each observer has its own thread, so no service
waits for an observer that raises, hangs or is slow. Events that arrive faster than the observer takes them are dropped and
counted.

Each process delivers its own events, each at most once. The events of different processes have no order. Events are no journal: a
killed process loses the events that it has not delivered. Several processes may see one event, and then each of them delivers it
(a service is down, for example). The store has the complete state of an instance. An observer that must not miss a change
implements :meth:`Observer.follow`, which receives the journal.
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

#: 1.1: instance.rebuilt; the end of an instance is also reported by the agent that cleans after its agent, and by the API if the
#: instance is on no host.
#: 1.2: operation.hung, work.reported.
#: 1.3: Observer.follow.
API_VERSION = (1, 3)


class ObserverEvent:
    """The base class of events. Fields are text, numbers, and mappings of text to numbers."""

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
    """Reports what one work loop of an agent did since its last report.

    It comes every ``[agent] sweep_interval`` seconds while the loop has work.

    :param service: the name of the loop. :param taken: how many operations began.
    :param ended: how many operations ended, by outcome: done, retry (released, for later), stale (another owner was faster).
    :param hung: how many operations were given up. :param milliseconds: the time that all ended operations took, in sum.
    :param waiting: operations in the queue. :param running: operations that the loop holds, and ``longest_milliseconds`` the age
        of the oldest one.
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
    """A service is ready. The service reports it. If a silent service sends heartbeats again, schedulers report it."""

    kind = "service.up"
    service: str
    binary: str
    host: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ServiceDown(ObserverEvent):
    """A service sends no heartbeats any more. Every scheduler that sees it reports it.

    :param reason: ``stopped`` (in good order), or ``silent``.
    """

    kind = "service.down"
    service: str
    binary: str
    host: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class ServiceFenced(ObserverEvent):
    """A live service was declared dead. Both the declaring service and the fenced service, when it finds out, report it."""

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


#: All events, by kind.
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
    """Identifies the process that delivers an event: its service, and the epoch of the service.

    The processes of a WSGI server deliver events too, but are no services: their uuid is in no list, their binary is ``api-all``
    or ``api-`` and the dialect, and their host is the machine's name and the process's number.
    """

    service: str
    binary: str
    host: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Notice:
    """An event as an observer receives it.

    :param sequence: rises within a source. If a number is missing, its event was dropped or the observer does not want that kind.
    :param at: seconds since the Unix epoch by this machine's clock. For people only: it orders nothing.
    :param dropped: how many notices this observer has lost so far in this process.
    """

    event: ObserverEvent
    source: ProcessIdentity
    sequence: int
    at: float
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class ObserverTools:
    """Holds what the constructor of an observer gets.

    :param conf: the configuration (an oslo.config ``ConfigOpts``).
    :param clock: :class:`moorage.clock.Clock`.
    """

    conf: Any
    clock: Any
    source: ProcessIdentity


class Observer(abc.ABC):
    """Receives events. Built as ``plugin(tools)`` in every role's process, again with each reload; used by one thread.

    Errors that it raises are logged, and end nothing. After ``[observers] max_errors`` errors in a row, or when one call takes
    longer than ``[observers] deadline`` seconds (while the process was not stopped), it receives no more events. The log says so
    with the observer's name.
    """

    api_version: ClassVar[tuple[int, int]]
    #: The kinds of events that it receives; None: all. If the set is empty, it is built in engines only, for :meth:`follow`.
    kinds: ClassVar[frozenset[str] | None] = None

    def __init__(self, tools: ObserverTools) -> None:
        """Keeps the tools. Must not block.

        :raises ConfigError: an option cannot be used.
        """
        self.tools = tools

    @abc.abstractmethod
    def observe(self, notice: Notice) -> None:
        """Handles one event. It may block for a while: ``[observers] queue`` notices wait meanwhile."""

    def follow(self, events: Sequence[RecordedEvent], missed: int) -> None:  # noqa: B027  (most follow nothing)
        """Handles the next events of the journal, in the order of their numbers. Each event comes at least once.

        Each engine builds an observer that implements this method once more, for this method only. One engine at a time calls it,
        in one thread. The store keeps the cursor under the plugin's name. The first event is the first one after the plugin's
        first start. If the call raises, or does not return within ``[observers] deadline``, these events come again, before all
        later ones. An event may also come again after later events: compare the numbers.

        :param events: at most 100.
        :param missed: how many events were purged, so far, before they were delivered.
        :raises Exception: the events were not handled. Administrators see the text, so it must not contain secrets.
        """

    def flush(self) -> None:  # noqa: B027  (most have nothing to write later)
        """Writes what was collected. Called when no event waits. Does nothing by default."""

    def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """Ends the observer: the process ends, or a reload has built another one. Does nothing by default."""


#: Chosen by ``[observers] enabled``.
OBSERVERS: ExtensionPoint[Observer] = ExtensionPoint("moorage.observers", Observer, API_VERSION, "[observers] enabled")
