# SPDX-License-Identifier: Apache-2.0
"""The journal: events and the sequence that numbers them"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, BigId, JsonText, exact

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "event_sequence",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.Column("purged", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("owner", exact(255), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event_sequence")),
        **INNODB,
    )
    op.create_table(
        "events",
        sa.Column("id", BigId, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=True),
        sa.Column("kind", exact(64), nullable=False),
        sa.Column("subject", exact(255), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("actor", exact(255), nullable=False),
        sa.Column("service", exact(255), nullable=False),
        sa.Column("project_id", exact(255), nullable=False),
        sa.Column("request_id", exact(64), nullable=False),
        sa.Column("global_request_id", exact(64), nullable=False),
        sa.Column("state", JsonText(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
        sa.UniqueConstraint("number", name="uq_events_number"),
        **INNODB,
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_request_id", ["request_id"], unique=False)
        batch_op.create_index("ix_events_subject", ["subject", "number"], unique=False)
