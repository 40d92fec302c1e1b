# SPDX-License-Identifier: Apache-2.0
"""Instances keep the version of their flavor"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("instances", schema=None) as batch_op:
        batch_op.add_column(sa.Column("flavor_version", sa.Integer(), server_default="0", nullable=False))
