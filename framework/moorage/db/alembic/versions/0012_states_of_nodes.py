# SPDX-License-Identifier: Apache-2.0
"""Disabled and maintenance of nodes, with since when"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("disabled", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("nodes", sa.Column("disabled_reason", sa.Text(), nullable=True))
    op.add_column("nodes", sa.Column("disabled_since", sa.BigInteger(), nullable=True))
    op.add_column("nodes", sa.Column("maintenance_since", sa.BigInteger(), nullable=True))
    nodes = sa.table(
        "nodes",
        sa.column("maintenance", sa.Boolean()),
        sa.column("maintenance_since", sa.BigInteger()),
        sa.column("updated_at", sa.BigInteger()),
    )
    # The last change is the best that is known of when it began.
    op.execute(sa.update(nodes).where(nodes.c.maintenance == sa.true()).values(maintenance_since=nodes.c.updated_at))
    op.create_index("ix_nodes_disabled", "nodes", ["disabled"])
    op.create_index("ix_nodes_maintenance", "nodes", ["maintenance"])
