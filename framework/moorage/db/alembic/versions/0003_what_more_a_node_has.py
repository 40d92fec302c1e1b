# SPDX-License-Identifier: Apache-2.0
"""What more a node has"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import JsonText, exact

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # SQLite makes the table again, and from now on gives no number twice.
    with op.batch_alter_table("nodes", schema=None, table_kwargs={"sqlite_autoincrement": True}) as batch_op:
        for name in ("driver", "owner", "lessee", "reservation", "fault"):
            batch_op.add_column(sa.Column(name, exact(255), nullable=True))
        batch_op.add_column(sa.Column("conductor_group", exact(255), server_default="", nullable=False))
        for name in ("driver_info", "extra", "instance_info"):
            batch_op.add_column(sa.Column(name, JsonText(), server_default=sa.text("('{}')"), nullable=False))
        for name in ("description", "maintenance_reason", "last_error"):
            batch_op.add_column(sa.Column(name, sa.Text(), nullable=True))
        batch_op.add_column(sa.Column("instance_uuid", exact(36), nullable=True))
        batch_op.add_column(sa.Column("provision_state", exact(40), server_default="available", nullable=False))
        for name in ("target_provision_state", "power_state", "target_power_state"):
            batch_op.add_column(sa.Column(name, exact(40), nullable=True))
        batch_op.add_column(sa.Column("provision_updated_at", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("maintenance", sa.Boolean(), server_default=sa.false(), nullable=False))
        batch_op.create_unique_constraint("uq_nodes_instance_uuid", ["instance_uuid"])
