# SPDX-License-Identifier: Apache-2.0
"""Plans of shards"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import BigId, JsonText, exact

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "shard_moves",
        sa.Column("id", BigId, nullable=False),
        sa.Column("plan_id", sa.BigInteger(), nullable=False),
        sa.Column("node_uuid", exact(36), nullable=False),
        sa.Column("source", exact(255), nullable=True),
        sa.Column("target", exact(255), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("status", exact(20), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shard_moves")),
        mysql_charset="utf8mb4",
        mysql_engine="InnoDB",
    )
    with op.batch_alter_table("shard_moves", schema=None) as batch_op:
        batch_op.create_index("ix_shard_moves_plan_id", ["plan_id", "status", "id"], unique=False)

    op.create_table(
        "shard_plans",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("strategy", exact(255), nullable=False),
        sa.Column("status", exact(20), nullable=False),
        sa.Column("request", JsonText(), nullable=False),
        sa.Column("summary", JsonText(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shard_plans")),
        sa.UniqueConstraint("uuid", name="uq_shard_plans_uuid"),
        mysql_charset="utf8mb4",
        mysql_engine="InnoDB",
        sqlite_autoincrement=True,
    )
