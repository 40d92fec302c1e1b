# SPDX-License-Identifier: Apache-2.0
"""The block storage service's part in the agent: does operations on the backend that its cluster shares.

An operation is started by whoever of the cluster is told of it, or finds it: one transaction takes the worker rows that nobody has,
and writes their tokens into the resources. An operation whose service died is not begun again; it is cleaned, so that everybody
sees what became of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, threads
from moorage.control_plane.interface import AgentService, AgentTools
from moorage.rpc.server import rpc_method
from moorage.work.interface import Lease, Operation, Phase
from moorage_plugins.block_storage import outcomes
from moorage_plugins.block_storage.collector import Collector
from moorage_plugins.block_storage.configuration import open_backend
from moorage_plugins.block_storage.mount import Mount
from moorage_plugins.block_storage.operations import PAIRED_ROWS, WITH_BACKUP, Job, Write, are_paired, run
from moorage_plugins.block_storage.outcomes import ROWS
from moorage_plugins.block_storage.rows import BACKUP, SNAPSHOT, VOLUME

__all__ = ["BlockStorageAgent", "NotFree"]

LOG = logging.getLogger(__name__)
_TYPES = (VOLUME, SNAPSHOT, BACKUP)
_PAUSE = 0.5
_PAGE = 500


class _Stopping(Exception):
    """The agent stops in the middle of a copy."""


class NotFree(Exception):
    """Somebody else has it, or it is over."""


class BlockStorageAgent(AgentService):
    """Does operations on volumes, snapshots and backups."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: AgentTools) -> None:
        self._tools = tools
        self._backend = open_backend(tools.conf)
        section = tools.conf.block_storage
        self._delay = float(section.chunk_delay)
        self._collector = Collector(self._backend, tools.database, tools.workers)
        self._collect_every = float(section.collect_interval)
        self._collected_at = tools.clock.monotonic()
        cluster = tools.identity.cluster
        self._names = [tools.identity.host] if cluster is None else [tools.identity.host, cluster]
        self._mount = Mount(self._backend, tools.database, self._names)
        try:
            self._mount.check()
        except (errors.MoorageError, OSError) as error:
            LOG.error("No operation is begun until this is mended: %s", error)
        self._asked: threads.Queue[tuple[str, str] | None] = threads.queue()
        self._waiting: set[tuple[str, str]] = set()
        #: The tokens of waiting rows that could not be begun when their turn came, so that nobody is told to wait for them.
        self._not_startable: dict[tuple[str, str], int] = {}
        self._leases = tools.workers.renewer("block-renew")
        self._lock = threads.lock()
        self._stopping = threads.event()
        self._threads = [threads.thread(self._operate, name=f"block-{number}") for number in range(section.operations)]

    @override
    def endpoints(self) -> list[object]:
        return [self]

    @override
    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        self.sweep()

    @override
    def sweep(self) -> None:
        """Take operations whose message was lost; announce what waits here for its turn; now and then, collect files of nothing."""
        with self._lock:
            gone = set(self._not_startable)
        for kind in _TYPES:
            after = ""
            while True:
                page = self._tools.workers.waiting(kind, self._names, after=after, limit=_PAGE)
                self._announce(kind, self._still_queued(kind, page))
                for worker in page:
                    self._ask(kind, worker.resource_id)
                gone.difference_update((kind, each.resource_id) for each in page)
                if len(page) < _PAGE:
                    break
                after = page[-1].resource_id
        with self._lock:
            for key in gone:
                self._not_startable.pop(key, None)
        if self._tools.clock.monotonic() - self._collected_at >= self._collect_every:
            self._collected_at = self._tools.clock.monotonic()
            self._collector.collect()

    @override
    def stop(self) -> None:
        """Give back what is being done: another service of the cluster, or the next start, begins it anew."""
        self._stopping.set()
        if not self._threads[0].ident:
            return
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join()
        self._leases.stop()

    @rpc_method
    def block_storage_operation(self, resource_type: str, uuid: str) -> None:
        """There is something to do to a volume, snapshot or backup."""
        self._ask(resource_type, uuid)

    def _ask(self, kind: str, uuid: str) -> None:
        with self._lock:
            if (kind, uuid) in self._waiting or self._leases.keeps(kind, uuid):
                return
            self._waiting.add((kind, uuid))
        self._asked.put((kind, uuid))

    def _still_queued(self, kind: str, found: Sequence[Operation]) -> list[str]:
        """What has been in the queue since an earlier look, or a message, and can be begun for all that is known."""
        with self._lock:
            keys = [((kind, each.resource_id), each.token) for each in found]
            return [key[1] for key, token in keys if key in self._waiting and self._not_startable.get(key) != token]

    def _announce(self, kind: str, uuids: Sequence[str]) -> None:
        """Have nobody clean what is in the queue, nor the volumes' rows that are started with it."""
        if not uuids:
            return
        tools = self._tools
        tools.workers.announce(kind, uuids)
        if kind == BACKUP:
            with tools.database.read() as tx:
                rows = ROWS[kind].many(tx, uuids).values()
            companions = [(PAIRED_ROWS.get((kind, row.status)), row) for row in rows]
            tools.workers.announce(VOLUME, [getattr(row, each.column) for each, row in companions if each])

    # -- one operation --------------------------------------------------------------------------------------------

    def _operate(self) -> None:
        while True:
            asked = self._asked.get()
            if asked is None:
                return
            with self._lock:
                self._waiting.discard(asked)
            if self._stopping.is_set():
                continue
            try:
                self._mount.check()
                job = self._tools.database.run(lambda tx, asked=asked: self._start(tx, *asked))
            except NotFree:
                self._note_not_startable(asked)
                continue
            except (errors.MoorageError, OSError) as error:
                LOG.warning("The operation on %s %s is put off: %s", *asked, error)
                continue
            except Exception:
                LOG.exception("The operation on %s %s could not be started.", *asked)
                self._note_not_startable(asked)
                continue
            if job is not None:
                self._do(job)

    def _note_not_startable(self, asked: tuple[str, str]) -> None:
        """It may be waiting still: for what never comes, so that it is to be cleaned in the end."""
        try:
            row = self._tools.workers.get(*asked)
        except errors.MoorageError as error:
            LOG.info("Why %s %s could not be begun is not known: %s", *asked, error.message)
            return
        if row is not None and row.phase == Phase.WAITING:
            with self._lock:
                self._not_startable[asked] = row.token

    def _start(self, tx: sa.Connection, kind: str, uuid: str) -> Job | None:
        """Take the rows that nobody has, all or none, and write their tokens into the resources.

        Half of an operation whose other half was taken away is ended; None then.
        """
        rows: dict[str, Any] = {kind: ROWS[kind].find(tx, uuid)}
        wanted = {kind: uuid}
        if rows[kind] is None:
            raise NotFree
        if (paired_rows := _paired_rows(tx, kind, rows[kind])) is not None:
            if not are_paired(*paired_rows):
                self._end_half(tx, kind, uuid)
                return None
            if kind == VOLUME:
                # It is started together with the backup, which is asked for itself.
                raise NotFree
            # The volume first, as all do who take both.
            wanted = {VOLUME: paired_rows[0].uuid, **wanted}
        leases: dict[str, Lease] = {}
        for each, resource in wanted.items():
            found = self._tools.workers.start_many(tx, each, [resource], self._tools.identity)
            row = ROWS[each].find(tx, resource) if found else None
            if row is None:
                raise NotFree
            rows[each], leases[each] = row, found[resource]
            self._adopt(tx, each, row, found[resource])
        job = Job(
            kind, leases, rows, self._tools.conf, self._tools.database, self._backend,
            functools.partial(self._tick, tuple(leases.values())),
        )  # fmt: skip
        now = _paired_rows(tx, kind, job.row)
        if (now is None) != (paired_rows is None) or (now is not None and not are_paired(rows[VOLUME], job.row)):
            # It became another operation since it was looked at.
            raise NotFree
        return job

    def _end_half(self, tx: sa.Connection, kind: str, uuid: str) -> None:
        """End what can no longer be done, as when it had failed."""
        held = self._tools.workers.start_many(tx, kind, [uuid], self._tools.identity).get(uuid)
        row = ROWS[kind].find(tx, uuid) if held else None
        if (
            held is None
            or row is None
            or (paired_rows := _paired_rows(tx, kind, row)) is None
            or are_paired(*paired_rows)
        ):
            # Since it was looked at, it ended, and was asked for again perhaps.
            raise NotFree
        fault = f"The {held.operation} was not done: the {BACKUP if kind == VOLUME else VOLUME} was taken away from it."
        held.end(tx)
        outcomes.give_up(tx, kind, [row], held.status, held.token, fault)

    def _adopt(self, tx: sa.Connection, kind: str, row: Any, held: Lease) -> None:
        changes: Mapping[str, Any] = {}
        if kind == VOLUME and row.image and row.status == "creating":
            changes = {"status": "downloading"}
            held.advance(tx, "downloading")
        ROWS[kind].must_write(tx, row.uuid, held.token, **changes)
        if kind == VOLUME and row.status == "uploading":
            ROWS["image"].must_write(tx, row.upload_to, held.token)

    def _do(self, job: Job) -> None:
        try:
            with self._leases.keeping(list(job.leases.values())):
                try:
                    self._end(job)
                except _Stopping:
                    for held in job.leases.values():
                        self._give_back(held)
        finally:
            self._tidy(job)

    def _end(self, job: Job) -> None:
        """Do the files, and write what became of it: whatever happens, no row stays that a living service has and nobody ends."""
        what = f"The {job.held.operation} of {job.kind} {job.held.resource_id}"
        try:
            for kind, held in job.leases.items():
                self._collector.begin(kind, job.rows[kind], held.token)
            self._finish(list(job.leases.values()), run(job))
            return
        except errors.Fenced as error:
            fault = f"{what} was overtaken: {error.message}"
            LOG.warning("%s", fault)
        except (errors.MoorageError, OSError) as error:
            fault = error.message if isinstance(error, errors.MoorageError) else f"The backend failed: {error}"
            LOG.warning("%s failed: %s", what, fault)
        except _Stopping:
            raise
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            LOG.exception("%s failed.", what)
        self._give_up(job, list(job.leases), fault)

    def _give_up(self, job: Job, kinds: Sequence[str], fault: str) -> None:
        """Write what became of the resources; of two, one may have been taken away by force."""

        def write(tx: sa.Connection) -> None:
            for kind in kinds:
                held = job.leases[kind]
                outcomes.give_up(tx, kind, [job.rows[kind]], held.status, held.token, fault)

        try:
            self._finish([job.leases[kind] for kind in kinds], write)
        except errors.Fenced:
            if len(kinds) > 1:
                for kind in kinds:
                    self._give_up(job, [kind], fault)
        except _Stopping:
            raise
        except Exception:
            LOG.exception("What became of %s %s could not be written.", job.kind, job.held.resource_id)
            for kind in kinds:
                self._give_back(job.leases[kind])

    def _finish(self, leases: Sequence[Lease], write: Write) -> None:
        """One transaction; waits for a store that is away, until the agent stops."""

        def whole(tx: sa.Connection) -> None:
            for held in leases:
                held.end(tx)
            write(tx)

        while True:
            try:
                self._tools.database.run(whole)
                return
            except errors.Unavailable as error:
                LOG.warning("The end of an operation is not written yet: %s", error.message)
                if self._tools.clock.wait(self._stopping, _PAUSE):
                    raise _Stopping from error

    def _tidy(self, job: Job) -> None:
        """Remove what no row refers to: of this try when it was in vain, of earlier ones otherwise."""
        try:
            for kind, held in job.leases.items():
                self._collector.collect_one(kind, held.resource_id)
            if job.held.operation == "upload":
                self._collector.collect_one("image", job.row.upload_to)
        except (errors.MoorageError, OSError) as error:
            LOG.warning("What is left of %s %s is collected later: %s", job.kind, job.held.resource_id, error)

    def _give_back(self, held: Lease) -> None:
        try:
            held.release("the agent is stopping")
        except errors.Unavailable as error:
            LOG.warning("The operation on %s stays until it is cleaned: %s", held.resource_id, error.message)

    def _tick(self, leases: Sequence[Lease]) -> None:
        if any(self._leases.lost(each) for each in leases):
            raise errors.Fenced("somebody else has the lease, or the work is over.")
        if self._stopping.is_set() or (self._delay and self._tools.clock.wait(self._stopping, self._delay)):
            raise _Stopping


def _paired_rows(tx: sa.Connection, kind: str, row: Any) -> tuple[Any, Any] | None:
    """The rows of the volume and of the backup, where the operation has two, or None of one that is gone; None for others."""
    if kind == VOLUME and row.status in WITH_BACKUP:
        return row, ROWS[BACKUP].find(tx, row.upload_to)
    companion = PAIRED_ROWS.get((kind, row.status))
    return None if companion is None else (ROWS[VOLUME].find(tx, getattr(row, companion.column)), row)
