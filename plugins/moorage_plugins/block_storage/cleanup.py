# SPDX-License-Identifier: Apache-2.0
"""The cleanup handlers of volumes, snapshots and backups; the table of what becomes of what is in ``outcomes``.

First the row says what the resource became, with the fence; then the files of this try and of earlier ones are removed. A cleaner
that dies between the two leaves files that nothing refers to, which the agents collect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.cleanup.interface import CleanupTools, SetCleanupHandler
from moorage.work.interface import Lease, by_status_and_token
from moorage_plugins.block_storage import outcomes
from moorage_plugins.block_storage.backend import DirectoryBackend
from moorage_plugins.block_storage.configuration import open_backend
from moorage_plugins.block_storage.leftover_files import Collector
from moorage_plugins.block_storage.rows import BACKUP, SNAPSHOT, VOLUME

__all__ = ["BackupHandler", "SnapshotHandler", "VolumeHandler"]

LOG = logging.getLogger(__name__)


class _Handler(SetCleanupHandler):
    kind: ClassVar[str]

    def __init__(self, tools: CleanupTools) -> None:
        super().__init__(tools)
        self._backend: DirectoryBackend = open_backend(tools.conf)
        self._collector = Collector(self._backend, tools.database, tools.workers)

    @override
    def read(self, transaction: Any, resource_ids: Sequence[str]) -> Mapping[str, Any]:
        return outcomes.ROWS[self.kind].many(transaction, resource_ids)

    @override
    def stamp_token(self, transaction: Any, leases: Mapping[str, Lease]) -> None:
        for (_, token), uuids in by_status_and_token(leases.values()).items():
            outcomes.ROWS[self.kind].write_many(transaction, uuids, token)

    @override
    def finish_batch(self, transaction: Any, leases: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
        for (status, token), uuids in by_status_and_token(leases.values()).items():
            rows = [resources[uuid] for uuid in uuids]
            # All that are cleaned together are so for one cause.
            outcomes.give_up(transaction, self.kind, rows, status, token, leases[uuids[0]].cause)

    @override
    def after_commit(self, leases: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
        for uuid, lease in leases.items():
            try:
                if lease.status != outcomes.DELETING:
                    self._collector.begin(self.kind, resources[uuid], lease.token)
                outcomes.sweep(self._backend, self.kind, resources[uuid], lease.status, lease.token)
            except (errors.MoorageError, OSError) as error:
                LOG.warning("What is left of %s %s is collected later: %s", self.kind, uuid, error)


class VolumeHandler(_Handler):
    """Volumes that were being created, downloaded, uploaded, deleted, backed up or restored."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    kind = VOLUME
    cleanable = outcomes.CLEANABLE[VOLUME]


class SnapshotHandler(_Handler):
    """Snapshots that were being created or deleted."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    kind = SNAPSHOT
    cleanable = outcomes.CLEANABLE[SNAPSHOT]


class BackupHandler(_Handler):
    """Backups that were being created, restored or deleted."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    kind = BACKUP
    cleanable = outcomes.CLEANABLE[BACKUP]
