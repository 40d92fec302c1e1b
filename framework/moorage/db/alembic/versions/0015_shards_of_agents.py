# SPDX-License-Identifier: Apache-2.0
"""The shard that an agent serves"""

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import exact

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("services", sa.Column("shard", exact(255), nullable=True))
