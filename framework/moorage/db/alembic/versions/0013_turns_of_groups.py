# SPDX-License-Identifier: Apache-2.0
"""Turns of server groups that requests bring along"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "group_turns",
        sa.Column("slot", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("slot", name=op.f("pk_group_turns")),
        **INNODB,
    )
