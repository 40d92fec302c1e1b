# SPDX-License-Identifier: Apache-2.0
"""Agents promise that their hosts fence themselves"""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("services", sa.Column("self_fence", sa.BigInteger(), nullable=True))
