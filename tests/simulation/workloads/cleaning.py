# SPDX-License-Identifier: Apache-2.0
"""Creates and deletes on agents of one cluster that die for good: supervisors have the living ones clean after them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from tests.simulation.kernel import Process
from tests.simulation.workloads.placement import HOSTS, SCHEDULERS, Placement

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
        # So small that sets are full, and the cleaner starts its second thread.
        ("cleanup", "batch"): 2,
        ("cleanup", "backoff"): 1.0,
        ("cleanup", "backoff_longest"): 4.0,
        ("cleanup", "unclaimed_timeout"): 40.0,
        ("scheduling", "silent_hosts_age"): 20.0,
    }
    points: ClassVar[int] = 550
    steps: ClassVar[int] = 1200

    @override
    def begin(self) -> None:
        self.dead: set[str] = set()
        #: (Type, uuid) -> phase and end of the lease, after the last commit.
        self._operations: dict[tuple[str, str], tuple[str, int]] = {}
        #: Requests for cleanup that are done, after the last commit.
        self._closed: frozenset[str] = frozenset()
        super().begin()

    @override
    def begin_clients(self) -> None:
        super().begin_clients()
        self.client("operator", self._operator)

    def _operator(self, process: Process) -> None:
        """Requests cleanups: after dead agents, and of what earlier incarnations of living agents left."""
        platform = self.world.platform(process, "api", beats=False)
        for _ in range(self.random.choice((0, 2, 5))):
            platform.clock.sleep(self.random.uniform(0, 5))
            args = {"filters": {"is_up": self.random.random() < 0.8}, "requested_by": process.name}
            with contextlib.suppress(errors.MoorageError):
                platform.sender.call("scheduler", "request_cleanup", args)
                self.facts["cleanups requested"] = self.facts.get("cleanups requested", 0) + 1

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
    def check_step(self) -> None:
        super().check_step()
        self.check_taken()
        self.check_closed()

    def check_taken(self) -> None:
        """Cleaners take from a service only what it had before its epoch, or what it did not renew."""
        epochs = dict(self.rows("SELECT uuid, epoch FROM services"))
        now: dict[tuple[str, str], tuple[str, int]] = {}
        for kind, uuid, phase, worker, epoch, expires_at, updated_at in self.rows(
            "SELECT resource_type, resource_id, phase, worker, worker_epoch, expires_at, updated_at FROM workers"
        ):
            now[kind, uuid] = phase, expires_at
            before, expired_at = self._operations.get((kind, uuid), ("", 0))
            self.require(
                phase != "cleaning" or before != "working" or epoch < epochs[worker] or expired_at < updated_at,
                f"the operation on {kind} {uuid} was taken from service {worker}, which lives",
            )
        self._operations = now

    def check_closed(self) -> None:
        """A request for cleanup is closed only when nothing that it asks for is left, but for what is in quarantine."""
        closed = frozenset(uuid for (uuid,) in self.rows("SELECT uuid FROM cleanup_requests WHERE done_at IS NOT NULL"))
        if closed - self._closed:
            left = self.rows(
                "SELECT r.uuid, w.resource_id, w.phase FROM cleanup_requests r JOIN workers w"
                " ON w.worker = r.service AND w.worker_epoch < r.epoch WHERE r.done_at IS NOT NULL"
                " AND w.phase <> 'quarantined' AND (w.phase <> 'working' OR w.updated_at <= r.until)"
            )
            early = [tuple(row) for row in left if row[0] not in self._closed]
            self.require(not early, f"requests for cleanup are closed, and rows are left: {early}")
        self._closed = closed

    @override
    def quiet(self) -> str:
        rows = self.rows("SELECT resource_id, operation, phase, addressed_to AS target_host FROM workers")
        # A dead source may still run what has moved away. It keeps its room until the host is fenced.
        left = [row for row in rows if not (row[1] == "let_go" and row[3] in self.dead)]
        if left:
            return f"operations are left: {left}"
        # A host that stood still, or was cut off, is cleaned and lives: its agent sees what runs there.
        settled = self.rows(
            "SELECT uuid, host, status, actual_state FROM instances WHERE status IN ('active', 'stopped')"
        )
        executing = self.executing()
        for uuid, host, status, seen in settled:
            runs = [each for each in executing.get(uuid, ()) if each not in self.dead]
            if host not in self.dead and (seen == "unknown" or runs != ([host] if status == "active" else [])):
                return f"instance {uuid} of {host} is {status}, was seen {seen} and executes on {runs}"
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

    def _seen_stopped(self, host: str) -> Sequence[str]:
        return ["unknown"] if host in self.dead else ["stopped", "paused"]

    @override
    def check(self) -> None:
        if self.calm:
            dead = self.rows("SELECT uuid, fault FROM instances WHERE status = 'error'")
            self.require(not dead, f"instances of living hosts were cleaned: {dead}")
        rest = self.rows(
            "SELECT uuid, status, host, actual_state FROM instances"
            " WHERE status NOT IN ('active', 'error', 'shelved_offloaded')"
        )
        # What a dead host may run, since its last operation was a step of a move or an unshelving, and what an agent that came
        # back has seen there: stopped, or paused where the host died before it let the copy of a live migration go on.
        documented = [("stopped", host, seen) for host in HOSTS for seen in self._seen_stopped(host)]
        statuses = [tuple(row) for row in rest if tuple(row)[1:] not in documented]
        self.require(not statuses, f"instances did not reach a documented end state: {statuses}")
        open_requests = self.rows("SELECT service, epoch FROM cleanup_requests WHERE done_at IS NULL")
        self.require(len(open_requests) <= 3, f"cleanup requests stay open: {open_requests}")
        super().check()
