# SPDX-License-Identifier: Apache-2.0
"""The operations server: what an agent does with the clusters of its host.

Each operation on a cluster has a worker row, which the agent takes, and which ends in the transaction of the operation's last
write; so one that was overtaken, by a termination or by a cleaner, writes nothing. A termination that a periodic task asks for with
a smaller token than the cluster has seen is refused, and what two sweeps ask for twice is done once: the row goes with the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, threads
from moorage.control_plane.interface import AgentService, AgentTools
from moorage.rpc.server import rpc_method
from moorage.work.interface import Lease
from moorage_plugins.data_processing.engine import LocalEngine
from moorage_plugins.data_processing.store import CLUSTER, ENDED, OPEN, DataStore
from moorage_plugins.data_processing.tasks import folder_of

__all__ = ["DataProcessingAgent"]

LOG = logging.getLogger(__name__)
_PAGE = 500
#: After so many tries a cluster that cannot be made is called so.
_ATTEMPTS = 3
#: Folders without a cluster are looked for in the first of so many sweeps.
_STRANGERS = 20


class DataProcessingAgent(AgentService):
    """Makes and terminates clusters, starts and kills jobs in them."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: AgentTools) -> None:
        self._tools = tools
        self._store = DataStore(tools.database, tools.workers)
        self._engine = LocalEngine(folder_of(tools.conf))
        self._host = tools.identity.host
        self._sweeps = 0
        #: One operation at a time: what is done to a cluster then has an order.
        self._lock = threads.lock()

    @override
    def endpoints(self) -> Sequence[object]:
        return [self]

    @override
    def start(self) -> None:
        self.sweep()

    @override
    def sweep(self) -> None:
        """Do what a lost message asked for, and what an earlier epoch left."""
        after = ""
        while True:
            page = self._tools.workers.pending(CLUSTER, self._tools.identity, after=after, limit=_PAGE)
            for worker in page:
                self._operate(worker.resource_id)
            if len(page) < _PAGE:
                break
            after = page[-1].resource_id
        for job in self._store.jobs_to_do(self._host):
            (self.start_job if job.status == "Pending" else self.cancel_job)(job.uuid)
        if self._sweeps % _STRANGERS == 0:
            self._remove_strangers()
        self._sweeps += 1

    @override
    def stop(self) -> None:
        with self._lock:
            return

    # -- clusters -------------------------------------------------------------------------------------------------

    @rpc_method
    def create_cluster(self, cluster: str) -> bool:
        """Make it, if that is to be done; True when it is made, False when somebody else does or did."""
        return self._operate(cluster)

    @rpc_method
    def terminate_cluster(self, cluster: str, token: int) -> bool:
        """Kill its jobs and remove it; False when there is nothing to do.

        :raises Fenced: a later owner has written the cluster.
        """
        found = self._store.cluster(cluster)
        if found is None or found.status != "Deleting":
            return False
        if token < found.fence:
            raise errors.Fenced(
                f"Cluster {cluster} is not terminated for token {token}: {found.fence} has been there since."
            )
        return self._operate(cluster)

    def _operate(self, cluster: str) -> bool:
        """Do the operation that is recorded for a cluster, if nobody does; whether it was done."""
        with self._lock:
            held = self._tools.workers.take_many(
                CLUSTER, [cluster], self._tools.identity, stamp_token=self._stamp_token
            ).get(cluster)
            if held is None:
                return False
            try:
                return self._do(held)
            except errors.Fenced as error:
                LOG.info("%s", error.message)
            except errors.MoorageError as error:
                held.release(error.message)
            return False

    def _stamp_token(self, transaction: Any, taken: Mapping[str, Lease]) -> None:
        for uuid, held in taken.items():
            self._store.stamp_token(transaction, [uuid], held.token)

    def _do(self, held: Lease) -> bool:
        uuid = held.resource_id
        if held.operation == "terminate":
            self._engine.remove(uuid)
            done = held.finish_with(lambda tx: self._store.remove_cluster(tx, uuid, held.token))
            LOG.info("Cluster %s was terminated.", uuid)
            return done
        status = "Active"
        try:
            self._engine.create(uuid)
        except errors.Unavailable as error:
            if held.attempts < _ATTEMPTS:
                raise
            LOG.warning("Cluster %s is given up: %s", uuid, error.message)
            status = "Error"
        return held.finish_with(lambda tx: self._store.settle(tx, uuid, status, held.token)) and status == "Active"

    @rpc_method
    def report_health(self, cluster: str, token: int) -> bool:
        """Write down whether an active cluster can work; False when nothing changed, or a later owner has written it."""
        found = self._store.cluster(cluster)
        health = "green" if self._engine.healthy(cluster) else "red"
        if found is None or found.status != "Active" or found.health == health:
            return False
        return bool(self._tools.database.run(lambda tx: self._store.set_health(tx, cluster, health, token)))

    def _remove_strangers(self) -> None:
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
