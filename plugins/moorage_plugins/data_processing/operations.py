# SPDX-License-Identifier: Apache-2.0
"""The operations server: what an agent does with the clusters of its host.

Each operation on a cluster has a worker row, which the agent takes, and which ends in the transaction of the operation's last
write; so one that was overtaken, by a termination or by a cleaner, writes nothing. A termination that a periodic task asks for with
a smaller token than the cluster has seen is refused, and what two sweeps ask for twice is done once: the row goes with the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, threads
from moorage.control_plane.interface import AgentTools, LoopService
from moorage.rpc.server import rpc_method
from moorage.work.interface import Lease
from moorage.work.job import Job, Work
from moorage_plugins.data_processing.engine import LocalEngine
from moorage_plugins.data_processing.statuses import ENDED, OPEN
from moorage_plugins.data_processing.store import CLUSTER, DataStore
from moorage_plugins.data_processing.tasks import folder_of

__all__ = ["ClusterWork", "DataProcessingAgent"]

LOG = logging.getLogger(__name__)
_PAGE = 500
#: After so many tries a cluster that cannot be made is called so.
_ATTEMPTS = 3
#: The first of so many sweeps looks for folders without a cluster.
_UNKNOWN_CLUSTERS = 20


class DataProcessingAgent(LoopService):
    """Makes and terminates clusters, starts and kills jobs in them."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: AgentTools) -> None:
        self._tools = tools
        self._store = DataStore(tools.database, tools.workers)
        self._engine = LocalEngine(folder_of(tools.conf))
        self._host = tools.identity.host
        self._sweeps = 0
        #: One operation or job at a time: what is done to a cluster then has an order.
        self._lock = threads.lock()
        work = ClusterWork(tools, self._store, self._engine, self._lock)
        self.loop = tools.work_loop("data-processing", work, operations=1)

    @override
    def sweep(self) -> None:
        """Does what a lost message asked for, and what an earlier epoch left."""
        super().sweep()
        for job in self._store.jobs_to_do(self._host):
            (self.start_job if job.status == "Pending" else self.cancel_job)(job.uuid)
        if self._sweeps % _UNKNOWN_CLUSTERS == 0:
            self._remove_unknown_clusters()
        self._sweeps += 1

    # -- clusters -------------------------------------------------------------------------------------------------

    @rpc_method
    def create_cluster(self, cluster: str) -> None:
        """Makes a cluster."""
        self.loop.ask(CLUSTER, cluster)

    @rpc_method
    def terminate_cluster(self, cluster: str, token: int) -> None:
        """Kills the jobs of a cluster and removes it.

        :raises Fenced: a later owner has written the cluster.
        """
        found = self._store.cluster(cluster)
        if found is None or found.status != "Deleting":
            return
        if token < found.fence:
            raise errors.Fenced(
                f"Cluster {cluster} is not terminated for token {token}: {found.fence} has been there since."
            )
        self.loop.ask(CLUSTER, cluster)

    @rpc_method
    def report_health(self, cluster: str, token: int) -> bool:
        """Write down whether an active cluster can work; False when nothing changed, or a later owner has written it."""
        found = self._store.cluster(cluster)
        health = "green" if self._engine.healthy(cluster) else "red"
        if found is None or found.status != "Active" or found.health == health:
            return False
        return bool(self._tools.database.run(lambda tx: self._store.set_health(tx, cluster, health, token)))

    def _remove_unknown_clusters(self) -> None:
        """Remove the folders of clusters that are gone: a cleaner, which may not reach them, has ended their termination.

        The rows are read after the folders; a row is there before its folder is.
        """
        found = self._engine.clusters()
        for start in range(0, len(found), _PAGE):
            page = found[start : start + _PAGE]
            for uuid in sorted(set(page) - self._store.known(page)):
                LOG.warning("There is no cluster %s any more; what it left is removed.", uuid)
                try:
                    self._engine.remove(uuid)
                except errors.Unavailable as error:
                    LOG.warning("%s", error.message)

    # -- jobs -----------------------------------------------------------------------------------------------------

    @rpc_method
    def start_job(self, job: str) -> None:
        """Start it, if it was not."""
        with self._lock:
            found = self._store.job(job)
            if found is None or found.status != "Pending":
                return
            try:
                self._engine.start(found.cluster, job, found.command)
            except errors.Unavailable as error:
                LOG.warning("%s It is tried again.", error.message)

    @rpc_method
    def cancel_job(self, job: str) -> None:
        """Kill it, if that is to be done, and write down what became of it."""
        with self._lock:
            found = self._store.job(job)
            if found is None or found.status != "ToBeKilled":
                return
            try:
                self._engine.cancel(found.cluster, job)
            except errors.Unavailable as error:
                LOG.warning("%s It is tried again.", error.message)
                return
        self.report_job(job, found.fence)

    @rpc_method
    def report_job(self, job: str, token: int) -> bool:
        """Write down what has become of it; False when nothing has, or a later owner has written it."""
        found = self._store.job(job)
        if found is None or found.status in ENDED:
            return False
        status, code = self._engine.status(found.cluster, job)
        # One that is to be killed, and still runs, is called so until it has ended.
        expected = OPEN if status in ENDED else ("Pending", "Running")
        if status == found.status or found.status not in expected:
            return False
        return bool(
            self._tools.database.run(
                lambda tx: self._store.set_job(tx, job, status, token, exit_code=code, expected=expected)
            )
        )


class ClusterWork(Work[str]):
    """Makes and terminates clusters. The result is the cluster's status; empty: the cluster is gone."""

    types = (CLUSTER,)

    def __init__(self, tools: AgentTools, store: DataStore, engine: LocalEngine, lock: threads.Lock) -> None:
        super().__init__(tools.database, tools.workers, tools.identity)
        self._clusters = store
        self._engine = engine
        self._lock = lock

    @override
    def stamp_token(self, transaction: Any, leases: Mapping[str, Lease]) -> None:
        for uuid, held in leases.items():
            self._clusters.stamp_token(transaction, [uuid], held.token)

    @override
    def do(self, job: Job[str]) -> str:
        with self._lock:
            if job.lease.operation == "terminate":
                self._engine.remove(job.lease.resource_id)
                return ""
            self._engine.create(job.lease.resource_id)
            return "Active"

    @override
    def failed(self, job: Job[str], error: Exception) -> str | None:
        """A cluster that cannot be made is given up after some owners."""
        if job.lease.operation == "terminate" or job.lease.attempts < _ATTEMPTS:
            return None
        return "Error" if isinstance(error, errors.Unavailable) else None

    @override
    def finish(self, transaction: Any, job: Job[str], result: str) -> None:
        uuid, token = job.key[1], job.lease.token
        if result:
            self._clusters.set_final_status(transaction, uuid, result, token)
        else:
            self._clusters.remove_cluster(transaction, uuid, token)
