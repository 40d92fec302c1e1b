# SPDX-License-Identifier: Apache-2.0
"""Builds all HTTP APIs of a process: the core's routes and the dialects, health and metrics beside them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from moorage.allocation import api as allocation_api
from moorage.allocation import pools_api, quotas_api
from moorage.cleanup import api as cleanup_api
from moorage.cleanup.dry_run import blocked_reason
from moorage.cleanup.requests import RequestStore
from moorage.cleanup.views import OperationViews
from moorage.context import RequestContext
from moorage.control_plane.core_api import PREFIX, CoreApplication, root_application
from moorage.control_plane.engine_metrics import EngineCollector
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.factories import (
    open_departures,
    open_detectors,
    open_instances,
    open_store,
    open_workers,
)
from moorage.control_plane.fleet_audit import FleetAudit
from moorage.control_plane.host_power import HostPower
from moorage.control_plane.idempotency import IdempotencyKeys
from moorage.control_plane.interface import API_EXTENSIONS, ApiExtension, ApiTools
from moorage.control_plane.notifications import ask_to_sync, tell_schedulers
from moorage.control_plane.periodic import RegisteredEngines, enabled_tasks
from moorage.control_plane.policies import core_policies
from moorage.control_plane.process import Platform
from moorage.control_plane.scheduler_client import Schedulers
from moorage.control_plane.shard_hosts import ShardHosts
from moorage.control_plane.sharding_factories import open_mover, open_plans, shards_for_new
from moorage.coordination import api as coordination_api
from moorage.coordination.ring_ledger import SqlRingLedger
from moorage.coordination.task_store import TaskStore
from moorage.extensions import Loaded
from moorage.fleet import api as fleet_api
from moorage.fleet import facts_api
from moorage.fleet.aggregates import AggregateStore
from moorage.fleet.nodes import NodeStore
from moorage.fleet.view import NodeView
from moorage.http import authentication
from moorage.http.application import Application
from moorage.http.health import Health
from moorage.http.metrics import Metrics
from moorage.http.middleware import with_middleware
from moorage.http.mounts import IsolatedApp, MountDispatcher, resolve_mounts
from moorage.http.policy import AccessPolicy
from moorage.http.routes import Route, Wsgi
from moorage.http.server import address_of
from moorage.instances import api as instances_api
from moorage.instances import server_groups_api
from moorage.instances.agent_messages import AgentMessages, cast_to_agent
from moorage.instances.ask_agent import AgentQuestions
from moorage.instances.availability import Availability
from moorage.instances.delete import Deleter
from moorage.instances.in_place import InPlace
from moorage.instances.interface import holds_of
from moorage.instances.on_node import NodeContents
from moorage.instances.reset_state import Resetter
from moorage.instances.resizes import Resizes
from moorage.journal import api as journal_api
from moorage.journal import webhooks_api
from moorage.journal.reader import JournalReader
from moorage.journal.tail import Tail
from moorage.journal.webhooks import WebhookStore
from moorage.observers.interface import InstanceDeleted, ShardReassigned
from moorage.part import parts
from moorage.scheduling import api as scheduling_api
from moorage.scheduling import flavors_api
from moorage.scheduling.flavor_requests import FlavorResolver
from moorage.scheduling.flavors import FlavorStore
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.reporter import TOPIC as SCHEDULERS
from moorage.services import api as services_api
from moorage.services.interface import Service
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import ServiceRegistry
from moorage.sharding import api as sharding_api

__all__ = ["ApiAssembly", "check", "dialects", "living"]

#: Seconds that a request takes at most beside waiting for schedulers.
_SPARE = 30.0


def living(registry: ServiceRegistry, observer: LivenessObserver) -> list[tuple[Service, bool]]:
    """Returns all services, each with whether it is up."""
    rows = registry.list()
    up = observer.observe(rows)
    return [(row, up[row.uuid]) for row in rows]


class ApiAssembly:
    """The applications over one platform; stores are opened when they are first needed.

    :param platform: its identity need not be registered, because the API owns nothing.
    :param conf: what needs a restart is taken from here, the rest from what :meth:`mounts` is given.
    """

    def __init__(self, platform: Platform, conf: cfg.ConfigOpts) -> None:
        self._platform = platform
        self._conf = conf
        self._metrics = Metrics()
        self._nodes = NodeStore(platform.database)
        self._flavors = FlavorResolver(FlavorStore(platform.database))
        self._tail = Tail(platform.database, platform.clock)
        self._observer = LivenessObserver(platform.clock, conf.services.service_down_time)
        for part in parts():
            for collector in part.declared.collectors:
                self._metrics.registry.register(part.load(collector)(platform.database))
        names = RegisteredEngines(platform.registry, self._observer)
        self._metrics.registry.register(EngineCollector(platform.database, names, self._living))
        # Every scheduler that is asked may use up its time; then the first request with a key is taken for dead.
        section = conf.control_plane
        busy = section.create_attempts * section.create_timeout + _SPARE
        self._idempotency = IdempotencyKeys(platform.database, busy_seconds=busy)
        self._store = functools.cache(lambda: open_store(platform, conf))
        self._enrolment = functools.cache(self._enrol)
        self._routes = functools.cache(self._all_routes)

    def stop(self) -> None:
        """End what reads for requests that wait."""
        self._tail.stop()

    def mounts(self, conf: cfg.ConfigOpts) -> Mapping[str, Wsgi]:
        """Returns all applications by prefix: the core, the enabled dialects, ``/healthcheck``, ``/metrics``.

        :raises ConfigError: the configuration or a plugin cannot be used.
        """
        policy = _policy(conf, API_EXTENSIONS.chosen(conf))
        tools = self._tools(conf, policy)
        brought = [
            route for part in parts() for each in part.declared.routes for route in part.load(f"{each}:routes")(tools)
        ]
        core = CoreApplication((*self._routes(), *brought), tools, self._idempotency)
        open_to_all: dict[str, Wsgi] = {
            "/healthcheck": Health({"store": self._store_answers, "schedulers": self._schedulers_listen}),
            "/metrics": self._metrics,
        }
        # At the root are the versions of the core, unless a dialect is mounted there.
        apis = {"": root_application(tools), PREFIX: core} | dialects(tools, {PREFIX, *open_to_all})
        return {**open_to_all, "": with_middleware(MountDispatcher(apis), conf)}

    def dialect(self, name: str, conf: cfg.ConfigOpts) -> Wsgi:
        """One dialect, enabled or not.

        :raises ConfigError: the configuration or the plugin cannot be used.
        """
        loaded = API_EXTENSIONS.load(name)
        return with_middleware(_built(loaded, self._tools(conf, _policy(conf, [loaded]))), conf)

    def watch(self) -> None:
        """Look at the heartbeats, and read the catalogue of flavors when it has changed; to be called again and again.

        Only what is watched can be missed.
        """
        self._observer.observe(self._platform.registry.list())
        self._flavors.refresh()

    # -- inside ---------------------------------------------------------------------------------------------------
    def _enrol(self) -> Enrolment:
        platform = self._platform
        changed = tell_schedulers(platform)
        shards = shards_for_new(self._nodes, self._conf)
        return Enrolment(
            platform.database, self._nodes, self._store(), platform.registry, changed, shards,
            lambda nodes: self._resharded("", nodes, 0), tell_schedulers(platform, "states_changed"),
            open_mover(open_instances(platform, self._conf)), self._contents(),
        )  # fmt: skip

    def _contents(self) -> NodeContents:
        platform, store = self._platform, self._store()
        departures = open_departures(platform, self._conf, store)
        return NodeContents(platform.database, open_instances(platform, self._conf), store, departures)

    def _resharded(self, plan: str, moved: int, conflicts: int) -> None:
        self._platform.tell(ShardReassigned(plan, moved, conflicts))
        if moved:
            platform, instances = self._platform, open_instances(self._platform, self._conf)
            departures = open_departures(platform, self._conf, self._store())
            hosts = ShardHosts(platform.database, platform.registry, instances, open_mover(instances), departures)
            if hosts.correct() + self._enrolment().assign():
                tell_schedulers(self._platform)()

    def _tools(self, conf: cfg.ConfigOpts, policy: AccessPolicy) -> ApiTools:
        platform = self._platform
        return ApiTools(
            conf=conf,
            clock=platform.clock,
            database=platform.database,
            authenticate=authentication.authenticator(conf),
            check_policy=policy.check,
            count=self._metrics.count,
            store=self._store,
            fleet=self._enrolment,
            sender=lambda: platform.sender,
            workers=lambda: open_workers(platform, conf),
            services=self._living,
        )

    def _living(self) -> list[tuple[Service, bool]]:
        return living(self._platform.registry, self._observer)

    def _all_routes(self) -> tuple[Route, ...]:
        platform, conf, nodes = self._platform, self._conf, self._nodes
        store, instances = self._store(), open_instances(platform, conf)
        section = conf.control_plane
        schedulers = Schedulers(platform.sender, platform.clock, section.create_attempts, section.create_timeout)
        groups = server_groups_api.Groups(GroupStore(platform.database), instances)
        changed, states_changed = tell_schedulers(platform), tell_schedulers(platform, "states_changed")
        mover = open_mover(instances)
        plans = open_plans(platform.database, nodes, mover, conf)
        workers, cast = open_workers(platform, conf), cast_to_agent(platform.sender)

        def resolve(body: Mapping[str, Any], context: RequestContext) -> Mapping[str, Any]:
            found = self._flavors.resolved(body)
            return groups.resolved(found, context)

        def hinders(resource_type: str) -> str:
            return blocked_reason(resource_type, conf.cleanup.paused, conf.cleanup.enabled_handlers)

        availability = Availability(platform.database, conf.services.service_down_time)
        deleter = Deleter(
            platform.database, instances, workers, AgentMessages(cast, availability.lacking, platform.clock).delete,
            lambda uuid: platform.tell(InstanceDeleted(uuid, "")),
        )  # fmt: skip
        view = NodeView(nodes, availability.down, self._contents().counts)
        questions = AgentQuestions(platform.sender, availability, conf.api.threads)
        in_place = InPlace(platform.database, instances, workers, cast, availability.lacking)
        resizes = Resizes(platform.database, instances, workers, store, cast, availability.down)
        resetter = Resetter(platform.database, instances, workers, store, ask_to_sync(platform))
        return (
            *services_api.routes(
                platform.registry, self._observer, states_changed, HostPower(nodes, conf, platform.clock).turn_off
            ),
            *fleet_api.routes(nodes, self._enrolment(), view),
            *facts_api.routes(
                view,
                AggregateStore(platform.database),
                self._enrolment().change_properties,
                changed,
                states_changed,
            ),
            *allocation_api.routes(store),
            *pools_api.routes(
                store,
                open_detectors(platform, conf),
                FleetAudit(
                    platform.database, nodes, store, instances, self._enrolment(), conf.allocation.step_size_rule
                ).checks(),
            ),
            *quotas_api.routes(store, conf.quota.source),
            *scheduling_api.routes(schedulers, resolve),
            *flavors_api.routes(FlavorStore(platform.database), self._flavors.refresh),
            *cleanup_api.routes(
                OperationViews(platform.database, open_workers(platform, conf), hinders),
                RequestStore(platform.database, platform.registry),
                schedulers,
                conf.cleanup.enabled_handlers,
                hinders,
            ),
            *instances_api.routes(
                instances,
                schedulers,
                deleter,
                in_place,
                resizes,
                resetter,
                resolve,
                questions.ask,
                functools.partial(holds_of, store),
            ),
            *server_groups_api.routes(groups),
            *sharding_api.routes(platform.database, nodes, plans, mover, self._resharded),
            *coordination_api.routes(
                SqlRingLedger(platform.database),
                TaskStore(platform.database),
                enabled_tasks(conf),
                RegisteredEngines(platform.registry, self._observer),
            ),
            *journal_api.routes(JournalReader(platform.database), self._tail, platform.clock),
            *webhooks_api.routes(WebhookStore(platform.database)),
        )

    def _store_answers(self) -> str:
        with self._platform.database.read() as tx:
            tx.execute(sa.text("SELECT 1"))
        return ""

    def _schedulers_listen(self) -> str:
        listening = self._platform.transport.listeners(SCHEDULERS)
        return "no scheduler is listening" if listening is not None and not listening else ""


def check(conf: cfg.ConfigOpts) -> None:
    """Refuse what the API role could not serve; opens nothing.

    :raises ConfigError: the address, a dialect, a mount or the policy cannot be used.
    """
    address_of(conf.api.bind)
    authentication.refuse_open_noauth(conf.api.auth_strategy, conf.api.bind)
    extensions = API_EXTENSIONS.chosen(conf)
    resolve_mounts({each.name: each.plugin.mount for each in extensions}, conf.api.mounts, ())
    _policy(conf, extensions)


def _policy(conf: cfg.ConfigOpts, extensions: Iterable[Loaded[ApiExtension]]) -> AccessPolicy:
    rules = (rule for each in extensions for rule in each.plugin.policies)
    return AccessPolicy((*core_policies(), *rules), conf.api.policy_file)


def dialects(tools: ApiTools, taken: Collection[str]) -> dict[str, Wsgi]:
    """The enabled dialects by the prefix they are mounted at.

    :param taken: prefixes that are in use already.
    :raises ConfigError: a plugin or mount that cannot be used.
    """
    conf = tools.conf
    loaded = API_EXTENSIONS.chosen(conf)
    prefixes = resolve_mounts({each.name: each.plugin.mount for each in loaded}, conf.api.mounts, taken)
    found: dict[str, Wsgi] = {}
    for each in loaded:
        found[prefixes[each.name]] = _built(each, tools)
    return found


def _built(loaded: Loaded[ApiExtension], tools: ApiTools) -> Wsgi:
    with loaded.building():
        application = loaded.plugin(tools).application()
    if not isinstance(application, Application):
        # That one contains its handlers itself, and answers in its dialect.
        application = IsolatedApp(application, loaded)
    return application
