# SPDX-License-Identifier: Apache-2.0
"""Members of groups, for the coordination backend database"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, exact

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "coordination_members",
        sa.Column("group_name", exact(80), nullable=False),
        sa.Column("member", exact(160), nullable=False),
        sa.Column("service", exact(36), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("joined_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("group_name", "member", name=op.f("pk_coordination_members")),
        **INNODB,
    )
