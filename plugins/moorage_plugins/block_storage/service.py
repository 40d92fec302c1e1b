# SPDX-License-Identifier: Apache-2.0
"""What can be asked of block storage: each request is one transaction that writes the resource and its worker row, then a message.

Immediate changes (attach, detach) are one conditional statement. Nothing here waits for an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from oslo_log import log as logging

from moorage import errors, randomness
from moorage.work.interface import OperationStore
from moorage_plugins.block_storage import outcomes
from moorage_plugins.block_storage.configuration import image_file
from moorage_plugins.block_storage.outcomes import CLEANABLE, ROWS
from moorage_plugins.block_storage.rows import BACKUP, DELETED, IMAGE, SNAPSHOT, VOLUME
from moorage_plugins.block_storage.tables import images, snapshots, volumes

__all__ = ["RESETTABLE", "UNKNOWN", "BlockStorage"]

LOG = logging.getLogger(__name__)
#: What a volume is attached to, if no request has said it.
UNKNOWN = "unknown"
_IDLE = ("available", "in-use")
#: Statuses of an image whose upload has ended.
_UPLOADED = ("active", "killed")
_IN_PROGRESS = {**CLEANABLE, IMAGE: frozenset({"saving"})}
_AT_REST = {
    VOLUME: ("available", "error", "error_restoring"),
    SNAPSHOT: ("available", "error"),
    BACKUP: ("available", "error"),
}
#: Resource type -> statuses that a person may set.
RESETTABLE = {
    VOLUME: ("available", "in-use", "error", "error_restoring"),
    SNAPSHOT: ("available", "error"),
    BACKUP: ("available", "error"),
}

#: What a volume's status, when it is set, says of its attachment: later operations bring it back to where that says it was.
_ATTACHED: Mapping[str, Mapping[str, Any]] = {
    "available": {"attached_to": "", "mountpoint": ""},
    "in-use": {"attached_to": sa.case((volumes.c.attached_to == "", UNKNOWN), else_=volumes.c.attached_to)},
}


class BlockStorage:
    """Requests on volumes, snapshots and backups. Safe for use by several threads.

    :param place: chooses the host of a new volume, or the host's cluster; raises Unavailable if no service is up.
    :param tell: tells a living service of a location: ``tell(location, resource type, uuid)``; may be lost.
    """

    def __init__(
        self,
        conf: Any,
        database: Any,
        workers: OperationStore,
        place: Callable[[], str],
        tell: Callable[[str, str, str], None],
    ) -> None:
        self._conf = conf
        self._database = database
        self._workers = workers
        self._place = place
        self._tell = tell

    # -- looking --------------------------------------------------------------------------------------------------

    def get(self, kind: str, uuid: str, project_id: str | None) -> Any:
        """One resource; another project's does not exist.

        :raises NotFound: there is none.
        """
        with self._database.read() as tx:
            row = ROWS[kind].get(tx, uuid)
        if row.status == DELETED or (project_id is not None and row.project_id != project_id):
            raise errors.NotFound(f"There is no {kind} {uuid}.")
        return row

    def page(
        self, kind: str, project_id: str | None, *, after: str = "", limit: int = 1000, **filters: Any
    ) -> list[Any]:
        """Resources by uuid."""
        with self._database.read() as tx:
            return ROWS[kind].page(tx, after=after, limit=limit, project_id=project_id, **filters)

    # -- volumes --------------------------------------------------------------------------------------------------

    def create_volume(self, size_bytes: int, *, name: str = "", project_id: str = "", image: str = "") -> Any:
        """Begin to make a volume of zeros, or from an image (a file's name, or an uploaded one's uuid).

        :raises PayloadTooLarge: it is larger than ``[block_storage] max_volume_gb``.
        :raises InvalidInput: there is no such image.
        """
        self._check_size(size_bytes)
        found = self._check_image(image, size_bytes, project_id) if image else None
        # Where the image's data are, if it was uploaded.
        uuid, location = randomness.new_uuid(), getattr(found, "location", "") or self._place()
        values = {"name": name, "project_id": project_id, "size_bytes": size_bytes, "image": image}

        def work(tx: sa.Connection) -> None:
            token = self._workers.create(
                tx, VOLUME, uuid, "create", "creating", target_host=location, project_id=project_id
            )
            rest = {"location": location, "upload_to": "", "attached_to": "", "snapshots": 0}
            ROWS[VOLUME].insert(tx, uuid, "creating", token, **values, **rest)

        return self._done(work, VOLUME, uuid, location)

    def _check_size(self, size_bytes: int) -> None:
        section = self._conf.block_storage
        limit, gigabyte = int(section.max_volume_gb), int(section.gigabyte_bytes)
        if size_bytes > limit * gigabyte:
            raise errors.PayloadTooLarge(
                f"Requested volume size {-(-size_bytes // gigabyte)}G is larger than maximum allowed limit {limit}G "
                "([block_storage] max_volume_gb).",
                path="volume.size",
            )

    def _check_image(self, image: str, size_bytes: int, project_id: str) -> Any | None:
        """Returns the uploaded image's row; None for a file."""
        with self._database.read() as tx:
            row = ROWS[IMAGE].find(tx, image)
        if row is not None and project_id not in ("", row.project_id):
            raise errors.InvalidInput(f"There is no image {image}.", path="image")
        if row is not None and row.status == "active":
            size = row.size_bytes
        else:
            row = None
            path = image_file(self._conf, image)
            if path is None:
                raise errors.InvalidInput(f"There is no image {image}.", path="image")
            size = path.stat().st_size
        if size > size_bytes:
            raise errors.InvalidInput(f"The image {image} has {size} bytes, the volume {size_bytes}.", path="size")
        return row

    def delete_volume(self, uuid: str, *, force: bool = False) -> None:
        """Begins to delete it; with ``force`` also while another operation on it is in progress.

        :raises InUse: an operation is in progress and ``force`` is not given.
        :raises Conflict: its status, or its snapshots, do not allow it.
        """
        volume = self.get(VOLUME, uuid, None)

        def work(tx: sa.Connection) -> None:
            token = self._workers.create(
                tx, VOLUME, uuid, "delete", "deleting", target_host=volume.location, force=force,
                project_id=volume.project_id,
            )  # fmt: skip
            free: list[Any] = [volumes.c.fence <= token, volumes.c.snapshots == 0]
            if not force:
                free.append(volumes.c.status.in_(_AT_REST[VOLUME]))
            outcomes.kill_uploads(tx, [ROWS[VOLUME].get(tx, uuid)], "Its volume was deleted.")
            if not ROWS[VOLUME].change(tx, uuid, *free, status="deleting", upload_to="", fence=token):
                raise self._refused(tx, VOLUME, uuid, "deleted", _AT_REST[VOLUME])

        self._done(work, VOLUME, uuid, volume.location)

    def upload(self, uuid: str, image_name: str) -> Any:
        """Begin to upload it to a new image, whose row is returned."""
        volume = self.get(VOLUME, uuid, None)
        image = randomness.new_uuid()

        def work(tx: sa.Connection) -> None:
            token = self._workers.create(
                tx, VOLUME, uuid, "upload", "uploading", target_host=volume.location, project_id=volume.project_id
            )
            self._move(tx, uuid, token, "uploading", _IDLE, upload_to=image)
            values = {"name": image_name, "project_id": volume.project_id, "size_bytes": volume.size_bytes}
            ROWS[IMAGE].insert(tx, image, "saving", token, location=volume.location, **values)

        self._done(work, VOLUME, uuid, volume.location)
        return self.get(IMAGE, image, None)

    def delete_image(self, uuid: str) -> None:
        """At once, of an image that a volume was uploaded to; agents then collect its file.

        A volume that is being made from it in that moment may fail, and says why.

        :raises Conflict: it is being uploaded.
        """

        def work(tx: sa.Connection) -> None:
            if not ROWS[IMAGE].change(tx, uuid, images.c.status.in_(_UPLOADED), status=DELETED, path=""):
                raise self._refused(tx, IMAGE, uuid, "deleted", _UPLOADED)

        self._database.run(work)

    def attach(self, uuid: str, server: str, mountpoint: str = "") -> None:
        """Records at once, by one conditional statement, that a server uses the volume.

        :param mountpoint: the device under which the server sees the volume; only shown.
        :raises Conflict: the volume is not available.
        """
        condition = volumes.c.status == "available"
        self._immediate(
            uuid, "attached", ("available",), condition, status="in-use", attached_to=server, mountpoint=mountpoint,
            fault="",
        )  # fmt: skip

    def detach(self, uuid: str) -> None:
        """Records at once that no server uses the volume; a volume that is being deleted stays so.

        :raises Conflict: the volume is not in use.
        """
        condition = volumes.c.status == "in-use"
        self._immediate(
            uuid, "detached", ("in-use",), condition, status="available", attached_to="", mountpoint="", fault=""
        )

    def _immediate(self, uuid: str, verb: str, allowed: Sequence[str], *conditions: Any, **values: Any) -> None:
        def work(tx: sa.Connection) -> None:
            if not ROWS[VOLUME].change(tx, uuid, *conditions, **values):
                raise self._refused(tx, VOLUME, uuid, verb, allowed)

        self._database.run(work)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def create_snapshot(self, volume_uuid: str, *, name: str = "", project_id: str = "") -> Any:
        """Begin to copy the volume into a snapshot."""
        volume = self.get(VOLUME, volume_uuid, None)
        uuid = randomness.new_uuid()

        def work(tx: sa.Connection) -> None:
            idle = volumes.c.status.in_(_IDLE)
            if not ROWS[VOLUME].change(tx, volume_uuid, idle, snapshots=volumes.c.snapshots + 1):
                raise self._refused(tx, VOLUME, volume_uuid, "snapshotted", _IDLE)
            token = self._workers.create(
                tx, SNAPSHOT, uuid, "create", "creating", target_host=volume.location, project_id=project_id
            )
            values = {"name": name, "project_id": project_id, "size_bytes": volume.size_bytes}
            ROWS[SNAPSHOT].insert(tx, uuid, "creating", token, volume_uuid=volume_uuid, **values)

        return self._done(work, SNAPSHOT, uuid, volume.location)

    def delete(self, kind: str, uuid: str, *, force: bool = False) -> None:
        """Begin to delete a snapshot or a backup; errors as :meth:`delete_volume`."""
        row = self.get(kind, uuid, None)
        location = self._location(row)

        def work(tx: sa.Connection) -> None:
            token = self._workers.create(
                tx, kind, uuid, "delete", "deleting", target_host=location, force=force, project_id=row.project_id
            )
            expected = () if force else _AT_REST[kind]
            if not ROWS[kind].write(tx, uuid, token, expected=expected, status="deleting"):
                raise self._refused(tx, kind, uuid, "deleted", _AT_REST[kind])

        self._done(work, kind, uuid, location)

    # -- backups --------------------------------------------------------------------------------------------------

    def create_backup(self, volume_uuid: str, *, name: str = "", project_id: str = "") -> Any:
        """Begin to back a volume up; both have a worker row, and end together."""
        volume = self.get(VOLUME, volume_uuid, None)
        uuid = randomness.new_uuid()

        def work(tx: sa.Connection) -> None:
            token = self._workers.create(
                tx,
                VOLUME,
                volume_uuid,
                "backup",
                "backing-up",
                target_host=volume.location,
                project_id=volume.project_id,
            )
            self._move(tx, volume_uuid, token, "backing-up", _IDLE, upload_to=uuid)
            token = self._workers.create(
                tx, BACKUP, uuid, "create", "creating", target_host=volume.location, project_id=project_id
            )
            values = {"name": name, "project_id": project_id, "size_bytes": volume.size_bytes}
            rest = {"volume_uuid": volume_uuid, "restore_to": "", "checksum": "", "location": volume.location}
            ROWS[BACKUP].insert(tx, uuid, "creating", token, **values, **rest)

        return self._done(work, BACKUP, uuid, volume.location)

    def restore(self, backup_uuid: str, volume_uuid: str | None = None, *, name: str = "") -> Any:
        """Requests the restoration of a backup, to a new volume unless a volume is given. Returns the volume.

        :param volume_uuid: a volume that nothing uses; the restoration replaces its data.
        :param name: of the new volume; ``restore_backup_<uuid of the backup>`` unless given, as with Cinder.
        :raises Conflict: the given volume is at another location than the backup's data, a snapshot of it is being made, or an
            operation on the volume or the backup is in progress.
        :raises PayloadTooLarge: the new volume is larger than ``[block_storage] max_volume_gb``.
        """
        backup = self.get(BACKUP, backup_uuid, None)
        if volume_uuid is None:
            self._check_size(backup.size_bytes)
            uuid, location, project = randomness.new_uuid(), self._location(backup), backup.project_id
        else:
            target = self._target(backup, volume_uuid)
            uuid, location, project = target.uuid, target.location, target.project_id

        def work(tx: sa.Connection) -> None:
            token = self._workers.create(
                tx, VOLUME, uuid, "restore", "restoring-backup", target_host=location, project_id=project
            )
            if volume_uuid is None:
                self._insert_target(tx, uuid, token, location, backup, name)
            else:
                self._move(tx, uuid, token, "restoring-backup", ("available", "error_restoring"), upload_to=backup_uuid)
                self._refuse_while_read(tx, uuid)
            token = self._workers.create(
                tx, BACKUP, backup_uuid, "restore", "restoring", target_host=location, project_id=backup.project_id
            )
            written = ROWS[BACKUP].write(
                tx, backup_uuid, token, expected=("available",), status="restoring", restore_to=uuid, fault=""
            )
            if not written:
                raise self._refused(tx, BACKUP, backup_uuid, "restored", ("available",))

        self._done(work, BACKUP, backup_uuid, location)
        return self.get(VOLUME, uuid, None)

    def _target(self, backup: Any, volume_uuid: str) -> Any:
        """Returns the volume that a backup is to be restored to, if the backup fits and lies at the volume's location."""
        volume = self.get(VOLUME, volume_uuid, None)
        if volume.size_bytes < backup.size_bytes:
            raise errors.InvalidInput(
                f"The volume has {volume.size_bytes} bytes, the backup {backup.size_bytes}.", path="volume_id"
            )
        if backup.location not in ("", volume.location):
            raise errors.Conflict(
                f"The backup lies at {backup.location}, the volume at {volume.location}; restore it to a volume there, or to a "
                "new one."
            )
        return volume

    @staticmethod
    def _insert_target(tx: sa.Connection, uuid: str, token: int, location: str, backup: Any, name: str) -> None:
        """Inserts the new volume that a backup is restored to. It has no data until the restoration ends."""
        ROWS[VOLUME].insert(
            tx, uuid, "restoring-backup", token, name=name or f"restore_backup_{backup.uuid}", project_id=backup.project_id,
            size_bytes=backup.size_bytes, location=location, image="", upload_to=backup.uuid, attached_to="", snapshots=0,
        )  # fmt: skip

    @staticmethod
    def _refuse_while_read(tx: sa.Connection, uuid: str) -> None:
        """A snapshot is made of what the volume holds when its turn comes, which must be what it held when that was requested.

        To be called after the volume's row is written: the request of a snapshot writes it too, so that an earlier one is seen
        here, and a later one finds the volume's status.

        :raises InUse: there is one; the transaction must be rolled back.
        """
        if not ROWS[VOLUME].get(tx, uuid).snapshots:
            return
        reading = [snapshots.c.volume_uuid == uuid, snapshots.c.status == "creating"]
        holder = tx.execute(sa.select(snapshots.c.uuid).where(*reading).limit(1)).scalar()
        if holder is not None:
            raise errors.InUse(
                f"The snapshot {holder} of the volume {uuid} is being made; wait until that has ended, or delete it by force.",
                holder=holder,
            )

    # -- all ------------------------------------------------------------------------------------------------------

    def reset(self, kind: str, uuid: str, status: str) -> None:
        """Sets the status as an operator says. An available volume is attached to nothing, a volume in use to something.

        An operation that is in progress on the resource ends here: its row is removed, its later writes are refused, and the files
        that it wrote are collected. A status without an error leaves no reason of an earlier failure behind.

        :raises InvalidInput: that status cannot be set.
        """
        if status not in RESETTABLE[kind]:
            raise errors.InvalidInput(
                f"The status of a {kind} can be reset to {', '.join(RESETTABLE[kind])}, not to {status!r}.",
                path="status",
            )

        def work(tx: sa.Connection) -> None:
            token = self._workers.reset(tx, kind, uuid)
            row = ROWS[kind].get(tx, uuid)
            if status in _IDLE and not row.path:
                raise errors.Conflict(f"The {kind} {uuid} has no data, so it cannot be {status}.")
            changes: dict[str, Any] = {} if status.startswith("error") else {"fault": ""}
            if kind == VOLUME:
                outcomes.kill_uploads(tx, [row], "Its volume was reset.")
                changes |= {"upload_to": "", **_ATTACHED.get(status, {})}
            ROWS[kind].must_write(tx, uuid, token, status=status, **changes)

        self._database.run(work)

    def _move(
        self, tx: sa.Connection, uuid: str, token: int, status: str, allowed: Sequence[str], **values: Any
    ) -> None:
        """Moves a volume into the status of an operation. The reason of an earlier failure goes."""
        if not ROWS[VOLUME].write(tx, uuid, token, expected=allowed, status=status, fault="", **values):
            raise self._refused(tx, VOLUME, uuid, status, allowed)

    def _refused(
        self, tx: sa.Connection, kind: str, uuid: str, verb: str, allowed: Sequence[str]
    ) -> errors.MoorageError:
        row = ROWS[kind].get(tx, uuid)
        if row.status == DELETED:
            return errors.NotFound(f"There is no {kind} {uuid}.")
        if kind == VOLUME and row.snapshots and row.status in allowed:
            return errors.Conflict(f"The volume {uuid} has {row.snapshots} snapshots; delete them first.")
        needed = f"It must be {' or '.join(allowed)} to be {verb}."
        if row.status in _IN_PROGRESS[kind]:
            return errors.InUse(f"The {kind} {uuid} is {row.status}; an operation on it is in progress. {needed}")
        return errors.Conflict(f"The {kind} {uuid} is {row.status}. {needed}")

    def _location(self, row: Any) -> str:
        """Where the services are that work on what was made from a volume."""
        if getattr(row, "location", ""):
            return str(row.location)
        with self._database.read() as tx:
            volume = ROWS[VOLUME].find(tx, row.volume_uuid)
        return volume.location if volume is not None else self._place()

    def _done(self, work: Callable[[sa.Connection], None], kind: str, uuid: str, location: str) -> Any:
        self._database.run(work)
        self._tell(location, kind, uuid)
        with self._database.read() as tx:
            return ROWS[kind].find(tx, uuid)
