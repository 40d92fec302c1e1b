# SPDX-License-Identifier: Apache-2.0
"""Compute drivers: plugins that run the workloads of one host.

An agent has one driver (``[compute] driver``) and calls it by several threads. A :class:`ComputeDriver` makes, removes and shows
workloads; what only some drivers can do is a further power: :class:`PowerControl`, :class:`Migration`, :class:`LiveMigration`,
:class:`Console`, :class:`UsageReport`, :class:`SelfFencing`. The kit :mod:`moorage.testing.drivers` tests the contract.

Every call that changes something carries a token. Tokens of one instance only rise: each operation on it has a higher one than the
operation before. An agent can be killed between any two steps, and one that was paused may go on after another agent has taken its
place. So a driver compares tokens, not moments: the newest token is the workload, and what has an older one goes.
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
    """The driver could not do what was asked.

    The text goes into the fault of the instance. Members of its project read it, so it names no path and no address of the host:
    these belong in the log of the agent.
    """


class WorkloadState(enum.StrEnum):
    """How a workload is.

    RUNNING: it runs, or is being started. STOPPED: it was stopped by :meth:`PowerControl.stop`, or was made by
    :meth:`Migration.prepare`. PAUSED: it is complete and does not execute, by :meth:`LiveMigration.transfer`. ENDED: it ended by
    itself, without an error. FAILED: it ended with an error, was killed, or never began.
    """

    RUNNING = "running"
    STOPPED = "stopped"
    PAUSED = "paused"
    ENDED = "ended"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a driver is to run.

    :param uuid: of the instance. :param name: as its owner gave it, any text; may be empty.
    :param resources: what is claimed for it, resource class -> units.
    :param image: ``id``, ``properties`` and what else the request said of the image; empty for none.
    :param extra_specs: of the flavor.
    :param command: what to run, the program first; empty for none. Only drivers with ``runs_commands`` get one.
    :param operation: what makes it: build, rebuild, resize, revert_resize, live_migrate, unshelve.
    :param holds: what is claimed of which providers: provider uuid -> resource class -> units. Other uuids than the node's are
        those of its NUMA cells, devices and pools. Empty: everything is claimed of the node's own provider.
    :param node: the uuid of the node that it is to run on. An agent may have several.
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
    """A node that names a driver, for drivers that manage machines from outside.

    :param driver: of the node: how the machine is reached, ``redfish``.
    :param driver_info: of the node: where, and with which user name and password. So it belongs in no log and in no error.
    """

    uuid: str
    name: str
    driver: str
    driver_info: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Observed:
    """What a driver saw of one workload.

    :param token: the newest one that there is anything of.
    :param since: when it came into this state, in seconds since the Unix epoch, for people to read; None when that is not known.
    :param detail: a sentence for people, for example with what it ended; may be empty.
    """

    token: int
    state: WorkloadState
    since: float | None = None
    detail: str = ""


class NodePower(enum.StrEnum):
    """Whether a machine has power, by the words that Ironic has. ERROR: it cannot be seen."""

    ON = "power on"
    OFF = "power off"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """What a driver saw of a machine.

    :param occupied: an instance has it, or is about to have it.
    :param target: what an operation that is under way makes of its power; None: none is.
    :param error: why its power cannot be seen; empty where it can.
    """

    power: NodePower
    occupied: bool
    target: NodePower | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class HostResources:
    """What a host has for workloads.

    :param inventory: resource class -> total units, also of what workloads use now. A class that the driver cannot give to
        workloads is absent. Empty: the driver does not know what there is, and the host cannot be enrolled.
    :param traits: standard ones (of os-traits) that are certain, and others that begin with ``CUSTOM_``.
    """

    inventory: Mapping[str, int] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Usage:
    """What one workload uses now: seconds of processor time since it began, and bytes of memory."""

    cpu_seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class DriverTools:
    """What a driver is built with.

    :param conf: the configuration (an oslo.config ``ConfigOpts``).
    :param host: the name of the agent. Two agents on one machine have different ones, and must not see each other's workloads.
    :param machines: the agent's nodes that name a driver, read again each time.
    """

    conf: cfg.ConfigOpts
    clock: Clock
    host: str
    machines: Callable[[], Sequence[Machine]] = tuple


class ComputeDriver(abc.ABC):
    """Runs the workloads of one host.

    Built once in the life of an agent as ``plugin(tools)``. The constructor raises ConfigError when the driver cannot be used here,
    with what to do about it. Workloads go on without the agent: a driver that is built again finds them.

    Methods may block, and are called by several threads at once, also for one instance. They raise :class:`DriverError` for what
    the driver cannot do.
    """

    api_version: ClassVar[tuple[int, int]]
    #: Whether :attr:`Workload.command` is run. Where it is not, the agent refuses instances that have a command.
    runs_commands: ClassVar[bool] = False

    def __init__(self, tools: DriverTools) -> None:
        self.tools = tools

    @abc.abstractmethod
    def spawn(self, workload: Workload, token: int) -> None:
        """Have it run under this token; returns when it runs.

        Repeated with the same token it changes nothing, whatever became of the workload since. What an older token left is
        removed. Where there is something of a newer token, it changes nothing. Nor where :meth:`destroy` was called with this or
        a newer token within the last day: an agent that stood still may call late, when the instance has moved and runs elsewhere.

        What can be refused is refused before anything of an older token is ended. A workload that ran under an older token, and was
        ended for a new one that then cannot run, is run again under its own token where the driver can do that.

        :raises DriverError: it cannot be run here; the text also says what became of an older one that was ended. What is left of
            this try is removed by :meth:`destroy`.
        """

    @abc.abstractmethod
    def destroy(self, uuid: str, up_to_token: int) -> None:
        """Remove what tokens up to this one left of an instance; returns when it runs no more. Nothing there: no error.

        :raises DriverError: it may still run. It is asked again later.
        """

    @abc.abstractmethod
    def inspect(self) -> Mapping[str, Observed]:
        """All workloads of the host, by uuid of the instance, also those that ended. Called every few seconds.

        A workload that has ended by itself may be seen as running for a moment more.

        :raises DriverError: it cannot be seen what runs. An empty answer would mean that nothing does.
        """

    def check(self, workload: Workload) -> None:  # noqa: B027  (most drivers refuse nothing)
        """Called before an operation ends a workload that could stay (shelve_offload); nothing by itself.

        :raises DriverError: the operation cannot be done; the workload stays.
        """

    def resources(self) -> HostResources:
        """What the host has for workloads; unknown by itself. ``moorage agent --enrol`` makes the node of the host with it.

        Asked once at each start of the agent. What runs does not change the answer.

        :raises DriverError: it cannot be seen what there is.
        """
        return HostResources()


@runtime_checkable
class PowerControl(Protocol):
    """A further power of drivers: workloads are stopped and started again in their place.

    Each call is for the workload with exactly this token. Where another token is there, or nothing is, it changes nothing.

    ``order`` is the token of the operation that calls. A call can come late, from an agent that stood still or from a restart that
    takes its time. So the driver keeps the highest order of each workload with the workload, as it keeps the token. A call with a
    lower order changes nothing and raises no error, also when the later call came while it was under way.
    """

    def stop(self, uuid: str, token: int, order: int) -> None:
        """End the workload and keep what it is made of; it is STOPPED then.

        One that has ended stays as it is; the order is kept for it too.
        """

    def start(self, uuid: str, token: int, order: int) -> None:
        """Run a workload again that has ended or was stopped; one that is paused goes on where it was, one that runs goes on.

        :raises DriverError: it cannot be run.
        """

    def reboot(self, uuid: str, token: int, order: int) -> None:
        """End the workload where it runs, and run it again."""


@runtime_checkable
class Migration(PowerControl, Protocol):
    """A further power of drivers: a workload moves from one host to another.

    A cold move stops the workload on its host, and starts what :meth:`prepare` made on the other one. It carries what the drivers
    of both hosts share, and nothing else. At most one of the two executes: the agents start the second only when the first has
    stopped and the move is committed, and :meth:`PowerControl.start` compares orders on each host.
    """

    def prepare(self, workload: Workload, token: int) -> str:
        """Make all that the workload needs, under this token; it does not execute and is STOPPED.

        Tokens are compared as by :meth:`ComputeDriver.spawn`. Returns the address at which :meth:`LiveMigration.transfer` of the
        other host's driver reaches it, at most 1,000 characters; empty where there is none.

        :raises DriverError: it cannot be run here. What is left of this try is removed by :meth:`ComputeDriver.destroy`.
        """


@runtime_checkable
class LiveMigration(Migration, Protocol):
    """A further power of drivers: a workload moves with its memory. What arrives does not execute before it is started."""

    def transfer(self, uuid: str, token: int, order: int, to: str) -> None:
        """Carry a workload to the address that :meth:`Migration.prepare` returned; then both are PAUSED, and none executes.

        For the workload with exactly this token, and with an order, as a call of :class:`PowerControl`. Repeated it changes nothing
        that is complete. A call that is killed leaves the workload running or PAUSED here, and none executing there.

        :raises DriverError: it is not complete there. Here it may be PAUSED; :meth:`PowerControl.start` lets it go on.
        """


@runtime_checkable
class Console(Protocol):
    """A further power of drivers: what a workload writes can be read."""

    def console(self, uuid: str, lines: int) -> str:
        """The last lines that the workload wrote, at most so many; empty when there are none. The agent shows 64 KiB at most.

        :raises DriverError: there is no such workload, or they cannot be read.
        """


@runtime_checkable
class NodeReport(Protocol):
    """A further power of drivers that manage whole machines: the power of each node is seen.

    The agent writes it into the nodes, where clients of the baremetal dialect read it.
    """

    def nodes(self) -> Mapping[str, NodeSeen]:
        """What the last :meth:`ComputeDriver.inspect` saw, by uuid of the node; nodes that were not looked at are absent."""


@runtime_checkable
class UsageReport(Protocol):
    """A further power of drivers: what workloads use is measured."""

    def usage(self) -> Mapping[str, Usage]:
        """What each workload that runs uses, by uuid; those that cannot be measured are absent."""


@runtime_checkable
class SelfFencing(Protocol):
    """A further power of drivers: workloads end by themselves when the agent does not renew the lease of the host.

    The agent renews it after each heartbeat that the store has confirmed. So workloads have ended when the store lets others take
    their place, also when the agent was killed, or stands still, or does not reach the store. Something else than the agent ends
    them, and looks at the clock (:meth:`moorage.clock.Clock.boottime`) at least every second.
    """

    @property
    def self_fence(self) -> float:
        """Seconds of the lease; 0: it is off, and workloads do not end by themselves."""

    def renew(self, epoch: int, until: float) -> None:
        """Have all workloads end at ``until``, of :meth:`moorage.clock.Clock.boottime`, unless it is called again before.

        Where the power is off, workloads go on for ever from then on. A workload is started only while the lease lasts.

        :param epoch: of the agent. What an agent of a lower epoch says has no effect after a call with a higher one.
        :raises DriverError: it cannot be kept, or an agent of a higher epoch has called before.
        """

    def not_fenced(self) -> Collection[str]:
        """The uuids of workloads that run and would not end with the lease: they were started while the power was off.

        Called after the first :meth:`renew` of an agent. What starts from then on, also by an earlier
        agent, is not among them.
        """


#: Chosen by ``[compute] driver``.
COMPUTE_DRIVERS: ExtensionPoint[ComputeDriver] = ExtensionPoint(
    "moorage.compute_drivers", ComputeDriver, API_VERSION, "[compute] driver"
)


class FencingDriver(abc.ABC):
    """Turns machines off from outside, so that nothing can run on them.

    Built as ``plugin(conf, clock)`` for each host that is fenced, in the process that serves the API.
    """

    api_version: ClassVar[tuple[int, int]]

    def __init__(self, conf: cfg.ConfigOpts, clock: Clock) -> None:
        self.conf = conf
        self.clock = clock

    @abc.abstractmethod
    def turn_off(self, machine: Machine) -> None:
        """Cut the power of a machine, also of one that is about to be on; returns when it is seen to be off.

        Returns within the timeout of a client, two minutes. What was accepted but not seen is no success.

        :raises DriverError: the machine is not seen to be off; it may run.
        """


#: Chosen by the driver of the node.
FENCING_DRIVERS: ExtensionPoint[FencingDriver] = ExtensionPoint(
    "moorage.fencing_drivers", FencingDriver, API_VERSION, "the driver of the node"
)
