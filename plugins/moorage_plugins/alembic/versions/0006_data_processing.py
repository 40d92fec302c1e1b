# SPDX-License-Identifier: Apache-2.0
"""Clusters, jobs and proxy users of data processing"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, BigId, JsonText, exact

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "dp_clusters",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("host", exact(255), nullable=False),
        sa.Column("status", exact(40), nullable=False),
        sa.Column("transient", sa.Boolean(), nullable=False),
        sa.Column("health", exact(10), nullable=False),
        sa.Column("changed_at", sa.BigInteger(), nullable=False),
        sa.Column("used_at", sa.BigInteger(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dp_clusters")),
        sa.UniqueConstraint("uuid", name="uq_dp_clusters_uuid"),
        **INNODB,
    )
    with op.batch_alter_table("dp_clusters", schema=None) as batch_op:
        batch_op.create_index("ix_dp_clusters_host", ["host", "status"], unique=False)
        batch_op.create_index("ix_dp_clusters_position", ["position"], unique=False)

    op.create_table(
        "dp_jobs",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("cluster", exact(36), nullable=False),
        sa.Column("command", JsonText(), nullable=False),
        sa.Column("status", exact(40), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("changed_at", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dp_jobs")),
        sa.UniqueConstraint("uuid", name="uq_dp_jobs_uuid"),
        **INNODB,
    )
    with op.batch_alter_table("dp_jobs", schema=None) as batch_op:
        batch_op.create_index("ix_dp_jobs_cluster", ["cluster", "status"], unique=False)
        batch_op.create_index("ix_dp_jobs_position", ["position", "status"], unique=False)

    op.create_table(
        "dp_proxy_users",
        sa.Column("id", BigId, nullable=False),
        sa.Column("name", exact(80), nullable=False),
        sa.Column("job", exact(36), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dp_proxy_users")),
        sa.UniqueConstraint("name", name="uq_dp_proxy_users_name"),
        **INNODB,
    )
    with op.batch_alter_table("dp_proxy_users", schema=None) as batch_op:
        batch_op.create_index("ix_dp_proxy_users_job", ["job"], unique=False)
