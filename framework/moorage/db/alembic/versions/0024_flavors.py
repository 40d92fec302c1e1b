# SPDX-License-Identifier: Apache-2.0
"""Flavors and their versions"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, JsonText, exact

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "flavors",
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("flavorid", exact(255), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("resources", JsonText(), nullable=False),
        sa.Column("extra_specs", JsonText(), nullable=False),
        sa.Column("implicit", sa.Boolean(create_constraint=False), nullable=False),
        sa.Column("deprecated", sa.Boolean(create_constraint=False), nullable=False),
        sa.Column("successor", exact(255), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("uuid", name=op.f("pk_flavors")),
        sa.UniqueConstraint("flavorid", "version", name="uq_flavors_version"),
        **INNODB,
    )
