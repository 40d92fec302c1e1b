# SPDX-License-Identifier: Apache-2.0
"""Operations that wait, in the order in which they are read; what was given back is nobody's"""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("workers", schema=None) as batch_op:
        # The owner stood in it, so that every transfer wrote the index too.
        batch_op.drop_index("ix_workers_addressed_to")
        batch_op.create_index("ix_workers_addressed_to", ["addressed_to", "resource_type", "resource_id"], unique=False)
    op.execute("UPDATE workers SET worker = NULL, worker_epoch = 0 WHERE phase = 'waiting'")
