# SPDX-License-Identifier: Apache-2.0
"""Where backups and images lie: their volumes may be gone"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import exact

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("block_backups", "block_images"):
        with op.batch_alter_table(table, schema=None) as batch_op:
            batch_op.add_column(sa.Column("location", exact(255), server_default="", nullable=False))
    # Of the others nobody knows any more.
    backups = sa.table("block_backups", sa.column("volume_uuid"), sa.column("location"))
    volumes = sa.table("block_volumes", sa.column("uuid"), sa.column("location"))
    its_volume = sa.select(volumes.c.location).where(volumes.c.uuid == backups.c.volume_uuid).scalar_subquery()
    op.execute(sa.update(backups).values(location=sa.func.coalesce(its_volume, "")))
