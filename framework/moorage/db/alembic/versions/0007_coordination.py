# SPDX-License-Identifier: Apache-2.0
"""Rings, claims of ticks, and what periodic tasks did"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, BigId, JsonText, exact

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "coordination_adoptions",
        sa.Column("group_name", exact(80), nullable=False),
        sa.Column("member", exact(160), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("adopted_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("group_name", "member", name=op.f("pk_coordination_adoptions")),
        **INNODB,
    )
    op.create_table(
        "coordination_rings",
        sa.Column("group_name", exact(80), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("members", JsonText(), nullable=False),
        sa.Column("replicas", sa.Integer(), nullable=False),
        sa.Column("hash_function", exact(20), nullable=False),
        sa.Column("changed_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("group_name", name=op.f("pk_coordination_rings")),
        **INNODB,
    )
    op.create_table(
        "periodic_claims",
        sa.Column("task", exact(80), nullable=False),
        sa.Column("object_id", exact(255), nullable=False),
        sa.Column("tick", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("owner", exact(160), nullable=False),
        sa.Column("sweep", exact(32), nullable=False),
        sa.Column("finished", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("task", "object_id", name=op.f("pk_periodic_claims")),
        **INNODB,
    )
    op.create_table(
        "periodic_runs",
        sa.Column("id", BigId, nullable=False),
        sa.Column("task", exact(80), nullable=False),
        sa.Column("member", exact(160), nullable=False),
        sa.Column("tick", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("milliseconds", sa.BigInteger(), nullable=False),
        sa.Column("owned", sa.Integer(), nullable=False),
        sa.Column("handled", sa.Integer(), nullable=False),
        sa.Column("acted", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Integer(), nullable=False),
        sa.Column("fenced", sa.Integer(), nullable=False),
        sa.Column("ended", exact(20), nullable=False),
        sa.Column("problem", sa.String(length=255), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_periodic_runs")),
        **INNODB,
    )
    with op.batch_alter_table("periodic_runs", schema=None) as batch_op:
        batch_op.create_index("ix_periodic_runs_task_id", ["task", "id"], unique=False)

    op.create_table(
        "periodic_tasks",
        sa.Column("name", exact(80), nullable=False),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.String(length=255), nullable=False),
        sa.Column("requested_at", sa.BigInteger(), nullable=False),
        sa.Column("requested_object", exact(255), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_periodic_tasks")),
        **INNODB,
    )
