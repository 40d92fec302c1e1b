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
        "allocations",
        sa.Column("id", BigId, nullable=False),
        sa.Column("resource_provider_id", sa.BigInteger(), nullable=False),
        sa.Column("consumer_id", exact(36), nullable=False),
        sa.Column("resource_class_id", sa.Integer(), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_allocations")),
        sa.UniqueConstraint("consumer_id", "resource_provider_id", "resource_class_id", name="uq_allocations_consumer"),
        **INNODB,
    )
    with op.batch_alter_table("allocations", schema=None) as batch_op:
        batch_op.create_index("ix_allocations_provider", ["resource_provider_id", "resource_class_id"], unique=False)

    op.create_table(
        "consumers",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("consumer_type", exact(255), nullable=False),
        sa.Column("project_id", exact(255), nullable=False),
        sa.Column("user_id", exact(255), nullable=False),
        sa.Column("request_id", exact(255), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_consumers")),
        sa.UniqueConstraint("uuid", name="uq_consumers_uuid"),
        **INNODB,
    )
    with op.batch_alter_table("consumers", schema=None) as batch_op:
        batch_op.create_index("ix_consumers_project_id", ["project_id", "user_id"], unique=False)

    op.create_table(
        "instances",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("status", exact(40), nullable=False),
        sa.Column("host", exact(255), nullable=False),
        sa.Column("node", exact(255), nullable=False),
        sa.Column("node_uuid", exact(36), nullable=False),
        sa.Column("flavorid", exact(255), nullable=False),
        sa.Column("resources", JsonText(), nullable=False),
        sa.Column("project_id", exact(255), nullable=False),
        sa.Column("user_id", exact(255), nullable=False),
        sa.Column("fault", sa.Text(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("request", JsonText(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_instances")),
        sa.UniqueConstraint("uuid", name="uq_instances_uuid"),
        **INNODB,
    )
    with op.batch_alter_table("instances", schema=None) as batch_op:
        batch_op.create_index("ix_instances_host", ["host", "uuid"], unique=False)

    op.create_table(
        "inventories",
        sa.Column("id", BigId, nullable=False),
        sa.Column("resource_provider_id", sa.BigInteger(), nullable=False),
        sa.Column("resource_class_id", sa.Integer(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("reserved", sa.BigInteger(), nullable=False),
        sa.Column("min_unit", sa.BigInteger(), nullable=False),
        sa.Column("max_unit", sa.BigInteger(), nullable=False),
        sa.Column("step_size", sa.BigInteger(), nullable=False),
        sa.Column("allocation_ratio", sa.Double(), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_inventories")),
        sa.UniqueConstraint("resource_provider_id", "resource_class_id", name="uq_inventories_provider_class"),
        **INNODB,
    )
    op.create_table(
        "resource_classes",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", exact(255), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_resource_classes")),
        sa.UniqueConstraint("name", name="uq_resource_classes_name"),
        **INNODB,
    )
    op.create_table(
        "resource_providers",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("name", exact(255), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("can_host", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_resource_providers")),
        sa.UniqueConstraint("name", name="uq_resource_providers_name"),
        sa.UniqueConstraint("uuid", name="uq_resource_providers_uuid"),
        **INNODB,
    )
