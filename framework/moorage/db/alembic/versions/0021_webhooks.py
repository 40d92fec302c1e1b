# SPDX-License-Identifier: Apache-2.0
"""Subscriptions to the journal, and webhooks"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, JsonText, exact

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "event_subscriptions",
        sa.Column("name", exact(160), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("missed", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("owner", exact(36), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("failing_since", sa.BigInteger(), nullable=False),
        sa.Column("retry_at", sa.BigInteger(), nullable=False),
        sa.Column("last_error", sa.String(1000), nullable=False),
        sa.Column("last_error_at", sa.BigInteger(), nullable=False),
        sa.Column("delivered_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_event_subscriptions")),
        **INNODB,
    )
    op.create_table(
        "webhooks",
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("name", exact(80), nullable=False),
        sa.Column("url", sa.String(2000), nullable=False),
        sa.Column("secret", exact(120), nullable=False),
        sa.Column("kinds", JsonText(), nullable=False),
        sa.Column("projects", JsonText(), nullable=False),
        sa.Column("enabled", sa.Boolean(create_constraint=False), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("uuid", name=op.f("pk_webhooks")),
        sa.UniqueConstraint("name", name="uq_webhooks_name"),
        **INNODB,
    )
