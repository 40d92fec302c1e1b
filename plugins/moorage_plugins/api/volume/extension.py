# SPDX-License-Identifier: Apache-2.0
"""The plugin ``volume`` of the group moorage.api."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, randomness, threads
from moorage.control_plane.interface import ApiExtension
from moorage.http.routes import Route, Wsgi
from moorage.services.interface import AGENT, Service
from moorage_plugins.api.volume import resources, workers
from moorage_plugins.api.volume.application import DIALECT, VolumeApplication, versions_document
from moorage_plugins.block_storage.service import BlockStorage

__all__ = ["VolumeApi"]

LOG = logging.getLogger(__name__)
#: With and without a project in the path: clients do either.
_PREFIXES = ("/v3", "/v3/{project_id}")
_SCHEDULER = "scheduler"
#: The agent service that works on volumes.
_SERVICE = "block_storage"


class VolumeApi(ApiExtension):
    """Cleanup of workers, volumes, snapshots and backups for Cinder's clients, microversions 3.0 to 3.72."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    mount = "/volume"
    policies = (*workers.POLICIES, *resources.POLICIES)

    @override
    def application(self) -> Wsgi:
        tools = self.tools
        self._lock = threads.lock()
        self._opened: Any = None
        storage = BlockStorage(tools.conf, tools.database, tools.workers(), self._place, self._tell)
        gigabyte = int(tools.conf.block_storage.gigabyte_bytes)
        versions = [Route("GET", path, versions_document, public=True) for path in ("", "/", "/v3", "/v3/")]
        routes = [
            *versions,
            *workers.routes(self._ask, _PREFIXES),
            *resources.routes(storage, gigabyte, _PREFIXES),
        ]
        return VolumeApplication(DIALECT, routes, tools)

    def _sender(self) -> Any:
        """Opened by the first request that needs it, and shared."""
        with self._lock:
            if self._opened is None:
                self._opened = self.tools.sender()
            return self._opened

    def _ask(self, method: str, args: Mapping[str, Any]) -> Any:
        """Any scheduler; another one when it is lost, since a request that is made twice is one."""
        attempts = int(self.tools.conf.control_plane.create_attempts)
        for attempt in range(1, attempts + 1):
            try:
                return self._sender().call(_SCHEDULER, method, dict(args))
            except errors.TransportError as error:
                if attempt == attempts:
                    raise
                LOG.warning("A scheduler was lost (%s); another one is asked.", error.message)
        raise AssertionError("unreachable")

    def _place(self) -> str:
        """A location whose agents offer block storage and take new work: a cluster, or a host without a cluster."""
        able = [each.cluster or each.host for each in self._agents() if not each.disabled]
        if not able:
            raise errors.Unavailable(
                f"No agent that is up and enabled offers {_SERVICE}. See the column offers of moorage service list; [agent] "
                "services of an agent says what it runs."
            )
        return randomness.generator().choice(able)

    def _agents(self) -> list[Service]:
        return [service for service, up in self.tools.services() if up and service.can(_SERVICE)]

    def _tell(self, location: str, kind: str, uuid: str) -> None:
        able = [each.host for each in self._agents() if location in (each.host, each.cluster)]
        if not able:
            LOG.warning(
                "No agent of %s is up and offers %s; the operation on %s %s waits.", location, _SERVICE, kind, uuid
            )
            return
        host = randomness.generator().choice(able)
        args = {"resource_type": kind, "uuid": uuid}
        try:
            self._sender().cast(AGENT, "block_storage_operation", args, server=host)
        except errors.TransportError as error:
            LOG.warning("Agent %s got no message about %s %s (%s); it finds it by itself.", host, kind, uuid, error)
