# SPDX-License-Identifier: Apache-2.0
"""Wires the role ``agent`` from the families. An agent does the operations of one host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors, randomness, threads
from moorage.allocation.interface import AllocationStore
from moorage.bounded_pool import BoundedPool
from moorage.control_plane.cleanup_endpoints import AgentCleaning
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.factories import open_instances, open_store, open_workers
from moorage.control_plane.host_enrolment import HostEnrolment, gathered
from moorage.control_plane.interface import AGENT_SERVICES, AgentService, AgentTools, LoopService
from moorage.control_plane.node_machines import machines_of, observe_nodes
from moorage.control_plane.notifications import tell_schedulers
from moorage.control_plane.periodic_loop import PeriodicLoop, run_logged
from moorage.control_plane.process import Platform
from moorage.control_plane.sharding_factories import open_mover
from moorage.fleet.interface import Node, check_shard
from moorage.fleet.nodes import NodeStore
from moorage.instances.agent_messages import cast_to_agent
from moorage.instances.resizes import Resizes
from moorage.rpc.interface import Subscription
from moorage.rpc.server import RpcDispatcher, endpoints_of, rpc_method
from moorage.scheduling.instance_fields import declared_fields
from moorage.scheduling.options import sync_seconds
from moorage.scheduling.reporter import AGENTS, Reporter

__all__ = ["Agent", "check_types", "chosen_by", "nodes_of_agent"]

LOG = logging.getLogger(__name__)
_PAGE = 1000
#: Seconds that services have to end, however little the rest has left of them.
_LEAST = 1.0


def chosen_by(host: str, my_shard: str | None) -> dict[str, str]:
    """Returns the column and value that the nodes of an agent have: those of its shard where it has one, else those of its host.

    :raises ConfigError: ``my_shard`` is no name of a shard; it is not taken for "everything".
    """
    if my_shard is None:
        return {"host": host}
    try:
        check_shard(my_shard, "[sharding] my_shard")
    except errors.InvalidInput as error:
        raise errors.ConfigError(error.message) from error
    return {"shard": my_shard}


def nodes_of_agent(nodes: NodeStore, host: str, my_shard: str | None) -> Callable[[], Iterable[Node]]:
    """What an agent works on, read by pages each time.

    :raises ConfigError: as :func:`chosen_by` does.
    """
    chosen: dict[str, Any] = chosen_by(host, my_shard)

    def read() -> Iterable[Node]:
        after = ""
        while True:
            page = nodes.list(after=after, limit=_PAGE, **chosen)
            yield from page
            if len(page) < _PAGE:
                return
            after = page[-1].uuid

    return read


def check_types(services: Iterable[tuple[str, AgentService]]) -> None:
    """Each type of resource has one service at most: the first of two that looks would do the other's operations.

    :raises ConfigError: two have the same type.
    """
    named: dict[str, str] = {}
    for name, service in services:
        for kind in service.loop.types if isinstance(service, LoopService) else ():
            other = named.setdefault(kind, name)
            if other != name:
                raise errors.ConfigError(
                    f"[agent] services names {other} and {name}, and both do the operations on resources of the type {kind!r}. "
                    "Name one of them, or give the resources of the other a type of their own."
                )


class Agent:
    """Does operations for one host."""

    binary = "agent"
    owns_work = True

    def __init__(self) -> None:
        #: Set when a comparison of instances was asked for, and when the agent ends.
        self._soon, self._ending = threads.event(), threads.event()

    def start(self, platform: Platform, conf: cfg.ConfigOpts) -> None:
        """Finish what an earlier epoch left, then serve."""
        self._clock = platform.clock
        store, nodes = open_store(platform, conf), NodeStore(platform.database)
        of_agent = chosen_by(platform.name, conf.sharding.my_shard)
        reporter = Reporter(
            platform.sender,
            platform.name,
            enabled=conf.scheduling.track_instance_changes,
            fields=declared_fields(conf),
            largest=conf.rpc.max_message_bytes,
        )
        workers, instances, cast = (
            open_workers(platform, conf),
            open_instances(platform, conf),
            cast_to_agent(platform.sender),
        )
        tools = AgentTools(
            conf=conf,
            clock=platform.clock,
            database=platform.database,
            identity=platform.identity,
            workers=workers,
            instances=instances,
            release=store.release,
            reporter=reporter,
            nodes=nodes_of_agent(nodes, platform.name, conf.sharding.my_shard),
            machines=lambda: machines_of(nodes, of_agent),
            observe_nodes=functools.partial(observe_nodes, platform.database, nodes, of_agent),
            store=store,
            cast=cast,
            confirm_resize=Resizes(platform.database, instances, workers, store, cast).confirm_seen,
            tell=platform.tell,
            renew=platform.renew,
        )
        self._services: list[AgentService] = []
        self._cleaning = AgentCleaning(
            platform, conf, tools, open_workers(platform, conf), lambda: any(each.is_behind for each in self._services)
        )
        services = [(loaded, loaded.build(tools)) for loaded in AGENT_SERVICES.load_all(conf.agent.services)]
        check_types((loaded.name, service) for loaded, service in services)
        self._services += [service for _, service in services]
        if conf.agent.enrol:
            self._enrol(platform, conf, store)
        endpoints: list[object] = []
        for loaded, service in services:
            with loaded.building():
                endpoints += service.endpoints()
        self._subscription: Subscription = platform.transport.serve(
            AGENTS,
            platform.name,
            RpcDispatcher(endpoints_of(self, self._cleaning, *endpoints)),
            threads=conf.rpc.threads,
        )
        for loaded, service in services:
            with loaded.building():
                service.start()
        self._cleaning.start()
        self._periodic = self._sweeps(platform, conf.agent.sweep_interval)
        seconds = sync_seconds(conf)
        if seconds is not None:
            # Agents that were started together must not all speak at once.
            first = randomness.generator().uniform(0, seconds)
            self._periodic.append(
                PeriodicLoop(platform, "comparison of instances", self._tell_instances, seconds, first=first)
            )

    def _enrol(self, platform: Platform, conf: cfg.ConfigOpts, store: AllocationStore) -> None:
        nodes = NodeStore(platform.database)
        enrolment = Enrolment(
            platform.database, nodes, store, platform.registry, tell_schedulers(platform),
            mover=open_mover(open_instances(platform, conf)),
        )  # fmt: skip
        found = gathered(self._services)
        HostEnrolment(nodes, store, enrolment, conf, platform.name, conf.sharding.my_shard).enrol(found)

    @rpc_method
    def sync_instances(self, soon: bool = False) -> None:
        """Has schedulers compare the instances that they know of this host with those of the agent.

        :param soon: do it after a random part of ``[agent] sweep_interval``, so that agents do not all read the store at once.
        """
        if soon:
            self._soon.set()
        else:
            self._tell_instances()

    @rpc_method
    def report_instances(self) -> None:
        """Tell all schedulers all instances of this host."""
        self._tell_instances(everything=True)

    def _tell_instances(self, *, everything: bool = False) -> None:
        for service in self._services:
            service.tell_instances(everything=everything)

    def reload(self, conf: cfg.ConfigOpts) -> None:
        """How it cleans; nothing else changes without a restart, the plugins are checked all the same."""
        AGENT_SERVICES.load_all(conf.agent.services)
        self._cleaning.reload(conf)

    def stop(self, drain_seconds: float) -> None:
        """Take nothing new, end what runs. The services end side by side: one that hangs takes no time of the others."""
        end = self._clock.monotonic() + drain_seconds
        self._ending.set()
        self._subscription.stop(drain_seconds)
        for each in self._periodic:
            each.stop(end - self._clock.monotonic())
        self._cleaning.stop()
        pool = BoundedPool("end of services", self._clock, len(self._services))
        pool.for_each(
            self._services,
            lambda service: run_logged(f"end of {_name(service)}", service.stop),
            max(_LEAST, end - self._clock.monotonic()),
            lambda service: LOG.warning("%s has not ended within %g s.", _name(service), drain_seconds),
        )
        pool.close()

    def _sweeps(self, platform: Platform, seconds: float) -> list[PeriodicLoop]:
        """A thread for each service: one whose sweep fails, or hangs, holds up no other one."""
        works = [(f"sweep of {_name(service)}", service.sweep) for service in self._services]
        # Agents that were started together would always sweep together.
        draw = randomness.generator()
        loops = [PeriodicLoop(platform, name, work, seconds, first=draw.uniform(0, seconds)) for name, work in works]
        name, pause = "comparison of instances that was asked for", draw.uniform(0, seconds)

        def tell_after_pause() -> None:
            # Once for all who have asked until the end of the pause.
            if not platform.clock.wait(self._ending, pause):
                self._soon.clear()
                self._tell_instances()

        return [*loops, PeriodicLoop(platform, name, tell_after_pause, None, wake=self._soon)]


def _name(service: AgentService) -> str:
    return type(service).__name__
