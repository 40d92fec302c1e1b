# SPDX-License-Identifier: Apache-2.0
"""The first tables"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, BigId, JsonText, exact

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "fences",
        sa.Column("resource_type", exact(40), nullable=False),
        sa.Column("resource_id", exact(36), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("resource_type", "resource_id", name=op.f("pk_fences")),
        **INNODB,
    )
    op.create_table(
        "nodes",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("name", exact(255), nullable=False),
        sa.Column("host", exact(255), nullable=True),
        sa.Column("shard", exact(255), nullable=True),
        sa.Column("resource_class", exact(80), nullable=True),
        sa.Column("properties", JsonText(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sa.UniqueConstraint("name", name="uq_nodes_name"),
        sa.UniqueConstraint("uuid", name="uq_nodes_uuid"),
        **INNODB,
    )
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        batch_op.create_index("ix_nodes_host", ["host"], unique=False)
        batch_op.create_index("ix_nodes_shard_id", ["shard", "id"], unique=False)

    op.create_table(
        "plugin_incidents",
        sa.Column("id", BigId, nullable=False),
        sa.Column("plugin", exact(255), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plugin_incidents")),
        **INNODB,
    )
    with op.batch_alter_table("plugin_incidents", schema=None) as batch_op:
        batch_op.create_index("ix_plugin_incidents_plugin_at", ["plugin", "at"], unique=False)

    op.create_table(
        "services",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("host", exact(255), nullable=False),
        sa.Column("binary", exact(64), nullable=False),
        sa.Column("cluster", exact(255), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("beat_at", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("rpc_version", sa.String(length=16), nullable=False),
        sa.Column("disabled", sa.Boolean(), nullable=False),
        sa.Column("disabled_reason", sa.String(length=255), nullable=False),
        sa.Column("forced_down", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_services")),
        sa.UniqueConstraint("host", "binary", name="uq_services_host_binary"),
        sa.UniqueConstraint("uuid", name="uq_services_uuid"),
        **INNODB,
    )
    op.create_table(
        "workers",
        sa.Column("id", BigId, nullable=False),
        sa.Column("resource_type", exact(40), nullable=False),
        sa.Column("resource_id", exact(36), nullable=False),
        sa.Column("operation", exact(40), nullable=False),
        sa.Column("status", exact(40), nullable=False),
        sa.Column("addressed_to", exact(255), nullable=False),
        sa.Column("owner", exact(36), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
        sa.UniqueConstraint("resource_type", "resource_id", name="uq_workers_resource"),
        **INNODB,
    )
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.create_index("ix_workers_addressed_to", ["addressed_to", "resource_type", "owner"], unique=False)
