# SPDX-License-Identifier: Apache-2.0
"""Refused requests"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, BigId, exact

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "refusals",
        sa.Column("id", BigId, nullable=False),
        sa.Column("request_id", exact(255), nullable=False),
        sa.Column("instance_uuid", exact(36), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("decision", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_refusals")),
        **INNODB,
    )
    with op.batch_alter_table("refusals", schema=None) as batch_op:
        batch_op.create_index("ix_refusals_at", ["at"], unique=False)
        batch_op.create_index("ix_refusals_instance_uuid", ["instance_uuid"], unique=False)
        batch_op.create_index("ix_refusals_request_id", ["request_id"], unique=False)
