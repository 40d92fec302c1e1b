# SPDX-License-Identifier: Apache-2.0
"""Trees, traits, aggregates and leases"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, BigId, exact

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "traits",
        sa.Column("id", BigId, nullable=False),
        sa.Column("name", exact(255), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_traits")),
        sa.UniqueConstraint("name", name="uq_traits_name"),
        **INNODB,
    )
    op.create_table(
        "provider_traits",
        sa.Column("resource_provider_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("trait", exact(255), nullable=False),
        sa.PrimaryKeyConstraint("resource_provider_id", "trait", name=op.f("pk_provider_traits")),
        **INNODB,
    )
    with op.batch_alter_table("provider_traits", schema=None) as batch_op:
        batch_op.create_index("ix_provider_traits_trait", ["trait", "resource_provider_id"], unique=False)
    op.create_table(
        "provider_aggregates",
        sa.Column("resource_provider_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("aggregate_uuid", exact(36), nullable=False),
        sa.PrimaryKeyConstraint("resource_provider_id", "aggregate_uuid", name=op.f("pk_provider_aggregates")),
        **INNODB,
    )
    with op.batch_alter_table("provider_aggregates", schema=None) as batch_op:
        batch_op.create_index(
            "ix_provider_aggregates_aggregate", ["aggregate_uuid", "resource_provider_id"], unique=False
        )

    with op.batch_alter_table("resource_classes", schema=None) as batch_op:
        batch_op.alter_column("name", existing_type=exact(255), nullable=True)
        batch_op.add_column(sa.Column("generation", sa.BigInteger(), server_default="0", nullable=False))
        batch_op.add_column(sa.Column("updated_at", sa.BigInteger(), server_default="0", nullable=False))

    with op.batch_alter_table("resource_providers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("parent_uuid", exact(36), nullable=True))
        batch_op.add_column(sa.Column("root_uuid", exact(36), nullable=True))
        batch_op.add_column(sa.Column("updated_at", sa.BigInteger(), server_default="0", nullable=False))
    op.execute("UPDATE resource_providers SET root_uuid = uuid")
    with op.batch_alter_table("resource_providers", schema=None) as batch_op:
        batch_op.alter_column("root_uuid", existing_type=exact(36), nullable=False)
        batch_op.create_index("ix_resource_providers_parent", ["parent_uuid"], unique=False)
        batch_op.create_index("ix_resource_providers_root", ["root_uuid"], unique=False)

    with op.batch_alter_table("inventories", schema=None) as batch_op:
        batch_op.create_index("ix_inventories_class", ["resource_class_id"], unique=False)

    with op.batch_alter_table("consumers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("updated_at", sa.BigInteger(), server_default="0", nullable=False))
        batch_op.add_column(sa.Column("expires_at", sa.BigInteger(), nullable=True))
        batch_op.create_index("ix_consumers_expires_at", ["expires_at"], unique=False)
