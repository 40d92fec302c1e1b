# SPDX-License-Identifier: Apache-2.0
"""The agent services that an agent runs"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import exact

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("services", schema=None) as batch_op:
        # NULL until the agent starts again: it may run any of them.
        batch_op.add_column(sa.Column("offers", exact(1000)))
