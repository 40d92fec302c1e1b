# SPDX-License-Identifier: Apache-2.0
"""The brake of automatic fences"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import exact

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "automatic_fences",
        sa.Column("slot", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("fenced_at", sa.BigInteger(), nullable=False),
        sa.Column("host", exact(255), nullable=False),
        sa.PrimaryKeyConstraint("slot"),
    )
