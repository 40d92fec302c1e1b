# SPDX-License-Identifier: Apache-2.0
"""The rows of data processing. Every change of a state is one statement with its condition and its fence."""

from __future__ import annotations

import uuid as uuid_module
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from moorage import errors, lease
from moorage.db import MICROSECONDS, Database, now
from moorage.db.ranges import within
from moorage.ring import position_of
from moorage_plugins.data_processing.tables import clusters, jobs, proxy_users

__all__ = ["ENDED", "Cluster", "DataStore", "Job"]

#: Statuses of jobs that change no more.
ENDED = ("Succeeded", "Failed", "Killed")
_FENCE = {"token": sa.bindparam("token", type_=sa.BigInteger)}
_SET_CLUSTER = lease.WRITE.update(clusters, clusters.c.uuid == sa.bindparam("of_uuid"), _FENCE).values(changed_at=now())
_SET_JOB = lease.WRITE.update(jobs, jobs.c.uuid == sa.bindparam("of_uuid"), _FENCE).values(changed_at=now())
_REMOVE_CLUSTER = lease.REMOVE.delete(clusters, clusters.c.uuid == sa.bindparam("of_uuid"), _FENCE)
_REMOVE_USER = lease.REMOVE.delete(proxy_users, proxy_users.c.name == sa.bindparam("of_name"), _FENCE)

Ranges = Sequence[tuple[int, int]] | None


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
class Job:
    """A row of ``dp_jobs``."""

    uuid: str
    cluster: str
    command: Sequence[str]
    status: str
    exit_code: int | None
    fence: int


_CLUSTER = (
    clusters.c.uuid, clusters.c.name, clusters.c.host, clusters.c.status, clusters.c.transient, clusters.c.health,
    clusters.c.changed_at, clusters.c.used_at, clusters.c.fence,
)  # fmt: skip
_JOB = (jobs.c.uuid, jobs.c.cluster, jobs.c.command, jobs.c.status, jobs.c.exit_code, jobs.c.fence)


class DataStore:
    """Clusters, jobs and proxy users. Safe for use by several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # -- making ---------------------------------------------------------------------------------------------------

    def create_cluster(self, name: str, host: str, *, transient: bool = False, status: str = "Starting") -> str:
        """A cluster that the agent of the host is to make; its uuid."""
        uuid = str(uuid_module.uuid4())
        row = {
            "uuid": uuid, "name": name, "host": host, "status": status, "transient": transient, "health": "unknown",
            "changed_at": now(), "used_at": now(), "fence": 0, "position": position_of(uuid),
        }  # fmt: skip
        self._database.run(lambda tx: tx.execute(sa.insert(clusters).values(row)))
        return uuid

    def create_job(self, cluster: str, command: Sequence[str]) -> str:
        """A job that is to run in an active cluster, with its proxy user; its uuid.

        :raises Conflict: the cluster is not active.
        """
        uuid = str(uuid_module.uuid4())
        job = {
            "uuid": uuid, "cluster": cluster, "command": list(command), "status": "Pending", "exit_code": None,
            "fence": 0, "changed_at": now(), "position": position_of(uuid),
        }  # fmt: skip
        # Writing the cluster's row makes this take turns with a termination.
        use = sa.update(clusters).where(clusters.c.uuid == cluster, clusters.c.status == "Active").values(used_at=now())

        def work(tx: sa.Connection) -> None:
            if tx.execute(use).rowcount != 1:
                raise errors.Conflict(f"Cluster {cluster} is not active, so nothing can run in it.")
            tx.execute(sa.insert(jobs).values(job))
            tx.execute(sa.insert(proxy_users).values(name=f"job-{uuid}", job=uuid, fence=0))

        self._database.run(work)
        return uuid

    # -- reading --------------------------------------------------------------------------------------------------

    def cluster(self, uuid: str) -> Cluster | None:
        """One cluster, or None."""
        with self._database.read() as tx:
            row = tx.execute(sa.select(*_CLUSTER).where(clusters.c.uuid == uuid)).first()
        return None if row is None else Cluster(*row)

    def job(self, uuid: str) -> Job | None:
        """One job, or None."""
        with self._database.read() as tx:
            row = tx.execute(sa.select(*_JOB).where(jobs.c.uuid == uuid)).first()
        return None if row is None else Job(*row)

    def jobs(self, cluster: str) -> Sequence[Job]:
        """The jobs of a cluster."""
        with self._database.read() as tx:
            return [Job(*row) for row in tx.execute(sa.select(*_JOB).where(jobs.c.cluster == cluster))]

    def cluster_ids(
        self,
        *,
        statuses: Sequence[str] = (),
        without: Sequence[str] = (),
        transient: bool | None = None,
        host: str | None = None,
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
        if host is not None:
            query = query.where(clusters.c.host == host)
        return self._ids(query, clusters.c.position, ranges)

    def open_job_ids(self, ranges: Ranges = None) -> Sequence[str]:
        """Ids of jobs that have not ended."""
        return self._ids(sa.select(jobs.c.uuid).where(jobs.c.status.not_in(ENDED)), jobs.c.position, ranges)

    def proxy_user_names(self) -> Sequence[str]:
        """All of them."""
        return self._ids(sa.select(proxy_users.c.name), None, None)

    def _ids(self, query: Any, position: Any, ranges: Ranges) -> Sequence[str]:
        if ranges is not None:
            query = query.where(within(position, ranges))
        with self._database.read() as tx:
            return list(tx.execute(query).scalars())

    # -- changing, in the caller's transaction ----------------------------------------------------------------------

    def set_cluster(self, tx: Any, uuid: str, status: str, token: int, *, expected: Sequence[str]) -> bool:
        """Flip the status where it is one of ``expected`` and no later owner has written; False when it was not."""
        statement = _SET_CLUSTER.where(clusters.c.status.in_(expected)).values(status=status)
        return bool(tx.execute(statement, {"of_uuid": uuid, "token": token}).rowcount == 1)

    def idle(self, tx: Any, uuid: str, token: int, *, seconds: float) -> bool:
        """Flip an active cluster to ``Deleting`` where nothing runs in it and nothing has for so long."""
        busy = sa.exists().where(jobs.c.cluster == uuid, jobs.c.status.not_in(ENDED))
        oldest = now() - int(seconds * MICROSECONDS)
        statement = _SET_CLUSTER.where(clusters.c.status == "Active", ~busy, clusters.c.used_at <= oldest).values(
            status="Deleting"
        )
        return bool(tx.execute(statement, {"of_uuid": uuid, "token": token}).rowcount == 1)

    def overdue(self, tx: Any, uuid: str, token: int, *, seconds: float, without: Sequence[str]) -> bool:
        """Flip a cluster to ``Deleting`` that has been in any other status for so long."""
        oldest = now() - int(seconds * MICROSECONDS)
        statement = _SET_CLUSTER.where(clusters.c.status.not_in(without), clusters.c.changed_at <= oldest).values(
            status="Deleting"
        )
        return bool(tx.execute(statement, {"of_uuid": uuid, "token": token}).rowcount == 1)

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
        """Remove the row of a cluster that is being deleted; its jobs were killed."""
        killed = sa.update(jobs).where(jobs.c.cluster == uuid, jobs.c.status.not_in(ENDED))
        statement = _REMOVE_CLUSTER.where(clusters.c.status == "Deleting")
        if tx.execute(statement, {"of_uuid": uuid, "token": token}).rowcount != 1:
            return False
        tx.execute(killed.values(status="Killed", changed_at=now()))
        return True
