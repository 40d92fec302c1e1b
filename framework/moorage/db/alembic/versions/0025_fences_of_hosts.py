# SPDX-License-Identifier: Apache-2.0
"""Hosts of agents can be fenced"""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("services", schema=None) as batch_op:
        batch_op.add_column(sa.Column("fenced_epoch", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("fence_reason", sa.String(255), nullable=False, server_default=""))
        batch_op.add_column(sa.Column("evacuated", sa.BigInteger(), nullable=False, server_default="0"))
