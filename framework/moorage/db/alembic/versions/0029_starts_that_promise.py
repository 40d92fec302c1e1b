# SPDX-License-Identifier: Apache-2.0
"""Which start of an agent promised that its host fences itself"""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("services", sa.Column("self_fence_start", sa.BigInteger(), nullable=True))
