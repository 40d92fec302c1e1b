# SPDX-License-Identifier: Apache-2.0
"""Limits of projects, and which consumers are counted against them"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, exact

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "quota_projects",
        sa.Column("project_id", exact(255), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_quota_projects")),
        **INNODB,
    )
    op.create_table(
        "quotas",
        sa.Column("project_id", exact(255), nullable=False),
        sa.Column("resource_class_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("maximum", sa.BigInteger(), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("project_id", "resource_class_id", name=op.f("pk_quotas")),
        **INNODB,
    )
    with op.batch_alter_table("consumers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("counted", sa.SmallInteger(), server_default="0", nullable=False))
        batch_op.add_column(sa.Column("counts_with", exact(36), nullable=True))
        batch_op.drop_index("ix_consumers_project_id")
        batch_op.create_index("ix_consumers_project_id", ["project_id", "counted", "user_id"], unique=False)
        batch_op.create_index("ix_consumers_counts_with", ["counts_with"], unique=False)
