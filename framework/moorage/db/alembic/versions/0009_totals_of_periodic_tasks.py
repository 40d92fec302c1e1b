# SPDX-License-Identifier: Apache-2.0
"""What periodic tasks did in all"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, exact

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("lost", "skipped"):
        op.add_column("periodic_runs", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "periodic_totals",
        sa.Column("task", exact(80), nullable=False),
        sa.Column("complete", sa.BigInteger(), nullable=False),
        sa.Column("stale", sa.BigInteger(), nullable=False),
        sa.Column("broken", sa.BigInteger(), nullable=False),
        sa.Column("milliseconds", sa.BigInteger(), nullable=False),
        sa.Column("handled", sa.BigInteger(), nullable=False),
        sa.Column("acted", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("fenced", sa.BigInteger(), nullable=False),
        sa.Column("lost", sa.BigInteger(), nullable=False),
        sa.Column("skipped", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("task", name=op.f("pk_periodic_totals")),
        **INNODB,
    )
