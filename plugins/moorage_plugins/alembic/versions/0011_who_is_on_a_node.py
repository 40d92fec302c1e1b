# SPDX-License-Identifier: Apache-2.0
"""Who is on a node: a version of its residents, and indexes to read them by"""

import json

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import exact

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("resource_providers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("residents", sa.BigInteger(), server_default="0", nullable=False))
    with op.batch_alter_table("instances", schema=None) as batch_op:
        batch_op.add_column(sa.Column("destination_uuid", exact(36), server_default="", nullable=False))
        batch_op.create_index("ix_instances_node", ["node_uuid"], unique=False)
        batch_op.create_index("ix_instances_destination", ["destination_uuid"], unique=False)
    fill_destinations(op.get_bind())


def fill_destinations(connection: sa.Connection) -> None:
    """Write where instances go that are being moved at the moment of the upgrade."""
    columns: list[sa.ColumnClause[str]] = [
        sa.column(name) for name in ("uuid", "status", "pending", "destination_uuid")
    ]
    instances = sa.table("instances", *columns)
    moving = sa.select(instances.c.uuid, instances.c.pending).where(instances.c.status.in_(("resizing", "migrating")))
    for uuid, pending in connection.execute(moving).all():
        destination = json.loads(pending or "{}").get("node_uuid") or ""
        connection.execute(sa.update(instances).where(instances.c.uuid == uuid).values(destination_uuid=destination))
