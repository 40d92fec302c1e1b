# SPDX-License-Identifier: Apache-2.0
"""Scheduling alone: somebody else's fleet, ranked from memory; somebody else's claims."""

from __future__ import annotations

import os
import random

from moorage import options
from moorage.clock import SystemClock
from moorage.scheduling import filter_and_weigh
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import ClaimResult, ExcludedTargets, Flavor, FleetChanges, NodeState, RequestSpec
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.scheduling.scheduler import Scheduler
from moorage.scheduling.scheduling_policy import SchedulingPolicy


class Fleet:
    """Where nodes and claims are kept: here, three machines in memory."""

    def __init__(self) -> None:
        self.claims: dict[str, str] = {}

    def nodes(self) -> list[NodeState]:
        return [NodeState(f"uuid-{n}", f"node-{n}", f"host-{n}", {"VCPU": 4.0 * n}, {}) for n in (1, 2, 3)]

    def changes(self, *, compare: bool = False) -> FleetChanges | None:
        return None  # read all nodes each time

    def unavailable(self) -> ExcludedTargets:
        return ExcludedTargets()

    def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
        self.claims[spec.instance_uuid] = node_uuid
        return ClaimResult(node_uuid)

    def earlier(self, spec: RequestSpec, request_id: str) -> ClaimResult | None:
        found = self.claims.get(spec.instance_uuid)
        return ClaimResult(found, repeated=True) if found is not None else None

    def release(self, instance_uuid: str) -> None:
        self.claims.pop(instance_uuid, None)

    def record(self, plugin: str) -> None:
        """A plugin hung; kept, it would not be run any more after a few times."""

    def count(self, plugin: str) -> int:
        return 0


clock, fleet = SystemClock(), Fleet()
conf = options.defaults(scheduling={"enabled_filters": ["compute", "capacity"], "enabled_weighers": ["cpu"]})
guard = PluginRunner(clock, fleet, lambda why: os._exit(70), deadline=10, threshold=3, window=600, skip_advisory=False)
policy = SchedulingPolicy(filter_and_weigh.load(conf), guard, host_subset_size=1, max_attempts=3)
scheduler = Scheduler(FleetView(), fleet, fleet, lambda: policy, clock, random.Random())
scheduler.refresh()
for number in range(6):
    spec = RequestSpec(f"instance-{number}", Flavor("small", {"VCPU": 3}))
    placed = scheduler.place(spec, request_id=f"request-{number}").record
    print(f"{placed.uuid} goes to {placed.node} on {placed.host}")
