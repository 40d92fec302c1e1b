# SPDX-License-Identifier: Apache-2.0
"""The operations server: what an agent does with the clusters of its host.

It refuses what carries a smaller token than the cluster has seen, and what two sweeps ask for twice is done once: the row goes
with the first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.control_plane.interface import AgentService, AgentTools
from moorage.rpc.server import rpc_method
from moorage_plugins.data_processing.engine import LocalEngine
from moorage_plugins.data_processing.store import DataStore
from moorage_plugins.data_processing.tasks import folder_of

__all__ = ["DataProcessingAgent"]

LOG = logging.getLogger(__name__)


class DataProcessingAgent(AgentService):
    """Makes and terminates clusters, and starts jobs in them."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: AgentTools) -> None:
        self._tools = tools
        self._store = DataStore(tools.database)
        self._engine = LocalEngine(folder_of(tools.conf))
        self._host = tools.identity.host
        #: One operation at a time: what is done to a cluster then has an order.
        self._lock = threading.Lock()

    @override
    def endpoints(self) -> Sequence[object]:
        return [self]

    @override
    def start(self) -> None:
        self.sweep()

    @override
    def sweep(self) -> None:
        """Do what a lost message asked for."""
        for uuid in self._store.cluster_ids(statuses=("Starting",), host=self._host):
            self.create_cluster(uuid)
        for uuid in self._store.cluster_ids(statuses=("Deleting",), host=self._host):
            found = self._store.cluster(uuid)
            if found is not None:
                self.terminate_cluster(uuid, found.fence)

    @override
    def stop(self) -> None:
        with self._lock:
            return

    @rpc_method
    def create_cluster(self, cluster: str) -> None:
        """Make it and call it active; one that is terminated meanwhile is removed by that."""
        with self._lock:
            found = self._store.cluster(cluster)
            if found is None or found.status != "Starting":
                return
            self._engine.create(cluster)
            self._run(lambda tx: self._store.set_cluster(tx, cluster, "Active", found.fence, expected=("Starting",)))

    @rpc_method
    def start_job(self, job: str) -> None:
        """Start it, if it was not."""
        found = self._store.job(job)
        if found is None or found.status != "Pending":
            return
        with self._lock:
            self._engine.start(found.cluster, job, found.command)

    @rpc_method
    def terminate_cluster(self, cluster: str, token: int) -> bool:
        """Kill its jobs and remove it; False when there is nothing to do.

        :raises Fenced: a later owner has written the cluster.
        """
        with self._lock:
            found = self._store.cluster(cluster)
            if found is None or found.status != "Deleting":
                return False
            if token < found.fence:
                raise errors.Fenced(
                    f"Cluster {cluster} is not terminated for token {token}: {found.fence} has been there since."
                )
            self._engine.remove(cluster)
            removed = bool(self._run(lambda tx: self._store.remove_cluster(tx, cluster, token)))
            if removed:
                LOG.info("Cluster %s was terminated.", cluster)
            return removed

    def _run(self, work: Any) -> Any:
        return self._tools.database.run(work)
