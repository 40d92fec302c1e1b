# SPDX-License-Identifier: Apache-2.0
"""The fence of operations in the rows of clusters"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("dp_clusters", schema=None) as batch_op:
        batch_op.add_column(sa.Column("operation_fence", sa.BigInteger(), server_default="0", nullable=False))
