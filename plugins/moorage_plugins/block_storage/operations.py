# SPDX-License-Identifier: Apache-2.0
"""The operations themselves: the files first, under names with the token, then one fenced transaction that says what there is now.

Each is given what was started (its leases and rows) and returns the write of its last transaction, and what to remove after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa

from moorage import errors
from moorage.work.interface import Lease
from moorage_plugins.block_storage import backup_format, outcomes
from moorage_plugins.block_storage.backend import DirectoryBackend, Tick
from moorage_plugins.block_storage.configuration import image_file
from moorage_plugins.block_storage.outcomes import ROWS, at_rest
from moorage_plugins.block_storage.rows import BACKUP, IMAGE, SNAPSHOT, VOLUME

__all__ = ["PAIRED_ROWS", "WITH_BACKUP", "Task", "Write", "are_paired", "run"]

#: What is written in the transaction that ends the operation.
Write = Callable[[sa.Connection], None]


class Companion(NamedTuple):
    """An operation that works on a volume too, which then has a worker row of its own.

    :param on_volume: the status of the volume meanwhile; ``column`` names the volume.
    """

    on_volume: str
    column: str


#: By (type, status).
PAIRED_ROWS: Mapping[tuple[str, str], Companion] = {
    (BACKUP, "creating"): Companion("backing-up", "volume_uuid"),
    (BACKUP, "restoring"): Companion("restoring-backup", "restore_to"),
}
#: Statuses of a volume whose operation is its backup's.
WITH_BACKUP = frozenset(each.on_volume for each in PAIRED_ROWS.values())


def are_paired(volume: Any | None, backup: Any | None) -> bool:
    """Returns whether the two are halves of one operation, by their rows.

    A request writes both halves in one transaction, and only where neither has a worker row, so that nothing is left of an earlier
    request that could be taken for one of them. Whatever ends one half (its end, cleanup, a reset, a deletion by force) takes the
    other's name out of its row. So what is restored to a volume is what that request named which has the volume.
    """
    if volume is None or backup is None:
        return False
    companion = PAIRED_ROWS.get((BACKUP, backup.status))
    return (
        companion is not None
        and companion.on_volume == volume.status
        and getattr(backup, companion.column) == volume.uuid
        and volume.upload_to == backup.uuid
    )


@dataclass(frozen=True, slots=True)
class Task:
    """An operation that was started.

    :param kind: the type of what the operation is of; its lease is the first.
    :param leases: by type; ``rows`` the resources as they were read when it was started.
    """

    kind: str
    leases: Mapping[str, Lease]
    rows: Mapping[str, Any]
    conf: Any
    database: Any
    backend: DirectoryBackend
    tick: Tick

    @property
    def held(self) -> Lease:
        """The lease of the operation's own resource."""
        return self.leases[self.kind]

    @property
    def row(self) -> Any:
        """The operation's own resource."""
        return self.rows[self.kind]

    def live(self, kind: str, row: Any) -> Path:
        """Returns the data of a resource.

        :raises Conflict: it has none.
        """
        if not row.path:
            raise errors.Conflict(f"The {kind} {row.uuid} has no data.")
        path = self.backend.path(kind, row.uuid, row.path)
        if not path.exists():
            raise errors.Conflict(
                f"The data of the {kind} {row.uuid} are not there ({path}). If the database was restored from an older copy, later "
                "ones may lie beside it, under a name that ends with .set-aside."
            )
        return path

    def find(self, kind: str, uuid: str) -> Any:
        """Another resource, as it is now; None when it is gone."""
        with self.database.read() as tx:
            return ROWS[kind].find(tx, uuid)


def run(task: Task) -> Write:
    """Do the files; the write of the last transaction.

    :raises MoorageError, OSError: it failed; what it left lies under its token.
    """
    if task.held.operation == "delete":
        return lambda tx: outcomes.remove(tx, task.kind, [task.row], task.held.token)
    return _OPERATIONS[task.kind, task.held.operation](task)


def _create_volume(task: Task) -> Write:
    row, token = task.row, task.held.token
    with task.backend.writing(VOLUME, row.uuid, token) as path:
        if row.image:
            task.backend.copy(_image(task, row.image), path, row.size_bytes, task.tick)
        else:
            task.backend.allocate(path, row.size_bytes, task.tick)
    return lambda tx: ROWS[VOLUME].must_write(tx, row.uuid, token, status="available", path=str(token), fault="")


def _image(task: Task, name: str) -> Path:
    image = task.find(IMAGE, name)
    if image is not None and image.status == "active":
        return task.live(IMAGE, image)
    path = image_file(task.conf, name)
    if path is None:
        raise errors.InvalidInput(f"There is no image {name}.", path="image")
    return path


def _upload(task: Task) -> Write:
    row, token = task.row, task.held.token
    with task.backend.writing(IMAGE, row.upload_to, token) as path:
        task.backend.copy(task.live(VOLUME, row), path, row.size_bytes, task.tick)

    def write(tx: sa.Connection) -> None:
        ROWS[VOLUME].must_write(tx, row.uuid, token, status=at_rest(row), upload_to="", fault="")
        # The image's row belongs to the volume's operation: its fence is the volume's token.
        ROWS[IMAGE].must_write(tx, row.upload_to, token, status="active", path=str(token))

    return write


def _create_snapshot(task: Task) -> Write:
    row, token = task.row, task.held.token
    volume = task.find(VOLUME, row.volume_uuid)
    if volume is None:
        raise errors.NotFound(f"The volume {row.volume_uuid} is gone.")
    with task.backend.writing(SNAPSHOT, row.uuid, token) as path:
        task.backend.copy(task.live(VOLUME, volume), path, row.size_bytes, task.tick)
    return lambda tx: ROWS[SNAPSHOT].must_write(tx, row.uuid, token, status="available", path=str(token), fault="")


def _create_backup(task: Task) -> Write:
    row, token, volume = task.row, task.held.token, task.rows[VOLUME]
    with task.backend.writing(BACKUP, row.uuid, token) as path:
        digest = backup_format.write_backup(task.live(VOLUME, volume), path, task.backend.chunk_bytes, task.tick)
    if backup_format.verify_backup(path, volume.size_bytes, task.tick) != digest:
        raise errors.Conflict("The backup is not what was written; the backend is broken.")

    def write(tx: sa.Connection) -> None:
        held = task.leases[VOLUME]
        ROWS[VOLUME].must_write(tx, volume.uuid, held.token, status=at_rest(volume), upload_to="", fault="")
        ROWS[BACKUP].must_write(tx, row.uuid, token, status="available", path=str(token), checksum=digest, fault="")

    return write


def _restore(task: Task) -> Write:
    row, volume, token = task.row, task.rows[VOLUME], task.leases[VOLUME].token
    with task.backend.writing(VOLUME, volume.uuid, token) as path:
        digest = backup_format.read_backup(task.live(BACKUP, row), path, volume.size_bytes, task.tick)
    if digest != row.checksum:
        raise errors.Conflict("The backup is not the one that was made: its checksum differs.")

    def write(tx: sa.Connection) -> None:
        live = {"status": at_rest(volume), "path": str(token), "upload_to": "", "fault": ""}
        ROWS[VOLUME].must_write(tx, volume.uuid, token, **live)
        ROWS[BACKUP].must_write(tx, row.uuid, task.held.token, status="available", restore_to="", fault="")

    return write


_OPERATIONS: Mapping[tuple[str, str], Callable[[Task], Write]] = {
    (VOLUME, "create"): _create_volume,
    (VOLUME, "upload"): _upload,
    (SNAPSHOT, "create"): _create_snapshot,
    (BACKUP, "create"): _create_backup,
    (BACKUP, "restore"): _restore,
}
