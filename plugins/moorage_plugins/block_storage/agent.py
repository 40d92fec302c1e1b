# SPDX-License-Identifier: Apache-2.0
"""The block storage service's part in the agent: does operations on the backend that its cluster shares.

Any service of the cluster may start an operation: one transaction takes the operation's rows, if no service has them, and writes
their tokens into the resources. An operation whose service died is not begun again; a cleaner ends it, and its outcome is visible.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.control_plane.interface import AgentTools, LoopService
from moorage.rpc.server import rpc_method
from moorage.work.interface import Lease, Operation, Phase
from moorage.work.job import Job, Key, Work
from moorage_plugins.block_storage import outcomes
from moorage_plugins.block_storage.backend import DirectoryBackend
from moorage_plugins.block_storage.configuration import open_backend
from moorage_plugins.block_storage.leftover_files import Collector
from moorage_plugins.block_storage.mount import Mount
from moorage_plugins.block_storage.operations import PAIRED_ROWS, WITH_BACKUP, Task, Write, are_paired, run
from moorage_plugins.block_storage.outcomes import ROWS
from moorage_plugins.block_storage.rows import BACKUP, SNAPSHOT, VOLUME

__all__ = ["BlockStorageAgent", "NotFree", "VolumeWork"]

LOG = logging.getLogger(__name__)
#: Operations that could not be started and are remembered.
_REMEMBERED = 10_000


class NotFree(Exception):
    """Another service has the operation, or it is over."""


class BlockStorageAgent(LoopService):
    """Does operations on volumes, snapshots and backups."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: AgentTools) -> None:
        self._tools = tools
        section = tools.conf.block_storage
        self.work = VolumeWork(tools, open_backend(tools.conf))
        self._collect_every = float(section.collect_interval)
        self._collected_at = tools.clock.monotonic()
        try:
            self.work.mount.check()
        except (errors.MoorageError, OSError) as error:
            LOG.error("No operation is begun until this is mended: %s", error)
        self.loop = tools.work_loop("block-storage", self.work, operations=int(section.operations))

    @override
    def sweep(self) -> None:
        """Takes operations whose message was lost, announces those that wait here, and now and then collects unused files."""
        super().sweep()
        if self._tools.clock.monotonic() - self._collected_at >= self._collect_every:
            self._collected_at = self._tools.clock.monotonic()
            self.work.collector.collect()

    @rpc_method
    def block_storage_operation(self, resource_type: str, uuid: str) -> None:
        """Does what is recorded for a volume, snapshot or backup."""
        self.loop.ask(resource_type, uuid)


class VolumeWork(Work[Write]):
    """What operations on volumes, snapshots and backups do to files, and what their ends write."""

    types = (VOLUME, SNAPSHOT, BACKUP)

    def __init__(self, tools: AgentTools, backend: DirectoryBackend) -> None:
        super().__init__(tools.database, tools.workers, tools.identity)
        self._tools = tools
        self._backend = backend
        self._delay = float(tools.conf.block_storage.chunk_delay)
        cluster = tools.identity.cluster
        self._names = [tools.identity.host] if cluster is None else [tools.identity.host, cluster]
        self.collector = Collector(backend, tools.database, tools.workers)
        self.mount = Mount(backend, tools.database, self._names)
        #: Tokens of waiting operations that could not be taken when their turn came.
        self._not_startable: dict[Key, int] = {}

    # -- taking -----------------------------------------------------------------------------------------------------

    @override
    def source(self, resource_type: str, after: str, limit: int) -> Sequence[Operation]:
        return self.store.waiting(resource_type, self._names, after=after, limit=limit)

    @override
    def waits(self, resource_type: str, operations: Sequence[Operation]) -> None:
        """Announces the operations, and those of the volumes that start together with backups.

        No cleaner takes an announced operation for abandoned. One that could not be taken is not announced.
        """
        startable = [
            each for each in operations if self._not_startable.get((resource_type, each.resource_id)) != each.token
        ]
        ids = [each.resource_id for each in startable]
        self.store.announce(resource_type, ids)
        if resource_type == BACKUP:
            with self.database.read() as tx:
                rows = ROWS[BACKUP].many(tx, ids).values()
            pairs = [(PAIRED_ROWS.get((BACKUP, row.status)), row) for row in rows]
            self.store.announce(VOLUME, [getattr(row, each.column) for each, row in pairs if each])

    @override
    def take(self, resource_type: str, resource_ids: Sequence[str]) -> Iterator[Job[Write]]:
        self.mount.check()
        for uuid in resource_ids:
            try:
                task = self.database.run(functools.partial(self.begin, kind=resource_type, uuid=uuid))
            except (errors.MoorageError, OSError):
                raise
            except Exception as error:
                self._note_not_startable(resource_type, uuid)
                if not isinstance(error, NotFree):
                    raise
            else:
                if task is not None:
                    yield Job([*task.leases.values()], task)

    def _note_not_startable(self, kind: str, uuid: str) -> None:
        row = self.store.get(kind, uuid)
        if row is not None and row.phase == Phase.WAITING:
            self._not_startable[kind, uuid] = row.token
            if len(self._not_startable) > _REMEMBERED:
                del self._not_startable[next(iter(self._not_startable))]

    def begin(self, tx: sa.Connection, kind: str, uuid: str) -> Task | None:
        """Takes the rows of an operation, all or none, and writes their tokens into the resources.

        An operation on a backup and a volume that has lost one of the two is ended, and the result is None.

        :raises NotFree: another service has it, or it is over.
        """
        rows: dict[str, Any] = {kind: ROWS[kind].find(tx, uuid)}
        wanted = {kind: uuid}
        if rows[kind] is None:
            raise NotFree
        if (pair := _paired_rows(tx, kind, rows[kind])) is not None:
            if not are_paired(*pair):
                self._end_half(tx, kind, uuid)
                return None
            if kind == VOLUME:
                # It starts together with the backup, which is asked for itself.
                raise NotFree
            # The volume first, as in all transactions that take both.
            wanted = {VOLUME: pair[0].uuid, **wanted}
        leases: dict[str, Lease] = {}
        for each, resource in wanted.items():
            found = self.store.start_many(tx, each, [resource], self.identity)
            row = ROWS[each].find(tx, resource) if found else None
            if row is None:
                raise NotFree
            rows[each], leases[each] = row, found[resource]
            self._stamp(tx, each, row, found[resource])
        task = Task(kind, leases, rows, self._tools.conf, self.database, self._backend, lambda: None)
        now = _paired_rows(tx, kind, task.row)
        if (now is None) != (pair is None) or (now is not None and not are_paired(rows[VOLUME], task.row)):
            # It became another operation since it was looked at.
            raise NotFree
        return task

    def _end_half(self, tx: sa.Connection, kind: str, uuid: str) -> None:
        """Ends what can no longer be done, as if it had failed."""
        held = self.store.start_many(tx, kind, [uuid], self.identity).get(uuid)
        row = ROWS[kind].find(tx, uuid) if held else None
        if held is None or row is None or (pair := _paired_rows(tx, kind, row)) is None or are_paired(*pair):
            # Since it was looked at, it ended, and was perhaps asked for again.
            raise NotFree
        fault = f"The {held.operation} was not done: the {BACKUP if kind == VOLUME else VOLUME} was taken away from it."
        held.end(tx)
        outcomes.give_up(tx, kind, [row], held.status, held.token, fault)

    def _stamp(self, tx: sa.Connection, kind: str, row: Any, held: Lease) -> None:
        changes: Mapping[str, Any] = {}
        if kind == VOLUME and row.image and row.status == "creating":
            changes = {"status": "downloading"}
            held.advance(tx, "downloading")
        ROWS[kind].must_write(tx, row.uuid, held.token, **changes)
        if kind == VOLUME and row.status == "uploading":
            ROWS["image"].must_write(tx, row.upload_to, held.token)

    # -- working ----------------------------------------------------------------------------------------------------

    @override
    def do(self, job: Job[Write]) -> Write:
        task = dataclasses.replace(job.item, tick=functools.partial(self._tick, job))
        for kind, held in task.leases.items():
            self.collector.begin(kind, task.rows[kind], held.token)
        return run(task)

    def _tick(self, job: Job[Write]) -> None:
        """Called for each chunk that is copied."""
        job.check()
        if self._delay:
            self._tools.clock.sleep(self._delay)

    # -- finishing --------------------------------------------------------------------------------------------------

    @override
    def finish(self, transaction: Any, job: Job[Write], result: Write) -> None:
        result(transaction)

    @override
    def failed(self, job: Job[Write], error: Exception) -> Write:
        what = f"The {job.lease.operation} of {job.lease.resource_type} {job.lease.resource_id}"
        if isinstance(error, errors.Fenced):
            fault = f"{what} was overtaken: {error.message}"
        elif isinstance(error, errors.MoorageError):
            fault = error.message
        else:
            fault = f"The backend failed: {error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return _GiveUp(job, fault)

    @override
    def overtaken(self, job: Job[Write], result: Write) -> list[tuple[Job[Write], Write]]:
        """Gives up all, and then each by itself: of two operations one may have been taken away by force."""
        fault = f"The {job.lease.operation} of {job.lease.resource_type} {job.lease.resource_id} was overtaken."
        if not isinstance(result, _GiveUp):
            return [(job, _GiveUp(job, fault))]
        if len(job.leases) == 1:
            return []
        parts = [job.of([held]) for held in job.leases]
        return [(part, _GiveUp(part, result.fault)) for part in parts]

    @override
    def ended(self, job: Job[Write]) -> None:
        """Removes the files that no row refers to: those of this try when it failed, those of earlier ones otherwise."""
        task: Task = job.item
        for kind, held in task.leases.items():
            self.collector.collect_one(kind, held.resource_id)
        if task.held.operation == "upload":
            self.collector.collect_one("image", task.row.upload_to)


class _GiveUp:
    """Writes that an operation has failed."""

    def __init__(self, job: Job[Write], fault: str) -> None:
        self.fault = fault
        self._job = job

    def __call__(self, transaction: sa.Connection) -> None:
        for held in self._job.leases:
            row = self._job.item.rows[held.resource_type]
            outcomes.give_up(transaction, held.resource_type, [row], held.status, held.token, self.fault)


def _paired_rows(tx: sa.Connection, kind: str, row: Any) -> tuple[Any, Any] | None:
    """The rows of the volume and of the backup, where the operation has two, or None of one that is gone; None for others."""
    if kind == VOLUME and row.status in WITH_BACKUP:
        return row, ROWS[BACKUP].find(tx, row.upload_to)
    companion = PAIRED_ROWS.get((kind, row.status))
    return None if companion is None else (ROWS[VOLUME].find(tx, getattr(row, companion.column)), row)
