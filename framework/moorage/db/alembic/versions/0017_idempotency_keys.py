# SPDX-License-Identifier: Apache-2.0
"""Answers to requests with an Idempotency-Key"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, BigId, JsonText, exact

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("id", BigId, nullable=False),
        sa.Column("scope", exact(64), nullable=False),
        sa.Column("fingerprint", exact(64), nullable=False),
        sa.Column("operation", exact(36), nullable=False),
        sa.Column("owner", exact(36), nullable=False),
        sa.Column("busy_until", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("answer", JsonText(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_idempotency_keys")),
        sa.UniqueConstraint("scope", name="uq_idempotency_keys_scope"),
        **INNODB,
    )
    with op.batch_alter_table("idempotency_keys", schema=None) as batch_op:
        batch_op.create_index("ix_idempotency_keys_created_at", ["created_at"], unique=False)
