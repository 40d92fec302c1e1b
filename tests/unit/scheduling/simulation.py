# SPDX-License-Identifier: Apache-2.0
"""A small fleet in one thread: agents that report, schedulers that track, and a network and a clock that do as a test says.

Trackers, views, reporters, senders, dispatchers and healers are the real ones; the store is a dictionary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from oslo_config import cfg
from typing_extensions import override

from moorage.rpc.client import RpcSender
from moorage.rpc.server import RpcDispatcher, endpoints_of, rpc_method
from moorage.scheduling.epochs import ConfirmedEpochs
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.instance_tracker import InstanceTracker
from moorage.scheduling.interface import ExcludedTargets, FleetChanges, InstanceRecord, InstanceSource, NodeState
from moorage.scheduling.reporter import AGENTS, TOPIC, Reporter
from moorage.scheduling.rpc import SchedulerEndpoint
from moorage.scheduling.view_repair import UntrackedHosts, ViewReconciler
from moorage.testing.clock import ManualClock
from moorage_plugins.transports.memory import MemoryTransport, MessageHub
from moorage_plugins.transports.memory_network import ScriptedNetwork

SIZES = {"small": {"VCPU": 1}, "large": {"VCPU": 4}}
HEAL_TIMEOUT = 5.0


class DictStore(InstanceSource):
    """The store of instances; counts what is read."""

    def __init__(self) -> None:
        self.rows: dict[str, InstanceRecord] = {}
        self.loads = 0
        self.queries: list[Sequence[str]] = []

    @override
    def all(self, *, after: str = "", limit: int = 1000) -> Sequence[InstanceRecord]:
        self.loads += 1
        return [self.rows[uuid] for uuid in sorted(self.rows) if uuid > after][:limit]

    @override
    def by_hosts(self, hosts: Sequence[str]) -> Sequence[InstanceRecord]:
        self.queries.append(list(hosts))
        wanted = set(hosts)
        return [record for uuid, record in sorted(self.rows.items()) if record.host in wanted]


class Agent:
    """One host: what it commits, and tells afterwards. ``speaks = False`` is one of an older release."""

    def __init__(self, simulation: Simulation, host: str, *, speaks: bool = True) -> None:
        self.simulation = simulation
        self.host = host
        self.epoch = 0
        self.speaks = speaks
        self.transport = simulation.transport(host)
        self.restart()
        if speaks:
            self.transport.serve(AGENTS, host, RpcDispatcher(endpoints_of(self)))

    @property
    def node(self) -> str:
        return f"{self.host}-node"

    def restart(self) -> None:
        self.epoch += 1
        sender = RpcSender(self.transport, f"service-{self.host}", self.epoch)
        self.reporter = Reporter(sender, self.host, enabled=self.speaks and self.simulation.tracked)
        self.reporter.host_started(self.records())

    def records(self) -> Sequence[InstanceRecord]:
        return [record for _, record in sorted(self.simulation.store.rows.items()) if record.host == self.host]

    def create(self, uuid: str, flavor: str = "small") -> None:
        record = InstanceRecord(uuid, self.host, self.node, flavor, SIZES[flavor], "p")
        self.simulation.store.rows[uuid] = record
        self.reporter.created([record])

    def resize(self, uuid: str, flavor: str) -> None:
        rows = self.simulation.store.rows
        rows[uuid] = dataclasses.replace(rows[uuid], flavorid=flavor, resources=SIZES[flavor])
        self.reporter.resized(rows[uuid])

    def delete(self, uuid: str) -> None:
        del self.simulation.store.rows[uuid]
        self.reporter.deleted([uuid])

    def migrate(self, uuid: str, to: Agent) -> None:
        rows = self.simulation.store.rows
        record = rows[uuid] = dataclasses.replace(rows[uuid], host=to.host, node=to.node)
        to.reporter.live_migrated(record, source=False)
        self.reporter.live_migrated(record, source=True)

    @rpc_method
    def sync_instances(self, soon: bool = False) -> None:
        self.reporter.sync(self.records())

    @rpc_method
    def report_instances(self) -> None:
        self.reporter.host_started(self.records())


class Watcher:
    """One scheduler's view and what feeds it."""

    def __init__(self, simulation: Simulation, name: str, *, load: bool = True) -> None:
        self.view = FleetView()
        self.view.set_nodes(simulation.nodes())
        epochs = ConfirmedEpochs(
            lambda: {f"service-{each.host}": each.epoch for each in simulation.agents}, simulation.clock
        )
        self.tracker = InstanceTracker(self.view, simulation.clock, epochs)
        transport = simulation.transport(name)
        sender = RpcSender(transport, f"service-{name}", 1)
        self.endpoint = SchedulerEndpoint(None, self.tracker, None, enabled=simulation.tracked)  # type: ignore[arg-type]
        self.subscription = transport.serve(TOPIC, name, RpcDispatcher(endpoints_of(self.endpoint)))
        self.healer = ViewReconciler(
            self.tracker,
            simulation.store,
            lambda host, method: sender.cast(AGENTS, method, {}, server=host),
            simulation.clock,
            timeout=HEAL_TIMEOUT,
        )
        self.silent = UntrackedHosts(self.tracker, simulation.store, simulation.clock, max_age=10.0)
        if load and simulation.tracked:
            self.silent.loaded(simulation.clock.monotonic())
            self.tracker.load(simulation.store)

    def known(self) -> dict[str, tuple[str, str, str]]:
        """What the view has, by the snapshot that a request would get."""
        fleet = self.view.snapshot()
        return {
            uuid: (record.host, record.node, record.flavorid)
            for row in range(fleet.size)
            for uuid, record in fleet.host_state(row).instances.items()
        }

    def used(self) -> dict[str, float]:
        """What is in use by node."""
        fleet = self.view.snapshot()
        return {
            node.name: float(fleet.capacity("VCPU")[row] - fleet.free("VCPU")[row])
            for row, node in enumerate(fleet.nodes)
        }


class Simulation:
    """Agents, schedulers, their network and their store."""

    def __init__(self, hosts: Sequence[str], *, schedulers: int = 1, tracked: bool = True, silent: int = 0) -> None:
        self.clock = ManualClock(1000.0)
        self.network = ScriptedNetwork(self.clock)
        self.hub = MessageHub()
        self.store = DictStore()
        self.tracked = tracked
        self._hosts = hosts
        self.agents = [Agent(self, host, speaks=number >= silent) for number, host in enumerate(hosts)]
        self.schedulers = [Watcher(self, f"scheduler-{number}") for number in range(schedulers)]

    def transport(self, name: str) -> MemoryTransport:
        conf = cfg.ConfigOpts()
        conf([], project="moorage", default_config_files=[], default_config_dirs=[])
        return MemoryTransport(
            conf=conf, url="memory://", clock=self.clock, hub=self.hub, network=self.network, name=name
        )

    def nodes(self) -> list[NodeState]:
        return [NodeState(f"uuid-{host}", f"{host}-node", host, {"VCPU": 100.0}, {}) for host in sorted(self._hosts)]

    def changes(self, *, compare: bool = False) -> FleetChanges | None:
        return None

    def unavailable(self) -> ExcludedTargets:
        return ExcludedTargets()

    def pass_time(self, seconds: float) -> None:
        """Time goes by; schedulers look after what is in doubt, and what is sent arrives."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now = min(until, self.clock.now + 0.5)
            for scheduler in self.schedulers:
                scheduler.healer.tick()
            self.network.deliver_all()

    def sync_period(self) -> None:
        """What one period of comparisons does when nothing more is lost."""
        self.network.deliver_all()
        for agent in self.agents:
            agent.sync_instances()
        self.network.deliver_all()
        self.pass_time(2 * HEAL_TIMEOUT)

    def truth(self) -> dict[str, tuple[str, str, str]]:
        """What the store has."""
        return {uuid: (record.host, record.node, record.flavorid) for uuid, record in self.store.rows.items()}

    def used(self) -> dict[str, float]:
        """What is in use by node, as the store has it."""
        used = {node.name: 0.0 for node in self.nodes()}
        for record in self.store.rows.values():
            used[record.node] += record.resources["VCPU"]
        return used
