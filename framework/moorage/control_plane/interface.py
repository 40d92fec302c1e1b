# SPDX-License-Identifier: Apache-2.0
"""What a service that lives on Moorage implements: the store of its instances, its agent, and its dialect of the API.

The reference is the compute plugin. Transactions (``transaction``) are the store's own, an SQLAlchemy connection: the rows of an
instance, its worker and its claim are written in one.
"""

from __future__ import annotations

import abc
import contextlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from moorage import errors
from moorage.allocation.interface import AllocationStore
from moorage.context import RequestContext
from moorage.extensions import ExtensionPoint
from moorage.fleet.interface import FleetWriter, Node
from moorage.http.routes import PolicyCheck, PolicyRule, Wsgi
from moorage.observers.interface import Event
from moorage.scheduling.interface import InstanceRecord, InstanceSource
from moorage.services.interface import Service
from moorage.work.interface import ANY_SCHEDULER, OperationStore

__all__ = [
    "AGENT_SERVICES",
    "ANY_SCHEDULER",
    "API_EXTENSIONS",
    "API_VERSION",
    "DEPARTURE",
    "INSTANCE_STORES",
    "AgentService",
    "AgentTools",
    "ApiExtension",
    "ApiTools",
    "Instance",
    "InstanceStore",
    "Reassignable",
    "departed_consumer",
    "move_consumer",
]

API_VERSION = (1, 0)
#: Resource type of the operation by which the source of a move lets go of an instance; its resource_id is the instance's uuid.
DEPARTURE = "instance_source"
_MOVES = uuid.UUID("0f3d1a52-6f8b-5f0e-9a3c-6c1f6f1f7a11")


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance in full. Timestamps are microseconds since the Unix epoch, of the database's clock.

    :param status: building, active, deleting, error; during the operations of :mod:`moorage.control_plane.operations` theirs, and
        shelved_offloaded (a plugin may add others).
    :param node: name of the node; ``node_uuid`` its uuid. Empty, as ``host``, while it is on none.
    :param fence: the token of the last operation that wrote the row.
    :param request: what was asked for: extra_specs, hints, image, availability_zone, server_group.
    :param server_group: uuid (or, for one that a request brought along, name) of its server group; empty for none.
    :param pending: what the operation in progress is to make of it.
    """

    uuid: str
    name: str
    status: str
    host: str
    node: str
    node_uuid: str
    flavorid: str
    resources: Mapping[str, int]
    project_id: str = ""
    user_id: str = ""
    fault: str = ""
    fence: int = 0
    created_at: int = 0
    updated_at: int = 0
    request: Mapping[str, Any] = field(default_factory=dict)
    server_group: str = ""
    pending: Mapping[str, Any] = field(default_factory=dict)


def move_consumer(instance_uuid: str) -> str:
    """The consumer that holds resources on the destination while an instance moves."""
    return str(uuid.uuid5(_MOVES, instance_uuid))


def departed_consumer(instance_uuid: str) -> str:
    """The consumer that holds resources on the source of a move from its end until the source's agent has let go."""
    return str(uuid.uuid5(_MOVES, f"{instance_uuid}/source"))


class InstanceStore(InstanceSource):
    """Reads and writes instances. Built by the loader as ``plugin(conf=..., database=..., clock=...)``."""

    api_version: ClassVar[tuple[int, int]]
    #: The resource type of its worker rows (``instance``).
    resource_type: ClassVar[str] = "instance"

    @abc.abstractmethod
    def insert(self, transaction: Any, instance: Instance) -> Instance:
        """Write a new row and return it with its timestamps; AlreadyExists when the uuid is taken."""

    @abc.abstractmethod
    def get(self, uuid: str) -> Instance:
        """One instance; NotFound when there is none."""

    def find(self, uuids: Sequence[str], transaction: Any = None) -> Sequence[Instance]:
        """Those of several instances that exist, in any order.

        :param transaction: an open one of this store to read in; None: one of its own.
        """
        found = []
        for each in uuids:
            with contextlib.suppress(errors.NotFound):
                found.append(self.get(each))
        return found

    @abc.abstractmethod
    def list(
        self,
        *,
        after: str = "",
        limit: int = 1000,
        host: str | None = None,
        status: str | None = None,
        project_id: str | None = None,
    ) -> Sequence[Instance]:
        """Instances ordered by uuid, a page of ``limit`` after the given uuid."""

    def group_members(
        self, group: str, transaction: Any = None, *, project_id: str | None = None
    ) -> Sequence[tuple[str, str]]:
        """(uuid, uuid of the node) of the instances that are in a server group and occupy a node; one that moves is on both.

        A store that does not keep server groups knows of none, and policies of groups are then not checked with the claim.

        :param transaction: an open one of this store to read in; None: one of its own.
        :param project_id: those of a project only; groups that requests bring along may have one name in several.
        """
        return ()

    def on_node(self, node_uuid: str, transaction: Any) -> Sequence[InstanceRecord]:
        """The instances that occupy a node or are moving to it, read in an open transaction.

        An instance that leaves the node has its old flavor here, one that moves in has its new flavor. An instance that is
        resized on its own node stands here twice; the second record has the uuid :func:`move_consumer`.

        The claim asks filters that judge instances again with this answer. A store that does not keep it up to date breaks
        their promises when requests are concurrent.
        """
        return ()

    def occupies(self, node_uuid: Any) -> Any | None:
        """Returns a condition (SQLAlchemy): an instance occupies the node of the column ``node_uuid``, or moves to that node.

        Statements that may write only free nodes carry it. None: the store cannot tell, so every node counts as occupied.
        """
        return None

    @abc.abstractmethod
    def set_status(
        self,
        transaction: Any,
        uuid: str,
        status: str,
        token: int,
        *,
        fault: str = "",
        expected: Sequence[str] = (),
    ) -> bool:
        """Set the status with the fence: only where ``fence <= token`` (and the status is one of ``expected``, when given).

        The condition is in the statement; False when the row was not written.
        """

    @abc.abstractmethod
    def change(
        self,
        transaction: Any,
        uuid: str,
        token: int,
        values: Mapping[str, Any],
        *,
        expected: Sequence[str] = (),
        fence: int | None = None,
    ) -> bool:
        """Set fields of an instance with the fence, as :meth:`set_status` does; names are those of :class:`Instance`.

        :param fence: the row must still have this one: nothing was written since it was read.
        """

    @abc.abstractmethod
    def remove(self, transaction: Any, uuid: str, token: int) -> bool:
        """Delete the row where ``fence <= token``; False when it was not."""


class Reassignable(abc.ABC):
    """A further power of instance stores: instances change their host together with their node."""

    @abc.abstractmethod
    def reassign(self, transaction: Any, hosts: Mapping[str, str], host: str) -> int:
        """Give instances to another host: those of ``hosts`` (uuid -> host) that still are of that host, and in no operation.

        The condition is in the statement; answers how many were written.
        """


class AgentService(abc.ABC):
    """A service's part in the agent role: does operations for one host.

    Built as ``plugin(tools)``, with :class:`AgentTools`, by ``moorage agent``; once in the life of a process, after the service
    is enlisted.

    Programs that it starts end with the process, unless they have a session of their own (``start_new_session`` of subprocess)
    and no service manager ends them. It must not fork: a copy of the process is ended as soon as it returns from here.
    """

    api_version: ClassVar[tuple[int, int]]
    #: Names of agent services that this one offers beside its own name. A replacement of ``compute`` offers ``compute``, so that
    #: its agent gets instances.
    offers: ClassVar[Sequence[str]] = ()

    @abc.abstractmethod
    def __init__(self, tools: AgentTools) -> None:
        """Keep the tools; must not block."""

    @abc.abstractmethod
    def endpoints(self) -> Sequence[object]:
        """Objects whose methods marked with ``rpc_method`` are served on topic ``agent`` under the host's name."""

    @abc.abstractmethod
    def start(self) -> None:
        """Called once: finish what an earlier epoch left.

        Messages are served already, so that none is missed: endpoints may be called before this is, and while it runs.
        """

    @abc.abstractmethod
    def sweep(self) -> None:
        """Called every few seconds: take operations whose message was lost. Must return within seconds."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Finish running operations; called once, after the last message."""

    def tell_instances(self, *, everything: bool) -> None:  # noqa: B027  (a service without instances has nothing to tell)
        """Have schedulers compare what they believe of this host's instances; called periodically and on their wish.

        It is done by ``reporter.sync``, or with ``everything`` by ``reporter.host_started``, and must not wait here: what is
        told must be read after everything that was committed before has been told (see :mod:`moorage.scheduling.reporter`),
        so it is best done by the thread that commits.
        """


@dataclass(frozen=True, slots=True)
class AgentTools:
    """What an agent service is given.

    :param conf: the configuration (an oslo.config ``ConfigOpts``).
    :param database: :class:`moorage.db.Database`.
    :param identity: :class:`moorage.services.ServiceIdentity` of this agent (uuid, host, epoch, ...).
    :param workers: the leases of operations.
    :param nodes: the nodes that this agent works on, read anew each time: those of its shard where ``[sharding] my_shard`` is
        set (none when the shard is empty), else those of its host.
    :param release: gives back the claim of a consumer, inside a transaction: ``release(consumer, transaction, residents=nodes)``;
        ``nodes`` are the uuids of the nodes that an instance leaves with it.
    :param reporter: :class:`moorage.scheduling.reporter.Reporter`, tells every scheduler what changed.
    :param store: the allocation store; where it is an ``AllocationLedger`` too, instances can be moved and resized.
    :param cast: tells another host's agent something of an instance: ``cast(host, method, uuid)``.
    :param tell: tells the observers of an event that has happened; never waits, never raises.
    """

    conf: Any
    clock: Any
    database: Any
    identity: Any
    workers: OperationStore
    instances: InstanceStore
    release: Callable[..., bool]
    reporter: Any
    nodes: Callable[[], Iterable[Node]] = tuple
    store: Any = None
    cast: Callable[[str, str, str], None] = lambda host, method, uuid: None
    tell: Callable[[Event], None] = lambda event: None


def _not_given() -> Any:
    raise errors.ConfigError("This server gives its dialects no worker rows and no services.")


@dataclass(frozen=True, slots=True)
class ApiTools:
    """What a dialect is given.

    :param conf: the configuration (an oslo.config ``ConfigOpts``); ``clock`` and ``database`` as for agents.
    :param authenticate: from a WSGI environment to who is calling; raises Unauthenticated.
    :param check_policy: knows the policies of every enabled dialect and the deployer's overrides.
    :param count: told (method, route, status, seconds) of every request, for ``/metrics``.
    :param store: opens the allocation store that the configuration names.
    :param fleet: writes nodes and their providers; what there is is read from ``database`` (:mod:`moorage.fleet.tables`).
    :param workers: opens the worker rows (:class:`moorage.work.interface.OperationStore`).
    :param services: all services, each with whether it is up.
    :param sender: opens a way to agents and schedulers (:class:`moorage.rpc.client.Sender`); who sends nothing never calls it.
    """

    conf: Any
    clock: Any
    database: Any
    authenticate: Callable[[Mapping[str, Any]], RequestContext]
    check_policy: PolicyCheck
    count: Callable[[str, str, int, float], None]
    store: Callable[[], AllocationStore]
    fleet: Callable[[], FleetWriter]
    sender: Callable[[], Any]
    workers: Callable[[], OperationStore] = _not_given
    services: Callable[[], Sequence[tuple[Service, bool]]] = _not_given


class ApiExtension(abc.ABC):
    """A dialect. The loader builds one per configuration as ``plugin(tools)``, so a reload makes a new one.

    An error while it is built keeps the service from starting (or the reload from happening).
    """

    api_version: ClassVar[tuple[int, int]]
    #: Where it is mounted unless ``[api] mounts`` says otherwise: ``/placement``.
    mount: ClassVar[str]
    #: The rules that its application asks ``check_policy`` for.
    policies: ClassVar[Sequence[PolicyRule]] = ()

    def __init__(self, tools: ApiTools) -> None:
        self.tools = tools

    @abc.abstractmethod
    def application(self) -> Wsgi:
        """The application; called once. It sees its mount in SCRIPT_NAME and the rest of the path in PATH_INFO.

        It is called by several threads at once, and answers errors in the dialect's own shape: what it raises is a defect,
        which the server answers with a bare 500.
        """


#: Chosen by ``[control_plane] instance_store``.
INSTANCE_STORES: ExtensionPoint[InstanceStore] = ExtensionPoint(
    "moorage.instance_stores",
    InstanceStore,
    API_VERSION,
    "[control_plane] instance_store",
)
#: Chosen by ``[agent] services``.
AGENT_SERVICES: ExtensionPoint[AgentService] = ExtensionPoint(
    "moorage.agent_services",
    AgentService,
    API_VERSION,
    "[agent] services",
)
#: Chosen by ``[api] enabled_apis``.
API_EXTENSIONS: ExtensionPoint[ApiExtension] = ExtensionPoint(
    "moorage.api", ApiExtension, API_VERSION, "[api] enabled_apis"
)
