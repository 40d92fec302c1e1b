# SPDX-License-Identifier: Apache-2.0
"""Defines the interfaces of coordination plugins: backends for group membership, and periodic tasks that members share.

A *backend* keeps groups of members. Its list of members may be stale, and no write depends on that list alone. A *periodic task*
handles objects. The hash ring of the members decides which member handles an object. Each handling has a :class:`TaskLease`, and
every write carries the token of the lease.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from oslo_config import cfg

from moorage import errors
from moorage.clock import Clock
from moorage.context import RequestContext
from moorage.extensions import ExtensionPoint
from moorage.part import PartPoint
from moorage.work.interface import OperationStore, Right, Transactions

if TYPE_CHECKING:
    # Programs that use the family as a library import it without a database.
    from moorage.db import Database

__all__ = [
    "API_VERSION",
    "BACKENDS",
    "MEMBER_PREFIX",
    "PERIODIC_TASKS",
    "BackendTools",
    "BackendCapability",
    "CoordinationBackend",
    "NotMember",
    "PeriodicTask",
    "ServiceLives",
    "TaskLease",
    "TaskTools",
    "View",
    "stays_of",
]

API_VERSION = (1, 0)
T = TypeVar("T")

#: The prefix of all member ids. Ids without it are not members: on ZooKeeper, the election of a leader leaves a child of that name
#: in the group for ever, and other programs may use the server.
MEMBER_PREFIX = b"moorage."
#: Parts of a member id after the prefix.
_PARTS = 5


def stays_of(member_id: bytes) -> bytes:
    """Returns the common prefix of the ids of all sessions of one member. No other member's id begins with it.

    Moorage's ids are ``moorage.service.epoch.worker.stay.weight``. Any other id is its own prefix.
    """
    parts = member_id.removeprefix(MEMBER_PREFIX).split(b".")
    return member_id if len(parts) != _PARTS else MEMBER_PREFIX + b".".join(parts[:-2]) + b"."


class NotMember(errors.Fenced):
    """The member is not in the group, because its session has ended. It must join again, with a new id."""

    code = "moorage.not_member"


class BackendCapability(enum.Enum):
    """An optional capability of a backend."""

    #: Processes of one machine see each other.
    ACROSS_PROCESSES = "across-processes"
    #: Processes of different machines see each other.
    ACROSS_HOSTS = "across-hosts"
    #: The client calls ``BackendTools.changed`` when a connection or session was lost.
    PUSH = "push"
    #: Members stay members while the server is restarted.
    SURVIVES_RESTART = "survives-restart"
    #: :meth:`CoordinationBackend.members` reads Moorage's database only, by :meth:`moorage.db.Database.read`. If it has to write
    #: while ``Database.is_reading``, it raises Unavailable, and is called again after that transaction.
    READS_DATABASE = "reads-database"


@dataclass(frozen=True, slots=True)
class View:
    """Lists the members of a group at one moment.

    :param members: ids that begin with :data:`MEMBER_PREFIX`.
    :param observed_at: a time *before* the backend was asked, by the monotonic clock.
    """

    members: frozenset[bytes]
    observed_at: float


class ServiceLives(Protocol):
    """Gives access to the heartbeats of services, for a backend that has no sessions of its own."""

    @property
    def uuid(self) -> str:
        """The uuid of this process's service."""

    @property
    def epoch(self) -> int:
        """The epoch of this process's service."""

    def valid_until(self) -> float:
        """Returns the time, on the monotonic scale, until which no service can declare this service dead."""

    def living(self, transaction: Any = None) -> frozenset[tuple[str, int]]:
        """Returns (uuid, epoch) of all services that this process sees as up; one read.

        :param transaction: the caller's open transaction, to read in it.
        """


@dataclass(frozen=True, slots=True)
class BackendTools:
    """Holds what the constructor of a backend gets. Durations are seconds.

    :param conf: the configuration (an oslo.config ``ConfigOpts``), or None.
    :param url: the URL of the server from the configuration; may be empty.
    :param session_timeout: the server removes a member that does not renew for so long.
    :param connect_timeout: the longest that ``start`` may take.
    :param call_timeout: the longest that any other call may take.
    :param database: :class:`moorage.db.Database`, or None; ``services`` likewise.
    :param changed: the backend calls it, from any thread, when the membership may have changed. It returns at once.
    """

    conf: Any
    url: str
    clock: Clock
    session_timeout: float
    connect_timeout: float
    call_timeout: float
    database: Any = None
    services: ServiceLives | None = None
    changed: Callable[[], None] = lambda: None


class CoordinationBackend(abc.ABC):
    """A client of a coordination service, for one session of one member in one group. Built as ``plugin(tools)``.

    The owner calls start, join, then ``renew`` and ``members`` periodically, and at the end leave and close. If the session ends,
    or the connection does not come back, the owner closes the client and builds another one, which joins with another id. So a
    client never joins twice, and need not notice that a server has lost its data.

    Every method returns within the timeouts of the tools, whatever the server does. It raises ``errors.ConfigError`` (it cannot
    work with this configuration), ``errors.Unavailable`` (it may work later) and :class:`NotMember`, and nothing else. Several
    threads may call methods.
    """

    api_version: ClassVar[tuple[int, int]]
    #: The capabilities of this client; known before ``start``.
    capabilities: frozenset[BackendCapability] = frozenset()
    #: Cautions for operators about this configuration, one sentence each; logged at the start.
    cautions: Sequence[str] = ()

    def __init__(self, tools: BackendTools) -> None:
        """Checks the configuration. Must not connect.

        :raises ConfigError: it can never work.
        """
        self.tools = tools

    @abc.abstractmethod
    def start(self) -> None:
        """Connects to the server. If it raises ConfigError or Unavailable, the owner only closes the client."""

    @abc.abstractmethod
    def join(self, group: str, member_id: bytes) -> float:
        """Joins the group, and creates the group if necessary. Returns what ``renew`` returns.

        :param member_id: begins with :data:`MEMBER_PREFIX`; ASCII without ``/``; never used before. An earlier session of the
            member (see :func:`stays_of`) may not have left: it must end after the session timeout.
        """

    @abc.abstractmethod
    def renew(self) -> float:
        """Renews the membership. Returns a time before which the server cannot remove the member, by the monotonic clock.

        The time is counted from before the server was asked. (The caller subtracts a margin, and the drift of clocks.) The server
        must be asked for the member's own id: the client may have got a new session, to which the id does not belong.

        :raises NotMember: the id is not in the group.
        :raises Unavailable: it is unknown whether the id is in the group.
        """

    @abc.abstractmethod
    def members(self) -> View:
        """Returns the members of the group. They may be stale."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Leaves the group, so that other members need not wait for the end of the session."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the client. Never raises. If the member has not left, the server removes its id at the end of the session."""


class TaskLease(Right):
    """The right to handle one object for one tick. It is finished at most once; ``check`` costs nothing.

    :ivar task: the name of the task. :ivar object_id: the id of the object.
    :ivar tick: the time of the tick, in microseconds since the Unix epoch by the database's clock; rises from tick to tick.
    :ivar token: the token of the ring. It rises with every change of the ring, so it is never smaller than an earlier owner's
        token. Handlers write ``SET fence = :token ... WHERE fence <= :token`` (:data:`moorage.work.lease.WRITE`), and send it in
        messages.
    """

    __slots__ = ("object_id", "task", "tick")

    def __init__(self, transactions: Transactions, task: str, object_id: str, tick: int, token: int) -> None:
        super().__init__(transactions, token)
        self.task = task
        self.object_id = object_id
        self.tick = tick


class Casts(Protocol):
    """Sends a message without an answer (:class:`moorage.rpc.client.RpcSender`)."""

    def cast(self, topic: str, method: str, args: Any = None, *, server: str | None = None) -> None:
        """Sends a message.

        :raises TransportError: the message was not sent, or perhaps not.
        """


@dataclass(frozen=True, slots=True)
class TaskTools:
    """Holds what the constructor of a task gets.

    :param conf: the configuration.
    :param sender: sends messages to agents.
    :param context: the request context of the task, for messages and logs.
    :param workers: creates operations.
    :param services: parts of the control plane for the core's own tasks. Plugins must not use them.
    """

    conf: cfg.ConfigOpts
    clock: Clock
    database: Database
    sender: Casts
    context: RequestContext
    workers: OperationStore
    services: Any = None


class PeriodicTask(abc.ABC):
    """Handles each of many objects periodically. Each process builds it once, as ``plugin(tools)``.

    A task is level-triggered: it reads from the state of an object what there is to do, so a missed tick is no loss. Two sweeps of
    a task never overlap. If ``[periodic] concurrency`` is above 1, several threads call ``handle``. It should change a state by a
    conditional statement, send a message, and return: the service that receives the message does long work. An exception is
    counted and logged, and the object waits longer after each one. The sweep continues.
    """

    api_version: ClassVar[tuple[int, int]]
    #: Seconds between two ticks; ``[periodic] spacing`` overrides it.
    spacing: float = 60.0
    #: Seconds after which a handling loses its lease, and the sweep stops waiting for it; ``[periodic] timeout`` overrides it.
    timeout: float = 60.0
    #: How many objects a member handles at the same time; ``[periodic] concurrency`` overrides it.
    concurrency: int = 1
    #: Whether a sweep spreads the objects over the time between two ticks, by their positions on the ring.
    spread: bool = False
    #: The hash function of the positions that :meth:`objects_in` uses. It is not called while the ring has another hash function.
    positions: str = "md5"

    def __init__(self, tools: TaskTools) -> None:
        """Keeps the tools. Must not block. May raise ConfigError."""
        self.tools = tools

    @abc.abstractmethod
    def list_objects(self) -> Sequence[str]:
        """Returns the ids (up to 255 characters) of all objects that may need handling; one query."""

    def objects_in(self, ranges: Sequence[tuple[int, int]]) -> Sequence[str] | None:
        """Returns the ids of objects whose stored position is in one of the half-open ranges; None: positions are not stored.

        Store :func:`moorage.ring.position_of` with the hash function :attr:`positions`; :func:`moorage.db.ranges.within` makes the
        condition. The query may round: more ids than those in the ranges do no harm.
        """
        return None

    @abc.abstractmethod
    def handle(self, object_id: str, lease: TaskLease) -> object:
        """Handles one object. Returns whether it did anything, for statistics."""


#: Chosen by ``[coordination] periodic_coordination_backend``.
BACKENDS: ExtensionPoint[CoordinationBackend] = ExtensionPoint(
    "moorage.coordination",
    CoordinationBackend,
    API_VERSION,
    "[coordination] periodic_coordination_backend",
)
#: Chosen by ``[periodic] enabled_tasks``.
PERIODIC_TASKS: ExtensionPoint[PeriodicTask] = PartPoint(
    "moorage.periodic_tasks", PeriodicTask, API_VERSION, "[periodic] enabled_tasks", "periodic_tasks"
)
