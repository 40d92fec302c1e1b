# SPDX-License-Identifier: Apache-2.0
"""The tables of the block storage service; written by :mod:`moorage_plugins.block_storage.rows` alone."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from moorage.db.schema import BigId, Micros, Uuid, exact
from moorage_plugins.schema import plugins_metadata

__all__ = ["backups", "images", "snapshots", "volumes"]


def _common() -> list[sa.Column[Any]]:
    """``path`` is the token under whose name the live data lies, empty while there are none; ``fence`` as everywhere."""
    return [
        sa.Column("id", BigId, primary_key=True),
        sa.Column("uuid", Uuid, nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("status", exact(40), nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("path", exact(64), nullable=False),
        sa.Column("project_id", exact(255), nullable=False),
        sa.Column("fault", sa.String(1000), nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("created_at", Micros, nullable=False),
        sa.Column("updated_at", Micros, nullable=False),
    ]


def _location() -> sa.Column[Any]:
    """Where the data are, as with volumes, which may be gone. Empty: unknown, an earlier version made the row."""
    return sa.Column("location", exact(255), server_default="", nullable=False)


volumes = sa.Table(
    "block_volumes",
    plugins_metadata,
    *_common(),
    #: The host, or cluster, whose services work on it and all that is made from it.
    sa.Column("location", exact(255), nullable=False),
    #: What it is made from: a file's name or an image's uuid. Empty: zeros.
    sa.Column("image", sa.String(255), nullable=False),
    #: What the operation in progress works on beside it: the image that it is being uploaded to, the backup that is made of it or
    #: restored to it. Written when the operation is requested, empty when it is over: the two halves of an operation belong
    #: together only while each names the other.
    sa.Column("upload_to", exact(36), nullable=False),
    #: The server it is attached to.
    sa.Column("attached_to", sa.String(255), nullable=False),
    #: The device under which that server sees the volume; only shown.
    sa.Column("mountpoint", sa.String(255), server_default="", nullable=False),
    #: How many snapshots there are: a volume with some cannot go.
    sa.Column("snapshots", sa.Integer, nullable=False),
    sa.UniqueConstraint("uuid", name="uq_block_volumes_uuid"),
)

snapshots = sa.Table(
    "block_snapshots",
    plugins_metadata,
    *_common(),
    sa.Column("volume_uuid", Uuid, nullable=False),
    sa.UniqueConstraint("uuid", name="uq_block_snapshots_uuid"),
)

backups = sa.Table(
    "block_backups",
    plugins_metadata,
    *_common(),
    sa.Column("volume_uuid", Uuid, nullable=False),
    sa.Column("restore_to", exact(36), nullable=False),
    sa.Column("checksum", exact(64), nullable=False),
    _location(),
    sa.UniqueConstraint("uuid", name="uq_block_backups_uuid"),
)

#: Volumes that were uploaded: saving, active, killed, or deleted, whose row stays for its fence.
images = sa.Table(
    "block_images",
    plugins_metadata,
    *_common(),
    _location(),
    sa.UniqueConstraint("uuid", name="uq_block_images_uuid"),
)
