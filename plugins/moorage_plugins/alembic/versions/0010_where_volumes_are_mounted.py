# SPDX-License-Identifier: Apache-2.0
"""The device under which a server sees a volume"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("block_volumes", schema=None) as batch_op:
        batch_op.add_column(sa.Column("mountpoint", sa.String(255), server_default="", nullable=False))
