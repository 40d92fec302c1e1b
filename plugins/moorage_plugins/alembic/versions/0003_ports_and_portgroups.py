# SPDX-License-Identifier: Apache-2.0
"""Ports and portgroups"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import BigId, JsonText, exact

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "baremetal_portgroups",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("node_id", sa.BigInteger(), nullable=False),
        sa.Column("name", exact(255), nullable=True),
        sa.Column("address", exact(18), nullable=True),
        sa.Column("mode", exact(255), nullable=False),
        sa.Column("standalone_ports_supported", sa.Boolean(), nullable=False),
        sa.Column("physical_network", exact(64), nullable=True),
        sa.Column("properties", JsonText(), nullable=False),
        sa.Column("extra", JsonText(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_baremetal_portgroups")),
        sa.UniqueConstraint("address", name="uq_baremetal_portgroups_address"),
        sa.UniqueConstraint("name", name="uq_baremetal_portgroups_name"),
        sa.UniqueConstraint("uuid", name="uq_baremetal_portgroups_uuid"),
        mysql_charset="utf8mb4",
        mysql_engine="InnoDB",
    )
    with op.batch_alter_table("baremetal_portgroups", schema=None) as batch_op:
        batch_op.create_index("ix_baremetal_portgroups_node_id", ["node_id", "id"], unique=False)

    op.create_table(
        "baremetal_ports",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("node_id", sa.BigInteger(), nullable=False),
        sa.Column("portgroup_uuid", exact(36), nullable=True),
        sa.Column("address", exact(18), nullable=False),
        sa.Column("name", exact(255), nullable=True),
        sa.Column("description", exact(255), nullable=True),
        sa.Column("vendor", exact(32), nullable=True),
        sa.Column("category", exact(80), nullable=True),
        sa.Column("physical_network", exact(64), nullable=True),
        sa.Column("pxe_enabled", sa.Boolean(), nullable=False),
        sa.Column("is_smartnic", sa.Boolean(), nullable=False),
        sa.Column("local_link_connection", JsonText(), nullable=False),
        sa.Column("extra", JsonText(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_baremetal_ports")),
        sa.UniqueConstraint("address", name="uq_baremetal_ports_address"),
        sa.UniqueConstraint("name", name="uq_baremetal_ports_name"),
        sa.UniqueConstraint("uuid", name="uq_baremetal_ports_uuid"),
        mysql_charset="utf8mb4",
        mysql_engine="InnoDB",
    )
    with op.batch_alter_table("baremetal_ports", schema=None) as batch_op:
        batch_op.create_index("ix_baremetal_ports_node_id", ["node_id", "id"], unique=False)
        batch_op.create_index("ix_baremetal_ports_portgroup_uuid", ["portgroup_uuid"], unique=False)
