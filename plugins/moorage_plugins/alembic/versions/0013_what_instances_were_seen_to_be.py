# SPDX-License-Identifier: Apache-2.0
"""What the driver of its host saw an instance to be, and since when"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import Micros, exact

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("instances", schema=None) as batch_op:
        batch_op.add_column(sa.Column("actual_state", exact(16), server_default="unknown", nullable=False))
        batch_op.add_column(sa.Column("actual_detail", sa.String(1000), server_default="", nullable=False))
        batch_op.add_column(sa.Column("actual_at", Micros, server_default="0", nullable=False))
        batch_op.add_column(sa.Column("restarts", sa.Integer(), server_default="0", nullable=False))
