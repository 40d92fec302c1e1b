# SPDX-License-Identifier: Apache-2.0
"""Volumes, snapshots, backups and images"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, BigId, exact

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "block_backups",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("status", exact(40), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("path", exact(64), nullable=False),
        sa.Column("project_id", exact(255), nullable=False),
        sa.Column("fault", sa.String(length=1000), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("volume_uuid", exact(36), nullable=False),
        sa.Column("restore_to", exact(36), nullable=False),
        sa.Column("checksum", exact(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_block_backups")),
        sa.UniqueConstraint("uuid", name="uq_block_backups_uuid"),
        **INNODB,
    )
    op.create_table(
        "block_images",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("status", exact(40), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("path", exact(64), nullable=False),
        sa.Column("project_id", exact(255), nullable=False),
        sa.Column("fault", sa.String(length=1000), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_block_images")),
        sa.UniqueConstraint("uuid", name="uq_block_images_uuid"),
        **INNODB,
    )
    op.create_table(
        "block_snapshots",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("status", exact(40), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("path", exact(64), nullable=False),
        sa.Column("project_id", exact(255), nullable=False),
        sa.Column("fault", sa.String(length=1000), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("volume_uuid", exact(36), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_block_snapshots")),
        sa.UniqueConstraint("uuid", name="uq_block_snapshots_uuid"),
        **INNODB,
    )
    op.create_table(
        "block_volumes",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("status", exact(40), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("path", exact(64), nullable=False),
        sa.Column("project_id", exact(255), nullable=False),
        sa.Column("fault", sa.String(length=1000), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("location", exact(255), nullable=False),
        sa.Column("image", sa.String(length=255), nullable=False),
        sa.Column("upload_to", exact(36), nullable=False),
        sa.Column("attached_to", sa.String(length=255), nullable=False),
        sa.Column("snapshots", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_block_volumes")),
        sa.UniqueConstraint("uuid", name="uq_block_volumes_uuid"),
        **INNODB,
    )
