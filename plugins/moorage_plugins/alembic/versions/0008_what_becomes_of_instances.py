# SPDX-License-Identifier: Apache-2.0
"""What becomes of instances: the operation in progress"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import JsonText

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("instances", schema=None) as batch_op:
        batch_op.add_column(sa.Column("pending", JsonText(), nullable=True))
