# SPDX-License-Identifier: Apache-2.0
"""Defines the interface of compute drivers: plugins that run the workloads of one host.

An agent has one driver (``[compute] driver``), and several threads call it. A :class:`ComputeDriver` creates, removes and shows
workloads. Drivers may have more powers: :class:`PowerControl`, :class:`Migration`, :class:`LiveMigration`, :class:`Console`,
:class:`UsageReport`, :class:`SelfFencing`. The kit :mod:`moorage.testing.drivers` tests the contract.

Every call that changes something has a token. The tokens of an instance only rise: each operation has a higher token than the
operation before. An agent can be killed between any two steps, and a paused agent may continue after another agent has replaced it.
So a driver compares tokens, not times: what has the newest token is the workload, and what has an older token is removed.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from oslo_config import cfg

from moorage.clock import Clock
from moorage.extensions import ExtensionPoint

__all__ = [
    "API_VERSION",
    "COMPUTE_DRIVERS",
    "ComputeDriver",
    "Console",
    "DriverError",
    "DriverTools",
    "FENCING_DRIVERS",
    "FencingDriver",
    "HostResources",
    "LiveMigration",
    "Migration",
    "Machine",
    "NodePower",
    "NodeReport",
    "NodeSeen",
    "Observed",
    "PowerControl",
    "SelfFencing",
    "Usage",
    "UsageReport",
    "Workload",
    "WorkloadState",
]

API_VERSION = (1, 2)


class DriverError(Exception):
    """The driver could not do an operation.

    The text becomes the fault of the instance, which members of its project read. So it must not contain paths or addresses of the
    host: write these to the agent's log.
    """


class WorkloadState(enum.StrEnum):
    """The state of a workload.

    RUNNING: it runs, or is being started. STOPPED: :meth:`PowerControl.stop` stopped it, or :meth:`Migration.prepare` created it.
    PAUSED: it is complete and does not execute, after :meth:`LiveMigration.transfer`. ENDED: it ended by itself, without an error.
    FAILED: it ended with an error, was killed, or never began.
    """

    RUNNING = "running"
    STOPPED = "stopped"
    PAUSED = "paused"
    ENDED = "ended"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Describes what a driver has to run.

    :param uuid: the instance. :param name: any text that its owner chose; may be empty.
    :param resources: the claimed units by resource class.
    :param image: ``id``, ``properties`` and all other fields of the image in the request; empty: no image.
    :param extra_specs: those of the flavor.
    :param command: the program to run and its arguments; empty: none. Only drivers with ``runs_commands`` get a command.
    :param operation: the operation that creates the workload: build, rebuild, resize, revert_resize, live_migrate, unshelve.
    :param holds: the claimed units by provider uuid and resource class. Uuids other than the node's are those of its NUMA cells,
        devices and pools. Empty: all units are claimed from the node's own provider.
    :param node: the uuid of the node to run on. An agent may have several nodes.
    """

    uuid: str
    name: str = ""
    project_id: str = ""
    resources: Mapping[str, int] = field(default_factory=dict)
    image: Mapping[str, Any] = field(default_factory=dict)
    extra_specs: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    operation: str = "build"
    holds: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node that a driver manages from outside, for example through its BMC.

    :param driver: the node's driver, for example ``redfish``.
    :param driver_info: the address of the machine's controller, with user name and password. Never write it to logs or errors.
    """

    uuid: str
    name: str
    driver: str
    driver_info: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Observed:
    """The state of one workload, as a driver saw it.

    :param token: the newest token that the driver has anything of.
    :param since: when it entered this state, in seconds since the Unix epoch, for people only; None: unknown.
    :param detail: a sentence for people, for example the exit status; may be empty.
    """

    token: int
    state: WorkloadState
    since: float | None = None
    detail: str = ""


class NodePower(enum.StrEnum):
    """The power state of a machine, in Ironic's words. ERROR: the state cannot be read."""

    ON = "power on"
    OFF = "power off"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """The state of a machine, as a driver saw it.

    :param occupied: whether an instance uses the machine, or is being placed on it.
    :param target: the power state that an operation in progress sets; None: there is no such operation.
    :param error: why the power state cannot be read; empty if it can.
    """

    power: NodePower
    occupied: bool
    target: NodePower | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class HostResources:
    """The resources that a host offers to workloads.

    :param inventory: total units by resource class, including those in use. It lacks classes that the driver cannot give to
        workloads. Empty: the driver does not know the resources, and the host cannot be enrolled.
    :param traits: standard traits (of os-traits) that the host certainly has, and others that begin with ``CUSTOM_``.
    """

    inventory: Mapping[str, int] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of one workload: seconds of processor time since it began, and bytes of memory now."""

    cpu_seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class DriverTools:
    """Holds what the constructor of a driver gets.

    :param conf: the configuration (an oslo.config ``ConfigOpts``).
    :param host: the name of the agent. Two agents on one machine have different names, and must not see each other's workloads.
    :param machines: reads the agent's nodes that name a driver.
    """

    conf: cfg.ConfigOpts
    clock: Clock
    host: str
    machines: Callable[[], Sequence[Machine]] = tuple


class ComputeDriver(abc.ABC):
    """Runs the workloads of one host.

    Each agent builds it once, as ``plugin(tools)``. If the driver cannot be used on this machine, the constructor raises
    ConfigError, which says what to do. Workloads run on without the agent; a driver that is built again finds them.

    Methods may block. Several threads call them at once, also for one instance. They raise :class:`DriverError` if the driver
    cannot do an operation.
    """

    api_version: ClassVar[tuple[int, int]]
    #: Whether the driver runs :attr:`Workload.command`. If not, the agent refuses instances with a command.
    runs_commands: ClassVar[bool] = False

    def __init__(self, tools: DriverTools) -> None:
        self.tools = tools

    @abc.abstractmethod
    def spawn(self, workload: Workload, token: int) -> None:
        """Runs a workload under a token. Returns when it runs.

        A repeated call with an equal token changes nothing, whatever happened to the workload since. What has an older token is
        removed. The call changes nothing if there is something with a newer token, or if :meth:`destroy` was called with this or a
        newer token within the last day: a paused agent may call late, when the instance has moved and runs elsewhere.

        The driver refuses what it cannot run before it ends anything with an older token. If a workload with an older token was
        ended, and the new one then cannot run, the driver runs the old one again if it can.

        :raises DriverError: the workload cannot be run here. The text also says what happened to an older workload. The agent calls
            :meth:`destroy` to remove what is left of this try.
        """

    @abc.abstractmethod
    def destroy(self, uuid: str, up_to_token: int) -> None:
        """Removes everything of an instance that has this token or an older one. Returns when none of it runs. Nothing: no error.

        :raises DriverError: it may still run. The agent tries again later.
        """

    @abc.abstractmethod
    def inspect(self) -> Mapping[str, Observed]:
        """Returns all workloads of the host, ended ones included, by the instance's uuid. Called every few seconds.

        A workload that has just ended by itself may be reported as running for a moment.

        :raises DriverError: the driver cannot see what runs. (An empty answer means that nothing runs.)
        """

    def check(self, workload: Workload) -> None:  # noqa: B027  (most drivers refuse nothing)
        """Checks an operation before it ends a workload that could stay (shelve_offload). Does nothing by default.

        :raises DriverError: the operation cannot be done. The workload stays.
        """

    def resources(self) -> HostResources:
        """Returns the resources of the host; unknown by default. ``moorage agent --enrol`` creates the host's node from them.

        Called once at each start of the agent. The workloads that run do not change the answer.

        :raises DriverError: the resources cannot be read.
        """
        return HostResources()


@runtime_checkable
class PowerControl(Protocol):
    """A power of drivers: stops workloads, and starts them again on the same host.

    Each call is for the workload with exactly this token. If the workload has another token, or there is none, it changes nothing.

    ``order`` is the token of the operation that calls. A call can come late, from a paused agent or a slow restart. So the driver
    stores the highest order of each workload with the workload, as it stores the token. A call with a lower order changes nothing
    and raises no error, also if the call with the higher order comes while it runs.
    """

    def stop(self, uuid: str, token: int, order: int) -> None:
        """Stops a workload and keeps its data. The workload is STOPPED then.

        A workload that has ended stays ENDED or FAILED; its order is stored too.
        """

    def start(self, uuid: str, token: int, order: int) -> None:
        """Starts a workload that has ended or was stopped. A paused one continues where it was; a running one is left as it is.

        :raises DriverError: it cannot be run.
        """

    def reboot(self, uuid: str, token: int, order: int) -> None:
        """Stops a workload if it runs, and starts it again."""


@runtime_checkable
class Migration(PowerControl, Protocol):
    """A power of drivers: moves a workload from one host to another.

    A cold migration stops the workload on the source host, and starts what :meth:`prepare` created on the destination. It moves no
    data: both drivers must share the data. At most one of the two workloads executes: the agents start the second one only after
    the first has stopped and the move is committed, and :meth:`PowerControl.start` compares orders on each host.
    """

    def prepare(self, workload: Workload, token: int) -> str:
        """Creates everything that the workload needs, under this token. It does not execute, and is STOPPED.

        Tokens are compared as :meth:`ComputeDriver.spawn` does. Returns the address to which :meth:`LiveMigration.transfer` of the
        source host's driver sends the workload, at most 1,000 characters; empty if there is none.

        :raises DriverError: it cannot be run here. The agent calls :meth:`ComputeDriver.destroy` to remove what is left of the try.
        """


@runtime_checkable
class LiveMigration(Migration, Protocol):
    """A power of drivers: moves a workload with its memory. It does not execute on the destination before it is started there."""

    def transfer(self, uuid: str, token: int, order: int, to: str) -> None:
        """Sends a workload to the address that :meth:`Migration.prepare` returned. Then both copies are PAUSED.

        Token and order mean what they mean in :class:`PowerControl`. A repeated call changes nothing that is complete. If the call
        is killed, the workload runs or is PAUSED here, and does not execute on the destination.

        :raises DriverError: it is not complete on the destination. Here it may be PAUSED; :meth:`PowerControl.start` continues it.
        """


@runtime_checkable
class Console(Protocol):
    """A power of drivers: reads the output of workloads."""

    def console(self, uuid: str, lines: int) -> str:
        """Returns the last lines that a workload wrote; empty if there are none. The agent shows 64 KiB at most.

        :param lines: how many lines at most.
        :raises DriverError: there is no such workload, or its output cannot be read.
        """


@runtime_checkable
class NodeReport(Protocol):
    """A power of drivers that manage whole machines: reports the power state of each node.

    The agent writes it into the nodes, where clients of the baremetal dialect read it.
    """

    def nodes(self) -> Mapping[str, NodeSeen]:
        """Returns what the last :meth:`ComputeDriver.inspect` saw, by the node's uuid. It lacks nodes that were not inspected."""


@runtime_checkable
class UsageReport(Protocol):
    """A power of drivers: measures the use of workloads."""

    def usage(self) -> Mapping[str, Usage]:
        """Returns the use of each running workload, by uuid. It lacks workloads that cannot be measured."""


@runtime_checkable
class SelfFencing(Protocol):
    """A power of drivers: ends all workloads if the agent does not renew the lease of the host.

    The agent renews the lease after each heartbeat that the store has confirmed. So the workloads have ended before the store lets
    others replace them, also if the agent was killed, is paused, or does not reach the store. Another process than the agent ends
    them. It reads the clock (:meth:`moorage.clock.Clock.boottime`) at least every second.
    """

    @property
    def self_fence(self) -> float:
        """The length of the lease in seconds; 0: self-fencing is off, and workloads do not end by themselves."""

    def renew(self, epoch: int, until: float) -> None:
        """Renews the lease: all workloads end at ``until``, unless this is called again before.

        If self-fencing is off, workloads do not end from then on. A workload is started only while the lease lasts.

        :param epoch: the agent's epoch. After a call with a higher epoch, calls with a lower one have no effect.
        :param until: by :meth:`moorage.clock.Clock.boottime`.
        :raises DriverError: the lease cannot be stored, or an agent of a higher epoch has called before.
        """

    def not_fenced(self) -> Collection[str]:
        """Returns the uuids of running workloads that do not end with the lease: they were started while self-fencing was off.

        Called after the first :meth:`renew` of an agent. Workloads that start later, also by an earlier agent, end with the lease.
        """


#: Chosen by ``[compute] driver``.
COMPUTE_DRIVERS: ExtensionPoint[ComputeDriver] = ExtensionPoint(
    "moorage.compute_drivers", ComputeDriver, API_VERSION, "[compute] driver"
)


class FencingDriver(abc.ABC):
    """Turns machines off from outside, so that nothing can run on them.

    The API's process builds it as ``plugin(conf, clock)`` for each host that is fenced.
    """

    api_version: ClassVar[tuple[int, int]]

    def __init__(self, conf: cfg.ConfigOpts, clock: Clock) -> None:
        self.conf = conf
        self.clock = clock

    @abc.abstractmethod
    def turn_off(self, machine: Machine) -> None:
        """Turns off the power of a machine, also of one that is being turned on. Returns when the machine reports that it is off.

        Must return within two minutes, the timeout of clients. A request that the machine only accepted is no success.

        :raises DriverError: the machine does not report that it is off. It may run.
        """


#: Chosen by the driver of the node.
FENCING_DRIVERS: ExtensionPoint[FencingDriver] = ExtensionPoint(
    "moorage.fencing_drivers", FencingDriver, API_VERSION, "the driver of the node"
)
