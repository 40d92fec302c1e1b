# SPDX-License-Identifier: Apache-2.0
"""Defines the interfaces of a service that runs on Moorage: its agent service, and its dialect of the API.

The compute plugin is the reference.
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
#: The share of ``[control_plane] drain_timeout`` that a work loop waits for running calls. The rest is for the other services.
_DRAIN = 0.5


class AgentService(abc.ABC):
    """The part of a service that does operations on one host, in the agent's process.

    ``moorage agent`` builds it once as ``plugin(tools)``, with :class:`AgentTools`, after the agent is registered as a service.

    Programs that it starts end with the process, unless they have their own session (``start_new_session`` of subprocess) and no
    service manager ends them. It must not fork: a copy of the process ends when it returns from here.
    """

    api_version: ClassVar[tuple[int, int]]
    #: Names of agent services that it offers besides its own name. A replacement of ``compute`` offers ``compute``, so that its
    #: agent gets instances.
    offers: ClassVar[Sequence[str]] = ()

    @classmethod
    def powers(cls, conf: cfg.ConfigOpts) -> Sequence[str]:
        """Returns the powers that the service has with a configuration, as SERVICE.POWER: ``compute.commands``.

        The agent offers them. An agent that names no power of a service may have all powers but ``compute.power``. So a service
        with powers also names SERVICE.powers, even if a configuration gives it no power.
        """
        return ()

    @abc.abstractmethod
    def __init__(self, tools: AgentTools) -> None:
        """Keeps the tools. Must not block."""

    @abc.abstractmethod
    def endpoints(self) -> Sequence[object]:
        """Returns objects whose methods marked with ``rpc_method`` serve messages on the topic ``agent`` to the host's name."""

    @abc.abstractmethod
    def start(self) -> None:
        """Starts the service, and finishes what an earlier epoch left. Called once.

        Messages are served already, so that none is missed: endpoints may be called before this method, and while it runs.
        """

    @abc.abstractmethod
    def sweep(self) -> None:
        """Takes operations whose message was lost. Called every few seconds; must return within seconds."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Finishes running operations. Called once, after the last message."""

    def host_resources(self) -> HostResources:
        """Returns the resources of the host for this service. ``[agent] enrol`` creates the host's node from them.

        Called once, before :meth:`start`. Empty by default: the service does not know the resources.

        :raises DriverError: the resources cannot be read.
        """
        return HostResources()

    @property
    def is_behind(self) -> bool:
        """Whether the store has more waiting operations than the service has queued. The service takes the others later.

        While it is true, the agent does not clean waiting operations up as unclaimed.
        """
        return False

    def tell_instances(self, *, everything: bool) -> None:  # noqa: B027  (a service without instances has nothing to tell)
        """Sends the instances of the host to schedulers, which compare their view. Called periodically and when schedulers ask.

        Call ``reporter.sync``, or with ``everything`` ``reporter.host_started``. This method must not wait. The thread that
        commits should read the store and call the reporter, because reports must be in the order of commits (see
        :mod:`moorage.scheduling.reporter`).
        """


class LoopService(AgentService):
    """An agent service that does its operations in one work loop. ``__init__`` sets ``loop``; messages call ``loop.ask``."""

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
        """Ends running operations, or releases them: another service, or this one after its next start, does them again."""
        self.loop.stop()


class Release(Protocol):
    """Releases the claim of a consumer, in a transaction, as :meth:`AllocationStore.release` does."""

    def __call__(self, consumer: str, transaction: Any = None, *, residents: Sequence[str] = ()) -> bool:
        """Releases the claim. Returns whether there was one. ``residents``: the uuids of the nodes that the instance leaves."""


@dataclass(frozen=True, slots=True)
class AgentTools:
    """Holds what the constructor of an agent service gets.

    :param conf: the configuration (an oslo.config ``ConfigOpts``).
    :param identity: the identity of the agent (uuid, host, epoch, ...).
    :param workers: the store of operations.
    :param nodes: reads the agent's nodes: those of its shard if ``[sharding] my_shard`` is set (none if the shard is empty),
        otherwise those of its host.
    :param machines: reads those of the agent's nodes that name a driver.
    :param observe_nodes: call it before the driver reads the power of nodes. It returns a function that writes the observed state
        of nodes. Nodes that another write has changed meanwhile are left to the next observation.
    :param store: the allocation store. If it is an ``AllocationLedger`` too, instances can be moved and resized.
    :param reporter: reports instances to all schedulers.
    :param cast: sends a message about an instance to another host's agent: ``cast(host, method, uuid)``.
    :param confirm_resize: confirms the resize of an instance that has not changed since it was read.
    :param tell: sends an event to the observers; never waits, never raises.
    :param renew: registers the lease of a host that fences itself: each heartbeat of the agent renews it.
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
        """Makes the work loop of a service, with the deadline of ``[agent] operation_deadline``; observers get its events.

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
    """Holds what the constructor of a dialect gets.

    :param conf: the configuration; ``clock`` and ``database`` as for agents.
    :param authenticate: returns the caller of a request, from its WSGI environment; raises Unauthenticated.
    :param check_policy: checks the policies of all enabled dialects, with the deployer's overrides.
    :param count: counts a request for ``/metrics``: method, route, status, seconds.
    :param store: opens the allocation store of the configuration.
    :param fleet: opens the writer of nodes and their providers. To read them, use ``database`` and :mod:`moorage.fleet.tables`.
    :param workers: opens the store of operations (:class:`moorage.work.interface.OperationStore`).
    :param services: reads all services, each with whether it is up.
    :param sender: opens the sender of messages to agents and schedulers. A dialect that sends none need not call it.
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
    """A dialect of the API. The loader builds it as ``plugin(tools)``, once for each configuration; a reload builds another one.

    If it cannot be built, the service does not start, or the reload is refused.
    """

    api_version: ClassVar[tuple[int, int]]
    #: The prefix of its paths, for example ``/placement``; ``[api] mounts`` overrides it.
    mount: ClassVar[str]
    #: The rules that its application passes to ``check_policy``.
    policies: ClassVar[Sequence[PolicyRule]] = ()

    def __init__(self, tools: ApiTools) -> None:
        self.tools = tools

    @abc.abstractmethod
    def application(self) -> Wsgi:
        """Returns the application; called once. SCRIPT_NAME has its prefix, and PATH_INFO the rest of the path.

        Several threads call the application at once. It must answer errors in the shape of the dialect. If it raises, that is a
        defect, and the server answers 500.
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
