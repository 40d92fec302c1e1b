# SPDX-License-Identifier: Apache-2.0
"""Draining of nodes, and who began each state"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import exact

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("maintenance_by", exact(255), nullable=True))
    op.add_column("nodes", sa.Column("disabled_by", exact(255), nullable=True))
    op.add_column("nodes", sa.Column("draining", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("nodes", sa.Column("draining_reason", sa.Text(), nullable=True))
    op.add_column("nodes", sa.Column("draining_since", sa.BigInteger(), nullable=True))
    op.add_column("nodes", sa.Column("draining_by", exact(255), nullable=True))
    op.create_index("ix_nodes_draining", "nodes", ["draining"])
