# SPDX-License-Identifier: Apache-2.0
"""Four indexes have only the few rows that are looked up by them"""

from alembic import op

from moorage.db.schema import partial_index

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_context().dialect.name == "mysql":
        # MariaDB has no such indexes.
        return
    for name, table, column, condition in (
        ("ix_consumers_counts_with", "consumers", "counts_with", "counts_with IS NOT NULL"),
        ("ix_consumers_expires_at", "consumers", "expires_at", "expires_at IS NOT NULL"),
        ("ix_instances_server_group", "instances", "server_group", "server_group <> ''"),
        ("ix_instances_destination", "instances", "destination_uuid", "destination_uuid <> ''"),
    ):
        op.drop_index(name, table_name=table)
        op.create_index(name, table, [column], unique=False, **partial_index(condition))
