# SPDX-License-Identifier: Apache-2.0
"""Cleans up clusters whose agent is dead and does not come back.

An agent that starts again continues its operations itself. A cleaner may not reach the machine of a dead agent. So a cluster
that was being made gets the status ``Error``. A cluster that was being terminated is removed, and its jobs count as killed. An
agent on that machine removes the files that are left there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors
from moorage.cleanup.interface import CleanupTools, SetCleanupHandler
from moorage.work.interface import Lease, by_status_and_token
from moorage_plugins.data_processing.store import DataStore
from moorage_plugins.data_processing.tables import clusters

__all__ = ["ClusterHandler"]


class ClusterHandler(SetCleanupHandler):
    """Starting -> Error, Deleting -> deleted."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    cleanable = frozenset({"Starting", "Deleting"})
    cleans_own = False

    def __init__(self, tools: CleanupTools) -> None:
        super().__init__(tools)
        self._store = DataStore(tools.database, tools.workers)

    @override
    def read(self, transaction: Any, resource_ids: Sequence[str]) -> Mapping[str, Any]:
        query = sa.select(clusters.c.uuid, clusters.c.status).where(clusters.c.uuid.in_(resource_ids))
        return {row.uuid: row for row in transaction.execute(query)}

    @override
    def stamp_token(self, transaction: Any, leases: Mapping[str, Lease]) -> None:
        for (_, token), uuids in by_status_and_token(leases.values()).items():
            self._store.stamp_token(transaction, uuids, token)

    @override
    def finish_batch(self, transaction: Any, leases: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
        for uuid in sorted(leases):
            if leases[uuid].status == "Deleting":
                written = self._store.remove_cluster(transaction, uuid, leases[uuid].token)
            else:
                written = self._store.set_final_status(transaction, uuid, "Error", leases[uuid].token)
            if not written:
                raise errors.Fenced(f"Cluster {uuid} was written by a later operation, or removed.")
