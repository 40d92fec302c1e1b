# SPDX-License-Identifier: Apache-2.0
"""Aggregates of nodes and their metadata"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, BigId, JsonText, exact

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "aggregates",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("name", exact(255), nullable=False),
        sa.Column("metadata", JsonText(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_aggregates")),
        sa.UniqueConstraint("name", name="uq_aggregates_name"),
        sa.UniqueConstraint("uuid", name="uq_aggregates_uuid"),
        **INNODB,
    )
    op.create_table(
        "aggregate_members",
        sa.Column("id", BigId, nullable=False),
        sa.Column("aggregate", exact(36), nullable=False),
        sa.Column("kind", exact(8), nullable=False),
        sa.Column("member", exact(255), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_aggregate_members")),
        sa.UniqueConstraint("aggregate", "kind", "member", name="uq_aggregate_members_member"),
        **INNODB,
    )
