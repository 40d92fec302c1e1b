# SPDX-License-Identifier: Apache-2.0
"""Dialects served alone, by the production server, over a database of their own."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from oslo_config import cfg

from moorage import errors
from moorage.clock import SystemClock
from moorage.context import RequestContext
from moorage.control_plane import api_assembly, config
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.factories import load_store
from moorage.control_plane.interface import API_EXTENSIONS, ApiTools
from moorage.control_plane.policies import core_policies
from moorage.db import Database, migrations
from moorage.fleet.nodes import NodeStore
from moorage.http.authentication import Authenticator
from moorage.http.middleware import with_middleware
from moorage.http.mounts import MountDispatcher
from moorage.http.policy import AccessPolicy
from moorage.http.server import Server
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import ServiceRegistry
from moorage.work.operations import SqlOperationStore

__all__ = ["LiveDialect", "token_is_role"]


def token_is_role(environ: Mapping[str, Any]) -> RequestContext:
    """Who is calling, by what the caller says: for suites that were written for a server without real authentication.

    The token is ``user[:project]``; X-Roles lists roles (without it, only the user ``admin`` has one); OpenStack-System-Scope
    takes the project away.
    """
    token = environ.get("HTTP_X_AUTH_TOKEN")
    if not token:
        raise errors.Unauthenticated("There is no X-Auth-Token.")
    user, _, project = token.partition(":")
    given = environ.get("HTTP_X_ROLES")
    roles = [role.strip() for role in given.split(",")] if given else (["admin"] if user == "admin" else [])
    scope = environ.get("HTTP_OPENSTACK_SYSTEM_SCOPE")
    return RequestContext(
        user_id=user,
        project_id=None if scope else environ.get("HTTP_X_PROJECT_ID") or project or user,
        system_scope=scope,
        roles=roles,
        overwrite=False,
    )


class LiveDialect:
    """One dialect behind a socket.

    :param url: of an empty database; None: a file of its own.
    :param options: the configuration's text.
    :param sender: opens a way to agents and schedulers; None: there are none.
    """

    def __init__(
        self,
        name: str,
        mount: str = "/",
        *,
        url: str | None = None,
        options: str = "",
        policies: str = "",
        authenticate: Authenticator = token_is_role,
        sender: Callable[[], Any] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(self._folder.name)
        (folder / "policy.yaml").write_text(policies or "{}")
        (folder / "moorage.conf").write_text(options)
        overrides: dict[tuple[str, str], Any] = {
            ("api", "enabled_apis"): [name],
            ("api", "mounts"): {name: mount},
            ("api", "policy_file"): str(folder / "policy.yaml"),
        }
        if url is not None:
            overrides["database", "connection"] = url
        self.conf: cfg.ConfigOpts = config.load(
            files=[str(folder / "moorage.conf")], state_dir=str(folder), overrides=overrides
        )
        clock = SystemClock()
        self.database = Database.from_config(self.conf, clock=clock)
        migrations.upgrade_all(self.database)
        self.store = load_store(self.conf, self.database, clock)
        policy = AccessPolicy((*core_policies(), *API_EXTENSIONS.load(name).plugin.policies), self.conf.api.policy_file)
        registry = ServiceRegistry(self.database, clock)
        observer = LivenessObserver(clock, self.conf.services.service_down_time)
        enrolment = Enrolment(self.database, NodeStore(self.database), self.store, registry, lambda: None)
        self.tools = ApiTools(
            conf=self.conf,
            clock=clock,
            database=self.database,
            authenticate=authenticate,
            check_policy=policy.check,
            count=lambda *_: None,
            store=lambda: self.store,
            fleet=lambda: enrolment,
            sender=sender or _nobody,
            workers=lambda: SqlOperationStore(self.database, lease_seconds=self.conf.cleanup.lease_seconds),
            services=lambda: api_assembly.living(registry, observer),
        )
        self.registry = registry
        dialects = api_assembly.dialects(self.tools, ())
        self._server = Server(
            "127.0.0.1:0", with_middleware(MountDispatcher(dialects), self.conf), threads=8, drain_seconds=1
        )
        self._server.start()
        self.url = self._server.url + mount.rstrip("/")

    def close(self) -> None:
        """End the server and forget the database."""
        self._server.stop()
        self.database.close()
        self._folder.cleanup()


def _nobody() -> Any:
    raise errors.NoListener("There are no agents here.")
