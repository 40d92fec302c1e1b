# SPDX-License-Identifier: Apache-2.0
"""What becomes of resources whose operation did not succeed: because it failed, or because its service died.

==========  =================  ==========================================================
resource    status             becomes
==========  =================  ==========================================================
volume      creating           error
volume      downloading        error
volume      uploading          in-use where it is attached, else available; the image is killed
volume      deleting           deleted
volume      backing-up         in-use where it is attached, else available, as before
volume      restoring-backup   error_restoring; its data are what they were before
snapshot    creating           error
snapshot    deleting           deleted
backup      creating           error
backup      restoring          available
backup      deleting           deleted
==========  =================  ==========================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from moorage_plugins.block_storage.backend import DirectoryBackend
from moorage_plugins.block_storage.rows import BACKUP, IMAGE, SNAPSHOT, VOLUME, Rows
from moorage_plugins.block_storage.tables import images, volumes

__all__ = ["CLEANABLE", "DELETING", "ROWS", "at_rest", "give_up", "kill_uploads", "remove", "sweep"]

ROWS: Mapping[str, Rows] = {kind: Rows(kind) for kind in (VOLUME, SNAPSHOT, BACKUP, IMAGE)}
DELETING = "deleting"
#: Resource type -> statuses in which an operation may be interrupted.
CLEANABLE: Mapping[str, frozenset[str]] = {
    VOLUME: frozenset({"creating", "downloading", "uploading", DELETING, "backing-up", "restoring-backup"}),
    SNAPSHOT: frozenset({"creating", DELETING}),
    BACKUP: frozenset({"creating", "restoring", DELETING}),
}
#: :func:`at_rest` in SQL.
_AT_REST = sa.case((volumes.c.attached_to != "", "in-use"), else_="available")
_BECOMES: Mapping[tuple[str, str], Any] = {
    (VOLUME, "uploading"): _AT_REST,
    (VOLUME, "backing-up"): _AT_REST,
    (VOLUME, "creating"): "error",
    (VOLUME, "downloading"): "error",
    (VOLUME, "restoring-backup"): "error_restoring",
    (SNAPSHOT, "creating"): "error",
    (BACKUP, "creating"): "error",
    (BACKUP, "restoring"): "available",
}


def at_rest(volume: Any) -> str:
    """Returns the status of a volume that nothing is done to."""
    return "in-use" if volume.attached_to else "available"


def give_up(tx: sa.Connection, kind: str, rows: Sequence[Any], status: str, token: int, fault: str) -> None:
    """Write what resources become, with the fence; their worker rows end in the same transaction.

    :param rows: resources as they were read, with one ``token`` and one ``status``, in which the operation was interrupted.
    :raises Fenced: a later operation wrote one of them.
    """
    if status == DELETING:
        remove(tx, kind, rows, token)
        return
    uuids = sorted(row.uuid for row in rows)
    changes: dict[str, Any] = {"fault": fault[:1000], "upload_to": ""} if kind == VOLUME else {"fault": fault[:1000]}
    if kind == BACKUP:
        changes["restore_to"] = ""
    if kind == VOLUME and status == "uploading":
        kill_uploads(tx, rows, fault)
    ROWS[kind].must_write_many(tx, uuids, token, status=_BECOMES[kind, status], **changes)


def kill_uploads(tx: sa.Connection, rows: Sequence[Any], fault: str) -> None:
    """The images that were being made of volumes will never be whole; the same transaction empties ``upload_to``."""
    uploads = sorted(row.upload_to for row in rows if row.upload_to)
    ROWS[IMAGE].change_many(tx, uploads, images.c.status == "saving", status="killed", fault=fault[:1000])


def remove(tx: sa.Connection, kind: str, rows: Sequence[Any], token: int) -> None:
    """Deletes rows and what refers to them. Their files are removed afterwards, when no request can find them any more.

    :raises Fenced: a later operation wrote one of them.
    """
    ROWS[kind].remove_many(tx, sorted(row.uuid for row in rows), token)
    if kind != SNAPSHOT:
        return
    for volume, count in sorted(Counter(row.volume_uuid for row in rows).items()):
        fewer = sa.case((volumes.c.snapshots > count, volumes.c.snapshots - count), else_=0)
        ROWS[VOLUME].change(tx, volume, snapshots=fewer)


def sweep(backend: DirectoryBackend, kind: str, row: Any, status: str, token: int) -> None:
    """Remove the files of the try, and of those before it, after the row says what it became; the live ones stay."""
    if status == DELETING:
        backend.sweep(kind, row.uuid, below=token)
        return
    backend.sweep(kind, row.uuid, below=token, keep=row.path)
    if kind == VOLUME and status == "uploading" and row.upload_to:
        backend.sweep(IMAGE, row.upload_to, below=token)
