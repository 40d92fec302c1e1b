# SPDX-License-Identifier: Apache-2.0
"""The periodic tasks of the seed, and the health check. They look, flip a state under the fence, and send a message.

What a message asks for is done by the operations of the agent (:mod:`.operations`), so that a termination that hangs never stops
a sweep, and since only the machine that a job runs on can say what has become of it. A message that is lost is no loss: agents
look for clusters to terminate by themselves, and the next tick asks again for the rest.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.coordination.interface import PeriodicTask, TaskLease, TaskTools
from moorage_plugins.data_processing.statuses import ENDED
from moorage_plugins.data_processing.store import DataStore

__all__ = [
    "ClusterHealth",
    "TerminateIncompleteClusters",
    "TerminateUnneededTransientClusters",
    "UpdateJobStatuses",
    "ZombieProxyUsers",
    "folder_of",
]

LOG = logging.getLogger(__name__)

#: The topic of agents, which the operations are served on.
AGENTS = "agent"
_GONE = ("Deleting",)


def folder_of(conf: object) -> Path:
    """Where clusters keep their files."""
    section = conf.data_processing  # type: ignore[attr-defined]
    return Path(section.folder or Path(conf.control_plane.state_dir) / "data_processing")  # type: ignore[attr-defined]


class _Task(PeriodicTask):
    api_version: ClassVar[tuple[int, int]] = (1, 0)
    interval_option: ClassVar[str]

    def __init__(self, tools: TaskTools) -> None:
        super().__init__(tools)
        self.section = tools.conf.data_processing
        self.spacing = float(getattr(self.section, self.interval_option))
        self.store = DataStore(tools.database, tools.workers)

    def ask(self, cluster: str, method: str, args: dict[str, object]) -> bool:
        """Sends the agent of a cluster a message. Returns False if there is no agent or it was lost: the next tick asks again."""
        found = self.store.cluster(cluster)
        if found is None:
            return False
        try:
            self.tools.sender.cast(AGENTS, method, args, server=found.host)
        except errors.TransportError as error:
            LOG.info("The agent of cluster %s was not asked: %s", cluster, error.message)
            return False
        return True


class UpdateJobStatuses(_Task):
    """Have agents write down what has become of jobs, under the fence of this tick."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    interval_option = "update_job_statuses_interval"

    @override
    def list_objects(self) -> Sequence[str]:
        return self.store.open_job_ids()

    @override
    def objects_in(self, ranges: Sequence[tuple[int, int]]) -> Sequence[str] | None:
        return self.store.open_job_ids(ranges)

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        job = self.store.job(object_id)
        if job is None or job.status in ENDED:
            return False
        return self.ask(job.cluster, "report_job", {"job": object_id, "token": lease.token})


class _Terminating(_Task):
    @abc.abstractmethod
    def mark_for_termination(self, tx: object, object_id: str, token: int) -> bool:
        """Flip the cluster to ``Deleting`` if it is its time, and record the termination."""

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        try:
            if not lease.finish_with(lambda tx: self.mark_for_termination(tx, object_id, lease.token)):
                return False
        except errors.Conflict as error:
            LOG.info("%s It is looked at again at the next tick.", error.message)
            return False
        # A message that is lost is no loss: the agent finds the worker row by itself.
        self.ask(object_id, "terminate_cluster", {"cluster": object_id, "token": lease.token})
        return True


class TerminateUnneededTransientClusters(_Terminating):
    """Terminate transient clusters in which nothing has run for a while."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    interval_option = "transient_clusters_interval"

    @override
    def list_objects(self) -> Sequence[str]:
        return self.store.cluster_ids(statuses=("Active",), transient=True)

    @override
    def objects_in(self, ranges: Sequence[tuple[int, int]]) -> Sequence[str] | None:
        return self.store.cluster_ids(statuses=("Active",), transient=True, ranges=ranges)

    @override
    def mark_for_termination(self, tx: object, object_id: str, token: int) -> bool:
        return self.store.idle(tx, object_id, token, seconds=self.section.min_transient_cluster_active_time)


class TerminateIncompleteClusters(_Terminating):
    """Terminate clusters that did not become active in time."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    interval_option = "incomplete_clusters_interval"
    COMPLETE: ClassVar[tuple[str, ...]] = ("Active", "Error", *_GONE)

    @override
    def list_objects(self) -> Sequence[str]:
        return self._ids(None)

    @override
    def objects_in(self, ranges: Sequence[tuple[int, int]]) -> Sequence[str] | None:
        return self._ids(ranges)

    def _ids(self, ranges: Sequence[tuple[int, int]] | None) -> Sequence[str]:
        if not self.section.cleanup_time_for_incomplete_clusters:
            return []
        return self.store.cluster_ids(without=self.COMPLETE, ranges=ranges)

    @override
    def mark_for_termination(self, tx: object, object_id: str, token: int) -> bool:
        seconds = self.section.cleanup_time_for_incomplete_clusters * 3600
        return self.store.overdue(tx, object_id, token, seconds=seconds, without=self.COMPLETE)


class ZombieProxyUsers(_Task):
    """Remove proxy users whose job has ended."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    interval_option = "zombie_proxy_users_interval"

    @override
    def list_objects(self) -> Sequence[str]:
        return self.store.proxy_user_names()

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        return lease.finish_with(lambda tx: self.store.remove_zombie(tx, object_id, lease.token))


class ClusterHealth(_Task):
    """Have agents write down whether active clusters can work."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    interval_option = "cluster_health_interval"

    @override
    def list_objects(self) -> Sequence[str]:
        return self.store.cluster_ids(statuses=("Active",))

    @override
    def objects_in(self, ranges: Sequence[tuple[int, int]]) -> Sequence[str] | None:
        return self.store.cluster_ids(statuses=("Active",), ranges=ranges)

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        return self.ask(object_id, "report_health", {"cluster": object_id, "token": lease.token})
