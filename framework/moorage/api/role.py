# SPDX-License-Identifier: Apache-2.0
"""The role ``api``: the application over the families, in the embedded server."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log as logging
from oslo_middleware import cors

from moorage import errors
from moorage.allocation import api as allocation_api
from moorage.allocation import pools_api
from moorage.api import auth
from moorage.api.application import PREFIX, Application
from moorage.api.collectors import CleanupCollector, PeriodicCollector
from moorage.api.mounts import Dispatcher, Health, Metrics, at_its_path, places
from moorage.api.policies import POLICIES
from moorage.api.policy import Policy
from moorage.api.server import Server
from moorage.cleanup import api as cleanup_api
from moorage.cleanup.requests import RequestStore
from moorage.cleanup.views import WorkerViews
from moorage.clock import Clock
from moorage.control_plane import api as control_plane_api
from moorage.control_plane import groups_api
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.interface import API_EXTENSIONS, ApiTools, Wsgi
from moorage.control_plane.operations import InPlace
from moorage.control_plane.periodic import EngineNames, enabled_tasks
from moorage.control_plane.placing import Deleter, cast_to_agent
from moorage.control_plane.process import Platform
from moorage.control_plane.roles import (
    Periodic,
    open_detectors,
    open_instances,
    open_store,
    open_workers,
    tell_schedulers,
)
from moorage.control_plane.sharding import open_plans, shards_for_new
from moorage.coordination import api as coordination_api
from moorage.coordination.ledger import SqlLedger
from moorage.coordination.task_store import TaskStore
from moorage.fleet import api as fleet_api
from moorage.fleet import facts_api
from moorage.fleet.aggregates import AggregateStore
from moorage.fleet.nodes import NodeStore
from moorage.fleet.properties import merge_properties
from moorage.observers.interface import ShardReassigned
from moorage.routes import Route
from moorage.rpc.client import Sender
from moorage.scheduling import api as scheduling_api
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.reporter import TOPIC as SCHEDULERS
from moorage.services import api as services_api
from moorage.services.heartbeat import LivenessObserver
from moorage.services.interface import Service
from moorage.services.registry import ServiceRegistry
from moorage.sharding import api as sharding_api

__all__ = ["ApiRole", "Schedulers", "dialects", "living", "with_middleware"]

LOG = logging.getLogger(__name__)
_CORE = PREFIX.rpartition("/")[0]


class Schedulers:
    """The API's way to the schedulers.

    :param attempts: how many are asked for one request, in all.
    :param timeout: seconds each of them has.  Without a connection to lose, a message queue cannot tell a dead scheduler
        from a slow one.
    """

    def __init__(self, sender: Sender, clock: Clock, attempts: int, timeout: float) -> None:
        self._sender = sender
        self._clock = clock
        self._attempts = attempts
        self._timeout = timeout

    def ask(self, method: str, args: Mapping[str, Any]) -> Any:
        """Ask any scheduler; another one when one is lost, because questions may be asked twice."""
        for attempt in range(1, self._attempts + 1):
            try:
                return self._sender.call(SCHEDULERS, method, dict(args), timeout=self._timeout)
            except errors.TransportError as error:
                if attempt == self._attempts:
                    raise
                LOG.warning("A scheduler was lost (%s); another one is asked.", error.message)
                self._clock.sleep(0.1 * attempt)
        raise AssertionError("unreachable")

    def find(self, method: str, args: Mapping[str, Any]) -> Any:
        """Ask one scheduler after the other until one knows."""
        names = self._sender.transport.listeners(SCHEDULERS)
        if not names:
            return self.ask(method, args)
        failure: errors.MoorageError = errors.NotFound("No scheduler is there to be asked.")
        for name in names:
            try:
                return self._sender.call(SCHEDULERS, method, dict(args), server=name, timeout=self._timeout)
            except errors.NotFound as error:
                failure = error
            except errors.TransportError as error:
                LOG.info("Scheduler %s was not asked: %s", name, error.message)
        raise failure

    def create_many(self, request: Mapping[str, Any], uuids: Sequence[str], request_id: str) -> None:
        """Place several instances alike, all or none; safe to ask again likewise."""
        self.ask("create_instances", {"request": dict(request), "uuids": list(uuids), "request_id": request_id})

    def move(self, uuid: str, operation: str, wanted: Mapping[str, Any], request_id: str) -> None:
        """Move an instance; safe to ask again, because the request_id is kept with what is in progress."""
        args = {"instance_uuid": uuid, "operation": operation, "wanted": dict(wanted), "request_id": request_id}
        self.ask("move_instance", args)

    def create(self, request: Mapping[str, Any], request_id: str) -> None:
        """Place an instance; safe to ask again, because uuid and request_id name the claim."""
        self.ask("create_instance", {"request": dict(request), "request_id": request_id})


class ApiRole:
    """Serves HTTP."""

    binary = "api"
    #: It answers 503 while the store is away, which says more than no answer.
    owns_work = False

    def start(self, platform: Platform, conf: cfg.ConfigOpts) -> None:
        """Build the application and listen."""
        auth.refuse_open_noauth(conf.api.auth_strategy, conf.api.bind)
        self._platform = platform
        self._metrics = Metrics()
        self._metrics.registry.register(CleanupCollector(platform.database))
        self._routes = self._all_routes(conf)
        self._metrics.registry.register(
            PeriodicCollector(
                platform.database,
                EngineNames(platform.registry, self._observer),
                lambda: living(platform.registry, self._observer),
            )
        )
        self._dispatcher = Dispatcher(self._mounts(conf))
        self._server = Server(
            conf.api.bind,
            self._dispatcher,
            threads=conf.api.threads,
            drain_seconds=conf.control_plane.drain_timeout,
            clock=platform.clock,
        )
        self._server.start()
        self.url = self._server.url
        self._beats = Periodic(platform, "watch over heartbeats", self._watch, conf.services.report_interval)

    def reload(self, conf: cfg.ConfigOpts) -> None:
        """New policy and limits, all or (by an error) none; requests that are being answered keep the old ones."""
        auth.refuse_open_noauth(conf.api.auth_strategy, conf.api.bind)
        self._dispatcher.swap(self._mounts(conf))

    def stop(self, drain_seconds: float) -> None:
        """Answer what was asked, then end."""
        self._server.stop()
        self._beats.stop()

    def _watch(self) -> None:
        self._observer.observe(self._platform.registry.list())

    def _all_routes(self, conf: cfg.ConfigOpts) -> tuple[Route, ...]:
        platform = self._platform
        store, instances = open_store(platform, conf), open_instances(platform, conf)
        self._store = store
        nodes = NodeStore(platform.database)
        self._observer = LivenessObserver(platform.clock, conf.services.service_down_time)
        section = conf.control_plane
        schedulers = Schedulers(platform.sender, platform.clock, section.create_attempts, section.create_timeout)
        groups = groups_api.Groups(GroupStore(platform.database), instances)
        changed = tell_schedulers(platform)
        enrolment = self._enrolment = Enrolment(
            platform.database, nodes, store, platform.registry, changed, shards_for_new(nodes, conf)
        )
        plans = open_plans(platform.database, nodes, instances, conf)
        workers, cast = open_workers(platform, conf), cast_to_agent(platform.sender)
        deleter = Deleter(platform.database, instances, workers, cast)
        in_place = InPlace(platform.database, instances, workers, cast)
        return (
            *services_api.routes(platform.registry, self._observer, changed),
            *fleet_api.routes(nodes, enrolment),
            *facts_api.routes(
                nodes,
                AggregateStore(platform.database),
                functools.partial(merge_properties, platform.database),
                changed,
            ),
            *allocation_api.routes(store),
            *pools_api.routes(store, open_detectors(platform, conf)),
            *scheduling_api.routes(schedulers, groups.resolved),
            *cleanup_api.routes(
                WorkerViews(platform.database, open_workers(platform, conf)),
                RequestStore(platform.database, platform.registry),
                schedulers,
            ),
            *control_plane_api.routes(instances, schedulers, deleter, in_place, groups.resolved),
            *groups_api.routes(groups),
            *sharding_api.routes(
                platform.database,
                nodes,
                plans,
                lambda plan, moved, conflicts: platform.tell(ShardReassigned(plan, moved, conflicts)),
            ),
            *coordination_api.routes(
                SqlLedger(platform.database),
                TaskStore(platform.database),
                enabled_tasks(conf),
                EngineNames(platform.registry, self._observer),
            ),
        )

    def _mounts(self, conf: cfg.ConfigOpts) -> Mapping[str, Wsgi]:
        extensions = API_EXTENSIONS.load_all(conf.api.enabled_apis)
        policy = Policy(
            (*POLICIES, *(rule for each in extensions for rule in each.plugin.policies)), conf.api.policy_file
        )
        authenticate = auth.authenticator(conf)
        application: Wsgi = Application(
            self._routes,
            authenticate,
            policy,
            conf,
            count=self._metrics.count,
            monotonic=self._platform.clock.monotonic,
        )
        application = with_middleware(application, conf)
        health = Health({"store": self._store_answers, "schedulers": self._schedulers_listen})
        own: dict[str, Wsgi] = {
            "/healthcheck": health,
            "/metrics": self._metrics,
            _CORE: at_its_path(application, _CORE),
        }
        tools = ApiTools(
            conf=conf,
            clock=self._platform.clock,
            database=self._platform.database,
            authenticate=authenticate,
            check_policy=policy.check,
            count=self._metrics.count,
            store=lambda: self._store,
            fleet=lambda: self._enrolment,
            sender=lambda: self._platform.sender,
            workers=lambda: open_workers(self._platform, conf),
            services=lambda: living(self._platform.registry, self._observer),
        )
        # The core answers at the root (with its versions) unless a dialect is mounted there.
        return {"": application, **own, **dialects(tools, own)}

    def _store_answers(self) -> str:
        with self._platform.database.read() as tx:
            tx.execute(sa.text("SELECT 1"))
        return ""

    def _schedulers_listen(self) -> str:
        listening = self._platform.transport.listeners(SCHEDULERS)
        return "no scheduler is listening" if listening is not None and not listening else ""


def living(registry: ServiceRegistry, observer: LivenessObserver) -> list[tuple[Service, bool]]:
    """All services, each with whether it is up."""
    rows = registry.list()
    up = observer.observe(rows)
    return [(row, up[row.uuid]) for row in rows]


def dialects(tools: ApiTools, taken: Mapping[str, Wsgi]) -> dict[str, Wsgi]:
    """The enabled dialects by the prefix they are mounted at.

    :param taken: what is mounted already.
    :raises ConfigError: a plugin or mount that cannot be used.
    """
    conf = tools.conf
    loaded = API_EXTENSIONS.load_all(conf.api.enabled_apis)
    prefixes = places({each.name: each.plugin.mount for each in loaded}, conf.api.mounts, taken)
    found: dict[str, Wsgi] = {}
    for each in loaded:
        with each.building():
            application = each.plugin(tools).application()
        found[prefixes[each.name]] = with_middleware(application, conf)
    return found


def with_middleware(application: Wsgi, conf: cfg.ConfigOpts) -> Wsgi:
    """An application behind what the configuration asks for: Keystone's tokens, and before them other origins (CORS)."""
    if conf.api.auth_strategy == "keystone":
        application = with_keystone(application, conf)
    if conf.cors.allowed_origin:
        # Browsers ask beforehand, without a token.
        application = cors.CORS(application, conf)
    return application


def with_keystone(application: Wsgi, conf: cfg.ConfigOpts) -> Any:
    """Keystonemiddleware before the application; it only marks who is calling, the application refuses."""
    try:
        auth_token = importlib.import_module("keystonemiddleware.auth_token")
    except ImportError as error:
        raise errors.ConfigError(
            "auth_strategy = keystone needs keystonemiddleware. Try: pip install 'moorage[keystone]'"
        ) from error
    return auth_token.AuthProtocol(
        application, {"oslo_config_config": conf, "delay_auth_decision": True, "oslo_config_project": "moorage"}
    )
