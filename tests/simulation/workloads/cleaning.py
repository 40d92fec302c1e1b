# SPDX-License-Identifier: Apache-2.0
"""Creates and deletes on agents of one cluster that die for good: supervisors have the living ones clean after them."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from typing_extensions import override

from tests.simulation.kernel import Process
from tests.simulation.workloads.placement import SCHEDULERS, Placement

__all__ = ["Cleaning"]


class Cleaning(Placement):
    """As :class:`Placement`, but some agents that die never come back."""

    settings: ClassVar[dict[tuple[str, str], Any]] = {
        **Placement.settings,
        ("services", "report_interval"): 3.0,
        ("services", "service_down_time"): 9.0,
        ("cleanup", "auto_cleanup_enabled"): True,
        ("cleanup", "auto_cleanup_checks"): 1,
        ("cleanup", "interval"): 12.0,
        ("cleanup", "backoff"): 1.0,
        ("cleanup", "backoff_longest"): 4.0,
        ("cleanup", "unclaimed_timeout"): 40.0,
        ("scheduling", "silent_hosts_age"): 20.0,
    }
    points: ClassVar[int] = 800
    steps: ClassVar[int] = 2000

    @override
    def begin(self) -> None:
        self.dead: set[str] = set()
        super().begin()

    @override
    def cluster_of(self, name: str) -> str | None:
        return "cluster-1" if name.startswith("agent") else None

    @override
    def restart(self, process: Process) -> None:
        name = process.name.partition("#")[0]
        agents = sum(each.startswith("agent") for each in self._makers)
        alone = agents - len(self.dead) <= 1
        killed = name.startswith("agent") and not process.alive and not process.lost
        if (
            killed
            and not alone
            and name not in self.dead
            and random.Random(f"{self.world.seed}/dies/{process.name}").random() < 0.6
        ):
            self.dead.add(name)
        if name not in self.dead:
            super().restart(process)

    @override
    def quiet(self) -> str:
        rows = self.rows("SELECT resource_id, operation, phase, addressed_to AS target_host FROM workers")
        # A dead source may still run what has moved away. It keeps its room until the host is fenced.
        left = [row for row in rows if not (row[1] == "let_go" and row[3] in self.dead)]
        if left:
            return f"operations are left: {left}"
        # Of a host that is silent a scheduler reads the instances when it decides, not before.
        occupying = "SELECT uuid, host FROM instances WHERE status NOT IN ('error', 'shelved_offloaded')"
        stored = sorted(row for row in self.rows(occupying) if row[1] not in self.dead)
        for name in SCHEDULERS:
            fleet = self.roles[name]._scheduler.view.snapshot()
            seen = sorted(
                (uuid, each.host)
                for row in range(fleet.size)
                for uuid, each in fleet.instances_on(row).items()
                if each.host not in self.dead
            )
            if seen != stored:
                return f"{name} believes {seen}, the store has {stored}"
        return ""

    @override
    def check(self) -> None:
        if self.calm:
            dead = self.rows("SELECT uuid, fault FROM instances WHERE status = 'error'")
            self.require(not dead, f"instances of living hosts were cleaned: {dead}")
        rest = self.rows(
            "SELECT uuid, status, host, actual_state FROM instances"
            " WHERE status NOT IN ('active', 'error', 'shelved_offloaded')"
        )
        # What a dead host may run, since its last operation was a step of a move or an unshelving.
        statuses = [
            tuple(row) for row in rest if tuple(row)[1:] not in [("stopped", host, "unknown") for host in self.dead]
        ]
        self.require(not statuses, f"instances did not reach a documented end state: {statuses}")
        open_requests = self.rows("SELECT service, epoch FROM cleanup_requests WHERE done_at IS NULL")
        self.require(len(open_requests) <= 3, f"cleanup requests stay open: {open_requests}")
        super().check()
