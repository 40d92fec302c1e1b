# SPDX-License-Identifier: Apache-2.0
"""Compute drivers: plugins that run the workloads of one host.

An agent has one driver (``[compute] driver``) and calls it by several threads. A :class:`ComputeDriver` makes, removes and shows
workloads; what only some drivers can do is a further power: :class:`PowerControl`, :class:`Console`, :class:`UsageReport`. The kit
:mod:`moorage.testing.drivers` tests the contract.

Every call that changes something carries a token. Tokens of one instance only rise: each operation on it has a higher one than the
operation before. An agent can be killed between any two steps, and one that was paused may go on after another agent has taken its
place. So a driver compares tokens, not moments: the newest token is the workload, and what has an older one goes.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
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
    "HostResources",
    "Observed",
    "PowerControl",
    "Usage",
    "UsageReport",
    "Workload",
    "WorkloadState",
]

API_VERSION = (1, 1)


class DriverError(Exception):
    """The driver could not do what was asked.

    The text goes into the fault of the instance. Members of its project read it, so it names no path and no address of the host:
    these belong in the log of the agent.
    """


class WorkloadState(enum.StrEnum):
    """How a workload is.

    RUNNING: it runs, or is being started. STOPPED: it was stopped by :meth:`PowerControl.stop`. ENDED: it ended by itself, without
    an error. FAILED: it ended with an error, was killed, or never began.
    """

    RUNNING = "running"
    STOPPED = "stopped"
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
    :param operation: what makes it: build, rebuild, resize, live_migrate, unshelve.
    :param holds: what is claimed of which providers: provider uuid -> resource class -> units. Other uuids than the node's are
        those of its NUMA cells, devices and pools. Empty: everything is claimed of the node's own provider.
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
    """

    conf: cfg.ConfigOpts
    clock: Clock
    host: str


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
    #: Whether a spawn on another host and a destroy on this one move a workload while it runs. Where it does not, the agent refuses
    #: live migrations.
    live_migrates: ClassVar[bool] = False

    def __init__(self, tools: DriverTools) -> None:
        self.tools = tools

    @abc.abstractmethod
    def spawn(self, workload: Workload, token: int) -> None:
        """Have it run under this token; returns when it runs.

        Repeated with the same token it changes nothing, whatever became of the workload since. What an older token left is
        removed. Where there is something of a newer token, it changes nothing.

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
        """Run a workload again that has ended or was stopped; one that runs goes on.

        :raises DriverError: it cannot be run.
        """

    def reboot(self, uuid: str, token: int, order: int) -> None:
        """End the workload where it runs, and run it again."""


@runtime_checkable
class Console(Protocol):
    """A further power of drivers: what a workload writes can be read."""

    def console(self, uuid: str, lines: int) -> str:
        """The last lines that the workload wrote, at most so many; empty when there are none. The agent shows 64 KiB at most.

        :raises DriverError: there is no such workload, or they cannot be read.
        """


@runtime_checkable
class UsageReport(Protocol):
    """A further power of drivers: what workloads use is measured."""

    def usage(self) -> Mapping[str, Usage]:
        """What each workload that runs uses, by uuid; those that cannot be measured are absent."""


#: Chosen by ``[compute] driver``.
COMPUTE_DRIVERS: ExtensionPoint[ComputeDriver] = ExtensionPoint(
    "moorage.compute_drivers", ComputeDriver, API_VERSION, "[compute] driver"
)
