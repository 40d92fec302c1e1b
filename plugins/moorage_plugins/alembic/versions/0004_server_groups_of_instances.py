# SPDX-License-Identifier: Apache-2.0
"""Instances know their server group"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import exact

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("instances", schema=None) as batch_op:
        batch_op.add_column(sa.Column("server_group", exact(255), nullable=False, server_default=""))
        batch_op.create_index("ix_instances_server_group", ["server_group"], unique=False)
