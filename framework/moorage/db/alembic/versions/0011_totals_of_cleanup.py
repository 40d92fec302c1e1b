# SPDX-License-Identifier: Apache-2.0
"""Totals of cleanup, which outlive the history"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, exact

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "cleanup_totals",
        sa.Column("resource_type", exact(40), nullable=False),
        sa.Column("event", exact(16), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("resource_type", "event", name=op.f("pk_cleanup_totals")),
        **INNODB,
    )
