# SPDX-License-Identifier: Apache-2.0
"""What becomes of resources whose operation did not succeed: because it failed, or because whoever did it died.

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

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from moorage_plugins.block_storage.backend import DirectoryBackend
from moorage_plugins.block_storage.rows import BACKUP, IMAGE, SNAPSHOT, VOLUME, Rows
from moorage_plugins.block_storage.tables import images, volumes

__all__ = ["CLEANABLE", "DELETING", "ROWS", "at_rest", "give_up", "remove", "sweep"]

ROWS: Mapping[str, Rows] = {kind: Rows(kind) for kind in (VOLUME, SNAPSHOT, BACKUP, IMAGE)}
DELETING = "deleting"
#: Resource type -> statuses in which an operation may be interrupted.
CLEANABLE: Mapping[str, frozenset[str]] = {
    VOLUME: frozenset({"creating", "downloading", "uploading", DELETING, "backing-up", "restoring-backup"}),
    SNAPSHOT: frozenset({"creating", DELETING}),
    BACKUP: frozenset({"creating", "restoring", DELETING}),
}
_FIXED = {
    (VOLUME, "creating"): "error",
    (VOLUME, "downloading"): "error",
    (VOLUME, "restoring-backup"): "error_restoring",
    (SNAPSHOT, "creating"): "error",
    (BACKUP, "creating"): "error",
    (BACKUP, "restoring"): "available",
}


def at_rest(volume: Any) -> str:
    """The status of a volume that nothing is done to."""
    return "in-use" if volume.attached_to else "available"


def give_up(tx: sa.Connection, kind: str, row: Any, status: str, token: int, fault: str) -> None:
    """Write what the resource becomes, with the fence; the worker row ends in the same transaction.

    :param row: the resource as it was read; ``status`` the one in which the operation was interrupted.
    :raises Fenced: a later operation wrote it.
    """
    if status == DELETING:
        remove(tx, kind, row, token)
        return
    changes: dict[str, Any] = {"fault": fault[:1000], "upload_to": ""} if kind == VOLUME else {"fault": fault[:1000]}
    if kind == BACKUP:
        changes["restore_to"] = ""
    if kind == VOLUME and status == "uploading":
        becomes = at_rest(row)
        ROWS[IMAGE].change(tx, row.upload_to, images.c.status == "saving", status="killed", fault=fault[:1000])
    elif kind == VOLUME and status == "backing-up":
        becomes = at_rest(row)
    else:
        becomes = _FIXED[kind, status]
    ROWS[kind].must_write(tx, row.uuid, token, status=becomes, **changes)


def remove(tx: sa.Connection, kind: str, row: Any, token: int) -> None:
    """Delete the row, and what refers to it; its files are removed afterwards, since nobody can find them any more.

    :raises Fenced: a later operation wrote it.
    """
    ROWS[kind].remove(tx, row.uuid, token)
    if kind == SNAPSHOT:
        fewer = volumes.c.snapshots - 1
        ROWS[VOLUME].change(tx, row.volume_uuid, volumes.c.snapshots > 0, snapshots=fewer)


def sweep(backend: DirectoryBackend, kind: str, row: Any, status: str, token: int) -> None:
    """Remove the files of the try, and of those before it, after the row says what it became; the live ones stay."""
    if status == DELETING:
        backend.sweep(kind, row.uuid)
        return
    backend.sweep(kind, row.uuid, below=token, keep=row.path)
    if kind == VOLUME and status == "uploading" and row.upload_to:
        backend.sweep(IMAGE, row.upload_to, below=token)
