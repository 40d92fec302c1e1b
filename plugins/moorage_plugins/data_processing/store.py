# SPDX-License-Identifier: Apache-2.0
"""The rows of data processing. Every change of a state is one statement with its condition and its fence.

Periodic tasks and operations have tokens of different origins, so the row of a cluster has two fences. ``fence`` is the highest
token of the ring that a periodic task wrote with. ``operation_fence`` is the highest token of a worker row: the request of an
operation, the agent or cleaner that takes it, and its last write each carry theirs, and a smaller token writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from moorage import errors, randomness
from moorage.db import MICROSECONDS, Database, now
from moorage.db.ranges import within
from moorage.ring import position_of
from moorage.work import lease
from moorage.work.interface import OperationStore
from moorage_plugins.data_processing.statuses import ENDED, RESETTABLE
from moorage_plugins.data_processing.tables import clusters, jobs, proxy_users

__all__ = ["CLUSTER", "Cluster", "ClusterJob", "DataStore", "ProxyUser"]

#: The type of the worker rows of clusters.
CLUSTER = "cluster"
_FENCE = {"token": sa.bindparam("token", type_=sa.BigInteger)}
_SET_CLUSTER = lease.WRITE.update(clusters, clusters.c.uuid == sa.bindparam("of_uuid"), _FENCE).values(changed_at=now())
_SET_JOB = lease.WRITE.update(jobs, jobs.c.uuid == sa.bindparam("of_uuid"), _FENCE).values(changed_at=now())
_REMOVE_USER = lease.REMOVE.delete(proxy_users, proxy_users.c.name == sa.bindparam("of_name"), _FENCE)

Ranges = Sequence[tuple[int, int]] | None


def _of_operation(uuids: Sequence[str], token: int) -> sa.Update:
    """Returns the fenced write of an operation to its clusters."""
    return (
        sa.update(clusters)
        .where(clusters.c.uuid.in_(uuids), clusters.c.operation_fence <= token)
        .values(operation_fence=token)
    )


@dataclass(frozen=True, slots=True)
class Cluster:
    """A row of ``dp_clusters``; moments are microseconds of the database's clock."""

    uuid: str
    name: str
    host: str
    status: str
    transient: bool
    health: str
    changed_at: int
    used_at: int
    fence: int


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A row of ``dp_jobs``."""

    uuid: str
    cluster: str
    command: Sequence[str]
    status: str
    exit_code: int | None
    fence: int


@dataclass(frozen=True, slots=True)
class ProxyUser:
    """A row of ``dp_proxy_users``: what a job may act as while it runs."""

    name: str
    job: str


_CLUSTER = (
    clusters.c.uuid, clusters.c.name, clusters.c.host, clusters.c.status, clusters.c.transient, clusters.c.health,
    clusters.c.changed_at, clusters.c.used_at, clusters.c.fence,
)  # fmt: skip
_JOB = (jobs.c.uuid, jobs.c.cluster, jobs.c.command, jobs.c.status, jobs.c.exit_code, jobs.c.fence)


class DataStore:
    """Clusters, jobs and proxy users. Safe for use by several threads.

    :param workers: where operations on clusters are recorded.
    """

    def __init__(self, database: Database, workers: OperationStore) -> None:
        self._database = database
        self._workers = workers

    # -- making ---------------------------------------------------------------------------------------------------

    def create_cluster(self, name: str, host: str, *, transient: bool = False, status: str = "Starting") -> str:
        """A cluster that the agent of the host is to make; its uuid. With another status it is a row alone."""
        uuid = randomness.new_uuid()
        row = {
            "uuid": uuid, "name": name, "host": host, "status": status, "transient": transient, "health": "unknown",
            "changed_at": now(), "used_at": now(), "fence": 0, "position": position_of(uuid),
        }  # fmt: skip

        def work(tx: sa.Connection) -> None:
            token = 0
            if status == "Starting":
                token = self._workers.create(tx, CLUSTER, uuid, "create", status, target_host=host)
            tx.execute(sa.insert(clusters).values({**row, "operation_fence": token}))

        self._database.run(work)
        return uuid

    def delete_cluster(self, uuid: str) -> Cluster:
        """Has its agent terminate it, also while another operation is in progress, and returns it as it is now.

        :raises NotFound: there is none. :raises Conflict: it has changed in this moment.
        """

        def work(tx: sa.Connection) -> Cluster:
            found = self._cluster(tx, uuid)
            if found is None:
                raise errors.NotFound(f"There is no cluster {uuid}.")
            if found.status != "Deleting":
                token = self._terminate(tx, found)
                change = _of_operation([uuid], token).where(clusters.c.status == found.status)
                if tx.execute(change.values(status="Deleting", changed_at=now())).rowcount != 1:
                    raise errors.Conflict(f"Cluster {uuid} has just changed; try again.")
            return replace(found, status="Deleting")

        return self._database.run(work)

    def reset_cluster(self, uuid: str, status: str) -> Cluster:
        """Sets the status as an operator says and returns the cluster. An operation in progress ends: it writes nothing more.

        :raises InvalidInput: that status cannot be set.
        :raises NotFound: there is no such cluster.
        """
        if status not in RESETTABLE:
            raise errors.InvalidInput(
                f"The status of a cluster can be reset to {' or '.join(RESETTABLE)}, not to {status!r}.",
                path="body/status",
            )

        def work(tx: sa.Connection) -> Cluster:
            token = self._workers.reset(tx, CLUSTER, uuid)
            change = _of_operation([uuid], token).values(status=status, changed_at=now())
            written = tx.execute(change).rowcount == 1
            found = self._cluster(tx, uuid)
            if found is None or not written:
                raise errors.NotFound(f"There is no cluster {uuid}.")
            return found

        return self._database.run(work)

    def _terminate(self, tx: Any, cluster: Cluster) -> int:
        """Records the termination and returns its token. An operation in progress is overtaken: it writes nothing more."""
        return self._workers.create(
            tx, CLUSTER, cluster.uuid, "terminate", "Deleting", target_host=cluster.host, force=True
        )

    def create_job(self, cluster: str, command: Sequence[str]) -> str:
        """A job that is to run in an active cluster, with its proxy user; its uuid.

        :raises Conflict: the cluster is not active. :raises NotFound: there is none.
        """
        uuid = randomness.new_uuid()
        job = {
            "uuid": uuid, "cluster": cluster, "command": list(command), "status": "Pending", "exit_code": None,
            "fence": 0, "changed_at": now(), "position": position_of(uuid),
        }  # fmt: skip
        # Writing the cluster's row makes this take turns with a termination.
        use = sa.update(clusters).where(clusters.c.uuid == cluster, clusters.c.status == "Active").values(used_at=now())

        def work(tx: sa.Connection) -> None:
            if tx.execute(use).rowcount != 1:
                found = self._cluster(tx, cluster)
                if found is None:
                    raise errors.NotFound(f"There is no cluster {cluster}.")
                raise errors.Conflict(f"Cluster {cluster} is {found.status}; a job can be run in one that is Active.")
            tx.execute(sa.insert(jobs).values(job))
            tx.execute(sa.insert(proxy_users).values(name=f"job-{uuid}", job=uuid, fence=0))

        self._database.run(work)
        return uuid

    def cancel_job(self, uuid: str) -> ClusterJob:
        """Have its agent kill it; as it is now.

        :raises NotFound: there is none. :raises Conflict: it has ended.
        """
        change = sa.update(jobs).where(jobs.c.uuid == uuid, jobs.c.status.in_(("Pending", "Running")))

        def work(tx: sa.Connection) -> ClusterJob:
            tx.execute(change.values(status="ToBeKilled", changed_at=now()))
            return self._must_job(tx, uuid)

        found = self._database.run(work)
        if found.status in ENDED:
            raise errors.Conflict(f"Job {uuid} has ended already: {found.status}.")
        return found

    def delete_job(self, uuid: str) -> None:
        """Forget a job that has ended.

        :raises NotFound: there is none. :raises Conflict: it has not ended.
        """
        gone = sa.delete(jobs).where(jobs.c.uuid == uuid, jobs.c.status.in_(ENDED))

        def work(tx: sa.Connection) -> None:
            if tx.execute(gone).rowcount != 1:
                found = self._must_job(tx, uuid)
                raise errors.Conflict(f"Job {uuid} is {found.status}; cancel it first.")

        self._database.run(work)

    # -- reading --------------------------------------------------------------------------------------------------

    def cluster(self, uuid: str) -> Cluster | None:
        """One cluster, or None."""
        with self._database.read() as tx:
            return self._cluster(tx, uuid)

    def job(self, uuid: str) -> ClusterJob | None:
        """One job, or None."""
        with self._database.read() as tx:
            return self._job(tx, uuid)

    def clusters(self, *, after: str = "", limit: int = 1000, status: str | None = None) -> Sequence[Cluster]:
        """Clusters by uuid, a page of ``limit`` after the given one."""
        query = sa.select(*_CLUSTER).where(clusters.c.uuid > after).order_by(clusters.c.uuid).limit(limit)
        if status is not None:
            query = query.where(clusters.c.status == status)
        with self._database.read() as tx:
            return [Cluster(*row) for row in tx.execute(query)]

    def job_page(
        self, *, after: str = "", limit: int = 1000, status: str | None = None, cluster: str | None = None
    ) -> Sequence[ClusterJob]:
        """Jobs likewise."""
        query = sa.select(*_JOB).where(jobs.c.uuid > after).order_by(jobs.c.uuid).limit(limit)
        if status is not None:
            query = query.where(jobs.c.status == status)
        if cluster is not None:
            query = query.where(jobs.c.cluster == cluster)
        with self._database.read() as tx:
            return [ClusterJob(*row) for row in tx.execute(query)]

    def proxy_users(self, *, after: str = "", limit: int = 1000) -> Sequence[ProxyUser]:
        """Proxy users by name, likewise."""
        columns = (proxy_users.c.name, proxy_users.c.job)
        query = sa.select(*columns).where(proxy_users.c.name > after).order_by(proxy_users.c.name).limit(limit)
        with self._database.read() as tx:
            return [ProxyUser(*row) for row in tx.execute(query)]

    def jobs_to_do(self, host: str) -> Sequence[ClusterJob]:
        """Returns the jobs that the agent of a host has to start or to kill."""
        query = (
            sa.select(*_JOB)
            .join(clusters, clusters.c.uuid == jobs.c.cluster)
            .where(clusters.c.host == host, clusters.c.status == "Active", jobs.c.status.in_(("Pending", "ToBeKilled")))
        )
        with self._database.read() as tx:
            return [ClusterJob(*row) for row in tx.execute(query)]

    def known(self, uuids: Sequence[str]) -> frozenset[str]:
        """Returns the uuids of the clusters that exist."""
        with self._database.read() as tx:
            return frozenset(tx.execute(sa.select(clusters.c.uuid).where(clusters.c.uuid.in_(uuids))).scalars())

    @staticmethod
    def _cluster(tx: Any, uuid: str) -> Cluster | None:
        row = tx.execute(sa.select(*_CLUSTER).where(clusters.c.uuid == uuid)).first()
        return None if row is None else Cluster(*row)

    @staticmethod
    def _job(tx: Any, uuid: str) -> ClusterJob | None:
        row = tx.execute(sa.select(*_JOB).where(jobs.c.uuid == uuid)).first()
        return None if row is None else ClusterJob(*row)

    def _must_job(self, tx: Any, uuid: str) -> ClusterJob:
        found = self._job(tx, uuid)
        if found is None:
            raise errors.NotFound(f"There is no job {uuid}.")
        return found

    def jobs(self, cluster: str) -> Sequence[ClusterJob]:
        """Returns the jobs of a cluster."""
        with self._database.read() as tx:
            return [ClusterJob(*row) for row in tx.execute(sa.select(*_JOB).where(jobs.c.cluster == cluster))]

    def cluster_ids(
        self,
        *,
        statuses: Sequence[str] = (),
        without: Sequence[str] = (),
        transient: bool | None = None,
        ranges: Ranges = None,
    ) -> Sequence[str]:
        """Ids of clusters, of some statuses, at some positions."""
        query = sa.select(clusters.c.uuid)
        if statuses:
            query = query.where(clusters.c.status.in_(statuses))
        if without:
            query = query.where(clusters.c.status.not_in(without))
        if transient is not None:
            query = query.where(clusters.c.transient == sa.literal(transient))
        return self._ids(query, clusters.c.position, ranges)

    def open_job_ids(self, ranges: Ranges = None) -> Sequence[str]:
        """Ids of jobs that have not ended."""
        return self._ids(sa.select(jobs.c.uuid).where(jobs.c.status.not_in(ENDED)), jobs.c.position, ranges)

    def proxy_user_names(self) -> Sequence[str]:
        """Returns all of them."""
        return self._ids(sa.select(proxy_users.c.name), None, None)

    def _ids(self, query: Any, position: Any, ranges: Ranges) -> Sequence[str]:
        if ranges is not None:
            query = query.where(within(position, ranges))
        with self._database.read() as tx:
            return list(tx.execute(query).scalars())

    # -- changing, in the caller's transaction ----------------------------------------------------------------------

    def stamp_token(self, tx: Any, uuids: Sequence[str], token: int) -> None:
        """Writes the token of operations that were just taken into their clusters, so that earlier owners can write nothing."""
        tx.execute(_of_operation(uuids, token))

    def set_final_status(self, tx: Any, uuid: str, status: str, token: int) -> bool:
        """Ends the making of a cluster with a status; False when a later operation wrote the cluster or it is not being made."""
        change = _of_operation([uuid], token).where(clusters.c.status == "Starting")
        return bool(tx.execute(change.values(status=status, changed_at=now())).rowcount == 1)

    def idle(self, tx: Any, uuid: str, token: int, *, seconds: float) -> bool:
        """Flip an active cluster to ``Deleting`` where nothing runs in it and nothing has for so long."""
        busy = sa.exists().where(jobs.c.cluster == uuid, jobs.c.status.not_in(ENDED))
        oldest = now() - int(seconds * MICROSECONDS)
        return self._mark_for_termination(
            tx, uuid, token, clusters.c.status == "Active", ~busy, clusters.c.used_at <= oldest
        )

    def overdue(self, tx: Any, uuid: str, token: int, *, seconds: float, without: Sequence[str]) -> bool:
        """Flip a cluster to ``Deleting`` that has been in any other status for so long."""
        oldest = now() - int(seconds * MICROSECONDS)
        return self._mark_for_termination(
            tx, uuid, token, clusters.c.status.not_in(without), clusters.c.changed_at <= oldest
        )

    def _mark_for_termination(self, tx: Any, uuid: str, token: int, *conditions: Any) -> bool:
        """Flip a cluster to ``Deleting`` under those conditions and the fence, and record its termination.

        :raises Conflict: it changed between two statements; the transaction must be rolled back.
        """
        row = tx.execute(sa.select(*_CLUSTER).where(clusters.c.uuid == uuid, *conditions)).first()
        if row is None or Cluster(*row).fence > token:
            return False
        # The worker row first, as all do that write both.
        operation = self._terminate(tx, Cluster(*row))
        flip = _SET_CLUSTER.where(*conditions, clusters.c.operation_fence <= operation)
        flip = flip.values(status="Deleting", operation_fence=operation)
        if tx.execute(flip, {"of_uuid": uuid, "token": token}).rowcount != 1:
            raise errors.Conflict(f"Cluster {uuid} has just changed.")
        return True

    def set_health(self, tx: Any, uuid: str, health: str, token: int) -> bool:
        """Write the health, which is no change of the cluster."""
        statement = lease.WRITE.update(clusters, clusters.c.uuid == uuid, {"token": token}).values(health=health)
        return bool(tx.execute(statement).rowcount == 1)

    def set_job(
        self, tx: Any, uuid: str, status: str, token: int, *, exit_code: int | None, expected: Sequence[str]
    ) -> bool:
        """Flip a job's status; when it has ended, its cluster counts as used until now."""
        statement = _SET_JOB.where(jobs.c.status.in_(expected)).values(status=status, exit_code=exit_code)
        if tx.execute(statement, {"of_uuid": uuid, "token": token}).rowcount != 1:
            return False
        if status in ENDED:
            of_job = sa.select(jobs.c.cluster).where(jobs.c.uuid == uuid).scalar_subquery()
            tx.execute(sa.update(clusters).where(clusters.c.uuid == of_job).values(used_at=now()))
        return True

    def remove_zombie(self, tx: Any, name: str, token: int) -> bool:
        """Remove a proxy user whose job has ended or is gone; False when its job needs it."""
        needed = sa.exists().where(jobs.c.uuid == proxy_users.c.job, jobs.c.status.not_in(ENDED))
        return bool(tx.execute(_REMOVE_USER.where(~needed), {"of_name": name, "token": token}).rowcount == 1)

    def remove_cluster(self, tx: Any, uuid: str, token: int) -> bool:
        """Removes the row of a cluster that is being deleted, whose jobs were killed; False when a later operation wrote it."""
        killed = sa.update(jobs).where(jobs.c.cluster == uuid, jobs.c.status.not_in(ENDED))
        gone = sa.delete(clusters).where(
            clusters.c.uuid == uuid, clusters.c.status == "Deleting", clusters.c.operation_fence <= token
        )
        if tx.execute(gone).rowcount != 1:
            return False
        tx.execute(killed.values(status="Killed", changed_at=now()))
        return True
