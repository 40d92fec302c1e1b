# SPDX-License-Identifier: Apache-2.0
"""Hosts that fence themselves: agents that stand still, die or do not reach the store; guardians that are late; an operator.

The clocks of hosts differ from the database's by 2 % (each is within 1 % of true time), and guardians act up to a margin late. Both
are at their limits more often than not. The operator tries to fence a host when its lease ends, and a margin later. The heartbeats,
the statements, what the agent makes of them and the files of the lease are production's; the guardian is a model, one for each
host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.control_plane.factories import open_instances
from moorage.db import MICROSECONDS, Database
from moorage.drivers.interface import COMPUTE_DRIVERS, DriverError, DriverTools, WorkloadState
from moorage.services.interface import SELF_FENCE_MARGIN
from moorage.services.registry import ServiceRegistry
from moorage_plugins.drivers.guarded.lease import OutdatedError, keep_lease, lease_until
from moorage_plugins.drivers.simulated import SimulatedDriver
from tests import hypervisors
from tests.simulation.kernel import Process
from tests.simulation.workloads.placement import HOSTS, Placement, enrol
from tests.simulation.world import SimClock

__all__ = ["SelfFences"]

#: Seconds of the lease; each start of an agent chooses one.
LEASES = (12.0, 9.0)
#: Of the clocks of hosts.
RATES = (0.98, 1.02)


class _Driver(SimulatedDriver):
    """A hypervisor whose workloads are ended by a guardian."""

    workload: SelfFences

    def __init__(self, tools: DriverTools) -> None:
        super().__init__(tools)
        self.self_fence = self.workload.choose_lease(tools.host)

    def renew(self, epoch: int, until: float) -> None:
        # An agent may stand still here, before it writes.
        self._clock.sleep(0.001)
        try:
            keep_lease(Path(self._folder), epoch, until)
        except OutdatedError as error:
            raise DriverError(f"an agent of epoch {error} has the lease") from error
        self.workload.renewed(self.tools.host)

    def not_fenced(self) -> Collection[str]:
        return ()

    @override
    def _create(self, uuid: str, content: Any, before: Any) -> None:
        # As the guardian does before it starts the sandbox.
        until = lease_until(Path(self._folder))
        if until is None or self._clock.boottime() >= until:
            raise DriverError("the lease of the host is over")
        super()._create(uuid, content, before)
        self.workload.witness(uuid, self.tools.host)


class SelfFences(Placement):
    """Two schedulers, three agents with guardians, two clients, an operator who fences hosts as soon as the store allows it."""

    settings: ClassVar[dict[tuple[str, str], Any]] = {
        **Placement.settings,
        ("services", "report_interval"): 2.0,
        ("services", "service_down_time"): 20.0,
    }
    reloaded: ClassVar[dict[tuple[str, str], Any]] = {}
    seconds: ClassVar[float] = 60.0
    points: ClassVar[int] = 1400
    steps: ClassVar[int] = 4500
    # A move has copies on two hosts that need not execute.
    asks: ClassVar[tuple[str, ...]] = ("create", "create", "delete", "rebuild")
    patience: ClassVar[int] = 2

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        enrol(database, conf, HOSTS, 16)

    @override
    def begin(self) -> None:
        self.faults.jumps_of_database = False
        self.world.boot_rates = RATES
        #: Hosts whose commits fail, and hosts whose store answers late, with seconds.
        self._cut: set[str] = set()
        self._slow: dict[str, float] = {}
        #: Hosts whose agent stands still after its next renewal, with seconds.
        self._stop_after: dict[str, float] = {}
        self._leases: dict[str, float] = {}
        _Driver.workload = self
        key = ("moorage.compute_drivers", "simulated")
        loaded = COMPUTE_DRIVERS.load("simulated")
        self.world.base.cache[key] = replace(loaded, plugin=_Driver)
        super().begin()
        for host in HOSTS:
            self._start_guardian(host)

    @override
    def begin_clients(self) -> None:
        fault = self.world.site.fault
        self.world.site.fault = functools.partial(self._fault, fault)
        for number in range(1, 3):
            self.client(f"client-{number}", self._client)
        self.client("operator", self._operator)

    # -- what happens to hosts ------------------------------------------------------------------------------------

    def choose_lease(self, host: str) -> float:
        """The lease that an agent has from its start on."""
        self._leases[host] = self.random.choice(LEASES)
        return self._leases[host]

    def renewed(self, host: str) -> None:
        """Called after an agent has renewed its lease."""
        seconds = self._stop_after.pop(host, 0.0)
        if seconds:
            self.kernel.freeze(self.kernel.in_process(), seconds)
            self.kernel.point("stands still")

    def _fault(self, others: Callable[[str, bool], str | None], kind: str, writer: bool) -> str | None:
        host = self.kernel.in_process().name.partition("#")[0]
        if kind == "committed" and host in self._slow:
            # The answer of the store takes its time.
            self.kernel.block(None, self._slow[host], "sleep", "late answer")
        if writer and host in self._cut and kind != "committed":
            return "lost"
        return others(kind, writer)

    def _start_guardian(self, host: str) -> None:
        process = self.world.process(f"guardian-{host}")
        machine = next(each for each in self.kernel.processes if each.name == host)
        process.boot_rate = process.rate = machine.boot_rate
        clock = SimClock(process)
        folder = self.world.folder / "hypervisors" / host

        def guard() -> None:
            share = self.random.choice((0.0, 1.0, 1.0)) * SELF_FENCE_MARGIN
            while True:
                late = share * self._leases.get(host, 0.0)
                until = lease_until(folder) if folder.exists() else None
                left = 1.0 if until is None else until - clock.boottime()
                if left <= 0:
                    self._end_all(host)
                clock.sleep(min(max(left, 0.2), 1.0) + (late if left <= 1.0 else 0.0))

        self.world.spawn(process, "guardian", guard)

    def _end_all(self, host: str) -> None:
        for uuid, hosts in self.executing().items():
            if host in hosts:
                hypervisors.put(self.world.folder, host, uuid, state=WorkloadState.FAILED)
                self.kernel.note("guardian", f"ends {uuid} on {host}")
                self.facts["ended"] = self.facts.get("ended", 0) + 1

    # -- the operator ---------------------------------------------------------------------------------------------

    def _operator(self, process: Process) -> None:
        platform = self.world.platform(process, "api", beats=False)
        registry = ServiceRegistry(platform.database, platform.clock)
        instances = open_instances(platform, self.world.conf)
        for _ in range(self.random.randint(2, 4)):
            platform.clock.sleep(self.random.uniform(1, 5))
            host = self.random.choice(HOSTS)
            agent = self._until(platform, functools.partial(registry.list, binary="agent", host=host))[0].uuid
            self._strike(host)
            end = self.kernel.now + 40.0
            while self.kernel.now < end and not self._fenced(registry, agent):
                self.kernel.block(None, self._patience(agent), "sleep")
            for each in self._until(platform, functools.partial(instances.by_hosts, [host])):
                self._evacuate(platform, each.uuid)
            platform.clock.sleep(self.random.uniform(0, 10))
            self._mend(platform, registry, host)

    def _mend(self, platform: Any, registry: ServiceRegistry, host: str) -> None:
        """What has happened to the host is over, and its agent is believed again."""
        self._cut.discard(host)
        self._slow.pop(host, None)
        self._stop_after.pop(host, None)
        agent = self._until(platform, functools.partial(registry.list, binary="agent", host=host))[0].uuid
        self._until(platform, functools.partial(registry.set, agent, forced_down=False))

    def _strike(self, host: str) -> None:
        """Something happens to the host; its agent is heard no more, or late."""
        what = self.random.choice(("freeze", "kill", "cut", "slow", "slow", "again"))
        self.kernel.note("strike", f"{what} {host}")
        agent = [each for each in self.kernel.processes if each.name.partition("#")[0] == host][-1]
        seconds = self.random.uniform(2, 40)
        if what == "freeze":
            self.kernel.freeze(agent, seconds)
        elif what == "kill":
            self.kernel.kill(agent)
            self.kernel.later(seconds, functools.partial(self.restart, agent))
        elif what == "cut":
            self._cut.add(host)
        elif what == "again":
            # The next agent has begun its lease, and has promised nothing.
            self._stop_after[host] = 40.0
            self.kernel.kill(agent)
            self.kernel.later(1.0, functools.partial(self.restart, agent))
        else:
            self._slow[host] = self.random.uniform(1, 6)
            self._stop_after[host] = 40.0

    def _patience(self, agent: str) -> float:
        """Seconds to the next try: to the end of the lease, or a margin later, or 3 if both are far or over."""
        ((beat_at, lease),) = self.rows("SELECT beat_at, self_fence FROM services WHERE uuid = ?", agent)
        since = self.world.site.time() - beat_at / MICROSECONDS
        ends = [(lease or 0) / MICROSECONDS * share - since for share in (1.0, 1.0 + SELF_FENCE_MARGIN)]
        # The database's clock has a grain.
        return min([end for end in ends if end > 0] + [3.0]) + 0.002

    def _fenced(self, registry: ServiceRegistry, agent: str) -> bool:
        try:
            registry.fence_itself(agent)
        except (errors.Conflict, errors.Unavailable):
            return False
        self.facts["fenced"] = self.facts.get("fenced", 0) + 1
        return True

    @property
    @override
    def calm(self) -> bool:
        """The operator is no calm one."""
        return False

    # -- checks ---------------------------------------------------------------------------------------------------

    def witness(self, uuid: str, host: str) -> None:
        """A copy has begun on a host: no other host has one."""
        others = sorted(set(self.executing().get(uuid, ())) - {host})
        self.require(not others, f"instance {uuid} begins on host {host} while it runs on {others}")

    @override
    def may_be_gone(self, uuid: str) -> bool:
        """Its rebuild removed what ran before, and the lease of the host was over then."""
        fault = "the lease of the host is over%"
        return bool(
            self.rows("SELECT 1 FROM instances WHERE uuid = ? AND status = 'stopped' AND fault LIKE ?", uuid, fault)
        )
