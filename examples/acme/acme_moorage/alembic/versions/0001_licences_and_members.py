# SPDX-License-Identifier: Apache-2.0
"""Licences, and members of groups"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, exact

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "acme_licences",
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("product", exact(80), nullable=False),
        sa.Column("status", exact(40), nullable=False),
        sa.Column("holder", exact(255), nullable=False),
        sa.Column("held_until", sa.BigInteger(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("uuid", name=op.f("pk_acme_licences")),
        **INNODB,
    )
    op.create_table(
        "acme_members",
        sa.Column("group_name", exact(80), nullable=False),
        sa.Column("member", exact(160), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("group_name", "member", name=op.f("pk_acme_members")),
        **INNODB,
    )
