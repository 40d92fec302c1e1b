# SPDX-License-Identifier: Apache-2.0
"""The interfaces of coordination plugins: backends that keep group membership, and periodic tasks that the members divide.

A *backend* keeps groups of members. It may be wrong about who lives; nothing that is written rests on it alone. A *periodic
task* handles objects; who handles which follows from the ring of the members, and each handling has a :class:`TaskLease`, whose
token goes into every write.
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

#: What every member id of ours begins with. Ids without it are not members: on ZooKeeper the election of a leader leaves a
#: child of that name in the group for ever, and others may use the same server.
MEMBER_PREFIX = b"moorage."
#: Of a member id of our own, after the prefix.
_PARTS = 5


def stays_of(member_id: bytes) -> bytes:
    """The prefix of the ids of all sessions of one member; no other member's ids begin with it.

    Ids of Moorage's own are ``moorage.service.epoch.worker.stay.weight``; any other one is the member's only stay.
    """
    parts = member_id.removeprefix(MEMBER_PREFIX).split(b".")
    return member_id if len(parts) != _PARTS else MEMBER_PREFIX + b".".join(parts[:-2]) + b"."


class NotMember(errors.Fenced):
    """The backend answered, and this member is not in the group: its session is over. It must join again, under a new id."""

    code = "moorage.not_member"


class BackendCapability(enum.Enum):
    """What a backend can do beyond keeping members apart."""

    #: Processes of one machine see each other.
    ACROSS_PROCESSES = "across-processes"
    #: Processes of different machines see each other.
    ACROSS_HOSTS = "across-hosts"
    #: It says by itself that a connection or a session was lost (``BackendTools.changed``).
    PUSH = "push"
    #: Members stay members while the server is restarted.
    SURVIVES_RESTART = "survives-restart"
    #: :meth:`CoordinationBackend.members` asks nothing but Moorage's database, by :meth:`moorage.db.Database.read`. Where it has to
    #: write and ``Database.is_reading``, it raises Unavailable, and is called again after that transaction.
    READS_DATABASE = "reads-database"


@dataclass(frozen=True, slots=True)
class View:
    """Who is in the group.

    :param members: ids that begin with :data:`MEMBER_PREFIX`.
    :param observed_at: on the clock's monotonic scale, a moment *before* the backend was asked.
    """

    members: frozenset[bytes]
    observed_at: float


class ServiceLives(Protocol):
    """The heartbeats of services, for a backend that has none of its own."""

    @property
    def uuid(self) -> str:
        """Of this process's service."""

    @property
    def epoch(self) -> int:
        """Of this process's incarnation of it."""

    def valid_until(self) -> float:
        """Returns the time, on the monotonic scale, until which no service can declare this service dead."""

    def living(self, transaction: Any = None) -> frozenset[tuple[str, int]]:
        """(uuid, epoch) of all services that are up in this process's eyes; one read.

        :param transaction: to read in, where the caller has one.
        """


@dataclass(frozen=True, slots=True)
class BackendTools:
    """What a backend is given. Durations are seconds.

    :param conf: the configuration (an oslo.config ``ConfigOpts``), or None where there is none.
    :param url: what the configuration says of the server; may be empty.
    :param session_timeout: a member that does not renew for this long is taken out of the group by the server.
    :param connect_timeout: the longest that ``start`` may take.
    :param call_timeout: the longest that any other call may take.
    :param database: :class:`moorage.db.Database`, or None; ``services`` likewise.
    :param changed: to be called, from any thread, when something may have changed; returns at once.
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
    """One client of a coordination service, for one stay of one member in one group. Built as ``plugin(tools)``.

    The life of a client is start, join, then ``renew`` and ``members`` again and again, at last leave and close. When a session
    is over, or a connection does not come back, the owner closes the client and builds another one, which joins under another
    id; so a client never has to join twice, or to notice that a server was wiped.

    Every method returns within the time that the tools allow, whatever the server does, and raises nothing but
    ``errors.ConfigError`` (it cannot work with this configuration), ``errors.Unavailable`` (it may work later) and
    :class:`NotMember`. Methods may be called from several threads.
    """

    api_version: ClassVar[tuple[int, int]]
    #: What this client offers; known before ``start``.
    capabilities: frozenset[BackendCapability] = frozenset()
    #: What an operator should know about this choice, one sentence each; logged at the start.
    cautions: Sequence[str] = ()

    def __init__(self, tools: BackendTools) -> None:
        """Look at the configuration; must not connect. Raises ConfigError for what can never work."""
        self.tools = tools

    @abc.abstractmethod
    def start(self) -> None:
        """Connect. Raises ConfigError or Unavailable; the client is then only closed."""

    @abc.abstractmethod
    def join(self, group: str, member_id: bytes) -> float:
        """Enter the group, which is created when it is not there; what ``renew`` returns.

        :param member_id: begins with :data:`MEMBER_PREFIX`, ASCII without ``/``; never used before. An earlier stay of
            the same member (see :func:`stays_of`) may not have been left: it must not outlast a session.
        """

    @abc.abstractmethod
    def renew(self) -> float:
        """Stay a member; the moment, on the clock's monotonic scale, before which the server cannot drop us.

        It counts from before the server was asked (the caller takes off a margin and what clocks may differ by). The server must
        have been asked for the own id: a client may have got a new session, which the id does not belong to.

        :raises NotMember: the id is not in the group.
        :raises Unavailable: it is not known.
        """

    @abc.abstractmethod
    def members(self) -> View:
        """Who is in the group now."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Go out of the group, so that others need not wait for the session's end."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the client; never raises. The id vanishes from the group with the session if it has not left."""


class TaskLease(Right):
    """The right to handle one object for one tick. It is finished at most once; ``check`` costs nothing.

    :ivar task: the name of the task. :ivar object_id: of what is handled.
    :ivar tick: microseconds since the Unix epoch by the database's clock; names the tick, and rises.
    :ivar token: the ring's. It rises with every change of the ring, so an owner's is never smaller than an earlier owner's.
        Handlers write ``SET fence = :token ... WHERE fence <= :token`` (:data:`moorage.work.lease.WRITE`), and send it along.
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
        """Send it; raises TransportError when it certainly or perhaps was not."""


@dataclass(frozen=True, slots=True)
class TaskTools:
    """What a task is given.

    :param conf: the configuration.
    :param sender: sends messages to agents.
    :param context: who the work is done for, for messages and logs.
    :param workers: where a task records an operation that it wants done.
    :param services: things of the control plane that the core's own tasks need, by name; plugins must not count on them.
    """

    conf: cfg.ConfigOpts
    clock: Clock
    database: Database
    sender: Casts
    context: RequestContext
    workers: OperationStore
    services: Any = None


class PeriodicTask(abc.ABC):
    """Work that is to be done for each of many objects, again and again. Built once in a process as ``plugin(tools)``.

    It is level-triggered: what is to be done is read from the state of the object, so a tick that was missed is no loss. A
    sweep of a task never overlaps the next one. ``handle`` is called by several threads when ``[periodic] concurrency`` says so.
    It should flip a state by a conditional statement, send a message, and return: long work is done by the service that gets the
    message. An exception is counted and logged, and the object waits longer after each one. The sweep goes on.
    """

    api_version: ClassVar[tuple[int, int]]
    #: Seconds between two ticks; ``[periodic] spacing`` goes before it.
    spacing: float = 60.0
    #: Seconds after which a handling loses its lease, and the sweep no longer waits for it; ``[periodic] timeout`` likewise.
    timeout: float = 60.0
    #: How many objects are handled at the same time, by this member; ``[periodic] concurrency`` likewise.
    concurrency: int = 1
    #: Whether the objects' handlings are spread over the whole time between two ticks, by their positions on the ring.
    spread: bool = False
    #: The hash function of the positions that :meth:`objects_in` knows. It is not asked while the ring has another one.
    positions: str = "md5"

    def __init__(self, tools: TaskTools) -> None:
        """Keep the tools; must not block. May raise ConfigError."""
        self.tools = tools

    @abc.abstractmethod
    def list_objects(self) -> Sequence[str]:
        """The ids (up to 255 characters) of all objects that may need handling; one query."""

    def objects_in(self, ranges: Sequence[tuple[int, int]]) -> Sequence[str] | None:
        """The ids of those whose stored position lies in one of the half-open ranges; None when positions are not stored.

        See :func:`moorage.ring.position_of` for what to store, of the hash function that :attr:`positions` says, and
        :func:`moorage.db.ranges.within` for the condition. Some more may be returned, so that the query may round.
        """
        return None

    @abc.abstractmethod
    def handle(self, object_id: str, lease: TaskLease) -> object:
        """Look at one object and do what is to be done; what it returns counts as acted when it is true."""


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
