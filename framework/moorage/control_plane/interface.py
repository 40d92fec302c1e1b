# SPDX-License-Identifier: Apache-2.0
"""The interfaces of a service that runs on Moorage: its agent service, and its dialect of the API.

The reference is the compute plugin.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

from oslo_config import cfg
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import AllocationStore
from moorage.clock import Clock
from moorage.context import RequestContext
from moorage.control_plane.observing import LoopEvents
from moorage.db import Database
from moorage.drivers.interface import HostResources, Machine, NodeSeen
from moorage.extensions import ExtensionPoint
from moorage.fleet.interface import FleetWriter, Node
from moorage.http.routes import PolicyCheck, PolicyRule, Wsgi
from moorage.instances.interface import Instance, InstanceStore
from moorage.observers.interface import ObserverEvent
from moorage.rpc.client import RpcSender
from moorage.scheduling.reporter import Reporter
from moorage.services.heartbeat import HostLease
from moorage.services.interface import Service, ServiceIdentity
from moorage.work.interface import OperationStore
from moorage.work.job import Work
from moorage.work.work_loop import WorkLoop

__all__ = [
    "AGENT_SERVICES",
    "API_EXTENSIONS",
    "API_VERSION",
    "AgentService",
    "AgentTools",
    "ApiExtension",
    "ApiTools",
    "LoopService",
    "Release",
]

API_VERSION = (1, 0)
R = TypeVar("R")
#: Share of ``[control_plane] drain_timeout`` that a work loop waits for calls that run. Then the others have their time to end.
_DRAIN = 0.5


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

    @classmethod
    def powers(cls, conf: cfg.ConfigOpts) -> Sequence[str]:
        """What the service can do with a configuration, as SERVICE.POWER: ``compute.commands``. The agent offers it.

        An agent that names no power of a service may have all of them but ``compute.power``. So a service that has powers names
        SERVICE.powers too, also where a configuration gives it none.
        """
        return ()

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

    def host_resources(self) -> HostResources:
        """What the host has for this service's operations; ``[agent] enrol`` makes the node of the host with it.

        Called once, before :meth:`start`. Empty by itself: the service does not know.

        :raises DriverError: it cannot be seen what there is.
        """
        return HostResources()

    @property
    def is_behind(self) -> bool:
        """Whether more operations wait in the store than the service has queued. The service takes the others later.

        While it is true, the agent does not clean waiting operations as unclaimed.
        """
        return False

    def tell_instances(self, *, everything: bool) -> None:  # noqa: B027  (a service without instances has nothing to tell)
        """Have schedulers compare what they believe of this host's instances; called periodically and on their wish.

        It is done by ``reporter.sync``, or with ``everything`` by ``reporter.host_started``, and must not wait here: what is
        told must be read after everything that was committed before has been told (see :mod:`moorage.scheduling.reporter`),
        so it is best done by the thread that commits.
        """


class LoopService(AgentService):
    """An agent service whose operations are done by one work loop. ``__init__`` sets ``loop``; messages call ``loop.ask``."""

    loop: WorkLoop[Any]

    @override
    def endpoints(self) -> Sequence[object]:
        return [self]

    @override
    def start(self) -> None:
        self.loop.start()
        self.sweep()

    @override
    def sweep(self) -> None:
        """Finds operations whose message was lost."""
        self.loop.sweep()

    @property
    @override
    def is_behind(self) -> bool:
        return self.loop.is_behind

    @override
    def stop(self) -> None:
        """Ends what is being done, or releases it: another service or the next start begins it again."""
        self.loop.stop()


class Release(Protocol):
    """Gives back the claim of a consumer, inside a transaction, as :meth:`AllocationStore.release` does."""

    def __call__(self, consumer: str, transaction: Any = None, *, residents: Sequence[str] = ()) -> bool:
        """Release it; False when it has none. ``residents`` are the uuids of the nodes that an instance leaves with it."""


@dataclass(frozen=True, slots=True)
class AgentTools:
    """What an agent service is given.

    :param conf: the configuration (an oslo.config ``ConfigOpts``).
    :param identity: who this agent is (uuid, host, epoch, ...).
    :param workers: the leases of operations.
    :param nodes: the nodes that this agent works on, read again each time: those of its shard where ``[sharding] my_shard`` is
        set (none when the shard is empty), else those of its host.
    :param machines: those of these nodes that name a driver, with what it needs; read again each time.
    :param observe_nodes: called before the driver is asked for them; returns the call that writes what was seen of these nodes.
        What another write has changed meanwhile is left to the next observation.
    :param store: the allocation store. Where it is an ``AllocationLedger`` too, instances can be moved and resized.
    :param reporter: tells every scheduler what changed.
    :param cast: tells another host's agent something of an instance: ``cast(host, method, uuid)``.
    :param confirm_resize: confirms the resize of an instance that has not changed since it was read.
    :param tell: tells the observers of an event that has happened; never waits, never raises.
    :param renew: has the heartbeats of the agent renew the lease of a host that fences itself.
    """

    conf: cfg.ConfigOpts
    clock: Clock
    database: Database
    identity: ServiceIdentity
    workers: OperationStore
    instances: InstanceStore
    store: AllocationStore
    release: Release
    reporter: Reporter
    nodes: Callable[[], Iterable[Node]] = tuple
    machines: Callable[[], Sequence[Machine]] = tuple
    observe_nodes: Callable[[], Callable[[Mapping[str, NodeSeen]], None]] = lambda: lambda seen: None
    cast: Callable[[str, str, str], None] = lambda host, method, uuid: None
    confirm_resize: Callable[[Instance], None] = lambda instance: None
    tell: Callable[[ObserverEvent], None] = lambda event: None
    renew: Callable[[HostLease], None] = lambda lease: None

    def work_loop(
        self, name: str, work: Work[R], *, operations: int, batch: int = 1, ahead: int = 0, queue: int = 10_000
    ) -> WorkLoop[R]:
        """Makes the loop of a service, with the deadline that ``[agent]`` says, watched by the observers.

        For the parameters see :class:`moorage.work.work_loop.WorkLoop`.
        """
        return WorkLoop(
            name, work, self.clock, operations=operations, batch=batch, ahead=ahead, queue=queue,
            deadline=float(self.conf.agent.operation_deadline),
            grace=_DRAIN * float(self.conf.control_plane.drain_timeout),
            observer=LoopEvents(name, self.tell),
        )  # fmt: skip


def _not_given() -> NoReturn:
    raise errors.ConfigError("This server gives its dialects no worker rows and no services.")


@dataclass(frozen=True, slots=True)
class ApiTools:
    """What a dialect is given.

    :param conf: the configuration; ``clock`` and ``database`` as for agents.
    :param authenticate: from a WSGI environment to who is calling; raises Unauthenticated.
    :param check_policy: knows the policies of every enabled dialect and the deployer's overrides.
    :param count: told (method, route, status, seconds) of every request, for ``/metrics``.
    :param store: opens the allocation store that the configuration names.
    :param fleet: writes nodes and their providers; what there is is read from ``database`` (:mod:`moorage.fleet.tables`).
    :param workers: opens the worker rows (:class:`moorage.work.interface.OperationStore`).
    :param services: all services, each with whether it is up.
    :param sender: opens a way to agents and schedulers; who sends nothing never calls it.
    """

    conf: cfg.ConfigOpts
    clock: Clock
    database: Database
    authenticate: Callable[[Mapping[str, Any]], RequestContext]
    check_policy: PolicyCheck
    count: Callable[[str, str, int, float], None]
    store: Callable[[], AllocationStore]
    fleet: Callable[[], FleetWriter]
    sender: Callable[[], RpcSender]
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
