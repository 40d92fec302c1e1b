# SPDX-License-Identifier: Apache-2.0
"""When the fence of a resource was raised last"""

import sqlalchemy as sa
from alembic import op

from moorage.db import now
from moorage.db.schema import Micros

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("fences", schema=None) as batch_op:
        batch_op.add_column(sa.Column("raised_at", Micros, server_default="0", nullable=False))
    # When the rows that there are were raised is not known: they count as raised now.
    fences = sa.table("fences", sa.column("raised_at"))
    op.execute(sa.update(fences).values(raised_at=now()))
