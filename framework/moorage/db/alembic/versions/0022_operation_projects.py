# SPDX-License-Identifier: Apache-2.0
"""Operations keep the project of their resource"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import exact

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("project_id", exact(255), nullable=True))
