# SPDX-License-Identifier: Apache-2.0
"""When nodes changed: an index by which schedulers read what changed"""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        batch_op.create_index("ix_nodes_updated_at", ["updated_at"], unique=False)
