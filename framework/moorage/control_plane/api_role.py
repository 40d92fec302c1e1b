# SPDX-License-Identifier: Apache-2.0
"""The role ``api``: serves all HTTP APIs with the embedded server."""

from __future__ import annotations

from oslo_config import cfg

from moorage.control_plane.api_assembly import ApiAssembly
from moorage.control_plane.periodic_loop import PeriodicLoop
from moorage.control_plane.process import Platform
from moorage.http import authentication
from moorage.http.mounts import MountDispatcher
from moorage.http.server import Server

__all__ = ["ApiRole"]


class ApiRole:
    """Serves HTTP."""

    binary = "api"
    #: It answers 503 while the store is away, which says more than no answer.
    owns_work = False

    def start(self, platform: Platform, conf: cfg.ConfigOpts) -> None:
        """Build the applications and listen."""
        authentication.refuse_open_noauth(conf.api.auth_strategy, conf.api.bind)
        self._assembly = ApiAssembly(platform, conf)
        self._dispatcher = MountDispatcher(self._assembly.mounts(conf))
        self._server = Server(
            conf.api.bind,
            self._dispatcher,
            threads=conf.api.threads,
            drain_seconds=conf.control_plane.drain_timeout,
            largest_body=conf.api.max_body_bytes,
            fatal=platform.fatal,
        )
        self._server.start()
        self.url = self._server.url
        self._beats = PeriodicLoop(
            platform, "watch over heartbeats", self._assembly.watch, conf.services.report_interval
        )

    def reload(self, conf: cfg.ConfigOpts) -> None:
        """Apply a new policy and new limits, all of them or, after an error, none. Requests in progress keep the old ones."""
        authentication.refuse_open_noauth(conf.api.auth_strategy, conf.api.bind)
        self._dispatcher.swap(self._assembly.mounts(conf))
        self._server.limit_bodies(conf.api.max_body_bytes)

    def stop(self, drain_seconds: float) -> None:
        """Answer the requests that have arrived, then end."""
        self._server.stop()
        self._assembly.stop()
        self._beats.stop()
