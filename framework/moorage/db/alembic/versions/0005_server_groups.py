# SPDX-License-Identifier: Apache-2.0
"""Server groups"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, BigId, exact

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "server_groups",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("name", exact(255), nullable=False),
        sa.Column("project_id", exact(255), nullable=False),
        sa.Column("policy", exact(40), nullable=False),
        sa.Column("max_server_per_host", sa.Integer(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_server_groups")),
        sa.UniqueConstraint("project_id", "name", name="uq_server_groups_name"),
        sa.UniqueConstraint("uuid", name="uq_server_groups_uuid"),
        **INNODB,
    )
