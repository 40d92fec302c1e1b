# SPDX-License-Identifier: Apache-2.0
"""Dialects under a WSGI server of one's own (uWSGI, gunicorn, mod_wsgi), each alone and at the root that the server gives it.

A dialect's plugin offers ``application = DialectCallable("its name")`` in a module ``wsgi``::

    gunicorn moorage_plugins.api.placement.wsgi:application
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable
from typing import Any

from oslo_log import log as logging

from moorage import errors
from moorage.api import auth
from moorage.api.mounts import Metrics
from moorage.api.policies import POLICIES
from moorage.api.policy import Policy
from moorage.api.role import living, with_middleware
from moorage.cleanup.workers import WorkerStore
from moorage.clock import SystemClock
from moorage.control_plane import config
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.interface import API_EXTENSIONS, ApiTools, Wsgi
from moorage.control_plane.process import RPC_VERSION, check_schema
from moorage.control_plane.roles import load_store
from moorage.control_plane.sharding import shards_for_new
from moorage.db import Database
from moorage.fleet.nodes import NodeStore
from moorage.rpc import client as rpc_client
from moorage.rpc import loading as rpc_loading
from moorage.services.heartbeat import LivenessObserver
from moorage.services.registry import ServiceRegistry

__all__ = ["DialectCallable", "build"]

LOG = logging.getLogger(__name__)
#: Configuration files, separated by colons; unset: /etc/moorage/moorage.conf where it exists.
FILES = "MOORAGE_CONFIG_FILES"
STATE_DIR = "MOORAGE_STATE_DIR"


def build(name: str) -> Wsgi:
    """The dialect's application, configured by the environment variables MOORAGE_CONFIG_FILES and MOORAGE_STATE_DIR.

    :raises ConfigError: the configuration, plugin or database cannot be used.
    """
    files = [file for file in os.environ.get(FILES, "").split(":") if file]
    conf = config.load(files=files, state_dir=os.environ.get(STATE_DIR))
    logging.setup(conf, f"moorage-{name}")
    clock = SystemClock()
    database = Database.from_config(conf, clock=clock)
    check_schema(database)
    loaded = API_EXTENSIONS.load(name)
    policy = Policy((*POLICIES, *loaded.plugin.policies), conf.api.policy_file)

    registry = ServiceRegistry(database, clock)
    observer = LivenessObserver(clock, conf.services.service_down_time)

    def sender() -> rpc_client.Sender:
        host = f"{os.uname().nodename}-{os.getpid()}"
        identity = ServiceRegistry(database, clock).enlist(f"api-{name}", host, rpc_version=RPC_VERSION)
        transport = rpc_loading.open_transport(conf, clock)
        return rpc_client.Sender(transport, identity.uuid, identity.epoch, timeout=conf.rpc.call_timeout)

    store = functools.cache(lambda: load_store(conf, database, clock))

    def fleet() -> Enrolment:
        # Schedulers are not told: they read the fleet anew by themselves.
        nodes = NodeStore(database)
        return Enrolment(
            database, nodes, store(), ServiceRegistry(database, clock), lambda: None, shards_for_new(nodes, conf)
        )

    tools = ApiTools(
        conf=conf,
        clock=clock,
        database=database,
        authenticate=auth.authenticator(conf),
        check_policy=policy.check,
        count=Metrics().count,
        store=store,
        fleet=fleet,
        sender=sender,
        workers=lambda: WorkerStore(database, lease_seconds=conf.cleanup.lease_seconds),
        services=lambda: living(registry, observer),
    )
    with loaded.building():
        application = loaded.plugin(tools).application()
    return with_middleware(application, conf)


class DialectCallable:
    """A WSGI callable that is built by the first request, in the worker process that serves it.

    A database that cannot be used, or any other mistake of the configuration, answers 503 and is told in the log; the next
    request tries again.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._application: Wsgi | None = None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """WSGI."""
        application = self._application
        if application is None:
            try:
                with self._lock:
                    application = self._application = self._application or build(self._name)
            except errors.MoorageError as error:
                LOG.error("The dialect %s cannot be served: %s", self._name, error.message)
                start_response("503 Service Unavailable", [("Content-Length", "0"), ("Retry-After", "5")])
                return []
        return application(environ, start_response)
