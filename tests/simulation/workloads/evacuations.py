# SPDX-License-Identifier: Apache-2.0
"""Hosts that lose their power, are fenced and evacuated, and come back meanwhile: an evacuation and a return take turns."""

from __future__ import annotations

import functools
import json
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.control_plane.factories import open_instances
from moorage.db import Database
from moorage.instances.moves import kept_source
from moorage.services.registry import ServiceRegistry
from tests.simulation.kernel import Process
from tests.simulation.workloads.placement import HOSTS, Placement, enrol

__all__ = ["Evacuations"]


class Evacuations(Placement):
    """As :class:`Placement`, with larger nodes, and an operator in place of a client."""

    settings: ClassVar[dict[tuple[str, str], Any]] = {
        **Placement.settings,
        # Some instances are evacuated while another host keeps a copy of them.
        ("compute", "resize_confirm_after"): 6.0,
    }
    operations: ClassVar[tuple[str, ...]] = ("live_migrate", "migrate", "resize", "resize")
    seconds: ClassVar[float] = 40.0
    points: ClassVar[int] = 550
    steps: ClassVar[int] = 1250

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        enrol(database, conf, HOSTS, 8)

    @override
    def begin(self) -> None:
        #: Hosts without power.
        self.off: set[str] = set()
        #: The epoch of a host's agent when it got its power again.
        self.came_back: dict[str, int] = {}
        self._evacuations: set[tuple[str, int]] = set()
        #: Host -> what was ever evacuated from it.
        self._left: dict[str, set[str]] = {}
        super().begin()

    @override
    def begin_clients(self) -> None:
        for number in range(1, 3):
            self.client(f"client-{number}", self._client)
        self.client("operator", self._operator)
        self.client("owner", self._owner)

    @override
    def restart(self, process: Process) -> None:
        if process.name.partition("#")[0] not in self.off:
            super().restart(process)

    # -- the operator ---------------------------------------------------------------------------------------------

    def _operator(self, process: Process) -> None:
        platform = self.world.platform(process, "api", beats=False)
        registry = ServiceRegistry(platform.database, platform.clock)
        instances = open_instances(platform, self.world.conf)
        for _ in range(self.random.randint(1, 3)):
            platform.clock.sleep(self.random.uniform(1, 8))
            host = self.random.choice(HOSTS)
            agent = registry.list(binary="agent", host=host)[0].uuid
            self._power_off(host)
            self._until(platform, functools.partial(registry.set, agent, forced_down=True))
            self._fence(platform, registry, agent)
            self.kernel.later(self.random.uniform(0, 6), functools.partial(self._power_on, host))
            for each in self._until(platform, functools.partial(instances.by_hosts, [host])):
                self._evacuate(platform, each.uuid)
            while host in self.off:
                platform.clock.sleep(0.5)
            self._until(platform, functools.partial(registry.set, agent, forced_down=False))

    def _fence(self, platform: Any, registry: ServiceRegistry, agent: str) -> None:
        """Fences a host when its agent is silent: for a moment, since the clients would delete all instances meanwhile."""
        fence = functools.partial(registry.fence, agent, "its power is off", down_time=0.5)
        while True:
            try:
                self._until(platform, fence)
            except errors.Conflict:
                platform.clock.sleep(0.5)
            else:
                return

    def _power_off(self, host: str) -> None:
        """Nothing runs on the host from here on, also nothing that stood still."""
        self.off.add(host)
        for process in [each for each in self.kernel.processes if each.name.partition("#")[0] == host]:
            self.kernel.kill(process)

    def _power_on(self, host: str) -> None:
        ((self.came_back[host],),) = self.rows(
            "SELECT epoch FROM services WHERE \"binary\" = 'agent' AND host = ?", host
        )
        self.off.discard(host)
        newest = [each for each in self.kernel.processes if each.name.partition("#")[0] == host][-1]
        self.restart(newest)

    # -- checks ---------------------------------------------------------------------------------------------------

    @override
    def check_step(self) -> None:
        super().check_step()
        self.check_turns()

    def check_turns(self) -> None:
        """An instance is evacuated only while its host has no power, or before the agent there has started again."""
        found = self.rows("SELECT uuid, fence, pending FROM instances WHERE status = 'evacuating'")
        for uuid, fence, text in found:
            if (uuid, fence) in self._evacuations:
                continue
            self._evacuations.add((uuid, fence))
            host = json.loads(text)["left"]
            self._left.setdefault(host, set()).add(uuid)
            if host in self.off:
                continue
            ((epoch,),) = self.rows("SELECT epoch FROM services WHERE \"binary\" = 'agent' AND host = ?", host)
            self.require(
                self.came_back.get(host) == epoch,
                f"instance {uuid} was evacuated from host {host}, whose agent had started with epoch {epoch}",
            )

    @override
    def started_role(self, name: str) -> None:
        """An agent that serves has destroyed what was evacuated from its host, unless that has come back or does so."""
        here = {uuid for uuid, hosts in self._effects().items() if name in hosts} & self._left.get(name, set())
        belong = {row[0] for row in self.rows("SELECT uuid FROM instances WHERE host = ?", name)}
        for uuid, pending in self.rows("SELECT uuid, pending FROM instances WHERE destination_uuid > ''"):
            if kept_source(json.loads(pending)).get("host") == name:
                belong.add(uuid)
        coming = self.rows(
            "SELECT resource_id FROM workers WHERE resource_type = 'instance' AND addressed_to = ?", name
        )
        left = here - belong - {row[0] for row in coming}
        self.require(
            not left, f"the agent of host {name} serves, and its host runs {sorted(left)}, which was evacuated"
        )
