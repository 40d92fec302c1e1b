# SPDX-License-Identifier: Apache-2.0
"""Hosts that fence themselves, and engines that fence and evacuate them without an operator, as far as the brake allows.

The clock of the database may jump here: engines believe their own clocks. These are within 1 % of true time and do not jump. An
operator strikes one or two of the three hosts at a time, and declares agents alive again. At last one host is lost until engines
have evacuated it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from moorage.control_plane.engine_role import Engine
from moorage.db import MICROSECONDS
from moorage.services.registry import ServiceRegistry
from tests.simulation.kernel import Process, SimThread
from tests.simulation.workloads.placement import HOSTS
from tests.simulation.workloads.self_fences import SelfFences

__all__ = ["AutomaticEvacuations"]

#: Of the clocks of processes.
RATES = (0.99, 1.01)
#: Hosts that are fenced in so many seconds at most.
MOST, PERIOD = 1, 45.0
DOWN_TIME = 20.0
#: Seconds in which a lost host is evacuated at last. The brake holds it back for a period at most.
PATIENCE = 400.0


class AutomaticEvacuations(SelfFences):
    """As :class:`SelfFences`, with two engines that do the periodic task ``evacuate_hosts``."""

    settings: ClassVar[dict[tuple[str, str], Any]] = {
        **SelfFences.settings,
        ("services", "service_down_time"): DOWN_TIME,
        ("coordination", "periodic_coordination_backend"): "database",
        ("coordination", "heartbeat_timeout"): 2.0,
        ("coordination", "session_timeout"): 10.0,
        ("coordination", "poll_interval"): 2.0,
        ("periodic", "enabled_tasks"): ["evacuate_hosts"],
        ("periodic", "poll"): 2.0,
        ("evacuation", "max_hosts"): MOST,
        ("evacuation", "period"): PERIOD,
    }
    seconds: ClassVar[float] = 90.0
    points: ClassVar[int] = 1800
    steps: ClassVar[int] = 5000

    @override
    def begin(self) -> None:
        self.world.rates = RATES
        #: Host -> the count of its agent's heartbeats, and the true second at which it was seen first.
        self._beats: dict[str, tuple[int, float]] = {}
        self._fenced_now: set[str] = set()
        #: The moments of all fences, by the clock of the database.
        self._fences: list[float] = []
        #: Thread -> the moment at which it began to wait for its transaction, by the clock of the database.
        self._began: dict[SimThread, float] = {}
        self._lost = ""
        super().begin()
        self.faults.jumps_of_database, self.faults.jumps = True, False
        for number in (1, 2):
            self.start_role(f"engine-{number}", Engine)

    @override
    def begin_clients(self) -> None:
        strike = self.kernel.at_point

        def at_point(me: SimThread, kind: str) -> None:
            if kind == "writer":
                self._began[me] = self.world.site.time()
            if strike is not None:
                strike(me, kind)

        self.kernel.at_point = at_point
        super().begin_clients()

    @override
    def restart(self, process: Process) -> None:
        if process.name.partition("#")[0] != self._lost:
            super().restart(process)

    # -- the operator ---------------------------------------------------------------------------------------------

    @override
    def _operator(self, process: Process) -> None:
        platform = self.world.platform(process, "api", beats=False)
        registry = ServiceRegistry(platform.database, platform.clock)
        for _ in range(self.random.randint(1, 2)):
            platform.clock.sleep(self.random.uniform(1, 5))
            hosts = self.random.sample(HOSTS, self.random.choice((1, 2)))
            for host in hosts:
                self._strike(host)
            platform.clock.sleep(self.random.uniform(10, 60))
            for host in hosts:
                self._mend(platform, registry, host)
        host = self.random.choice(HOSTS)
        end = self.kernel.now + PATIENCE
        while not self._promises(host):
            self.require(self.kernel.now < end, f"host {host} did not promise to fence itself in {PATIENCE:g} seconds")
            platform.clock.sleep(1.0)
        self._lost = host
        self.kernel.note("strike", f"lost {host}")
        machines = [each for each in self.kernel.processes if each.name.partition("#")[0] == self._lost]
        for each in machines:
            self.kernel.kill(each)
        end = self.kernel.now + PATIENCE
        while left := self._left_behind():
            self.require(
                self.kernel.now < end, f"{left} were not evacuated from host {self._lost} in {PATIENCE:g} seconds"
            )
            platform.clock.sleep(1.0)
        self._lost = ""
        self.restart(machines[-1])
        for host in HOSTS:
            self._mend(platform, registry, host)

    def _promises(self, host: str) -> bool:
        """Whether the agent of a host has promised that the host fences itself. Engines fence no other hosts."""
        return bool(
            self.rows(
                "SELECT 1 FROM services WHERE \"binary\" = 'agent' AND host = ? AND self_fence IS NOT NULL"
                " AND self_fence_start = started_at",
                host,
            )
        )

    def _left_behind(self) -> list[str]:
        """What shall run, and is on the lost host without an operation that could end there."""
        found = self.rows("SELECT uuid FROM instances WHERE host = ? AND status = 'active'", self._lost)
        return [row[0] for row in found]

    # -- checks ---------------------------------------------------------------------------------------------------

    @override
    def check_step(self) -> None:
        super().check_step()
        self.check_fences()

    def check_fences(self) -> None:
        """A fence is right when it is written: its agent was silent, the brake allowed it, and most agents were heard."""
        rows = self.rows(
            "SELECT host, epoch, beat, beat_at, fenced_epoch, CASE WHEN self_fence_start = started_at THEN self_fence END"
            " FROM services WHERE \"binary\" = 'agent'"
        )
        for host, _, beat, *_ in rows:
            if self._beats.get(host, (-1, 0.0))[0] != beat:
                self._beats[host] = beat, self.kernel.now
        fenced = {host for host, epoch, _, _, fenced_epoch, _ in rows if epoch == fenced_epoch}
        new, self._fenced_now = fenced - self._fenced_now, fenced
        for host in sorted(new):
            self._check_fence(host, rows)

    def _check_fence(self, fenced: str, rows: list[Any]) -> None:
        now = self.world.site.time()
        self.facts["fenced"] = self.facts.get("fenced", 0) + 1
        self.kernel.note("fenced", fenced)
        (lease,) = (row[5] / MICROSECONDS for row in rows if row[0] == fenced)
        silent = self.kernel.now - self._beats[fenced][1]
        self.require(
            silent > lease,
            f"host {fenced} was fenced, {silent:.3f} seconds after a heartbeat with a lease of {lease:g}",
        )
        lately = [moment for moment in self._fences if now - moment < PERIOD]
        self.require(len(lately) < MOST, f"host {fenced} was fenced at {now:.3f}, and others were at {lately}")
        self._fences.append(now)
        began = self._began.get(self.kernel.current) if self.kernel.current is not None else None
        if began is None or self.kernel.at_point is None:
            return
        heard = [
            host
            for host, _, _, beat_at, _, of_lease in rows
            if began - beat_at / MICROSECONDS < min(DOWN_TIME, of_lease / MICROSECONDS * 1.1 if of_lease else DOWN_TIME)
        ]
        self.require(
            2 * len(heard) > len(rows), f"host {fenced} was fenced while only {heard} of {len(rows)} were heard"
        )
