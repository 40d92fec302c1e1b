# SPDX-License-Identifier: Apache-2.0
"""Operations keep the request that asked for them"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("request", sa.String(1000), nullable=True))
